"""`launch.prepare`: data sets in every form checked, and what is found kept for all commands."""

import os
import shutil
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from diskcache import UnknownFileWarning

from launch import prepare
from launch.build import SqlSide
from launch.config import SPLITS, JobConfig, load_config
from sqlenv.cache import DiskCache, shared_cache
from sqlenv.config import ExecutorConfig
from sqlenv.data.sources import issues_of
from sqlenv.executor import Executor
from sqlenv.schema import values
from sqlenv.types import Observation, Result, ValueMatch
from tests.forked import Copy
from tests.vectors import read
from tests.waiting import wait_until
from tests.worlds import PEOPLE_GOLDS, edit, make_bird, make_file

from .conftest import json_lines

QUICK = ("executor.workers=1", "executor.timeout_s=5")
PAPERS = ("progress.yaml", "expo.yaml", "paverl.yaml", "astra.yaml")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Begin with an empty cache, and return what goes on with another one."""

    def use(name: str) -> Path:
        monkeypatch.setenv("MINIRL_CACHE", str(tmp_path / name))
        return tmp_path / name

    use("cache")
    return use


@pytest.fixture
def run(capsys, tmp_path, monkeypatch) -> Callable[..., tuple[list[dict[str, Any]], str]]:
    """Return what runs the command: the doubtful golds, and what is printed."""
    monkeypatch.setattr(prepare.cli.output, "width", 200)

    def run(root: Path, *more: str) -> tuple[list[dict[str, Any]], str]:
        out = tmp_path / "doubtful.jsonl"
        out.unlink(missing_ok=True)
        prepare.main(["--data-root", str(root), "--out", str(out), *more, *QUICK])
        told = " ".join(capsys.readouterr().out.split())
        return json_lines(out), told.partition("Cache of all runs: ")[0]

    return run


def test_witnesses_are_made_ahead_where_the_job_asks_for_them(downloads: Path, run):
    run(downloads, "--data", "spider-dev")
    assert not any(key.startswith("witnesses ") for key in shared_cache()._cache)
    run(downloads, "--data", "spider-dev", "env.witnesses=2")
    assert any(key.startswith("witnesses ") for key in shared_cache()._cache)


def test_a_set_has_its_own_file_of_each_dialect(tmp_path, run):
    root = make_bird(tmp_path / "bird")
    for name in ("sqlite", "postgresql"):
        shutil.copy(root / "dev.json", root / f"mini_dev_{name}.json")
        _, told = run(root, "--data", "bird-minidev", "--dialect", name)
        assert f"bird/mini_dev_{name}.json: 5 of 5 questions" in told


def test_every_data_set_is_checked_and_counted(downloads: Path, run):
    doubtful, told = run(downloads)
    found = {one["id"]: one for one in doubtful}
    issues = [found[f"bird/train/{n}"]["issues"] for n in (1, 2)]
    assert issues == [["failing"], ["empty"]]
    failing = found["bird/train/1"]
    assert (failing["db_id"], failing["gold_sql"]) == ("mine", PEOPLE_GOLDS[1])
    assert "no such column: nme" in failing["note"]
    assert "bird/train/0" not in found
    for words in (
        "bird/train: 18 of 18 questions, 18 golds executed, 3 empty, 3 failing, 12 scalar",
        "spider2/test: 3 of 4 questions, 3 blank",
    ):
        assert words in told


def test_prompts_are_the_same_function_of_the_same_facts(downloads: Path, empty_cache, run):
    """For all papers, byte by byte: of training, validation and evaluation, whatever is cached."""

    def prompts(job: JobConfig) -> list[tuple[Observation, Sequence[ValueMatch]]]:
        with SqlSide(job, Path()) as sql:
            asked = [one for split in SPLITS for one in sql.examples(split)]
            return [(sql.prompts.training(one), sql.prompts.matches(one)) for one in asked]

    small = ("data.held_out=3", "data.train.total=null", "data.train.exclude=[]", "train.steps=1")
    for name in PAPERS:
        job = load_config(name, (*small, *QUICK, f"data.root={downloads}"))
        empty_cache(f"{name}-cold")
        cold = prompts(job)
        assert prompts(job) == cold
        empty_cache(f"{name}-prepared")
        run(downloads, "--cfg", name)
        assert prompts(job) == cold
        shown = (("person", "City", "New York"),) if name != "paverl.yaml" else ()
        assert {matches for _, matches in cold} == {shown}


def test_what_is_known_is_not_done_again(root: Path, run, monkeypatch):
    ran: list[str] = []
    execute = Executor.execute

    def counting(executor: Executor, database: Path, sql: str, **more: Any) -> Result:
        ran.append(sql)
        return execute(executor, database, sql, **more)

    monkeypatch.setattr(Executor, "execute", counting)
    sets = ("--data", "spider-dev", "bird-train")
    first = run(root, *sets)
    count = len(ran)
    with monkeypatch.context() as patch:
        patch.setattr(values, "build_index", None)
        assert run(root, *sets) == first
    assert len(ran) == count
    edit(root / "spider" / "dev.json", 0, query="SELECT max(age) FROM person")
    run(root, *sets)
    assert ran[count:] == ["SELECT max(age) FROM person"]
    # Another database of the same name: everything about it is found anew, and the old is there.
    database = root / "spider" / "database" / "club" / "club.sqlite"
    content = database.read_bytes()
    make_file(database, "DELETE FROM person")
    changed, _ = run(root, *sets)
    count = len(ran)
    assert "empty" in {one["id"]: one["issues"] for one in changed}["spider/dev/3"]
    database.write_bytes(content)
    run(root, *sets)
    assert len(ran) == count


def test_processes_share_a_cache_also_where_one_is_killed(
    copies, downloads: Path, tmp_path: Path, empty_cache
):
    cache = empty_cache("shared")

    def start(name: str) -> Copy:
        where = ["--data-root", downloads, "--out", tmp_path / name]
        sets = ["--data", "spider-dev", "bird-train"]
        return copies(
            "launch.prepare", *where, *sets, *QUICK, cwd=tmp_path, MINIRL_CACHE=str(cache)
        )

    killed = start("killed")
    wait_until((cache / "minirl" / "sql" / "cache.db").exists)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.end().returncode == -signal.SIGKILL
    both = [start("first"), start("second")]
    assert [one.end().returncode for one in both] == [0, 0]
    first, second = ((tmp_path / name).read_bytes() for name in ("first", "second"))
    assert first == second
    with warnings.catch_warnings():  # which are errors here, of anything that is damaged
        # A file that was being written at the kill belongs to nothing.
        warnings.simplefilter("ignore", UnknownFileWarning)
        shared_cache()._cache.check()


def test_the_shared_cache_is_bounded(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("sqlenv.cache._LIMIT_BYTES", 100_000)
    disk = DiskCache(tmp_path / "small")
    for number in range(2_000):
        disk[str(number)] = [number] * 100
    assert disk.get("1999") == [1999] * 100
    assert disk.get("0") is None
    assert len(list(disk._cache)) < 1_500


def test_what_a_kill_left_in_the_cache_is_removed(tmp_path: Path):
    with closing(DiskCache(tmp_path / "small")) as disk:
        entered = disk.made_file("one", lambda file: file.write_bytes(b"1"))
    left, new = (entered.with_stem(name) for name in ("left", "new"))
    for path in (left, new):  # which another process may be about to enter
        path.write_bytes(b"2")
    mark = tmp_path / "small" / "swept"
    for old, there in (((left, entered), [entered, left, new]), ((mark,), [entered, new])):
        for path in old:
            os.utime(path, (0, 0))
        with closing(DiskCache(tmp_path / "small")) as disk:
            assert sorted(entered.parent.iterdir()) == sorted(there)
            assert disk.stored("one") == entered


def test_several_workers_find_what_one_finds(downloads, run, empty_cache):
    alone = run(downloads, "--data", "bird-train", "synsql")
    empty_cache("cache-of-workers")
    assert run(downloads, "--data", "bird-train", "synsql", "executor.workers=2") == alone


@pytest.mark.parametrize(("name", "layout"), [("dev", "spider"), ("b", "bird")])
def test_the_golds_of_a_question_file_are_checked_alone(root, run, name, layout):
    """A data set's own file, and one of another name."""
    own = root / {"spider": "spider/dev.json", "bird": "bird/dev_20240627/dev.json"}[layout]
    file = own.with_stem(name)
    file.write_bytes(own.read_bytes())
    doubtful, _ = run(file)
    assert [one["id"] for one in doubtful] == [f"{layout}/{name}/{n}" for n in (1, 2)]


def test_a_database_that_cannot_be_read_is_counted_and_one_to_leave_out_is_not(root: Path, run):
    (root / "spider" / "database" / "club" / "club.sqlite").write_bytes(b"no database" * 99)
    own = "data.train.exclude_databases=[mill]"
    doubtful, told = run(root, "--data", "spider-dev", "bird-train", own)
    unreadable = [one["id"] for one in doubtful if one["issues"] == ["unreadable database"]]
    assert unreadable == [f"spider/dev/{n}" for n in range(6)]
    assert "spider/dev: 6 of 6 questions, 6 golds executed, 6 unreadable database" in told
    assert "bird/train: 12 of 18 questions" in told


def test_issues_of_gold_queries(database):
    with Executor(ExecutorConfig()) as executor:
        for case in read("doubtful_golds"):
            result = executor.execute(database, case["gold"])
            assert sorted(issues_of(result)) == case["issues"], case["gold"]
