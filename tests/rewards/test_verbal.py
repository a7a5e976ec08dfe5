"""Verbal RL without a network: collecting, parsing, averaging, choosing."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from minirl.exchange import Message
from rewards.config import JudgeConfig
from rewards.verbal import Choice, Task, best, deliberate, mean_scores, normalise_sql, parse_scores
from sqlenv.sql.answers import answer_of
from sqlenv.types import SqlError, Table
from tests.vectors import read

CASES = read("judgements")
TABLE = Table(("a",), ((1,),))


class Model:
    """Answers from a list, and remembers what it was asked."""

    def __init__(self, queries, judgements=()):
        self.queries, self.judgements = list(queries), list(judgements)
        self.waves, self.shown, self.executed = [], [], []
        self.numbers = Counter()

    def answer(self, ask):
        self.numbers[ask.kind, ask.number] += 1
        told = self.queries if ask.kind == "generate" else self.judgements
        text = told[min(ask.number, len(told) - 1)]
        return None if text is None else f"<sql>{text}</sql>" if ask.kind == "generate" else text

    def play(self, seed=0, **settings) -> Choice:
        def judge_prompt(queries):
            self.shown = list(queries)
            return (Message("user", "judge"),)

        def execute(queries):
            self.executed += queries
            return [run(query) for query in queries]

        task = Task(
            prompt=(Message("user", "ask"),),
            judge_prompt=judge_prompt,
            extract=lambda text: answer_of(text, "sql_tag").sql,
            execute=execute,
            name="one",
        )
        game = deliberate(task, JudgeConfig(**settings), seed=seed)
        asks = next(game)
        while True:
            self.waves.append((asks[0].kind, len(asks)))
            try:
                asks = game.send([self.answer(ask) for ask in asks])
            except StopIteration as end:
                assert max(self.numbers.values()) == 1  # no request is made twice
                return end.value


def run(query):
    if "empty" in query:
        return Table(("a",), ())
    return SqlError("no") if "bad" in query else TABLE


def scores(*values):
    lines = "\n".join(f"SQL{i}: {value}" for i, value in enumerate(values, start=1))
    return f"<scores>\n{lines}\n</scores>"


def different(count):
    return [f"SELECT {n}" for n in range(count)]


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["id"])
def test_scores_are_read(case):
    expected = case["scores"] and tuple(case["scores"])
    assert parse_scores(case["text"], case["count"]) == expected


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["<scores>", "<think>", "\n", "SQL1: ", "</think>", "- "])
def test_long_nonsense_is_read_in_time(text):
    assert parse_scores(text * 100_000, 2) is None


@pytest.mark.parametrize(
    ("pair", "same"),
    [(pair, True) for pair in CASES["same"]] + [(pair, False) for pair in CASES["different"]],
)
def test_spelling_does_not_make_a_candidate(pair, same):
    assert (normalise_sql(pair[0]) == normalise_sql(pair[1])) is same


def test_ten_candidates_and_twenty_judgements():
    model = Model(different(30), [scores(*([0.1] * 9 + [0.9]))])
    choice = model.play()
    assert model.waves == [("generate", 10), ("judge", 20)]
    assert choice.candidates == tuple(different(10)) == tuple(model.shown)
    assert choice.sql == "SELECT 9"
    assert choice.scores == pytest.approx([0.1] * 9 + [0.9])
    assert (choice.attempts, choice.executable, choice.judged) == (10, 10, 20)


def test_failures_and_repetitions_do_not_count():
    queries = ["bad 1", "SELECT 1", "select  1;", "", "SELECT 2", "SELECT 3", "SELECT 4"]
    model = Model(queries, [scores(0, 1, 0)])
    choice = model.play(candidates=3)
    assert choice.candidates == ("SELECT 1", "SELECT 2", "SELECT 3")
    assert choice.sql == "SELECT 2"
    assert model.waves[:2] == [("generate", 3), ("generate", 2)]
    assert (choice.attempts, choice.executable) == (6, 4)


def test_attempts_end_and_a_single_candidate_is_taken_unjudged():
    model = Model(["SELECT 1"])
    choice = model.play()
    assert (choice.sql, choice.attempts, choice.judged) == ("SELECT 1", 200, 0)
    # Waves widen while nothing new comes: 200 answers are not 191 rounds.
    assert [size for _, size in model.waves] == [10, 9, 18, 36, 72, 55]


def test_without_a_candidate_the_last_query_is_returned():
    model = Model(["bad 1", "bad 2", "bad 3", ""])
    choice = model.play(attempts=7, candidates=4)
    assert (choice.sql, choice.candidates, choice.attempts) == ("bad 3", (), 7)
    assert Model([""]).play(attempts=2) == Choice("", attempts=2)


def test_unparsable_judgements_are_retried_then_left_out():
    garbage = "I like SQL2."
    model = Model(
        different(2), [garbage] * 3 + [scores(0, 1)] * 2 + [garbage, scores(1, 0), garbage]
    )
    choice = model.play(candidates=2, judgements=5, judge_retries=2)
    # 5 asked: 2 parsed; 3 again: 1 parsed; 2 again: none.
    assert model.waves[1:] == [("judge", 5), ("judge", 3), ("judge", 2)]
    assert (choice.judged, choice.left_out) == (3, 2)
    assert choice.scores == pytest.approx([1 / 3, 2 / 3])


def test_refused_requests_are_counted_and_not_repeated_for_ever():
    choice = Model([None]).play()
    assert (choice.sql, choice.attempts, choice.refused) == ("", 10, 10)
    choice = Model(different(2), [None]).play(candidates=2, judgements=4)
    assert (choice.refused, choice.left_out) == (4, 4)
    mixed = Model([None, "SELECT 1", "SELECT 2"], [scores(0, 1)]).play(candidates=2)
    assert (mixed.sql, mixed.refused, mixed.attempts) == ("SELECT 2", 1, 3)


def test_ties_are_broken_by_seed_and_evenly():
    found = [best("abc", (0.5, 0.2, 0.5), Random(seed)) for seed in range(1000)]
    counts = Counter(found)
    assert counts.keys() == {"a", "c"}
    assert 430 < counts["a"] < 570
    assert found[0] == best("abc", (0.5, 0.2, 0.5), Random(0))
    # The released code returns candidate 0 here.
    assert {best("abc", (0.1, 0.9, 0.2), Random(seed)) for seed in range(20)} == {"b"}
    # The sum of the same scores in another order is no other score.
    assert {best("ab", (0.1 + 0.2, 0.3), Random(seed)) for seed in range(20)} == {"a", "b"}


def test_means():
    rows = [(0.0, 1.0, 0.5), (0.5, 0.0, 1.0)]
    assert mean_scores(rows, 3) == (0.25, 0.5, 0.75)
    assert mean_scores([], 2) == (0.0, 0.0)


def test_a_query_without_rows_is_executable():
    assert Model(["SELECT empty"]).play(attempts=1).executable == 1
