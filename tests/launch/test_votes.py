"""The vote by hand: OmniSQL's rule on 30 questions with ties, empties, errors and time-outs."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launch.evaluation.answers import GREEDY, Decode, Sampled
from launch.evaluation.judge import judge
from launch.evaluation.questions import QuestionSet, own_set
from launch.evaluation.results import QuestionVerdict
from sqlenv.config import AnswerConfig, ExecutorConfig
from sqlenv.evaluators.votes import ERROR_SQL, ballot, choose
from sqlenv.executor import Executor
from sqlenv.types import Example, Table
from tests.vectors import read
from tests.worlds import make_database

DATA = read("votes")
SQLS: dict[str, str] = DATA["queries"]
CASES: dict[str, int | None] = {one["samples"]: one["answers"] for one in DATA["cases"]}


def judged(
    database: Path,
    samples: Sequence[Sequence[str]],
    limits: ExecutorConfig,
    turns: Sequence[Sequence[int]] = (),
) -> tuple[list[QuestionVerdict], list[list[bool]]]:
    asked = tuple(
        Example(f"spider/dev/{number}", "?", "emp", database, "SELECT 1", source="spider")
        for number in range(len(samples))
    )
    questions = QuestionSet("spider-dev", asked, ("set",))
    sampled = [
        Sampled(tuple(each), turns=tuple(turns[n]) if turns else ())
        for n, each in enumerate(samples)
    ]
    with Executor(limits) as executor:
        found, lines = judge(questions, sampled, Decode(len(samples[0]), 0.8), executor)
    return found, [
        [member["turns"][-1]["correct"] for member in line["trajectories"]] for line in lines
    ]


def scores(questions: QuestionSet, sql: str) -> list[dict[str, float]]:
    """Judge one answer to all questions."""
    answers = [Sampled((sql,))] * len(questions.examples)
    with Executor(ExecutorConfig()) as executor:
        found, _ = judge(questions, answers, GREEDY, executor)
    return [dict(one.scores) for one in found]


def test_thirty_questions(database):
    assert len(CASES) == 30
    samples = [[SQLS[letter] for letter in case] for case in CASES]
    # Steps end a query at the same place on every machine, seconds would not.
    limits = ExecutorConfig(max_steps=200_000)
    answers = [one.sql for one in judged(database, samples, limits)[0]]
    expected = [ERROR_SQL if place is None else SQLS[case[place]] for case, place in CASES.items()]
    assert answers == expected


def test_a_job_s_questions_are_judged_on_as_many_witnesses_as_it_asks(tmp_path):
    """The second of them tells; a question with a rule of its own has none, as in training."""
    database = make_database(tmp_path, "pets")
    gold = "SELECT count(*) FROM pet WHERE age > 3"
    plain = Example("spider/dev/0", "How many?", "pets", database, gold)
    examples = (plain, replace(plain, grading_method="set"))
    right, lucky = ({"witness": told, "set": 1.0} for told in (1.0, 0.0))
    for count, found in ((1, [right, right]), (4, [lucky, right])):
        questions = own_set("test", examples, AnswerConfig(witnesses=count))
        assert questions.measures == ("witness", "set")
        assert scores(questions, gold.replace("3", "4")) == found


def test_a_job_s_questions_are_judged_by_numbers_as_it_compares_them(database):
    examples = (Example("1", "?", "emp", database, "SELECT 100.0 * 1 / 3"),)
    for numbers, right in (("close", 1.0), ("exact", 0.0)):
        questions = own_set("test", examples, AnswerConfig(numbers=numbers))
        assert scores(questions, "SELECT 1 / 3.0 * 100") == [{"set": right}]
    official = own_set("test", examples, AnswerConfig(match="bird_ex"))
    assert (official.numbers, official.measures) == ("exact", ("bird_ex",))


def test_the_turns_of_the_answer_are_those_of_its_own_episode(database):
    samples = [[SQLS[letter] for letter in "BAA"], [SQLS[letter] for letter in "xyx"]]
    turns = [[1, 2, 3], [4, 3, 2]]
    limits = ExecutorConfig()
    found, right = judged(database, samples, limits, turns)
    # The elected query; none runs in the second question, and its first episode stands for it.
    assert [(one.sql, one.turns) for one in found] == [(SQLS["A"], 2), (ERROR_SQL, 4)]
    assert right == [[False, True, True], [False] * 3]


LARGE = "WITH c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 60000) SELECT n, n FROM c"


def test_rows_of_votes_are_never_together(database):
    """Sixteen results of 60,000 rows: 7 MB each where they are read, and one of 32 digits kept."""
    samples = [[f"{LARGE} WHERE n > {number // 9}" for number in range(16)]]
    limits = ExecutorConfig(workers=1)
    tracemalloc.start()
    [answer] = judged(database, samples, limits)[0]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answer.sql == samples[0][0]
    assert peak_bytes < 40e6


def test_without_any_result_others_than_spider_draw_one():
    """As random.Random(42) of OmniSQL's script draws, question after question."""
    samples = [list("abcdefgh")] * 3
    nothing = [[None] * 8] * 3
    assert choose(samples, nothing, spider=True) == [ERROR_SQL] * 3
    # A question in between with a result takes nothing from the generator.
    ran = [nothing[0], [None, "v"] + [None] * 6, nothing[0]]
    assert choose(samples, ran, spider=False) == ["b", "b", "a"]


@pytest.mark.parametrize(
    ("one", "other", "by_set", "by_table"),
    [
        ([(1,), (2,)], [(2,), (1,)], True, False),
        ([(1,)], [(1,), (1,)], True, False),
        ([(1,)], [(1.0,)], True, False),
        ([(2**53 + 1,)], [(float(2**53),)], False, False),
        ([(b"1",)], [("1",)], False, False),
        ([(float("inf"),)], [(float("inf"),)], True, True),
    ],
)
def test_what_is_one_vote(one, other, by_set, by_table):
    """By sets of rows as in OmniSQL, by the printed table as in PaVeRL-SQL."""
    one, other = (Table(("a",), tuple(rows)) for rows in (one, other))
    assert (ballot(one) == ballot(other)) is by_set
    assert (set(one.rows) == set(other.rows)) is by_set
    assert (ballot(one, "table") == ballot(other, "table")) is by_table
