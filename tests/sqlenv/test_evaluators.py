"""What comparators say of results and of queries, as the official programs say it."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.exchange import UserError
from sqlenv.config import OFFICIAL, ExecutorConfig
from sqlenv.evaluators import equality
from sqlenv.evaluators.comparators import COMPARATORS, Case, QueryRuns, compare_case, compare_cases
from sqlenv.evaluators.equality import is_ordered, like_gold, matches
from sqlenv.evaluators.graded import checked_method, is_graded_right, is_strictly_equal, soft_f1
from sqlenv.evaluators.hardness import clauses_of, grade
from sqlenv.evaluators.official import as_spider_runs, count_statements, same_query
from sqlenv.evaluators.spider2 import (
    Reference,
    agrees,
    columns_of_rows,
    read_references,
)
from sqlenv.executor import Executor
from sqlenv.sql.extraction import parse
from sqlenv.types import Denied, ExecutionMatch, SqlError, Table, TimedOut, TooLarge
from tests.vectors import read_cases, table
from tests.worlds import ENDLESS, make_file

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
    [judged] = compare_cases(executor, [Case(predicted, gold, database, suite)], names)
    return tuple(judged.scores[name] for name in names)


@pytest.mark.parametrize(("predicted", "gold", "names", "ended"), read_cases("how queries end"))
def test_how_queries_end_is_said_of_what_the_comparator_runs(
    executor, files, predicted, gold, names, ended
):
    database, suite = files
    case = Case(predicted, gold, database, suite)
    [judged] = compare_cases(executor, [case], [name for name in names.split(",") if name])
    assert (judged.predicted, judged.gold) == ended


@pytest.mark.parametrize(("predicted", "gold", "bird", "spider", "suite"), read_cases("verdicts"))
def test_official_verdicts(executor, files, predicted, gold, bird, spider, suite):
    found = scores(executor, files, predicted, gold, "bird_ex", "spider_ex", "spider_ts")
    assert found == (bird, spider, suite)


@pytest.mark.parametrize(("predicted", "gold", "name", "expected"), read_cases("variants"))
def test_variants(executor, files, predicted, gold, name, expected):
    assert scores(executor, files, predicted, gold, name) == (pytest.approx(expected),)


@pytest.mark.parametrize("name", ["spider_ts", "spider2_local"])
def test_nothing_is_right_by_what_a_case_lacks(executor, files, name):
    with pytest.raises(AssertionError):
        compare_cases(executor, [Case(ALL, ALL, files[0])], ["set", name])


def test_slow_queries_are_wrong_and_hold_nothing_up(files):
    database, suite = files
    config = ExecutorConfig(workers=1, timeout_s=0.5, max_steps=2**31 - 1)
    with Executor(config) as executor:
        # Together they take longer than a worker that is silent may live.
        cases = [Case(f"{ENDLESS} -- {n}", ALL, database, suite) for n in range(4)]
        judged = compare_cases(executor, [*cases, Case(ALL, ALL, database)], ["set", "spider_ex"])
    assert [one.predicted for one in judged] == ["timeout"] * 4 + ["ok"]
    assert [one.scores["set"] for one in judged] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("name", "seconds", "score", "ended"),
    read_cases("where time decides"),
)
def test_it_is_told_where_time_decides(name, seconds, score, ended, files, monkeypatch):
    database, _ = files
    clock = itertools.count(0, seconds)  # so that every query takes as long
    monkeypatch.setattr("sqlenv.evaluators.comparators.time.perf_counter", lambda: next(clock))
    runs = QueryRuns(lambda _path, _sql: Table(("a",), ((1,),)))
    judged = compare_case(Case("SELECT 1", "SELECT 2", database), [name], runs)
    assert (judged.scores[name], judged.predicted) == (score, ended)
    known = compare_case(Case("SELECT 1", "SELECT 2", database), [name], runs)
    assert known == judged


def test_settings_take_the_comparators_that_need_nothing_else():
    names = {name for name, one in COMPARATORS.items() if not one.needs}
    # Of a degree, of corrected golds, of one question: what an evaluation alone has.
    evaluated = {"bird_soft_f1", "bird_strict", "graded"}
    assert set(get_args(ExecutionMatch)) == names - evaluated


#

MODES: list[Any] = ["set", "bag", "bag_ordered", "test_suite"]


@pytest.mark.parametrize(
    ("predicted", "gold", "gold_sql", "expected"),
    read_cases("modes: set, bag, bag_ordered, test_suite"),
)
def test_modes(predicted: Any, gold: Any, gold_sql: str, expected: tuple[bool, ...]) -> None:
    found = [matches(table(predicted), table(gold), mode=mode, gold_sql=gold_sql) for mode in MODES]
    assert tuple(found) == expected


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_a_table_never_matches(mode: Any) -> None:
    for result in (SqlError("x"), TimedOut("wall"), TooLarge("rows"), Denied("PRAGMA")):
        assert not matches(result, result, mode=mode)
        assert not matches(table([(1,)]), result, mode=mode)
        assert not matches(result, table([(1,)]), mode=mode)


wide_rows = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.tuples(*[st.sampled_from([0, 1, None, "0"])] * width), min_size=1, max_size=5
    )
)


@given(wide_rows, wide_rows, st.randoms(use_true_random=False))
def test_suite_rule_tries_every_order_of_columns(left: Any, right: Any, random: Any) -> None:
    def by_hand(a: Any, b: Any) -> bool:
        width = len(a[0])
        if len(b) != len(a) or len(b[0]) != width:
            return False
        orders = permutations(range(width))
        return any(
            Counter(tuple(row[i] for i in order) for row in b) == Counter(a) for order in orders
        )

    assert matches(table(right), table(left), mode="test_suite") == by_hand(left, right)
    order = random.sample(range(len(left[0])), len(left[0]))
    moved = [tuple(row[i] for i in order) for row in random.sample(left, len(left))]
    assert matches(table(moved), table(left), mode="test_suite")


def test_the_search_for_an_order_of_columns_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of the same values in ever other rows: too many orders to try them all."""
    monkeypatch.setattr("sqlenv.evaluators.equality._SEARCHED_CELLS", 500_000)
    rng = Random(0)
    halves = [0, 1] * 30
    columns = [rng.sample(halves, 60) for _ in range(60)]
    others = [rng.sample(halves, 60) for _ in range(60)]
    names = tuple(map(str, range(60)))
    gold = Table(names, tuple(zip(*columns, strict=True)))
    assert not matches(Table(names, tuple(zip(*others, strict=True))), gold, mode="test_suite")
    moved = tuple(zip(*rng.sample(columns, 60), strict=True))
    assert matches(Table(names, moved), gold, mode="test_suite")
    ones = Table(names * 20, ((1,) * 1200,))
    assert matches(ones, replace(ones), mode="test_suite")


def test_far_more_numbers_than_the_golds_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply can have a million fractions, each of which would be looked up."""
    asked = Counter[float]()

    def nearest(value: float, ordered: Any) -> float:
        asked[value] += 1
        return ordered[0]

    monkeypatch.setattr(equality, "_nearest", nearest)
    gold = table([(number + 0.5,) for number in range(2_000)])
    for count, looked_up in ((29_000, 29_000), (31_000, 0)):
        asked.clear()
        predicted = table([(1 / number,) for number in range(3, count + 3)])
        found = like_gold(predicted, gold, "close")
        assert (found is predicted) == (looked_up == 0)
        assert asked.total() == looked_up
    # Many rows of few numbers are those of a query that forgets DISTINCT.
    again = like_gold(table([(0.1 + 0.2,)] * 100_000), table([(0.3,)]), "close")
    assert isinstance(again, Table)
    assert {*again.rows} == {(0.3,)}


# What official programs make of texts and tables, case by case (`tests/data/sql_rules.json`).


def agrees_in_order(predicted: Any, gold: Any, expected: bool) -> bool:
    golds = (columns_of_rows(gold, len(gold[0])),)
    assert agrees(table(predicted), Reference(golds)) is expected
    return agrees(table(predicted), Reference(golds, ignore_order=True))


RULES: Mapping[str, Callable[..., Any]] = {
    "what Spider runs": as_spider_runs,
    "statements": count_statements,
    "Spider's levels": grade,
    "ORDER BY of the whole query": is_ordered,
    "Spider's rule": lambda predicted, gold, sql: matches(
        table(predicted), table(gold), mode="test_suite", gold_sql=sql
    ),
    "Spider 2's rule": agrees_in_order,
    "BIRD's soft F1": lambda predicted, gold: soft_f1(table(predicted), table(gold)),
    "what a query has": clauses_of,
    "no query": parse,
}


@pytest.mark.parametrize(("rule", "case"), [(r, case) for r in RULES for case in read_cases(r)])
def test_rule(rule: str, case: tuple[Any, ...]) -> None:
    *given, expected = case
    found = RULES[rule](*given)
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)


def test_nesting_without_end_has_no_level() -> None:
    assert grade("SELECT a FROM t WHERE " + "(" * 5000) is None
    assert grade("SELECT a FROM " + "(SELECT a FROM " * 3000) is None


def test_long_predictions_are_not_kept() -> None:
    """A run that is rewarded by an official rule judges a million of them."""
    tracemalloc.start()
    for number in range(300):
        said = as_spider_runs(f"SELECT DISTINCT {number} FROM t -- {'so ' * 3000}\n;")
        assert (count_statements(said), same_query(said)) == ("one", f"select {number} from t")
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 1_000_000  # of 2.7 MB of text, each of them read twice


def test_same_query_evens_out_case_blanks_and_comments_outside_quotes() -> None:
    sql = "SELECT  Name\nFROM T WHERE a = 'X  Y' ;"
    assert same_query(sql) == "select name from t where a = 'X  Y'"
    assert same_query("select name from t where a = 'x  y'") != same_query(sql)
    assert same_query("SELECT É") != same_query("SELECT é")
    for spelling in ("SELECT 1 -- A", "SELECT /* A */ 1", "SELECT 1 /* open", "-- A\nSELECT 1 ; ;"):
        assert same_query(spelling) == "select 1"
    for kept in ("select '-- no  comment'", 'select "/* a */"', "select '; '"):
        assert same_query(kept) == kept


# The rules of corrected golds: as published, and repeated on published verdicts.


@pytest.mark.parametrize(
    ("method", "predicted", "gold", "expected"),
    read_cases("a question's own rule"),
)
def test_a_question_has_its_own_rule(method, predicted, gold, expected):
    found = is_graded_right(table(predicted), table(gold), method)
    assert found == expected


@pytest.mark.parametrize(
    ("predicted", "gold", "expected"),
    read_cases("BIRD-Platinum's strict rule"),
)
def test_the_strict_rule(predicted, gold, expected):
    assert is_strictly_equal(table(predicted), table(gold)) == expected


@pytest.mark.parametrize("text", ["sets", "subset,<,2", "subset,=,", "set,=,2", "subset,=,x"])
def test_other_rules_are_refused(text):
    with pytest.raises(ValueError, match="none of set, multiset, list, subset"):
        checked_method(text)


def test_the_best_of_several_golds_counts(database: Path):
    golds = ("SELECT name FROM city WHERE country = 'FR'", "SELECT 'Oslo'")
    cases = [Case(sql, golds[0], database, alternatives=golds[1:]) for sql in (*golds, "SELECT 1")]
    with Executor(OFFICIAL) as executor:
        judged = compare_cases(executor, cases, ("set", "bird_ex"))
    assert [one.scores for one in judged] == [
        {"set": score, "bird_ex": score} for score in (1.0, 1.0, 0.0)
    ]


def test_published_verdicts_of_bird_platinum_are_repeated(shared: Path):
    """31 result files on superhero, judged by BIRD's rule and by the strict one."""
    lines = (shared / "data/corrected/bird_platinum_superhero.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    database = shared / "data/bird_dev/dev_databases/superhero/superhero.sqlite"
    cases = [Case(one["prediction"], one["gold"], database) for one in records]
    with Executor(OFFICIAL) as executor:
        judged = compare_cases(executor, cases, ("bird_ex", "bird_strict"))
    pairs = [(one.scores["bird_ex"] == 1, one.scores["bird_strict"] == 1) for one in judged]
    published = [(one["set"], one["multiset"]) for one in records]
    differing = [n for n, pair in enumerate(pairs) if pair != published[n]]
    assert (len(pairs), differing) == (1073, [])


# Spider 2's comparison of tables; verdicts measured with the official program.

DB = Path("db")


def reference(*rows, ignore_order=False):
    return Reference((columns_of_rows(rows, len(rows[0])),), ignore_order)


def test_nothing_equals_zero_and_nothing():
    nothing = table([(None, 1), (5, 1)])
    assert agrees(nothing, reference((0, 1), (5, 1)))
    assert agrees(nothing, reference((None, 1), (5, 1)))


def test_any_gold_counts():
    golds = (((1, 2),), ((3, 4),))
    assert agrees(table([(3,), (4,)]), Reference(golds))
    assert not agrees(table([(3,), (5,)]), Reference(golds))
    assert not agrees(table([(3,), (4,)]), Reference(()))


def test_types_of_rows_are_those_of_the_written_text():
    rows = [(1, 2, b"x", "5"), (None, 2.5, "y", "6")]
    assert columns_of_rows(rows, 4)[1:] == ((2.0, 2.5), ("b'x'", "y"), (5, 6))
    # Integers beside floats alone become floats, as the program's array of numbers has it.
    found = columns_of_rows([(1, 2.5)], 2)
    assert [type(value) for column in found for value in column] == [float, float]


def test_references(tmp_path):
    results = tmp_path / "exec_result"
    results.mkdir()
    texts = {
        "local1_a": "a,b\n1,x\n", "local1_b": "a,b\n2,y\n",
        "local2": "a,b\n1,x\n", "local2_a": "a\n7\n",
        "local3_a": "a,b\n0,1\n", "local4_a": "a\n1\n", "local4_b": "a\n2\n",
    }  # fmt: skip
    for name, text in texts.items():
        (results / f"{name}.csv").write_text(text)
    standards = [
        {"instance_id": "local1", "condition_cols": [[1], [0]], "ignore_order": True},
        {"instance_id": "local2", "condition_cols": [0], "ignore_order": False},
        # Of one file with a letter the first number alone counts, and 0 means all.
        {"instance_id": "local3", "condition_cols": [1, 0], "ignore_order": False},
        # The second gold has no such column, where the program stops.
        {"instance_id": "local4", "condition_cols": [[0], [5]], "ignore_order": False},
        {"instance_id": "local5", "condition_cols": [], "ignore_order": False},
    ]
    file = tmp_path / "spider2lite_eval.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in standards))
    found = read_references(tmp_path)
    assert found["local1"] == Reference(((("x",),), ((2,),)), ignore_order=True)
    assert [each.rows for each in found["local1"].tables] == [((1, "x"),), ((2, "y"),)]
    assert found["local2"] == Reference((((1,),),))
    assert found["local3"] == Reference((((1,),),))
    assert found["local4"] == Reference((((1,),),))
    assert found["local5"] == Reference(())
    with pytest.raises(UserError, match="no such folder"):
        read_references(tmp_path / "nowhere")


def test_comparator_takes_fences_and_refuses_blanks():
    rows = table([(1,), (2,)])
    gold = reference((1,), (2,))
    function = COMPARATORS["spider2_local"].function
    runs = QueryRuns(lambda _path, sql: rows if sql == "SELECT 1" else table([(9,)]))
    for sql, score in (("```sql\nSELECT 1\n```", 1), ("SELECT 1", 1), ("SELECT 2", 0), ("", 0)):
        assert function(Case(sql, "", DB, reference=gold), runs).score == score
