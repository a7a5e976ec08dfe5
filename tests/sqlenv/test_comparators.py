"""Comparators on databases made here; what they must say is what the official programs say."""

from itertools import count
from typing import get_args

import pytest

from exchange import UserError
from sqlenv.config import ExecutorConfig
from sqlenv.evaluators.comparators import COMPARATORS, Case, QueryRuns, judge_case, judge_cases
from sqlenv.executor import Executor
from sqlenv.types import ExecutionMatch, Table
from tests.sqlenv.cases import read_cases
from tests.sqlenv.conftest import ENDLESS, make_file

ALL = "SELECT a, b FROM t"
PAIRS = "SELECT 1, 10 UNION ALL SELECT 2, 20"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Give a database, and a suite: its copy and one with other rows."""
    folder = tmp_path_factory.mktemp("suite")
    table = "CREATE TABLE t (a, b, value_usd); INSERT INTO t VALUES "
    database = make_file(folder / "one.sqlite", table + "(1, 'x', 5), (2, 'y', 6), (2, 'y', 6)")
    copy = folder / "copy.sqlite"
    copy.write_bytes(database.read_bytes())
    return database, (copy, make_file(folder / "other.sqlite", table + "(3, 'x', 5), (1, 'z', 1)"))


@pytest.fixture(scope="module")
def executor():
    config = ExecutorConfig(workers=1, timeout_s=20)
    with Executor(config) as made:
        yield made


def scores(executor, files, predicted, gold, *names):
    database, suite = files
    [judged] = judge_cases(executor, [Case(predicted, gold, database, suite)], names)
    return tuple(judged.scores[name] for name in names)


@pytest.mark.parametrize(("predicted", "gold", "names", "ended"), read_cases("how queries end"))
def test_how_queries_end_is_said_of_what_the_comparator_runs(
    executor, files, predicted, gold, names, ended
):
    database, suite = files
    case = Case(predicted, gold, database, suite)
    [judged] = judge_cases(executor, [case], [name for name in names.split(",") if name])
    assert (judged.predicted, judged.gold) == ended


@pytest.mark.parametrize(("predicted", "gold", "bird", "spider", "suite"), read_cases("verdicts"))
def test_official_verdicts(executor, files, predicted, gold, bird, spider, suite):
    found = scores(executor, files, predicted, gold, "bird_ex", "spider_ex", "spider_ts")
    assert found == (bird, spider, suite)


@pytest.mark.parametrize(("predicted", "gold", "name", "expected"), read_cases("variants"))
def test_variants(executor, files, predicted, gold, name, expected):
    assert scores(executor, files, predicted, gold, name) == (pytest.approx(expected),)


@pytest.mark.parametrize("name", ["spider_ts", "spider2_local"])
def test_what_a_comparator_needs_is_asked_for(executor, files, name):
    with pytest.raises(UserError, match=f"{name} needs"):
        judge_cases(executor, [Case(ALL, ALL, files[0])], ["set", name])


def test_slow_queries_are_wrong_and_hold_nothing_up(files):
    database, suite = files
    config = ExecutorConfig(workers=1, timeout_s=0.2, max_steps=2**31 - 1)
    with Executor(config) as executor:
        # Together they take longer than a worker that is silent may live.
        cases = [Case(f"{ENDLESS} -- {n}", ALL, database, suite) for n in range(4)]
        judged = judge_cases(executor, [*cases, Case(ALL, ALL, database)], ["set", "spider_ex"])
    assert [one.predicted for one in judged] == ["timeout"] * 4 + ["ok"]
    assert [one.scores["set"] for one in judged] == [0, 0, 0, 0, 1]
    assert [one.is_late for one in judged] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("name", "seconds", "score", "is_late"),
    read_cases("where time decides"),
)
def test_it_is_told_where_time_decides(name, seconds, score, is_late, files, monkeypatch):
    database, _ = files
    clock = count(0, seconds)  # so that every query takes as long
    monkeypatch.setattr("sqlenv.evaluators.comparators.time.perf_counter", lambda: next(clock))
    runs = QueryRuns(lambda _path, _sql: Table(("a",), ((1,),)))
    judged = judge_case(Case("SELECT 1", "SELECT 2", database), [name], runs)
    assert (judged.scores[name], judged.is_late) == (score, is_late)
    known = judge_case(Case("SELECT 1", "SELECT 2", database), [name], runs)
    assert known == judged


def test_settings_take_the_comparators_that_need_nothing_else():
    names = {one.name for one in COMPARATORS.values() if not one.needs}
    # Of a degree, of corrected golds, of one question: what an evaluation alone has.
    evaluated = {"bird_soft_f1", "bird_strict", "graded"}
    assert set(get_args(ExecutionMatch)) == names - evaluated
