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
from minirl.errors import UserError as ModelError
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
    assert not {"prepared.json", "spider-dev.jsonl"} & {p.name for p in tmp_path.rglob("*")}


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
    assert "--drop-missing" in message(root, tmp_path / "p", "--data", "spider-dk")
    found = run(root, tmp_path / "p", "--data", "spider-dk", "--drop-missing")["sets"]["spider-dk"]
    kept = [one["db_id"] for one in json_lines(tmp_path / "p" / "spider-dk.jsonl")]
    assert kept == ["new_pets_1"] * 6
    assert found["found"].get("missing database", 0) == 6 * (spoil is gone)
    if spoil is gone:
        told = message(root, tmp_path / "q", "--data", "spider-dev", "--drop-missing")
        assert told.startswith("spider-dev: ")  # no question is left


def test_files_that_no_data_set_has_are_told(root: Path, tmp_path: Path, caplog):
    """What is whole beside them is prepared, but not as if it were all that is there."""
    (root / "spider" / "dev.json").write_bytes(b"")
    sets = run(root / "spider", tmp_path / "p")["sets"]
    assert set(sets) == {"spider-train", "spider-test"}
    assert any("dev.json: " in one.getMessage() for one in caplog.records)


def test_windows_line_ends_and_tabs_inside_a_query_change_nothing(root: Path, tmp_path: Path):
    path = root / "bird" / "dev_20240627" / "dev.json"
    asked = json.loads(path.read_text())
    asked[0]["SQL"] = asked[0]["SQL"].replace(" FROM ", "\t\r\nFROM ")
    found = []
    for name, windows in (("p", False), ("q", True)):
        text = json.dumps(asked, indent=1)
        path.write_bytes(
            text.replace("\n", "\r\n").encode("utf-8-sig") if windows else text.encode()
        )
        found.append(run(root, tmp_path / name, "--data", "bird-dev")["sets"]["bird-dev"])
        first = json_lines(tmp_path / name / "bird-dev.jsonl")[0]
        assert (first["query"], first["rows"]) == (asked[0]["SQL"], 1)
    assert found[0]["fingerprint"] == found[1]["fingerprint"]


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


def test_a_folder_with_a_name_that_is_no_text_is_told(downloads: Path, tmp_path: Path):
    """Sets of questions name their databases, in UTF-8; the folder that is written may be so."""
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    odd.symlink_to(downloads)
    for root in (odd, odd / "spider" / "dev.json"):
        assert "UTF-8" in message(root, tmp_path / "p")
    run(downloads, tmp_path / os.fsdecode(b"\xe9"), "--data", "spider-dev")


def test_a_damaged_tokenizer_is_told_at_once(downloads: Path, tmp_path: Path):
    """And not by a process of the pool."""
    write(tmp_path / "model" / "tokenizer.json", [])
    with pytest.raises(ModelError, match="model: the tokenizer"):
        run(downloads, tmp_path / "p", "--tokenizer", str(tmp_path / "model"))
    assert not (tmp_path / "p").exists()


def test_nothing_is_written_over(root: Path, tmp_path: Path):
    out = tmp_path / "p"
    assert "--data-root" in message(root, root)
    assert str(root / "bird") in message(root, root / "bird")
    run(root, out, "--data", "spider-dev")
    before = {path: path.read_bytes() for path in out.glob("*.json*")}
    assert "spider-dev" in message(root, out, "--data", "bird-dev")
    assert str(out) in message(out, tmp_path / "q")
    named = ("--data-root", str(root), "--out", str(out), "--data", "spider-dev")
    prepare.main([*named, "--only", "check", *QUICK])
    assert {path: path.read_bytes() for path in out.glob("*.json*")} == before


# Going on.


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], int]]:
    """Return what prepares, and counts the questions whose gold queries were run; after `most` lots
    it is interrupted.
    """
    asked: list[int] = []
    look = inspection.check_golds

    def count(root: Path, out: Path, most: int = 99) -> tuple[dict[str, Any], int]:
        def noting(examples, *arguments, **options):
            if len(asked) == most:
                raise KeyboardInterrupt
            asked.append(len(examples))
            return look(examples, *arguments, **options)

        asked.clear()
        monkeypatch.setattr(inspection, "check_golds", noting)
        return run(root, out, "--data", "spider-dev", "bird-train"), sum(asked)

    return count


def test_what_changed_alone_is_done_again(root: Path, tmp_path: Path, counted):
    first, ran = counted(root, tmp_path / "p")
    assert ran == 24
    assert counted(root, tmp_path / "p") == (first, 0)
    path = root / "spider" / "dev.json"
    asked = json.loads(path.read_text())
    asked[0]["query"] = "SELECT max(age) FROM person"
    write(path, asked)
    changed, ran = counted(root, tmp_path / "p")
    assert ran == 1
    sets = [one["sets"]["spider-dev"]["fingerprint"] for one in (first, changed)]
    assert sets[0] != sets[1]
    assert changed["sets"]["bird-train"] == first["sets"]["bird-train"]


def test_an_interrupted_preparation_goes_on(root: Path, tmp_path: Path, counted):
    """And what was there before it stays."""
    expected, _ = counted(root, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        counted(root, tmp_path / "p", most=1)
    assert {path.name for path in (tmp_path / "p").iterdir() if path.is_file()} == {
        "config.yaml", "versions.json",
    }  # fmt: skip
    found, ran = counted(root, tmp_path / "p")
    assert 0 < ran < 24
    assert found["sets"] == expected["sets"]
    before = {path: path.read_bytes() for path in (tmp_path / "p").glob("*.json*")}
    write(root / "spider" / "dev.json", json.loads((root / "spider/dev.json").read_text())[1:])
    (root / "spider/database/club/club.sqlite").touch()
    with pytest.raises(KeyboardInterrupt):
        counted(root, tmp_path / "p", most=0)
    assert {path: path.read_bytes() for path in (tmp_path / "p").glob("*.json*")} == before
