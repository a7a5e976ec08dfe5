"""The lines of docs/claims.md for real hardware are jobs, shown on small data of the same form."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launch.config import load_config
from launch.data.preflight import check_inputs, check_questions

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
LINES = re.findall(r"^\| .*? \| `([\w-]+\.yaml[^`]*)` \|", PAGE.read_text(), re.MULTILINE)
WEIGHTS = {
    "config.json": "{}",
    "tokenizer.json": "{}",
    "model.safetensors.index.json": '{"weight_map": {"w": "model-1.safetensors"}}',
    "model-1.safetensors": "",
}


def test_every_table_has_a_line():
    names = [next((w for w in line.split() if w.startswith("run.name=")), line) for line in LINES]
    assert len(set(names)) == len(LINES) > 30  # no run takes another one's folder


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:60])
def test_a_line_resolves_on_small_data(line, downloads, tmp_path):
    for name, text in WEIGHTS.items():
        (tmp_path / name).write_text(text)
    name, *overrides = shlex.split(line)
    small = [f"data.root={downloads}", "data.train.total=12", "data.held_out=3"]
    excluded = ["data.train.exclude_databases=[farm_two]"] if "formula_1" in line else []
    config = load_config(name, [*overrides, *small, *excluded, f"model.path={tmp_path}"])
    check_inputs(config)
    check_questions(config)
