"""What does each reward pay a policy that does not answer the question?

    python benchmarks/hacking.py
    python benchmarks/hacking.py --data-root data     # Spider's dev set, not generated questions

Scripted policies play the papers' environments. Each is told the gold query, and uses it only for
what its trick needs. Prints a table as Markdown, then one JSON object: what a trick earns on
average, and how often it is wrong and earns as much as the gold query at once, with the paper's
settings and with the setting that closes it. docs/claims.md says which equation pays.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import sqlglot
from pydantic import BaseModel
from rich.progress import track
from sqlglot import exp

from benchmarks import markdown
from launch.evaluation.questions import find
from rewards.compose import build_reward
from rewards.config import RewardConfig, tree_of
from rewards.execution import columns_of
from rewards.progress.feedback import build_feedback
from rewards.types import Score
from sqlenv.config import DemoConfig, EnvConfig, ExecutorConfig, SourceConfig
from sqlenv.data.loading import read_all
from sqlenv.demo import generate
from sqlenv.envs.build import build_environment
from sqlenv.executor import Executor
from sqlenv.types import Example, Table

_HEAD = ("reward", "trick", "right %", "earns", "gold at once", "wrong and as much %", "closed by")
_HEAD += ("earns then", "gold then", "wrong and as much then %")
_CONSTANTS = "SELECT " + ", ".join(map(str, range(2000)))
_NO_ROWS = "SELECT 1 WHERE 0"

Policy = Callable[[Example, Executor], Sequence[str]]
Settings = Mapping[str, Mapping[str, Any]]


class _Setting(BaseModel):
    reward: RewardConfig
    env: EnvConfig


@dataclass(frozen=True, slots=True)
class Family:
    """A paper's reward in its environment, and how a policy answers there."""

    settings: Settings
    answer: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Trick:
    """A way to earn without answering, and the settings that close it."""

    family: str
    name: str
    policy: Policy
    closed_by: Settings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Earned:
    """What a trick earns, and what the gold query at once does, over the same questions.

    `as_much` is the share of questions where the trick is wrong and earns no less than the gold.
    """

    trick: float
    gold: float
    as_much: float
    right: float


def _tagged(sql: str) -> str:
    return f"<think>so</think><sql>{sql}</sql>"


def _fenced(sql: str) -> str:
    return f"```sql\n{sql}\n```"


def _call(sql: str) -> str:
    words = json.dumps({"name": "run_sql_remote", "arguments": {"query": sql}})
    return f"<tool_call>{words}</tool_call>"


def always(*replies: str) -> Policy:
    """Reply the same to every question."""
    return lambda _example, _executor: replies


def of_gold(*replies: Callable[[str], str]) -> Policy:
    """Reply with what is made of the gold query."""
    return lambda example, _executor: [reply(example.gold_sql.rstrip("; \n")) for reply in replies]


def no_rows(sql: str) -> str:
    """Return the columns of a query and none of its rows."""
    return f"SELECT * FROM ({sql}) LIMIT 0"


def doubled(sql: str) -> str:
    """Return every row of a query twice."""
    return f"SELECT g.* FROM ({sql}) AS g, (SELECT 1 UNION ALL SELECT 2)"


def one_column(sql: str) -> str:
    """Return the first column of a query, where it has several."""
    tree = sqlglot.parse_one(sql, dialect="sqlite")
    for select in tree.find_all(exp.Select):
        if select.parent is None and not select.args.get("distinct"):
            select.set("expressions", select.expressions[:1])
    return tree.sql(dialect="sqlite")


def with_more(sql: str) -> str:
    """Return a query with 20 columns more."""
    return f"SELECT g.*, {', '.join(map(str, range(20)))} FROM ({sql}) AS g"


def as_text(example: Example, executor: Executor) -> Sequence[str]:
    """Answer with the gold query's values, all of them as text."""
    found = executor.execute(example.database, example.gold_sql)
    names = (
        [f"c{number}" for number in range(len(found.columns))] if isinstance(found, Table) else []
    )
    casts = ", ".join(f"CAST({name} AS TEXT)" for name in names)
    gold = example.gold_sql.rstrip("; \n")
    return [_fenced(f"WITH g({', '.join(names)}) AS ({gold}) SELECT {casts} FROM g")]


def aggregates(example: Example, executor: Executor) -> Sequence[str]:
    """Answer with all aggregates of all columns of the gold query's first table."""
    table = sqlglot.parse_one(example.gold_sql, dialect="sqlite").find(exp.Table)
    assert table is not None
    found = executor.execute(example.database, f'SELECT * FROM "{table.name}" LIMIT 0')
    names = found.columns if isinstance(found, Table) else ()
    made = [
        f'{function}("{name}")'
        for name in names
        for function in ("COUNT", "MIN", "MAX", "SUM", "AVG")
    ]
    return [_fenced(f'SELECT {", ".join(["COUNT(*)", *made])} FROM "{table.name}"')]


def _column(sql: str) -> str:
    return _fenced(one_column(sql))


def _doubled(sql: str) -> str:
    return _fenced(doubled(sql))


_TURNS = Family({"reward": {"kind": "progressive"}, "env": {"kind": "diagnosed"}}, _tagged)
FAMILIES = {
    "Progress-SQL": _TURNS,
    "Progress-SQL, one-shot": Family({**_TURNS.settings, "reward": {"kind": "one_shot"}}, _tagged),
    "EXPO-SQL": Family(
        {"reward": {"kind": "expo"}, "env": {"kind": "single_turn", "match": "bag_ordered"}},
        _tagged,
    ),
    "PaVeRL-SQL": Family(
        {"reward": {"kind": "paverl"}, "env": {"kind": "single_turn", "wrapping": "fence"}}, _fenced
    ),
    "SQL-ASTRA": Family({"reward": {"kind": "astra"}, "env": {"kind": "agentic"}}, _fenced),
}
_BINARY = {"reward": {"payoff": "binary"}}
_ONE_STEP = {"reward": {"step_score": "binary", "aggregate": "last"}}
_EXECUTION = {"reward": {"kind": "astra", **_ONE_STEP["reward"]}}
_IMPROVED = {"reward": {"align_k1": "zero"}}
TRICKS = (
    Trick("Progress-SQL", "VALUES(1) first, then the gold",
          of_gold(lambda _: _tagged("VALUES(1)"), _tagged), _IMPROVED),
    Trick("Progress-SQL", "VALUES(1), then the gold with LIMIT 0, to the end",
          of_gold(lambda _: _tagged("VALUES(1)"), *[lambda sql: _tagged(no_rows(sql))] * 3)),
    Trick("Progress-SQL", "SELECT NULL", always(*[_tagged("SELECT NULL")] * 4)),
    Trick("Progress-SQL", "tags without SQL", always(*[_tagged("")] * 4)),
    Trick("Progress-SQL, one-shot", "SELECT NULL", always(*[_tagged("SELECT NULL")] * 4)),
    Trick("Progress-SQL, one-shot", "tags without SQL", always(*[_tagged("")] * 4)),
    Trick("EXPO-SQL", "SELECT NULL", always(_tagged("SELECT NULL"))),
    Trick("EXPO-SQL", "the gold without rows", of_gold(lambda sql: _tagged(no_rows(sql)))),
    Trick("EXPO-SQL", "one right column", of_gold(lambda sql: _tagged(one_column(sql)))),
    Trick("EXPO-SQL", "tags without SQL", always(_tagged(""))),
    Trick("PaVeRL-SQL", "SELECT 0, 1, …, 1999", always(_fenced(_CONSTANTS)), _BINARY),
    Trick("PaVeRL-SQL", "all aggregates of the table", aggregates, _BINARY),
    Trick("PaVeRL-SQL", "one right column", of_gold(_column), _BINARY),
    Trick("PaVeRL-SQL", "the gold and 20 columns more",
          of_gold(lambda sql: _fenced(with_more(sql))), _BINARY),
    Trick("PaVeRL-SQL", "the gold's values as text", as_text, _EXECUTION),
    Trick("PaVeRL-SQL", "no row (right where the gold has none)", always(_fenced(_NO_ROWS))),
    Trick("PaVeRL-SQL", "SELECT NULL", always(_fenced("SELECT NULL"))),
    Trick("PaVeRL-SQL", "rows doubled by a cross join", of_gold(_doubled),
          {"env": {"match": "bag"}}),
    Trick("SQL-ASTRA", "one right column", of_gold(_column), _ONE_STEP),
    Trick("SQL-ASTRA", "one right column called, then answered",
          of_gold(lambda sql: _call(one_column(sql)), _column), _ONE_STEP),
    Trick("SQL-ASTRA", "the gold called, nothing answered",
          of_gold(_call, lambda _: "done"), _ONE_STEP),
    Trick("SQL-ASTRA", "the answer given, no call", of_gold(_fenced)),
    Trick("SQL-ASTRA", "rows doubled by a cross join", of_gold(_doubled),
          {"env": {"match": "bag"}, **_ONE_STEP}),
)  # fmt: skip


def main() -> None:
    """Play all tricks and print what they earn."""
    options = _options()
    with tempfile.TemporaryDirectory() as made, Executor(ExecutorConfig()) as executor:
        examples = _questions(options, Path(made))
        game = _Game(examples, executor)
        found = [
            (
                trick,
                game.earned(trick, {}),
                game.earned(trick, trick.closed_by) if trick.closed_by else None,
            )
            for trick in track(TRICKS, description="tricks")
        ]
    print(markdown(_HEAD, (_row(*one) for one in found)))
    print(json.dumps({"cpu_count": os.cpu_count(), "questions": len(examples)}))


class _Game:
    """Plays families with settings; what the gold query earns at once is played once for each."""

    def __init__(self, examples: Sequence[Example], executor: Executor) -> None:
        self._examples, self._executor = examples, executor
        self._gold: dict[str, list[Score]] = {}

    def earned(self, trick: Trick, changes: Settings) -> Earned:
        """Play a trick against the gold query, with these settings beside the family's."""
        family = FAMILIES[trick.family]
        settings = _Setting.model_validate(
            {name: {**value, **changes.get(name, {})} for name, value in family.settings.items()}
        )
        key = f"{trick.family} {settings!r}"
        if key not in self._gold:
            self._gold[key] = self._scores(settings, lambda e, _: [family.answer(e.gold_sql)])
        gold, tricks = self._gold[key], self._scores(settings, trick.policy)
        return Earned(
            trick=mean(score.total for score in tricks),
            gold=mean(score.total for score in gold),
            as_much=mean(
                not a.correct and a.total >= b.total - 1e-9
                for a, b in zip(tricks, gold, strict=True)
            ),
            right=mean(score.correct for score in tricks),
        )

    def _scores(self, settings: _Setting, policy: Policy) -> list[Score]:
        """Play an episode of each question, as long as the policy replies."""
        executor, columns = self._executor, columns_of()
        environment = build_environment(
            settings.env,
            executor=executor,
            first_prompt=lambda _: (),
            feedback=build_feedback(columns, tree_of(settings.reward), style="progress"),
        )
        reward = build_reward(
            settings.reward, columns_of=columns, executor=executor, wrapping=settings.env.wrapping
        )
        found = []
        for example in self._examples:
            episode, seen = environment.reset(example)
            for reply in policy(example, executor):
                if seen is not None:
                    episode, seen = environment.step(episode, reply)
            found.append(reward(episode))
        return found


def _questions(options: argparse.Namespace, made: Path) -> tuple[Example, ...]:
    if options.data_root is not None:
        _, examples = find("spider-dev", options.data_root, options.file)
    else:
        generate(made / "data", DemoConfig(train_databases=1, validation_databases=1))
        examples = read_all(SourceConfig(layout="spider", path=made / "data", split="test"))
    return examples[: options.questions]


def _row(trick: Trick, now: Earned, then: Earned | None) -> tuple[str, ...]:
    closed = ", ".join(
        f"{part}.{key}={value}"
        for part, keys in trick.closed_by.items()
        for key, value in keys.items()
    )
    numbers = (f"{now.trick:.2f}", f"{now.gold:.2f}", f"{100 * now.as_much:.1f}")
    after = (
        (f"{then.trick:.2f}", f"{then.gold:.2f}", f"{100 * then.as_much:.1f}")
        if then
        else ("-",) * 3
    )
    right = f"{100 * now.right:.1f}"
    return (trick.family, trick.name, right, *numbers, f"`{closed}`" if closed else "-", *after)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="with Spider's dev set")
    parser.add_argument("--file", default="", help="question file in place of dev.json")
    parser.add_argument("--questions", type=int, metavar="N", help="the first N (default: all)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
