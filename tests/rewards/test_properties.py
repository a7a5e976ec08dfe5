"""What holds of every reward family: over made-up databases, for whatever a model writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from minirl.exchange import Score
from rewards.compose import Reward, build_reward
from rewards.config import RewardConfig
from sqlenv.config import AnswerConfig, DataConfig, DemoConfig, ExecutorConfig, SourceConfig
from sqlenv.data.loading import load
from sqlenv.demo import generate
from sqlenv.envs.single_turn import judge_reply
from sqlenv.executor import Executor
from sqlenv.sql.lexer import tokenize
from sqlenv.types import Episode, Example, MatchMode

DEMO = DemoConfig(
    train_databases=12, validation_databases=1, test_databases=1, questions_per_database=60
)
REPLY = "<think>thus</think><sql>{}</sql>"


class Family(NamedTuple):
    """Settings of a reward, what it takes for a match, its least and its best for one reply."""

    settings: dict[str, Any]
    match: MatchMode
    least: float
    best: float


FAMILIES = {
    "progressive": Family({"kind": "progressive"}, "set", -0.5, 2.75),
    "progressive, spared": Family({"kind": "progressive", "align_k1": "zero"}, "set", -0.5, 3.0),
    "one_shot": Family({"kind": "one_shot"}, "set", 0, 3.0),
    "expo": Family({"kind": "expo"}, "bag_ordered", -1.5, 1.5),
    "paverl": Family({"kind": "paverl"}, "set", 0, 10),
    "paverl, binary": Family({"kind": "paverl", "payoff": "binary"}, "set", 0, 10),
    "astra": Family({"kind": "astra"}, "set", -2, 1),
    "astra, fig2": Family({"kind": "astra", "atr": {"kind": "fig2"}}, "set", -2, 1),
    "astra, steps": Family({"kind": "astra", "aggregate": "steps"}, "set", 0, 1),
    "execution": Family({"kind": "execution"}, "set", 0, 1),
    "astra, last": Family({"kind": "astra", "aggregate": "last"}, "set", 0, 1),
}


class World:
    """Examples, and every family over one executor. No record: each failure would print it."""

    def __init__(
        self, examples: tuple[Example, ...], rewards: dict[str, Reward], executor: Executor
    ):
        self.examples, self.rewards, self.executor = examples, rewards, executor

    def play(self, example: Example, *replies: str, match: MatchMode) -> Episode:
        """Judge replies up to the first right one."""
        episode = Episode(example)
        for reply in replies:
            found = judge_reply(example, reply, self.executor, AnswerConfig(match=match))
            episode = Episode(example, (*episode.attempts, found))
            if found.correct:
                break
        return episode

    def score(self, name: str, example: Example, *replies: str) -> Score:
        return self.rewards[name](self.play(example, *replies, match=FAMILIES[name].match))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("demo") / "data"
    generate(folder, DEMO)
    source = SourceConfig(layout="spider", path=folder, file="train_spider.json")
    examples = load(DataConfig(sources=(source,))).examples
    config = ExecutorConfig(workers=1, timeout_s=5, max_steps=300_000)
    with Executor(config) as executor:
        rewards = {
            name: build_reward(
                TypeAdapter(RewardConfig).validate_python(family.settings),
                executor,
            )
            for name, family in FAMILIES.items()
        }
        yield World(examples, rewards, executor)


NUMBERS = st.integers(0, 10**6)
VOCABULARY = """
SELECT DISTINCT FROM WHERE GROUP BY ORDER HAVING LIMIT JOIN LEFT ON AND OR NOT IN EXISTS LIKE
BETWEEN IS UNION EXCEPT INTERSECT WITH x AS ( ) , ; . * = < > + - 1 0 'a' "b" count(*) max( sum( t1
t2 t1.id name id CASE WHEN THEN END -- /* */ <sql> </sql> ' é 🦆 ? NULL
"""
WORDS = st.sampled_from(VOCABULARY.split())
EDITS = st.lists(st.tuples(NUMBERS, st.integers(0, 2), st.lists(WORDS, max_size=2)), max_size=3)
WRAPPINGS: list[Callable[[str], str]] = [
    *[lambda sql: sql] * 4,
    lambda sql: f"SELECT * FROM ({sql})",
    lambda sql: f"SELECT *, 1, 2, 3, 4, 5, 6 FROM ({sql})",
    lambda sql: f"SELECT * FROM ({sql}) LIMIT 1",
    lambda sql: f"{sql} UNION ALL {sql}",
    lambda sql: f"WITH x AS ({sql}) SELECT * FROM x, x",
    lambda sql: f"SELECT 1; {sql}",
    lambda sql: f"{sql} WHERE 0",
    lambda sql: sql.replace("SELECT", "SELECT NULL,", 1),
]
REPLIES = [
    *[REPLY] * 16,
    *("{}", "<sql>{}</sql>", "<think>{}</think>", "<sql>{}</sql> so", "<think></think><sql>{}"),
    *("<think>a</think><sql>b</sql><sql>{}</sql>", "<sql><sql>{}</sql></sql>", "```sql\n{}\n```"),
]


@st.composite
def cases(draw: st.DrawFn) -> Callable[[World], tuple[Example, str]]:
    """Draw a question and a prediction, which are known only with the databases.

    A gold query of the same database, wrapped, with words of another one or words of SQL in it; or
    words of SQL alone; or any text. So some run, some are right, and some are no SQL at all.
    """
    number, other, third = draw(NUMBERS), draw(NUMBERS), draw(NUMBERS)
    wrap = draw(st.sampled_from(WRAPPINGS))
    text = draw(st.one_of(*[st.none()] * 6, st.lists(WORDS).map(" ".join), st.text()))
    edits = draw(st.one_of(st.just([]), EDITS))

    def resolve(world: World) -> tuple[Example, str]:
        example = world.examples[number % len(world.examples)]
        same = [each for each in world.examples if each.database == example.database]
        # Of the question itself, or of any.
        words = (example if other % 3 == 0 else same[other % len(same)]).gold_sql.split()
        donor = same[third % len(same)].gold_sql.split()
        for at, count, new in edits:
            place = at % (len(words) + 1)
            words[place : place + count] = new or [donor[at % len(donor)]]
        return example, wrap(" ".join(words)) if text is None else text

    return resolve


def change_words(sql: str, change: Callable[[str], str]) -> str:
    """Change the words of a query that are in no quotes and no comment."""
    pieces, end = [], 0
    for token in tokenize(sql):
        text = sql[token.start : token.end]
        pieces += [sql[end : token.start], change(text) if token.kind == "word" else text]
        end = token.end
    return "".join(pieces) + sql[end:]


def swap_ascii(word: str) -> str:
    """Swap the letters that SQLite takes for the same in either case."""
    return "".join(letter.swapcase() if letter.isascii() else letter for letter in word)


@given(NUMBERS)
def test_gold_is_scored_at_the_top_by_every_family(world, number):
    example = world.examples[number % len(world.examples)]
    for name in FAMILIES:
        score = world.score(name, example, REPLY.format(example.gold_sql))
        assert score.correct, (name, example.gold_sql)
        assert score.total == pytest.approx(FAMILIES[name].best), (name, example.gold_sql)


@given(cases(), st.sampled_from(REPLIES))
def test_no_text_raises_or_earns_more_than_the_gold(world, case, reply):
    example, text = case(world)
    for name in FAMILIES:
        score = world.score(name, example, reply.format(text))
        seen = (name, example.gold_sql, text, score)
        assert score.total >= FAMILIES[name].least, seen
        assert score.total <= world.score(name, example, REPLY.format(example.gold_sql)).total, seen
        assert sum(score.parts.values()) == pytest.approx(score.total), seen


@given(st.lists(st.tuples(cases(), st.sampled_from(REPLIES)), min_size=2, max_size=4))
def test_no_course_of_turns_leaves_the_range(world, turns):
    example, _ = turns[0][0](world)
    replies = [reply.format(case(world)[1]) for case, reply in turns]
    for name in FAMILIES:
        family, total = FAMILIES[name], world.score(name, example, *replies).total
        # As printed, a right first turn forgoes 0.25: the best is a match at the second.
        best = 3.0 if name == "progressive" else family.best
        assert family.least <= total <= best + 1e-9, (name, replies, total)


@given(cases())
def test_letter_case_changes_nothing(world, case):
    example, sql = case(world)
    assume("sql>" not in sql)  # a tag, which is no SQL
    replies = [REPLY.format(text) for text in (sql, change_words(sql, swap_ascii))]
    for name in FAMILIES:
        # A first turn, so that alignment can rise.
        totals = [world.score(name, example, REPLY.format("SELECT 1"), r).total for r in replies]
        assert totals[0] == totals[1], (name, example.gold_sql, replies)
