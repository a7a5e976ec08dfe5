"""`launch.prepare` and what people give it by mistake; and what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import prepare
from sqlenv.errors import UserError

from .conftest import ROOT
from .downloads import make_downloads, write
from .test_prepare import QUICK, lines, run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_downloads(tmp_path_factory.mktemp("data"))


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    """Copy the downloads, to be spoilt."""
    return shutil.copytree(whole, tmp_path / "data")


def message(root: Path, out: Path, *more: str) -> str:
    with pytest.raises(UserError) as caught:
        prepare.main(["--data-root", str(root), "--out", str(out), *more, *QUICK])
    text = str(caught.value)
    assert "\n" not in text
    return text


CLUB = "spider/database/club/club.sqlite"


DEV = "spider/dev.json"


def corrupt(root: Path) -> None:
    content = (root / CLUB).read_bytes()
    (root / CLUB).write_bytes(content[:4096] + b"x" * (len(content) - 4096))


def gone(root: Path) -> None:
    (root / CLUB).unlink()
    shutil.rmtree(root / "spider" / "test_database" / "club")


def without_question(root: Path) -> None:
    asked = json.loads((root / DEV).read_text())
    asked[3]["question"] = None
    write(root / DEV, asked)


def written(path: str, content: bytes) -> Callable[[Path], object]:
    return lambda root: (root / path).write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (written(CLUB, b""), f"{CLUB}: the database file is empty; "),
        (written(CLUB, b"version https://git-lfs"), f"{CLUB}: not a SQLite database; "),
        (corrupt, f"{CLUB}: the database is corrupt ("),
        (written(f"{CLUB}-journal", b"\xd9\xd5\x05\xf9"), f"{CLUB}-journal: unfinished writes; "),
        (gone, f"{CLUB} is not there, but question spider/dev/0 needs it; unpack it, or add"),
        (lambda root: os.truncate(root / DEV, 900), f"{DEV}: broken JSON after "),
        (written(DEV, b""), f"{DEV}: broken JSON"),
        (without_question, f"{DEV}: record 3: question: "),
        (written("spider/tables.json", b"\xff\xfe{"), "spider/tables.json: is UTF-16; "),
    ],
)
def test_a_damaged_download_is_named(
    root: Path, tmp_path: Path, spoil: Callable[[Path], object], expected: str
):
    spoil(root)
    assert expected in message(root, tmp_path / "p", "--data", "spider-dev")
    assert not (tmp_path / "p" / "prepared.json").exists()
    assert not (tmp_path / "p" / "spider-dev.jsonl").exists()


def test_a_locked_database_is_named(root: Path, tmp_path: Path):
    # Another process: locks of one process do not keep it out.
    code = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "db.execute('BEGIN EXCLUSIVE'); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root / CLUB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        told = message(root, tmp_path / "p", "--data", "spider-dev")
    assert f"{CLUB}: the database is locked by another program" in told


@pytest.mark.parametrize("spoil", [gone, corrupt])
def test_questions_of_missing_databases_may_be_left_out(
    root: Path, tmp_path: Path, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
):
    spoil(root)
    summary = run(root, tmp_path / "p", "--data", "spider-dk", "--drop-missing")
    assert summary["sets"]["spider-dk"]["questions"] == 6
    assert {one["db_id"] for one in lines(tmp_path / "p" / "spider-dk.jsonl")} == {"new_pets_1"}
    shown = " ".join(capsys.readouterr().out.split())
    assert ("left out: " in shown) == (spoil is corrupt)
    assert summary["sets"]["spider-dk"]["found"].get("missing database", 0) == 6 * (spoil is gone)


def test_a_set_of_which_no_question_is_left_is_named(root: Path, tmp_path: Path):
    for path in (root / "spider").rglob("*.sqlite"):
        path.unlink()
    told = message(root, tmp_path / "p", "--data", "spider-dev", "--drop-missing")
    assert told.startswith("spider-dev: no question is left; ")
    assert told.endswith("bring what is missing, or name the other sets with --data")


def test_files_that_no_data_set_has_are_told(root: Path, tmp_path: Path, caplog):
    """What is whole beside them is prepared, but not as if it were all that is there."""
    shutil.copy(root / "bird" / "dev_20240627" / "dev.json", root / "spider" / "dev.json")
    run(root / "spider", tmp_path / "p")
    (told,) = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert told.startswith("left out: bird-dev: ")
    assert "no folder train_databases or dev_databases in it" in told
    caplog.clear()
    (root / "spider" / "dev.json").write_bytes(b"")
    run(root / "spider", tmp_path / "q")
    told = " ".join(one.getMessage() for one in caplog.records)
    assert "dev.json: broken JSON" in told


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
    first = lines(tmp_path / "r" / "bird-dev.jsonl")[0]
    assert (first["query"], first["rows"]) == (asked[0]["SQL"], 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data", "spider"], "--data spider: no such data set; there are bird-train, spider-tr"),
        (["--data", "bird-minidev"], "no bird-minidev; expected mini_dev_sqlite.json with"),
        (["--sample", "progress", "--data", "synsql", "--validation", "9999"], "set fewer aside"),
        (["--data", "spider-dev", "--validation", "1"], "no data set to learn from is there"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere: no tokenizer.json in it"),
        (["executor.timeout=3"], "executor.timeout: unknown key; did you mean timeout_s"),
        (["--cfg", "nope.yaml"], "nope.yaml"),
    ],
)
def test_arguments_that_cannot_be_meant(
    whole: Path, tmp_path: Path, arguments: list[str], expected: str
):
    assert expected in message(whole, tmp_path / "p", *arguments)
    assert not (tmp_path / "p").exists()


def test_nothing_is_written_over(root: Path, tmp_path: Path):
    assert "is --data-root too; write to another folder" in message(root, root)
    assert "holds files that are not a run" in message(root, root / "bird")
    run(root, tmp_path / "p", "--data", "spider-dev")
    told = message(root, tmp_path / "p", "--data", "bird-dev")
    assert "holds results of other settings (sets.0 is 'spider-dev' there and 'bird-dev'" in told
    assert "was itself prepared" in message(tmp_path / "p", tmp_path / "q")


# Going on.


def counted(root: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], int]:
    """Prepare, and count the questions whose gold queries were run."""
    asked: list[int] = []
    with monkeypatch.context() as patch:
        from launch.data import inspection

        look = inspection.check_golds
        patch.setattr(
            inspection, "check_golds", lambda e, *a, **k: asked.append(len(e)) or look(e, *a, **k)
        )
        return run(root, out, "--data", "spider-dev", "bird-train"), sum(asked)


def test_what_is_complete_is_told_and_what_changed_is_done_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "p"
    first, ran = counted(root, out, monkeypatch)
    assert ran == 24
    again, ran = counted(root, out, monkeypatch)
    assert (again, ran) == (first, 0)
    path = root / "spider" / "dev.json"
    asked = json.loads(path.read_text())
    asked[0]["query"] = "SELECT max(age) FROM person"
    write(path, asked)
    changed, ran = counted(root, out, monkeypatch)
    assert ran == 1
    assert (
        changed["sets"]["spider-dev"]["fingerprint"] != first["sets"]["spider-dev"]["fingerprint"]
    )
    assert changed["sets"]["bird-train"] == first["sets"]["bird-train"]


def test_an_interrupted_preparation_goes_on(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected, _ = counted(root, tmp_path / "whole", monkeypatch)
    with monkeypatch.context() as patch:
        from launch.data import sets

        def stop(*_arguments: Any, **_options: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(sets, "_write_databases", stop)
        with pytest.raises(KeyboardInterrupt):
            run(root, tmp_path / "p", "--data", "spider-dev", "bird-train")
    assert not list((tmp_path / "p").glob("*.jsonl"))
    found, ran = counted(root, tmp_path / "p", monkeypatch)
    assert ran == 0
    assert found["sets"] == expected["sets"]


def test_a_killed_preparation_goes_on_to_the_same_end(root: Path, tmp_path: Path):
    """Kill it amid the questions; the next call does the rest."""
    slow = "WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT 30000) SELECT max(x) FROM r"
    asked = json.loads((root / "spider" / "dev.json").read_text())
    more = [{**asked[0], "query": f"{slow} -- {number}"} for number in range(96)]
    write(root / "spider" / "dev.json", [*asked, *more])
    arguments = [
        *("--data-root", str(root), "--out", str(tmp_path / "p"), "--data", "spider-dev"),
        *("executor.workers=1", "executor.timeout_s=60"),
    ]
    code = f"from launch import prepare; prepare.main({arguments!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    findings = tmp_path / "p" / "checks" / "cache.db"
    deadline = time.monotonic() + 90
    try:
        while _count(findings) < 1:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    kept = _count(findings)
    assert not (tmp_path / "p" / "prepared.json").exists()
    prepare.main(arguments)
    summary = json.loads((tmp_path / "p" / "prepared.json").read_text())
    assert summary["sets"]["spider-dev"]["questions"] == 102
    assert 0 < kept <= _count(findings) == 102
    assert len(lines(tmp_path / "p" / "spider-dev.jsonl")) == 102


def _count(findings: Path) -> int:
    if not findings.exists():
        return 0
    db = sqlite3.connect(f"file:{findings}?mode=ro", uri=True)
    try:
        return db.execute("SELECT count(*) FROM Cache").fetchone()[0]
    except sqlite3.OperationalError:  # not made yet
        return 0
    finally:
        db.close()
