"""The clause-level reward, from attempts to credit."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path

import pytest

from rewards.compose import build_reward
from rewards.config import ExpoConfig
from rewards.expo.clauses import KINDS
from rewards.expo.reward import ExpoReward
from rewards.types import Score
from sqlenv.config import ExecutorConfig
from sqlenv.envs.single_turn import judge
from sqlenv.executor import Executor
from sqlenv.types import Dialect, Episode, Example

DATA = Path(__file__).parents[1] / "data"
INCORRECT = json.loads((DATA / "expo_incorrect.json").read_text())
GOLD = "SELECT name FROM emp WHERE sal > 20"
WRONG = "SELECT name FROM emp WHERE sal > 40"
FAILING = "SELECT name FROM emp WHERE age > 40"
REPLY = "<think>é …</think>\n<sql>\n{}\n</sql>\n"


@pytest.fixture(scope="module")
def executor():
    with Executor(ExecutorConfig(isolation="thread")) as executor:
        yield executor


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("databases") / "a.sqlite"
    with sqlite3.connect(path) as connection:
        for statement in INCORRECT["database"]:
            connection.execute(statement)
    connection.close()
    return path


@pytest.fixture(scope="module")
def play(database, executor):
    """Answer a question with replies, as the environments do."""

    def answer(*replies: str, gold: str = GOLD, dialect: Dialect = "sqlite") -> Episode:
        example = Example("1", "?", "a", database, gold, dialect=dialect)
        return Episode(
            example,
            tuple(judge(example, reply, executor, match="bag_ordered") for reply in replies),
        )

    return answer


def reward_of(executor: Executor, **choices) -> ExpoReward:
    columns = {"emp": ["name", "dept", "sal"]}
    reward = build_reward(
        ExpoConfig(**choices), columns_of=lambda _: columns, executor=executor, wrapping="sql_tag"
    )
    assert isinstance(reward, ExpoReward)
    return reward


def credit_of(score: Score, reply: str) -> list[tuple[str, float]]:
    return [(reply[span.start : span.end], span.value) for span in score.spans]


@pytest.mark.parametrize("case", INCORRECT["cases"], ids=lambda case: case["id"])
def test_incorrect_results(case, play, executor):
    episode = play(REPLY.format(case["pred"]), gold=case["gold"])
    reward = reward_of(executor, **case.get("settings", {}))
    verdict = reward.judge(episode.example, episode.attempts[0])
    assert verdict.case == "incorrect"
    if "differences" in case:
        assert verdict.differences == set(case["differences"])
    sql = episode.attempts[0].sql
    texts = [clause.text(sql) for clause in verdict.clauses]
    labels = tuple(case["blamed"])
    assert {texts[n] for n in verdict.blamed} == {t for t in texts if t.startswith(labels)}
    assert all(any(text.startswith(label) for text in texts) for label in labels)


def test_each_case_has_its_rewards(play, executor):
    reward = reward_of(executor)
    cases = {GOLD: [1.5, 1.5, 1.5], WRONG: [0.5, 0.5, -0.5], FAILING: [-0.5, -0.5, -1.5]}
    query_level = {GOLD: 1.5, WRONG: -0.5, FAILING: -1.5}
    for sql, values in cases.items():
        reply = REPLY.format(sql)
        score = reward(play(reply))
        assert score.total == pytest.approx(sum(values) / 3)
        assert sum(score.parts.values()) == score.total
        assert score.correct is (sql == GOLD)
        start = reply.index(sql)
        assert credit_of(score, reply) == [
            (reply[:start], query_level[sql]),
            ("SELECT name ", values[0]),
            ("FROM emp ", values[1]),
            (sql[sql.index("WHERE") :], values[2]),
            ("\n</sql>\n", query_level[sql]),
        ]


@pytest.mark.parametrize(
    ("choice", "outside"), [("query", -0.5), ("mean", pytest.approx(1 / 6)), ("zero", None)]
)
def test_outside_tokens(choice, outside, play, executor):
    reply = REPLY.format(WRONG)
    score = reward_of(executor, outside_tokens=choice)(play(reply))
    found = credit_of(score, reply)
    clauses = [("SELECT name ", 0.5), ("FROM emp ", 0.5), ("WHERE sal > 40", -0.5)]
    if outside is None:
        assert found == clauses
    else:
        assert found[1:-1] == clauses
        assert found[0][1] == found[-1][1] == outside


@pytest.mark.parametrize(
    ("scale", "wrong", "failing"),
    [
        (0, [0, 0, 0], [-1, -1, -1]),
        (0.5, [0.25, 0.25, -0.25], [-0.75, -0.75, -1.25]),
        (1, [0.5, 0.5, -0.5], [-0.5, -0.5, -1.5]),
        (2, [1, 1, -1], [0, 0, -2]),
    ],
)
def test_gap_scale(scale, wrong, failing, play, executor):
    reward = reward_of(executor, gap_scale=scale)
    for sql, expected in ((WRONG, wrong), (FAILING, failing), (GOLD, [1.5] * 3)):
        episode = play(REPLY.format(sql))
        verdict = reward.judge(episode.example, episode.attempts[0])
        assert reward.clause_rewards(verdict) == expected


@pytest.mark.parametrize("reply", ["I do not know.", "<sql>SELECT 1", "<sql> \n </sql>"])
def test_a_reply_without_sql_is_punished_everywhere(reply, play, executor):
    score = reward_of(executor, outside_tokens="zero")(play(reply))
    assert score.total == -1.5
    assert credit_of(score, reply) == [(reply, -1.5)]
    assert reward_of(executor)(play("")).spans == ()


@pytest.mark.parametrize(
    "reply",
    [
        "<sql>{}</sql>",
        "<think>a</think><sql>{}</sql> Done.",
        "<think>a<sql>{}</sql>",
        "<think>a</think><sql>SELECT 1</sql><sql>{}</sql>",
    ],
)
def test_a_broken_format_is_punished_everywhere_on_demand(reply, play, executor):
    text = reply.format(GOLD)
    assert reward_of(executor)(play(text)).total == 1.5
    strict = reward_of(executor, format="think_sql")
    score = strict(play(text))
    assert score.total == score.parts["format"] == -1.5
    assert credit_of(score, text) == [(text, -1.5)]
    assert score.correct
    assert strict.diagnostics(play(text))["case/format"] == 1.0
    assert strict(play(REPLY.format(GOLD))).total == 1.5


def test_every_turn_has_its_credit_and_the_last_one_counts(play, executor):
    replies = [REPLY.format(WRONG), "?", REPLY.format(GOLD)]
    score = reward_of(executor)(play(*replies))
    assert score.total == 1.5
    for turn, reply in enumerate(replies):
        own = [span for span in score.spans if span.turn == turn]
        assert "".join(reply[span.start : span.end] for span in own) == reply
    assert reward_of(executor)(play()).total == -1.5


def test_asking_twice_runs_nothing_twice(play, executor, monkeypatch):
    reward = reward_of(executor)
    episode = play(REPLY.format(WRONG))
    first = reward(episode)
    monkeypatch.setattr(executor, "execute", None)
    assert reward(episode) == first
    assert reward.diagnostics(episode)["blamed/incorrect/WHERE"] == 1.0


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
    verdict = reward_of(executor).judge(episode.example, episode.attempts[0])
    assert verdict.case == case
    assert {verdict.clauses[number].kind for number in verdict.blamed} == blamed


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


def test_figures_7_and_8_by_a_setting(play, executor):
    episode = play(REPLY.format(FAILING))
    reward = reward_of(executor, error_blamed=-1.0)
    verdict = reward.judge(episode.example, episode.attempts[0])
    assert reward.clause_rewards(verdict) == [-0.5, -0.5, -1.0]


def test_diagnostics_count_the_blamed_clauses_of_wrong_queries(play, executor):
    reward = reward_of(executor)
    wrong = reward.diagnostics(play(REPLY.format(WRONG)))
    assert {name for name, value in wrong.items() if value} == {
        "case/incorrect",
        "blamed/incorrect/WHERE",
    }
    assert {name for name in wrong if "blamed" in name} == {
        f"blamed/incorrect/{kind.replace(' ', '_')}" for kind in KINDS
    }
    failing = reward.diagnostics(play(REPLY.format(FAILING)))
    assert {name for name, value in failing.items() if value} == {
        "case/error",
        "blamed/error/WHERE",
    }
    right = reward.diagnostics(play(REPLY.format(GOLD)))
    assert right == {
        f"case/{c}": float(c == "correct") for c in ("correct", "incorrect", "error")
    } | {"case/format": 0.0}
    assert reward.diagnostics(play()) == {}
