"""Whatever is wrong with data, databases or predictions is told in a line, and nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import eval as command
from minirl.errors import UserError as ModelError
from sqlenv.errors import UserError

from .small_sets import ASKED, GOLDS, make_bird, make_spider


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_spider(tmp_path / "spider_data")


def refused(predictions: Path, root: Path, *more: str, data: str = "spider-dev") -> str:
    """Give the line that an evaluation ends with; nothing may be left of it."""
    out = root.parent / "out" / "o.json"
    arguments = ["--predictions", str(predictions), "--data", data, "--data-root", str(root)]
    with pytest.raises((UserError, ModelError)) as caught:
        command.main([*arguments, "--json", str(out), *more])
    assert not out.exists()
    assert not out.with_name("o.json.part").exists()
    line = str(caught.value)
    assert "\n" not in line
    return line


def gold_file(folder: Path, lines: list[str] = GOLDS, name: str = "p.sql") -> Path:
    path = folder / name
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


# Predictions.


def lines(number: int, line: str) -> str:
    """Give the right predictions with another line in the place of one of them."""
    return "\n".join([*GOLDS[:number], line, *GOLDS[number + 1 :]])


PREDICTIONS: dict[str, tuple[str, bytes | str, str]] = {
    "one line short": (
        "p.sql",
        "\n".join(GOLDS[:-1]),
        "4 predictions for 5 questions, the last one is {path}:4",
    ),
    "a tab inside": (
        "p.sql",
        lines(2, "SELECT\tname\tFROM pet"),
        "{path}:3: a tab inside the query",
    ),
    "a tab before a word": (
        "p.sql",
        lines(3, "SELECT count(*)\titem"),
        "{path}:4: is for database item, but in the order of --data comes spider/dev/3",
    ),
    "a carriage return inside": (
        "p.sql",
        lines(1, "SELECT\rage"),
        "{path}:2: a carriage return inside",
    ),
    "other databases": (
        "p.json",
        json.dumps(dict.fromkeys("01234", "x\t----- bird -----\tbank")),
        '{path}: entry "0": is for database bank, but',
    ),
    "a number left out": (
        "p.json",
        json.dumps({"0": "x", "2": "x"}),
        "{path}: its numbers should run from 0 to 1, and 1 is not there",
    ),
    "broken JSON": ("p.json", '{"0": ', "{path}: not of BIRD's form"),
    "a broken line": (
        "p.jsonl",
        '{"pred": "x"}\n{"pred"\n',
        "{path}:2: neither a query nor a JSON object with `pred`",
    ),
    "an id left out": (
        "p.jsonl",
        '{"id": "spider/dev/1", "sql": ""}\n',
        "{path}: no prediction for 4 of 5 questions, the first is spider/dev/0",
    ),
    "an unknown id": (
        "p.jsonl",
        '{"id": "bird/dev/1", "sql": ""}\n',
        "{path}:1: the id bird/dev/1 is of no question of --data",
    ),
    "an id twice": (
        "p.jsonl",
        '{"id": "spider/dev/1", "sql": ""}\n' * 2,
        "{path}:2: the id spider/dev/1 is there twice",
    ),
    "a question twice": (
        "p.jsonl",
        "\n".join(json.dumps({"question": ASKED[n][1], "sql": ""}) for n in (0, 1, 2, 3, 3)),
        "{path}:5: a second prediction for spider/dev/3",
    ),
    "uneven samples": (
        "p.json",
        json.dumps([{"pred_sqls": ["x", "y"]}] * 4 + [{"pred_sqls": ["x"]}]),
        "{path}: entry 4: 1 samples where others have 2",
    ),
    "samples without a decoding": (
        "p.json",
        json.dumps([{"pred_sqls": ["x", "y"]}] * 5),
        "{path}: 2 samples a question; say --decode vote@2 or pass@2",
    ),
    "no JSON of BIRD": (
        "p.json",
        '"SELECT 1"',
        '{path}: not of BIRD\'s form {{"0": "SQL\\t----- bird -----\\tdb_id"}}',
    ),
    "an empty file": ("p.sql", "", "{path}: no prediction in it"),
    "an empty folder": ("p", "", "{path}: no .sql file in it"),
    "nothing": ("", "", "{path}: no such file"),
}


@pytest.mark.parametrize("case", PREDICTIONS)
def test_predictions(root, tmp_path, case):
    name, content, words = PREDICTIONS[case]
    path = tmp_path / (name or "missing.sql")
    if name == "p":
        path.mkdir()
    elif name:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refused(path, root)
    assert words.format(path=path) in line


def test_samples_that_are_too_few(root, tmp_path):
    line = refused(gold_file(tmp_path), root, "--decode", "vote@8")
    assert "1 samples a question, and --decode vote@8 takes 8" in line


# The data's layout.


def test_a_folder_too_deep_is_found_and_told(root, tmp_path, caplog):
    caplog.set_level("INFO")
    deep = tmp_path / "download" / "inner" / "data_of_mine"
    shutil.copytree(root, deep)
    place, out = ["--data-root", str(tmp_path / "download")], tmp_path / "o.json"
    path = gold_file(tmp_path)
    command.main(
        [*("--predictions", str(path)), "--data", "spider-dev", *place, "--json", str(out)]
    )
    sheet = json.loads(out.read_text())
    assert sheet["measures"]["spider_ex"]["mean"] == sheet["measures"]["spider_ts"]["mean"] == 1
    assert f"{deep / 'dev.json'}: taken for spider-dev" in caplog.text
    assert "5 questions, spider-dev as published has 1034" in caplog.text


@pytest.mark.parametrize(
    ("make", "data", "whose"),
    [
        (make_bird, "spider-dev", "bird"),
        (make_spider, "bird-dev", "spider"),
        (make_spider, "spider-syn", "spider"),
    ],
)
def test_the_questions_of_another_benchmark(tmp_path, make, data, whose):
    root = make(tmp_path / "data")
    line = refused(gold_file(tmp_path), root, data=data)
    assert f"{root / 'dev.json'}: its records are of {whose}" in line


def test_a_file_of_other_questions(root, tmp_path):
    make_bird(tmp_path / "bird")
    (root / "mine.json").write_text((tmp_path / "bird" / "dev.json").read_text())
    line = refused(gold_file(tmp_path), root, "--file", "mine.json")
    assert f"{root / 'mine.json'}: its records are of bird" in line
    assert "no nothing.json in it" in refused(gold_file(tmp_path), root, "--file", "nothing.json")


LAYOUTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no such root": (shutil.rmtree, "{root} does not exist; give the folder"),
    "no questions": (
        lambda r: (r / "dev.json").unlink(),
        "{root}: no spider-dev; expected dev.json or val.json with database",
    ),
    "no question in the file": (
        lambda r: (r / "dev.json").write_text("[]"),
        "{root}/dev.json: expected a list of records, found none",
    ),
    "no databases": (lambda r: shutil.rmtree(r / "database"), "{root}: no folder database or"),
    "a database left out": (
        lambda r: (r / "database" / "shop" / "shop.sqlite").unlink(),
        "{root}/database/shop/shop.sqlite is not there, but question spider/dev/3 needs it",
    ),
    "a suite of other databases": (
        lambda r: shutil.rmtree(r / "test_suite_database" / "pets"),
        "{root}/test_suite_database/pets: no database of the test suite in it",
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(root, tmp_path, case):
    damage, words = LAYOUTS[case]
    damage(root)
    assert words.format(root=root) in refused(gold_file(tmp_path), root)


LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_locked_database(root, tmp_path):
    """By another process: locks within one are no locks."""
    path = root / "database" / "pets" / "pets.sqlite"
    start = [sys.executable, "-c", LOCK, str(path)]
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        line = refused(gold_file(tmp_path), root)
        other.communicate()
    assert f"{path}: the database is locked by another program" in line


# Options.


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--comparators", "spider_exx"], "there is no spider_exx; there are set, bag"),
        (["--comparators", ","], "--comparators ,: names none"),
        (["--comparators", "spider2_local"], "these questions have gold queries alone"),
        (["--test-suite", "nowhere"], "--test-suite nowhere: no such folder"),
        (["--decode", "beam@3"], "--decode beam@3: write greedy, vote@n"),
        (["--timeout-s", "-1"], "--timeout-s -1.0: write a number of seconds above 0"),
        (
            ["--timeout-s", "1e30"],
            "--timeout-s 1e+30: write a number of seconds above 0, 1,000,000",
        ),
        (["--cfg", "progress-demo.yaml"], "--predictions: needs no --cfg"),
        (["--endpoint", "http://x/v1"], "--predictions: needs no model"),
        (["--decode", "judge@3"], "--decode judge@3: needs a model"),
    ],
)
def test_options(root, tmp_path, more, words):
    assert words in refused(gold_file(tmp_path), root, *more)


def test_a_pipe_of_predictions_is_a_file_of_them(root, tmp_path):
    pipe = tmp_path / "pipe.sql"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("SELECT 1\nSELECT 2\n",))
    writer.start()
    assert "2 predictions for 5 questions" in refused(pipe, root)
    writer.join()


def test_a_mistake_is_one_line_and_status_2(root, tmp_path, command):
    path = gold_file(tmp_path, GOLDS[:-1])
    done = command(
        *("launch.eval", "--predictions", path, "--data", "spider-dev", "--data-root", root),
        *("--json", tmp_path / "o.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {path}: 4 predictions for 5 questions")
    assert not (tmp_path / "o.json").exists()
