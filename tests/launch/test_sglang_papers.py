"""The papers' configs with SGLang, by the command of their heads: other sizes, on a CPU."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import config as configs

from .conftest import ROOT, TINY
from .sglang_server import ARGUMENTS, VARIABLES

STEPS = 2
SMALL: dict[str, Any] = {
    "data": {**TINY["data"], "root": None, "held_out": None},
    "model": {**TINY["model"], "path": None, "remat": "none"},
    "executor": TINY["executor"],
    "sampler": {"slots": 8, "max_prompt_tokens": 2000, "max_response_tokens": 120},
    "train": {"steps": STEPS, "epochs": None, "prompts_per_step": 4},
    "evaluation": {"questions": 4, "validation_questions": 2, "max_prompt_tokens": None},
}
TRAIN_DATA = {**TINY["data"]["train"], "total": None, "exclude_databases": []}


def small(paper: str, folder: Path, python: str) -> Path:
    """Write a paper's config with a tiny model, generated questions and servers for a CPU."""
    mine = {"group_size": 2, "second_stage": None} if paper == "paverl" else {}
    servers = {"python": python, "variables": VARIABLES, "arguments": ARGUMENTS}
    raw = {
        "base": f"{paper}.yaml",
        **SMALL,
        "data": {**SMALL["data"], "train": TRAIN_DATA},
        "train": {**SMALL["train"], "eval_every": STEPS, "checkpoint_every": STEPS, **mine},
        "rollout": {"sglang": servers},
    }
    path = folder / f"{paper}.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


def command_of(paper: str) -> list[str]:
    """Read the command with SGLang in the head of a paper's config: its settings."""
    text = (Path(configs.__file__).parent / "configs" / f"{paper}.yaml").read_text()
    found = re.search(r"^#   CUDA_VISIBLE_DEVICES=\S+ (.*?[^\\])$", text, re.MULTILINE | re.DOTALL)
    assert found
    words = shlex.split(found[1].replace("\\\n#", " "))
    start = words.index(f"{paper}.yaml")
    assert words[:start] == ["python", "-m", "launch.train", "--accel", "gpu", "--cfg"]
    return words[start + 1 :]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("paper", ["progress", "expo", "paverl", "astra"])
def test_the_command_of_a_papers_config_trains_with_servers(sglang_python, tmp_path, paper):
    config, run = small(paper, tmp_path, sglang_python), tmp_path / "run"
    settings = command_of(paper)
    # Two servers in place of four, and a CPU's share of its memory is of no concern.
    changes = {"launch=4": "launch=2", '["4", "5", "6", "7"]': '["0", "1"]'}
    for old, new in changes.items():
        assert sum(old in setting for setting in settings) == 1
        settings = [setting.replace(old, new) for setting in settings]
    line = [sys.executable, "-m", "launch.train", "--accel", "cpu", "--cfg", str(config)]
    done = subprocess.run(
        [*line, *settings, f"run.dir={run}"],
        capture_output=True, text=True, timeout=840, cwd=ROOT, check=False,
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 SGLang servers of each host (rollout.sglang.launch)" in done.stdout + done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["sglang/requests"] > 0 and line["mismatch/gap_max"] < 1e-4 for line in lines)
    assert json.loads((run / "result.json").read_text())["questions"] == 4
