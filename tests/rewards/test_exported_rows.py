"""From a download to a step in TRL, verl and SkyRL: docs/rewards.md, command by command."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import textwrap
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from exchange import Message, UserError
from launch import prepare
from launch.prepare import Trainer, rows
from rewards.adapters.scoring import example_of
from rewards.adapters.skyrl import SqlEnv
from rewards.adapters.trl import SqlReward
from rewards.adapters.verl import compute_score
from sqlenv.types import Example
from tests.databases import make_file
from tests.launch.downloads import make_downloads

from .conftest import interpreter_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"^    python -m launch\.prepare (.* --export (\w+) --out (\S+))$", PAGE, re.M
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with Spider in small, as the page's commands expect it."""
    make_downloads(tmp_path / "downloads", "spider/train")
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


def test_other_golds_and_a_rule_of_its_own_come_along(place: Path):
    """Where one question has them; a Parquet file has the same columns in all rows."""
    database = make_file(place / "a.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES (1), (2)")
    plain = Example("1", "?", "a", database, "SELECT 3")
    more = replace(plain, alternatives=("SELECT a FROM t",), grading_method="subset,=,1")
    prompt = (Message("user", "?"),)
    settings = {"reward": {"kind": "execution"}, "env": {"kind": "single_turn", "wrapping": "any"}}
    reply, scores = "SELECT 2", {}
    for trainer, one in product(get_args(Trainer), (plain, more)):
        row = rows(trainer, [plain, one], lambda _: prompt)[-1]
        if trainer == "trl":
            columns = {name: [value] for name, value in row.items()}
            reward: Any = SqlReward(settings)
            scores[trainer, one is more] = reward([reply], **columns)[0]
        elif trainer == "verl":
            given = row["reward_model"]["ground_truth"], row["extra_info"]
            found = compute_score("sql", reply, *given, settings=settings)
            scores[trainer, one is more] = found["score"]
        else:
            scores[trainer, one is more] = SqlEnv(settings, row).step(reply)["reward"]
    assert scores == {(t, told): float(told) for t in get_args(Trainer) for told in (False, True)}
    assert "alternatives" not in rows("trl", [plain], lambda _: prompt)[0]
    assert rows("trl", [plain, more], lambda _: prompt)[0]["alternatives"] == []
    with pytest.raises(UserError, match="grading_method: 'subset,<,1' is none of"):
        example_of({"database": database, "gold_sql": "SELECT 1", "grading_method": "subset,<,1"})


@pytest.mark.parametrize("trainer", ["trl", "verl", "skyrl"])
def test_the_real_library_takes_a_step_with_them(place: Path, trainer: str):
    interpreter = interpreter_of(trainer)
    ((words, _, out),) = (one for one in COMMANDS if one[1] == trainer)
    name = {"trl": "TRL", "verl": "verl", "skyrl": "SkyRL"}[trainer]
    ((_, block),) = re.findall(rf"^({name} loads .*:\n\n)((?: {{4}}.*\n)+)", PAGE, re.M)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
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
