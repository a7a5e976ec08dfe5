"""Whatever is damaged ends a command with one line that names it, status 2, and nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import cli
from launch import eval as evaluating
from launch import score as scoring

from .damage import (
    DAMAGES,
    DATABASE,
    EVAL,
    PAIRS,
    SCORE,
    SHOP,
    arguments,
    beside,
    link,
    make_inputs,
    rewrite,
)
from .small_sets import GOLDS


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_inputs(tmp_path / "spider_data")


def status_of(command: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Run a command as `python -m` does, in this process; give its exit status."""
    monkeypatch.setattr(cli, "_hush", lambda: None)
    monkeypatch.setattr(sys, "argv", ["x", *words])
    main = evaluating.main if command == EVAL else scoring.main
    with pytest.raises(SystemExit) as caught:
        cli.run(main)
    return caught.value.code


# Each damage by one command, and all commands in turn.
CASES = [
    (name, damage.commands[number % len(damage.commands)])
    for number, (name, damage) in enumerate(DAMAGES.items())
]


@pytest.mark.parametrize(("name", "command"), CASES)
def test_a_line_names_what_is_damaged(root, name, command, capsys, monkeypatch):
    DAMAGES[name].do(root)
    assert status_of(command, arguments(command, root), monkeypatch) == 2
    told = capsys.readouterr()
    line = told.err.splitlines()[-1]
    assert line.startswith("error: ")
    for words in DAMAGES[name].words:
        assert words.format(root=root) in line
    assert "Traceback" not in told.err
    assert told.out == ""
    assert not (root.parent / "out").exists()


def test_an_older_file_stays_until_the_new_one_is_whole(root, capsys, monkeypatch):
    """Also where a database is lost on the way."""
    old = root / "old.jsonl"
    old.write_text("old\n")
    os.truncate(root / SHOP, 4096)
    for command in (SCORE, PAIRS):
        words = [*arguments(command, root)[:-1], "--out", str(old)]
        assert status_of(command, words, monkeypatch) == 2
        assert "shop.sqlite" in capsys.readouterr().err
        assert old.read_text() == "old\n"
    assert [path.name for path in root.glob("*old*")] + [*root.glob(".*")] == ["old.jsonl"]


HARMLESS: dict[str, Callable[[Path], object]] = {
    "an empty log": lambda r: beside(r / DATABASE, "-wal", b""),
    "an empty journal": lambda r: beside(r / DATABASE, "-journal", b""),
    "a journal whose writer is done": lambda r: beside(r / DATABASE, "-journal", bytes(512)),
    "a link": lambda r: link(r / DATABASE),
    "a log beside another file": lambda r: beside(r / "p.sql", "-wal"),
    "a column whose name is not UTF-8": lambda r: rewrite(
        r / DATABASE, b"more (text", b"more (\xe4\xffxt"
    ),
    "a table whose name is not UTF-8": lambda r: rewrite(r / DATABASE, b"more", b"mo\xe4\xff"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_official_programs_read_is_judged(root, name, capsys, monkeypatch):
    HARMLESS[name](root)
    out = root.parent / "out" / "o.json"
    assert status_of(EVAL, [*arguments(EVAL, root), "--comparators", "bird_ex"], monkeypatch) == 0
    assert json.loads(out.read_text())["measures"]["bird_ex"]["mean"] == 1
    capsys.readouterr()
    for command in (SCORE, PAIRS):
        assert status_of(command, arguments(command, root), monkeypatch) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [json.loads(line)["ex"]["set"] for line in lines] == [True] * 5


def test_a_folder_whose_name_is_not_utf8(tmp_path, command):
    """In processes of their own, whose standard output takes text alone."""
    root = make_inputs(tmp_path / os.fsdecode(b"n\xe4\xff") / "spider_data")
    for name in (EVAL, SCORE, PAIRS):
        done = command(name.split()[0], *arguments(name, root), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    sheet = json.loads((root.parent / "out" / "o.json").read_text())
    assert sheet["measures"]["spider_ts"]["mean"] == 1
    done = command("launch.prepare", "--data-root", root, "--out", tmp_path / "new", cwd=tmp_path)
    assert done.returncode == 2
    assert "not UTF-8" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("place", "words", "command"),
    [
        (".", "spider_data: ", SCORE),
        ("database", "spider_data/database: ", EVAL),
        ("database/pets", "spider_data/database/pets", PAIRS),
    ],
)
def test_a_folder_that_may_not_be_read_is_named_and_not_what_is_missing_in_it(
    root, place, words, command, tmp_path
):
    """As a user without the rights of root, who may read everything."""
    (root / place).chmod(0)
    start = [] if os.geteuid() else _WITHOUT_RIGHTS
    line = [*start, sys.executable, "-m", command.split()[0], *arguments(command, root)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    (root / place).chmod(0o700)
    told = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert f"{root.parent}/{words}".rstrip(": " * (command == PAIRS)) in told
    assert "read" in told or "Permission denied" in told
    assert "not there" not in told
    assert "no such" not in told


_RIGHTS = "-dac_override,-dac_read_search"
_WITHOUT_RIGHTS = ["setpriv", f"--bounding-set={_RIGHTS}", f"--inh-caps={_RIGHTS}"]


@pytest.mark.parametrize(
    ("command", "more", "name"),
    [
        (PAIRS, ["--out", "/dev/full"], "/dev/full"),
        (EVAL, [], "standard output"),
    ],
)
def test_a_full_disk_names_the_file(root, tmp_path, command, more, name):
    """/dev/full is always full."""
    line = [sys.executable, "-m", command.split()[0], *arguments(command, root), *more]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            line, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {name}: No space left on device")


def test_verdicts_go_into_a_plain_file(root, capsys, monkeypatch):
    words = [*arguments(EVAL, root)[:-1], "/dev/full"]
    assert status_of(EVAL, words, monkeypatch) == 2
    assert "--json /dev/full: is no plain file" in capsys.readouterr().err


LONG: dict[str, str] = {
    "conditions": "SELECT name FROM pet WHERE age = 1" + " OR age = 1" * 200_000,
    "orders": "select a from t order by " * 80_000,
    "names": "[" * 2_000_000,
}


@pytest.mark.parametrize("name", LONG)
def test_a_text_of_megabytes_is_refused_before_anything_reads_it(root, name, capsys, monkeypatch):
    """Reading it took 3 to 19 s a pair, of which the limits of a query say nothing."""
    pair = {"id": 1, "db": str(root / DATABASE), "gold": GOLDS[0], "pred": LONG[name]}
    (root / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    words = [*arguments(PAIRS, root), "--timeout-s", "1"]
    assert status_of(PAIRS, words, monkeypatch) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["status"] == "too_large"
    assert record["seconds"] < 1
    (root / "p.jsonl").write_text(
        "".join(json.dumps({"pred": sql}) + "\n" for sql in [LONG[name], *GOLDS[1:]])
    )
    words = arguments(EVAL, root)
    words[1] = str(root / "p.jsonl")
    assert status_of(EVAL, [*words, "--timeout-s", "1"], monkeypatch) == 0
    sheet = json.loads((root.parent / "out" / "o.json").read_text())
    assert [one["scores"]["spider_ex"] for one in sheet["questions"]] == [0, 1, 1, 1, 1]
    assert sheet["questions"][0]["predicted"] == "too_large"
    assert sheet["late"] == []
