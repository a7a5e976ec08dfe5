"""`launch.prepare` and what people give it by mistake; and what an interruption leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import prepare
from launch.data import inspection
from sqlenv.errors import UserError

from .conftest import json_lines
from .downloads import write
from .test_prepare import QUICK, run

CLUB = "spider/database/club/club.sqlite"
DEV = "spider/dev.json"


def message(root: Path, out: Path, *more: str) -> str:
    with pytest.raises(UserError) as caught:
        prepare.main(["--data-root", str(root), "--out", str(out), *more, *QUICK])
    text = str(caught.value)
    assert "\n" not in text
    return text


def corrupt(root: Path) -> None:
    content = (root / CLUB).read_bytes()
    (root / CLUB).write_bytes(content[:4096] + b"x" * (len(content) - 4096))


def gone(root: Path) -> None:
    (root / CLUB).unlink()
    shutil.rmtree(root / "spider" / "test_database" / "club")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda root: (root / CLUB).write_bytes(b"version https://git-lfs"), CLUB),
        (lambda root: (root / f"{CLUB}-journal").write_bytes(b"\xd9\xd5\x05\xf9"), CLUB),
        (corrupt, CLUB),
        (gone, CLUB),
        (lambda root: os.truncate(root / DEV, 900), DEV),
    ],
    ids=["no database", "unfinished", "corrupt", "gone", "cut"],
)
def test_a_damaged_download_is_named(
    root: Path, tmp_path: Path, spoil: Callable[[Path], object], named: str
):
    spoil(root)
    assert named in message(root, tmp_path / "p", "--data", "spider-dev")
    assert not list((tmp_path / "p").glob("prepared.json"))
    assert not list((tmp_path / "p").glob("*.jsonl"))


LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_locked_database_is_named(root: Path, tmp_path: Path):
    """By another process: locks of one process do not keep it out."""
    start = [sys.executable, "-c", LOCK, str(root / CLUB)]
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        told = message(root, tmp_path / "p", "--data", "spider-dev")
    assert f"{CLUB}: the database is locked" in told


@pytest.mark.parametrize("spoil", [gone, corrupt])
def test_questions_of_missing_databases_may_be_left_out(
    root: Path, tmp_path: Path, spoil: Callable[[Path], None]
):
    spoil(root)
    summary = run(root, tmp_path / "p", "--data", "spider-dk", "--drop-missing")
    assert summary["sets"]["spider-dk"]["questions"] == 6
    kept = json_lines(tmp_path / "p" / "spider-dk.jsonl")
    assert {one["db_id"] for one in kept} == {"new_pets_1"}
    assert summary["sets"]["spider-dk"]["found"].get("missing database", 0) == 6 * (spoil is gone)
    for path in (root / "spider").rglob("*.sqlite"):
        path.unlink()
    told = message(root, tmp_path / "q", "--data", "spider-dev", "--drop-missing")
    assert told.startswith("spider-dev: ")  # no question is left


def test_files_that_no_data_set_has_are_told(root: Path, tmp_path: Path, caplog):
    """What is whole beside them is prepared, but not as if it were all that is there."""
    shutil.copy(root / "bird" / "dev_20240627" / "dev.json", root / "spider" / "dev.json")
    run(root / "spider", tmp_path / "p")
    assert any("bird-dev: " in one.getMessage() for one in caplog.records)
    caplog.clear()
    (root / "spider" / "dev.json").write_bytes(b"")
    run(root / "spider", tmp_path / "q")
    assert any("dev.json: " in one.getMessage() for one in caplog.records)


def test_windows_line_ends_and_tabs_inside_a_query_change_nothing(root: Path, tmp_path: Path):
    before = run(root, tmp_path / "p", "--data", "bird-dev")["sets"]["bird-dev"]
    path = root / "bird" / "dev_20240627" / "dev.json"
    asked = json.loads(path.read_text())
    path.write_bytes(json.dumps(asked, indent=1).replace("\n", "\r\n").encode("utf-8-sig"))
    again = run(root, tmp_path / "q", "--data", "bird-dev")["sets"]["bird-dev"]
    assert again["fingerprint"] == before["fingerprint"]
    asked[0]["SQL"] = asked[0]["SQL"].replace(" FROM ", "\t\r\nFROM ")
    write(path, asked)
    run(root, tmp_path / "r", "--data", "bird-dev")
    first = json_lines(tmp_path / "r" / "bird-dev.jsonl")[0]
    assert (first["query"], first["rows"]) == (asked[0]["SQL"], 1)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--data", "spider"], "--data spider: "),
        (["--data", "bird-minidev"], "bird-minidev"),
        (["--data", "spider-dev", "--validation", "1"], "--validation"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere: "),
        (["executor.timeout=3"], "executor.timeout: "),
        (["--cfg", "nope.yaml"], "nope.yaml"),
    ],
)
def test_arguments_that_cannot_be_meant(downloads, tmp_path, arguments, key):
    assert key in message(downloads, tmp_path / "p", *arguments)
    assert not (tmp_path / "p").exists()


def test_nothing_is_written_over(root: Path, tmp_path: Path):
    assert "--data-root" in message(root, root)
    assert str(root / "bird") in message(root, root / "bird")
    run(root, tmp_path / "p", "--data", "spider-dev")
    assert "spider-dev" in message(root, tmp_path / "p", "--data", "bird-dev")
    assert str(tmp_path / "p") in message(tmp_path / "p", tmp_path / "q")
    assert [one["id"] for one in json_lines(tmp_path / "p" / "spider-dev.jsonl")]
    summary = (tmp_path / "p" / "prepared.json").read_bytes()
    named = ("--data-root", str(root), "--out", str(tmp_path / "p"), "--data", "spider-dev")
    prepare.main([*named, "--only", "check", *QUICK])
    assert (tmp_path / "p" / "prepared.json").read_bytes() == summary


# Going on.


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], int]]:
    """Return what prepares, and counts the questions whose gold queries were run."""
    asked: list[int] = []
    look = inspection.check_golds

    def noting(examples, *arguments, **options):
        found = look(examples, *arguments, **options)
        asked.append(len(examples))
        return found

    monkeypatch.setattr(inspection, "check_golds", noting)

    def count(root: Path, out: Path) -> tuple[dict[str, Any], int]:
        asked.clear()
        return run(root, out, "--data", "spider-dev", "bird-train"), sum(asked)

    return count


def test_what_changed_alone_is_done_again(root: Path, tmp_path: Path, counted):
    out = tmp_path / "p"
    first, ran = counted(root, out)
    assert ran == 24
    again, ran = counted(root, out)
    assert (again, ran) == (first, 0)
    path = root / "spider" / "dev.json"
    asked = json.loads(path.read_text())
    asked[0]["query"] = "SELECT max(age) FROM person"
    write(path, asked)
    changed, ran = counted(root, out)
    assert ran == 1
    sets = [one["sets"]["spider-dev"]["fingerprint"] for one in (first, changed)]
    assert sets[0] != sets[1]
    assert changed["sets"]["bird-train"] == first["sets"]["bird-train"]


def test_an_interrupted_preparation_goes_on(root: Path, tmp_path: Path, counted, monkeypatch):
    expected, _ = counted(root, tmp_path / "whole")
    with monkeypatch.context() as patch:
        count = inspection.check_golds
        lots = iter([count])

        def stop(*arguments, **options):
            for one in lots:
                return one(*arguments, **options)
            raise KeyboardInterrupt

        patch.setattr(inspection, "check_golds", stop)
        with pytest.raises(KeyboardInterrupt):
            counted(root, tmp_path / "p")
    assert not (tmp_path / "p" / "prepared.json").exists()
    assert not list((tmp_path / "p").glob("spider*.jsonl"))
    found, ran = counted(root, tmp_path / "p")
    assert 0 < ran < 24
    assert found["sets"] == expected["sets"]
