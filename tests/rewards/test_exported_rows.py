"""From a download to a step in TRL, verl and SkyRL: docs/rewards.md, command by command."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from launch import prepare
from tests.launch.downloads import make_spider

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"^    python -m launch\.prepare (.* --export (\w+) --out (\S+))$", PAGE, re.M
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with Spider in small, as the page's commands expect it."""
    make_spider(tmp_path / "downloads" / "spider_data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINIRL_CACHE", str(tmp_path / "cache"))
    return tmp_path


SMALL = ("data.held_out=3", "executor.isolation=thread", "executor.workers=1")


def test_rows_have_what_each_trainer_loads(place: Path):
    assert [trainer for _, trainer, _ in COMMANDS] == ["trl", "verl", "skyrl"]
    written = {}
    for words, trainer, _ in COMMANDS:
        out = place / f"{trainer}.jsonl"
        arguments = shlex.split(words)
        prepare.main([*arguments[: arguments.index("--out")], "--out", str(out), *SMALL])
        written[trainer] = [json.loads(line) for line in out.read_text().splitlines()]
    # Three databases of six golds, of which four may stay; one database is held out.
    assert {len(rows) for rows in written.values()} == {8}
    first, verl, skyrl = (rows[0] for rows in written.values())
    assert Path(first["database"]).is_absolute()
    assert Path(first["database"]).is_file()
    assert first["id"] == f"spider/train_spider/{first['question_id']}"
    assert "New York" in first["prompt"][-1]["content"]
    gold = first["gold_sql"]
    assert verl["reward_model"] == {"style": "rule", "ground_truth": gold}
    assert skyrl["reward_spec"] == {"method": "rule", "ground_truth": gold}
    assert first["prompt"] == verl["prompt"] == skyrl["prompt"]
    assert verl["extra_info"]["database"] == skyrl["database"] == first["database"]


@pytest.mark.parametrize("trainer", ["trl", "verl", "skyrl"])
def test_the_real_library_takes_a_step_with_them(place: Path, trainer: str):
    module = {"skyrl": "skyrl_gym"}.get(trainer, trainer)
    python = os.environ.get(f"MINIRL_{trainer.upper()}_PYTHON")
    if not python and importlib.util.find_spec(module) is None:
        pytest.skip(
            f"{module} is not installed here: set MINIRL_{trainer.upper()}_PYTHON to the "
            "interpreter of an environment that has it"
        )
    ((words, _, out),) = (one for one in COMMANDS if one[1] == trainer)
    name = {"trl": "TRL", "verl": "verl", "skyrl": "SkyRL"}[trainer]
    ((_, block),) = re.findall(rf"^({name} loads .*:\n\n)((?: {{4}}.*\n)+)", PAGE, re.M)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    interpreter = python or sys.executable
    for line in (
        ["-m", "launch.prepare", *shlex.split(words), *SMALL],
        [
            str(ROOT / "tests/rewards/adapters/exported_rows.py"),
            trainer,
            out,
            textwrap.dedent(block),
        ],
    ):
        done = subprocess.run(
            [interpreter, *line], env=environment, capture_output=True, text=True, check=False,
            timeout=250,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told.pop("rows") == 8
    assert told in (
        {"steps": 1, "reward": 0.0},
        {"acc": [1.0, 0.0]},
        {"done": True, "correct": True},
    )
