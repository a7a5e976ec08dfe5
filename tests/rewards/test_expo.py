"""The clause-level reward, from attempts to credit."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from exchange import Score
from rewards.compose import build_reward
from rewards.config import ExpoConfig
from rewards.expo.clauses import KINDS
from rewards.expo.reward import ExpoReward
from sqlenv.config import AnswerConfig
from sqlenv.envs.single_turn import judge_reply
from sqlenv.executor import Executor
from sqlenv.types import Dialect, Episode, Example
from tests.vectors import read

from .conftest import labelled

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
        attempts = (
            judge_reply(example, reply, executor, AnswerConfig(match="bag_ordered"))
            for reply in replies
        )
        return Episode(example, tuple(attempts))

    return answer


def reward_of(executor: Executor, **choices) -> ExpoReward:
    reward = build_reward(ExpoConfig(**choices), executor)
    assert isinstance(reward, ExpoReward)
    return reward


def verdict_of(reward: ExpoReward, episode: Episode):
    return reward.judge(episode.example, episode.attempts[0])


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
    reward = reward_of(executor, outside_tokens="query")
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
        # As equation 4 has it, what is not SQL has no credit.
        literal = reward_of(executor)(play(reply))
        assert credit_of(literal, reply) == credit_of(score, reply)[1:-1]


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


@pytest.mark.parametrize("reply", ["I do not know.", "<sql>SELECT 1", "<sql> \n </sql>"])
def test_a_reply_without_sql_is_punished_everywhere(reply, play, executor):
    score = reward_of(executor)(play(reply))
    assert score.total == -1.5
    assert credit_of(score, reply) == [(reply, -1.5)]
    assert reward_of(executor)(play("")).spans == ()


def test_every_turn_has_its_credit_and_the_last_one_counts(play, executor):
    replies = [REPLY.format(WRONG), "?", REPLY.format(GOLD)]
    score = reward_of(executor, outside_tokens="query")(play(*replies))
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
    verdict = verdict_of(reward_of(executor), episode)
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
