"""Verbal RL without a network: collecting, parsing, averaging, choosing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from random import Random
from typing import Any

import pytest
from pydantic import TypeAdapter

from minirl.exchange import Message
from rewards.config import JudgeConfig
from rewards.verbal import Choice, ReplyRequest, Task, best, deliberate, normalise_sql, parse_scores
from sqlenv.sql.answers import answer_of
from sqlenv.types import SqlError, Table
from tests.vectors import read

CASES = read("judgements")


def run(query):
    if "bad" in query:
        return SqlError("no")
    return Table(("a",), () if "empty" in query else ((1,),))


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


def judgement(scores: Any) -> Any:
    """Write scores as a model is asked to; a text and a refusal (None) stay as they are."""
    if not isinstance(scores, list):
        return scores
    lines = [f"SQL{number}: {score}" for number, score in enumerate(scores, start=1)]
    return "\n".join(["<scores>", *lines, "</scores>"])


Game = Generator[list[ReplyRequest], Sequence[str | None], Choice]


def play(game: Game, answer: Callable[[ReplyRequest], str | None]) -> tuple[Choice, list[Any]]:
    """Answer requests to the end; return what comes of it, and all that were made at once."""
    waves = [next(game)]
    while True:
        try:
            waves.append(game.send([answer(request) for request in waves[-1]]))
        except StopIteration as end:
            return end.value, waves


@pytest.mark.parametrize("case", CASES["questions"], ids=lambda case: case["id"])
def test_a_question_is_asked_judged_and_answered(case):
    """The model answers from lists, whose last item serves all further requests."""
    texts = {
        "generate": [query and f"<sql>{query}</sql>" for query in case["queries"]],
        "judge": [judgement(scores) for scores in case.get("judgements", ())],
    }
    task = Task(
        prompt=(Message("user", "ask"),),
        judge_prompt=lambda queries: (Message("user", "; ".join(queries)),),
        extract=lambda text: answer_of(text, "sql_tag").sql,
        execute=lambda queries: [run(query) for query in queries],
        name="one",
    )

    def answer(request: ReplyRequest) -> str | None:
        known = texts[request.kind]
        return known[min(request.number, len(known) - 1)]

    choice, waves = play(deliberate(task, JudgeConfig(**case.get("settings", {})), seed=0), answer)
    assert choice == TypeAdapter(Choice).validate_python(case["choice"])
    assert [[wave[0].kind, len(wave)] for wave in waves] == case["waves"]
    requests = [request for wave in waves for request in wave]
    assert len({(one.kind, one.number) for one in requests}) == len(requests)  # none twice
    shown = {one.messages[0].content for one in requests if one.kind == "judge"}
    assert shown <= {"; ".join(choice.candidates)}


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
