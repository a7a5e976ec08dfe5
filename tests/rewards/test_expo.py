"""EXPO-SQL: clauses as slices of a query, clauses to blame, the reward from attempts to credit."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.exchange import Score
from rewards.compose import build_reward
from rewards.config import ExpoConfig
from rewards.execution import KnownColumns, columns_of
from rewards.expo import attribution, steps
from rewards.expo.attributes import is_computed, with_attributes
from rewards.expo.attribution import find_blamed
from rewards.expo.clauses import KINDS, WHOLE, clause_at, scan_clauses
from rewards.expo.differences import CANDIDATES, differences
from rewards.expo.failures import trace_error
from rewards.expo.reward import MATCH, MAX_STEPS, ExpoReward
from rewards.expo.steps import Steps, plan_steps
from sqlenv.config import AnswerConfig
from sqlenv.envs.single_turn import judge_reply
from sqlenv.evaluators.graded import is_graded_right
from sqlenv.executor import Executor
from sqlenv.types import Dialect, Episode, Example, Result, SqlError, Table
from tests.vectors import read, table
from tests.worlds import make_file

from .conftest import labelled

DIFFERENCES, ERRORS = read("expo_differences"), read("expo_errors")
INCORRECT, BLAME = read("expo_incorrect"), read("expo_blame")
ATTRIBUTES = read("expo_attributes")
KNOWN = KnownColumns({"t": frozenset("ya")})
RULE = AnswerConfig(match=MATCH)
WORDS = (
    "select from where join left natural group by having order limit offset with as union all "
    "except values window distinct is not recursive case end over a t x.y 'it''s' \"from\" `b [c] "
    "-- /* */ ( ) ' , ; . é 1 1.5 * = \n"
)
ANY_SQL = st.one_of(st.lists(st.sampled_from(WORDS.split(" "))).map(" ".join), st.text())


def name(case: dict) -> str:
    return case["id"]


@pytest.fixture(scope="module")
def incorrect(make_database):
    return make_database(INCORRECT["database"])


@pytest.fixture(scope="module")
def blame(make_database):
    return make_database(BLAME["database"])


@pytest.fixture(scope="module")
def failing(make_database):
    return make_database(ERRORS["database"])


@pytest.mark.parametrize("case", read("expo_clauses")["cases"], ids=name)
def test_scan(case):
    sql = "".join(text for _, _, text in case["clauses"])
    clauses = scan_clauses(sql)
    operands = [None if clause.operand == WHOLE else clause.operand for clause in clauses]
    found = [
        [clause.kind, operand, sql[clause.start : clause.end]]
        for clause, operand in zip(clauses, operands, strict=True)
    ]
    assert found == case["clauses"]
    if "spans" in case:
        assert [[clause.start, clause.end] for clause in clauses] == case["spans"]


MESSAGES = (
    *("no such column: x.y", "ambiguous column name: a", "no such table: t", "incomplete input"),
    *("misuse of aggregate: a()", 'near "from": syntax error', "datatype mismatch", "?"),
)


@given(ANY_SQL, st.integers(-1, 40), st.lists(st.sampled_from("nsvé")))
def test_clauses_cover_any_text_exactly_once(sql, offset, names):
    clauses = scan_clauses(sql)
    assert "".join(sql[clause.start : clause.end] for clause in clauses) == sql
    assert all(clause.start <= clause.stop <= clause.end for clause in clauses)
    assert all(clause.start < clause.end for clause in clauses)
    for number, clause in enumerate(clauses):
        assert clause_at(clauses, clause.start) == clause_at(clauses, clause.end - 1) == number
    for message in MESSAGES:
        found = trace_error(sql, SqlError(message, offset), columns=KNOWN)
        assert found <= set(range(len(clauses)))
        assert bool(found) == bool(clauses)
    assert len(with_attributes(sql, Table(tuple(names), ())).columns) == len(names)


def test_long_hostile_text_takes_no_time():
    # Each is quadratic where a scan looks at all tokens for every clause.
    for text in (
        "select " * 14_000,
        "from (select " * 7_000,
        "natural " * 12_000 + "join",
        "(" * 99_999,
    ):
        start = time.thread_time()
        clauses = scan_clauses(text)
        result = SqlError("no such column: t.a", 3)
        assert trace_error(text, result, columns=KNOWN) <= set(range(len(clauses)))
        assert time.thread_time() - start < 5, text[:10]


def test_rows_of_one_hash_take_no_time():
    numbers = [-(2.0 ** (61 * n)) for n in range(-15, 15)]
    rows = tuple(product(numbers, repeat=3))
    assert len(set(map(hash, rows))) == 1
    start = time.thread_time()
    assert differences(table([[1, 2, 3]]), table(rows)) == {"row_disjoint"}
    assert is_graded_right(table(rows), table([[1, 2, 3]]), "subset,>=,1") is False
    assert time.thread_time() - start < 2


@pytest.mark.parametrize("case", DIFFERENCES["cases"], ids=name)
def test_differences(case):
    reference = table(case["a"], case.get("a_columns"))
    candidate = table(case["b"], case.get("b_columns"))
    assert differences(reference, candidate) == set(case["types"])


def test_candidates_are_those_of_table_12():
    expected = {name: set(kinds) for name, kinds in DIFFERENCES["candidates"].items()}
    assert expected == CANDIDATES
    assert len(expected) == 10


@pytest.mark.parametrize(
    ("sql", "expected"),
    ATTRIBUTES["attributes"],
)
def test_attributes(sql, expected, blame, executor):
    result = executor.execute(blame, sql)
    assert isinstance(result, Table)
    named = with_attributes(sql, result)
    assert list(named.columns) == expected
    assert named.rows == result.rows
    # Of another query's result no more is named than it has.
    for other in ((), ("x",) * 9):
        assert len(with_attributes(sql, Table(other, ())).columns) == len(other)


@pytest.mark.parametrize(
    ("sql", "expected"),
    ATTRIBUTES["computed"],
)
def test_queries_that_compute_all_their_outputs(sql, expected):
    assert is_computed(sql) is expected


@pytest.mark.parametrize("case", [c for c in INCORRECT["cases"] if "steps" in c], ids=name)
def test_change_at_each_step(case, incorrect, executor):
    plan = plan_steps(case["pred"])
    chain = [*plan.operands[0], *plan.tail]
    tables = [executor.execute(incorrect, step.sql) for step in chain]
    named = [with_attributes(step.sql, table) for step, table in zip(chain, tables, strict=True)]
    changes = [
        differences(*pair, is_computed=is_computed(step.sql))
        for pair, step in zip(pairwise(named), chain[1:], strict=True)
    ]
    assert [set(), *changes] == [set(types) for types in case["steps"]]
    assert tables[-1] == executor.execute(incorrect, case["pred"])


COUNTED = (
    *("grouped: a filter too many", "grouped: HAVING too many", "limit", "figure 6"),
    "a filter that filters nothing is not blamed",
)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 1000])
@pytest.mark.parametrize("case", [c for c in INCORRECT["cases"] if c["id"] in COUNTED], ids=name)
def test_filters_of_large_steps_are_judged_by_counts(
    case, max_rows, incorrect, executor, monkeypatch
):
    for module in (attribution, steps):
        monkeypatch.setattr(module, "MAX_STEP_ROWS", max_rows)
    sql = case["pred"]
    gold, predicted = executor.gold(incorrect, case["gold"]), executor.execute(incorrect, sql)
    asked = []

    def run(step: str) -> Result:
        asked.append(step.rpartition("\nLIMIT ")[0])
        return executor.execute(incorrect, step)

    own, golds = Steps(sql, predicted, run, "close"), Steps(case["gold"], gold, run, "close")
    found = find_blamed(own, golds, differences(gold, predicted))
    assert found == labelled(sql, scan_clauses(sql), case["blamed"])
    # Rows that were read need not be asked for one by one.
    filters = [step for step in asked if "\nWHERE" in step and step.startswith("SELECT *")]
    assert len(filters) == len(set(filters))


@pytest.mark.parametrize("case", ERRORS["cases"], ids=name)
def test_errors(case, failing, executor):
    sql = case["pred"]
    clauses = scan_clauses(sql)
    result = SqlError(*case["error"]) if "error" in case else executor.execute(failing, sql)
    assert isinstance(result, SqlError)
    assert result.message == case.get("message", result.message)
    columns = columns_of(Example("", "", "", failing, ""))
    found = trace_error(
        sql,
        result,
        columns=columns if case.get("schema", True) else None,
        traced=case.get("traced", True),
    )
    assert found == labelled(sql, clauses, case["blamed"])


# The clause-level reward, from attempts to credit.

FILES = {name: read(name) for name in ("expo_incorrect", "expo_blame", "expo_parts")}
WRONG_RESULTS = [(name, case) for name, file in FILES.items() for case in file["cases"]]
GOLD = "SELECT name FROM emp WHERE sal > 20"
WRONG = "SELECT name FROM emp WHERE sal > 40"
FAILING = "SELECT name FROM emp WHERE age > 40"
REPLY = "<think>é …</think>\n<sql>\n{}\n</sql>\n"


@pytest.fixture(scope="module")
def play(make_database, executor) -> Callable[..., Episode]:
    """Answer a question with replies, as the environments do."""
    paths = {name: make_database(file["database"]) for name, file in FILES.items()}

    def answer(
        *replies: str, gold: str = GOLD, dialect: Dialect = "sqlite", on: str = "expo_incorrect"
    ) -> Episode:
        example = Example("1", "?", "a", paths[on], gold, dialect=dialect)
        attempts = (judge_reply(example, reply, executor, RULE) for reply in replies)
        return Episode(example, tuple(attempts))

    return answer


def reward_of(executor: Executor, **choices) -> ExpoReward:
    reward = build_reward(ExpoConfig(**choices), executor)
    assert isinstance(reward, ExpoReward)
    return reward


def verdict_of(reward: ExpoReward, episode: Episode):
    return reward.blame(episode.example, episode.attempts[0])


def credit_of(score: Score, reply: str) -> list[tuple[str, float]]:
    return [(reply[span.start : span.end], span.value) for span in score.spans]


@pytest.mark.parametrize(
    ("name", "case"), WRONG_RESULTS, ids=[case["id"] for _, case in WRONG_RESULTS]
)
def test_wrong_results(name, case, play, executor):
    episode = play(REPLY.format(case["pred"]), gold=case["gold"], on=name)
    reward = reward_of(executor, **case.get("settings", {}))
    verdict = verdict_of(reward, episode)
    assert verdict.case == "incorrect"
    assert verdict.differences == set(case.get("differences", verdict.differences))
    assert verdict.blamed == labelled(case["pred"], verdict.clauses, case["blamed"])
    if not case["blamed"] and case["settings"]["attribution"] == "types":
        # By the types alone nobody is singled out: all have the uniform reward.
        assert set(reward.clause_rewards(verdict)) == {0.0}


def test_many_operands_take_little_time(play, executor):
    """A text longer than those that are remembered is read once, not once for every operand."""
    start = time.thread_time()
    pred = " UNION ".join(["SELECT name AS n FROM emp WHERE n > 'a'"] * 300)
    assert verdict_of(reward_of(executor), play(REPLY.format(pred))).case == "incorrect"
    assert time.thread_time() - start < 3


def test_each_case_has_its_rewards(play, executor):
    reward = reward_of(executor)
    cases = {GOLD: [1.5, 1.5, 1.5], WRONG: [0.5, 0.5, -0.5], FAILING: [-0.5, -0.5, -1.5]}
    for sql, values in cases.items():
        reply = REPLY.format(sql)
        score = reward(play(reply))
        assert score.total == pytest.approx(sum(values) / 3)
        assert sum(score.parts.values()) == score.total
        assert score.correct is (sql == GOLD)
        # As equation 4 has it, what is not SQL has no credit.
        assert credit_of(score, reply) == [
            ("SELECT name ", values[0]),
            ("FROM emp ", values[1]),
            (sql[sql.index("WHERE") :], values[2]),
        ]


@pytest.mark.parametrize(
    ("settings", "wrong", "failing"),
    [
        ({"gap_scale": 0}, [0, 0, 0], [-1, -1, -1]),
        ({"gap_scale": 0.5}, [0.25, 0.25, -0.25], [-0.75, -0.75, -1.25]),
        ({}, [0.5, 0.5, -0.5], [-0.5, -0.5, -1.5]),
        ({"gap_scale": 2}, [1, 1, -1], [0, 0, -2]),
        # Clauses that are not told apart have the middle of both rewards.
        ({"clause_level": "error"}, [0, 0, 0], [-0.5, -0.5, -1.5]),
        ({"clause_level": "incorrect"}, [0.5, 0.5, -0.5], [-1, -1, -1]),
    ],
    ids=str,
)
def test_rewards_by_setting(settings, wrong, failing, play, executor):
    reward = reward_of(executor, **settings)
    for sql, expected in ((WRONG, wrong), (FAILING, failing), (GOLD, [1.5] * 3)):
        assert reward.clause_rewards(verdict_of(reward, play(REPLY.format(sql)))) == expected


def test_a_query_of_many_clauses_costs_no_more_steps_of_sqlite(play, executor, monkeypatch):
    asked = []

    def execute(path, sql, *, max_steps=None, run=executor.execute):
        asked.append(max_steps)
        return run(path, sql, max_steps=max_steps)

    monkeypatch.setattr(executor, "execute", execute)
    for operands in (2, 200):
        query = " UNION ALL ".join(f"SELECT {n} FROM emp WHERE sal > 40" for n in range(operands))
        verdict_of(reward_of(executor), play(REPLY.format(query)))
    spent = [steps for steps in asked if steps]
    assert len(spent) > 200
    assert sum(spent) < 40 * MAX_STEPS


@pytest.mark.parametrize("reply", ["I do not know.", "<sql>SELECT 1", "<sql> \n </sql>"])
def test_a_reply_without_sql_is_punished_everywhere(reply, play, executor):
    score = reward_of(executor)(play(reply))
    assert score.total == -1.5
    assert credit_of(score, reply) == [(reply, -1.5)]
    assert reward_of(executor)(play("")).spans == ()


def test_every_turn_has_its_credit_and_the_last_one_counts(play, executor):
    replies = [REPLY.format(WRONG), "?", REPLY.format(GOLD)]
    score = reward_of(executor)(play(*replies))
    assert score.total == 1.5
    for turn, credited in enumerate((WRONG, "?", GOLD)):
        own = [span for span in score.spans if span.turn == turn]
        assert "".join(replies[turn][span.start : span.end] for span in own) == credited
    assert reward_of(executor)(play()).total == -1.5


def test_asking_twice_runs_nothing_twice(play, executor, monkeypatch):
    reward = reward_of(executor)
    episode = play(REPLY.format(WRONG))
    first = reward(episode)
    monkeypatch.setattr(executor, "execute", None)
    assert reward(episode) == first
    assert reward.diagnostics(episode)["blamed/incorrect/WHERE"] == 1.0


def test_clauses_are_blamed_on_the_database_as_it_is_now(executor, tmp_path):
    """The second one has other rows under the same name."""
    path, reward, blamed = tmp_path / "a.sqlite", reward_of(executor), []
    gold = "SELECT a FROM t WHERE b > 1 ORDER BY c DESC LIMIT 1"
    wrong = "SELECT a FROM t WHERE b > 0 ORDER BY c LIMIT 1"
    for b in (1, 2):
        path.unlink(missing_ok=True)
        rows = f"(1, {b}, 1), (2, 2, 2), (3, 3, 3)"
        make_file(path, f"CREATE TABLE t (a, b, c); INSERT INTO t VALUES {rows}")
        example = Example("1", "?", "a", path, gold)
        verdict = reward.blame(example, judge_reply(example, REPLY.format(wrong), executor, RULE))
        blamed.append({verdict.clauses[number].kind for number in verdict.blamed})
    assert blamed == [{"WHERE"}, {"ORDER BY"}]


@pytest.mark.parametrize(
    ("query", "case", "blamed"),
    [
        ("SELECT name FROM emp WHERE name ILIKE 'A'", "correct", set()),
        ("SELECT name FROM emp WHERE name ILIKE 'A' AND sal > 40", "incorrect", {"WHERE"}),
        ("SELECT name FROM emp WHERE name ILIKE 'A' ORDER BY age", "error", {"ORDER BY"}),
        # The place of the error is one in the query as it was carried over, which is longer.
        ("SELECT UPPER(name) FROM emp WHERE age > 1 ORDER BY name", "error", {"WHERE"}),
    ],
)
def test_queries_of_another_dialect_run_step_by_step(query, case, blamed, play, executor):
    episode = play(
        REPLY.format(query), gold="SELECT name FROM emp WHERE name ILIKE 'a'", dialect="postgres"
    )
    verdict = verdict_of(reward_of(executor), episode)
    assert verdict.case == case
    assert {verdict.clauses[number].kind for number in verdict.blamed} == blamed


def test_a_window_is_read_in_other_words_too(play, executor):
    asked = "SELECT name FROM emp ORDER BY sal {}"
    reply = REPLY.format(asked.format("FETCH FIRST 2 ROWS ONLY"))
    episode = play(reply, gold=asked.format("LIMIT 1"), dialect="postgres")
    verdict = verdict_of(reward_of(executor), episode)
    assert {verdict.clauses[number].kind for number in verdict.blamed} == {"ORDER BY"}


@pytest.mark.parametrize(
    "sql",
    [
        # Each runs, and has a step that never ends, or that returns all pairs of pairs.
        "WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT x FROM r WHERE x > 0 LIMIT 3",
        "WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT x AS name FROM r LIMIT 5",
        "WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r WHERE x < 300) "
        "SELECT a.x FROM r a, r b, r c, r d WHERE a.x < 0 OR a.x > 299 LIMIT 4",
    ],
)
def test_steps_without_end_are_cut_off(sql, play, executor):
    reward = reward_of(executor)
    start = time.process_time()
    score = reward(play(REPLY.format(sql), gold="SELECT 7"))
    assert time.process_time() - start < 5
    assert score.parts["incorrect"] == score.total
    assert min(span.value for span in score.spans) == -0.5


def test_diagnostics_count_the_blamed_clauses_of_wrong_queries(play, executor):
    reward = reward_of(executor)
    for sql, case in ((WRONG, "incorrect"), (FAILING, "error")):
        told = reward.diagnostics(play(REPLY.format(sql)))
        assert {n for n, value in told.items() if value} == {f"case/{case}", f"blamed/{case}/WHERE"}
        kinds = {f"blamed/{case}/{kind.replace(' ', '_')}" for kind in KINDS}
        assert {n for n in told if "blamed" in n} == kinds
    right = reward.diagnostics(play(REPLY.format(GOLD)))
    cases = ("correct", "incorrect", "error", "format")
    assert right == {f"case/{case}": float(case == "correct") for case in cases}
    assert reward.diagnostics(play()) == {}
