"""What does each reward pay a policy that does not answer the question?

    python benchmarks/hacking.py
    python benchmarks/hacking.py --data-root data     # Spider's dev set, not generated questions

Scripted policies play the papers' environments. Each is told the gold query, and uses it only for
what its trick needs. Prints a table as Markdown, then one JSON object: what a trick earns on
average and where it is wrong, and how often it is wrong and earns as much as an honest policy, with
the paper's settings and with the setting that closes it. docs/claims.md says which equation pays.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import sqlglot
from pydantic import BaseModel
from rich.console import Console
from rich.progress import track
from sqlglot import exp
from sqlglot.errors import SqlglotError

from benchmarks import markdown
from launch.evaluation.questions import find, folder_and_file
from rewards.compose import build_reward
from rewards.config import RewardConfig
from rewards.execution import columns_of
from rewards.progress.feedback import build_feedback
from rewards.types import Score
from sqlenv.config import DemoConfig, EnvConfig, ExecutorConfig, SourceConfig
from sqlenv.data.loading import read_all
from sqlenv.demo import generate
from sqlenv.envs.build import build_environment
from sqlenv.errors import UserError
from sqlenv.executor import Executor
from sqlenv.types import Example, Table

_HEAD = ("reward", "trick", "right %", "earns", "where wrong", "honest", "wrong and as much %")
_HEAD += ("closed by", *(f"{name} then" for name in _HEAD[2:]))

Query = Callable[[Example, Executor], str]
Reply = tuple[Callable[[str], str], Query]
"""A query, and what a reply is made of it."""
Settings = Mapping[str, Mapping[str, Any]]
_OPEN: Settings = {}
Pair = tuple[Score, Score]
"""What a trick and an honest policy earn on the same question."""


class _Setting(BaseModel):
    reward: RewardConfig
    env: EnvConfig


class Family(NamedTuple):
    """A paper's reward in its environment, how a reply answers, and what honest policies call."""

    settings: Settings
    answer: Callable[[str], str]
    calls: Sequence[Reply] = ()


class Trick(NamedTuple):
    """A way to earn without answering, the settings that close it, and which golds are asked."""

    family: str
    name: str
    replies: Sequence[Reply]
    closed_by: Settings = _OPEN
    is_empty_gold: bool = False


def _tagged(sql: str) -> str:
    return f"<think>so</think><sql>{sql}</sql>"


def _fenced(sql: str) -> str:
    return f"```sql\n{sql}\n```"


def _call(sql: str) -> str:
    words = json.dumps({"name": "run_sql_remote", "arguments": {"query": sql}})
    return f"<tool_call>{words}</tool_call>"


def always(sql: str) -> Query:
    """Write the same query for every question."""
    return lambda _example, _executor: sql


def _bare(sql: str) -> str:
    return sql.rstrip("; \n")


def of_gold(change: Callable[[str], str]) -> Query:
    """Write what is made of the gold query."""
    return lambda example, _executor: change(_bare(example.gold_sql))


def no_rows(sql: str) -> str:
    """Return a query with LIMIT 0, appended or in place of its own limit."""
    tree = sqlglot.parse_one(sql, dialect="sqlite")
    is_limited = isinstance(tree, exp.Query) and tree.args.get("limit")
    return tree.limit(0).sql("sqlite") if is_limited else f"{_bare(sql)} LIMIT 0"


def doubled(sql: str) -> str:
    """Return every row of a query twice."""
    return f"SELECT g.* FROM ({sql}) AS g, (SELECT 1 UNION ALL SELECT 2)"


def one_column(sql: str) -> str:
    """Return the first column of a query, where it has several."""
    tree = sqlglot.parse_one(sql, dialect="sqlite")
    if isinstance(tree, exp.Select) and not tree.args.get("distinct"):
        tree.set("expressions", tree.expressions[:1])
    return tree.sql("sqlite")


def with_more(columns: int, sql: str) -> str:
    """Return a query with more columns."""
    return f"SELECT g.*, {', '.join(map(str, range(columns)))} FROM ({sql}) AS g"


def as_text(example: Example, executor: Executor) -> str:
    """Return the gold query's values, all of them as text."""
    found = executor.gold(example.database, example.gold_sql)
    width = found.width if isinstance(found, Table) else 0
    names = [f"c{number}" for number in range(width)]
    casts = ", ".join(f"CAST({name} AS TEXT)" for name in names)
    return f"WITH g({', '.join(names)}) AS ({_bare(example.gold_sql)}) SELECT {casts} FROM g"


def aggregates(example: Example, executor: Executor) -> str:
    """Return all aggregates of all columns of the gold query's first table."""
    table = sqlglot.parse_one(example.gold_sql, dialect="sqlite").find(exp.Table)
    if table is None:
        return "SELECT COUNT(*)"
    found = executor.execute(example.database, f'SELECT * FROM "{table.name}" LIMIT 0')
    names = found.columns if isinstance(found, Table) else ()
    functions = ("COUNT", "MIN", "MAX", "SUM", "AVG")
    made = [f'{function}("{name}")' for name in names for function in functions]
    return f'SELECT {", ".join(["COUNT(*)", *made])} FROM "{table.name}"'


_GOLD, _LIMIT_0, _COLUMN = map(of_gold, (str, no_rows, one_column))
_TURNS, _ONCE = {"kind": "diagnosed"}, {"kind": "single_turn", "wrapping": "fence"}
_STRICT = {"kind": "single_turn", "match": "bag_ordered"}
_EX_B = {"kind": "paverl", "payoff": "binary"}
FAMILIES = {
    "Progress-SQL": Family({"reward": {"kind": "progressive"}, "env": _TURNS}, _tagged),
    "Progress-SQL, one-shot": Family({"reward": {"kind": "one_shot"}, "env": _TURNS}, _tagged),
    "EXPO-SQL": Family({"reward": {"kind": "expo"}, "env": _STRICT}, _tagged),
    "PaVeRL-SQL": Family({"reward": {"kind": "paverl"}, "env": _ONCE}, _fenced),
    "PaVeRL-SQL, EX_b": Family({"reward": _EX_B, "env": _ONCE}, _fenced),
    "SQL-ASTRA": Family(
        {"reward": {"kind": "astra"}, "env": {"kind": "agentic"}}, _fenced, [(_call, _GOLD)]
    ),
}
_SAME: Mapping[str, Query] = {
    "tags without SQL": always(""),
    "SELECT NULL": always("SELECT NULL"),
    "SELECT 0, 1, …, 1999": always("SELECT " + ", ".join(map(str, range(2000)))),
    "one right column": _COLUMN,
    "20 columns more": of_gold(partial(with_more, 20)),
    "values as text": as_text,
    "rows doubled": of_gold(doubled),
}
"""Queries that answer no question, for every family."""
_BAG = {"env": {"match": "bag"}}
_BINARY = {"reward": {"payoff": "binary"}}
_LAST = {"reward": {"step_score": "binary", "aggregate": "last"}}
_EXECUTION = {"reward": {"kind": "execution"}}
_UNIFORM = {"reward": {"gap_scale": 0}}
_CLOSED: Mapping[str, Mapping[str, Settings]] = {
    "Progress-SQL": {"rows doubled": _BAG},
    "EXPO-SQL": {"values as text": _UNIFORM},
    "PaVeRL-SQL": {
        **dict.fromkeys(("SELECT 0, 1, …, 1999", "one right column", "20 columns more"), _BINARY),
        "values as text": _EXECUTION,
        "rows doubled": _BAG,
    },
    "SQL-ASTRA": {
        **dict.fromkeys(("one right column", "20 columns more", "values as text"), _LAST),
        "rows doubled": {**_BAG, **_LAST},
    },
}


def _answered(
    family: str, name: str, query: Query, closed_by: Settings = _OPEN, **more: bool
) -> Trick:
    """Make the trick of a family whose replies all answer with the same query."""
    return Trick(family, name, [(FAMILIES[family].answer, query)] * 4, closed_by, **more)


def _of_every_family(family: str) -> list[Trick]:
    closed = _CLOSED[family]
    made = [
        _answered(family, name, query, closed.get(name, _OPEN)) for name, query in _SAME.items()
    ]
    dropped = {"data.train": {"drop_empty_gold": "true"}}
    no_row = always("SELECT 1 WHERE 0")
    return [*made, _answered(family, "no row, of empty golds", no_row, dropped, is_empty_gold=True)]


_VALUES = (_tagged, always("VALUES(1)"))
TRICKS = (
    Trick("Progress-SQL", "VALUES(1), then the gold", (_VALUES, (_tagged, _GOLD)),
          {"reward": {"align_k1": "zero"}}),
    Trick("Progress-SQL", "VALUES(1), then the gold with LIMIT 0, to the end",
          (_VALUES, *[(_tagged, _LIMIT_0)] * 3), {"reward": {"kind": "one_shot"}}),
    *_of_every_family("Progress-SQL"),
    _answered("Progress-SQL, one-shot", "tags without SQL", always("")),
    _answered("Progress-SQL, one-shot", "SELECT NULL", _SAME["SELECT NULL"]),
    _answered("EXPO-SQL", "one wrong clause: LIMIT 0", _LIMIT_0, _UNIFORM),
    *_of_every_family("EXPO-SQL"),
    _answered("PaVeRL-SQL", "all aggregates of the table", aggregates, _BINARY),
    *_of_every_family("PaVeRL-SQL"),
    _answered("PaVeRL-SQL, EX_b", "4 columns more", of_gold(partial(with_more, 4)), _EXECUTION),
    _answered("PaVeRL-SQL, EX_b", "SELECT 0, 1, 2, 3, 4", always("SELECT 0, 1, 2, 3, 4"),
              _EXECUTION),
    _answered("PaVeRL-SQL, EX_b", "values as text", as_text, _EXECUTION),
    Trick("SQL-ASTRA", "the gold called, nothing answered",
          ((_call, _GOLD), (str, always("done")))),
    Trick("SQL-ASTRA", "the gold answered, nothing called", ((_fenced, _GOLD),)),
    Trick("SQL-ASTRA", "one right column, called 3 times and answered",
          (*[(_call, _COLUMN)] * 3, (_fenced, _COLUMN)), _LAST),
    *_of_every_family("SQL-ASTRA"),
)  # fmt: skip


def play(
    trick: Trick, changes: Settings, examples: Sequence[Example], executor: Executor
) -> list[Pair]:
    """Play a trick and an honest policy, with these settings beside the family's."""
    family = FAMILIES[trick.family]
    merged = {
        part: new if "kind" in (new := changes.get(part, {})) else {**value, **new}
        for part, value in family.settings.items()
    }
    if trick.is_empty_gold:
        examples = [replace(one, gold_sql=no_rows(one.gold_sql)) for one in examples]
    if changes.get("data.train", {}).get("drop_empty_gold"):
        examples = [one for one in examples if count_rows(one, executor)]
    honest = [*family.calls, (family.answer, _GOLD)]
    scores = (_scores(merged, one, examples, executor) for one in (trick.replies, honest))
    return list(zip(*scores, strict=True))


def _scores(
    settings: Settings,
    replies: Sequence[Reply],
    examples: Sequence[Example],
    executor: Executor,
) -> list[Score]:
    """Play an episode of each question, as long as there is a reply."""
    read, columns = _Setting.model_validate(settings), columns_of()
    environment = build_environment(
        read.env,
        executor=executor,
        first_prompt=lambda _: (),
        feedback=build_feedback(columns, style="progress"),
    )
    reward = build_reward(read.reward, columns_of=columns, executor=executor)
    found = []
    for example in examples:
        episode, seen = environment.reset(example)
        for wrap, query in replies:
            if seen is not None:
                episode, seen = environment.step(episode, wrap(query(example, executor)))
        found.append(reward(episode))
    return found


def count_rows(example: Example, executor: Executor) -> int | None:
    """Count the rows of a gold query; None if it fails, or sqlglot cannot read it."""
    try:
        tree = sqlglot.parse_one(example.gold_sql or "VALUES (1)", dialect="sqlite")
    except SqlglotError:
        return None
    found = executor.gold(example.database, example.gold_sql)
    is_known = isinstance(tree, exp.Query) and isinstance(found, Table)
    return len(found.rows) if is_known else None


def questions(options: argparse.Namespace, made: Path) -> Sequence[Example]:
    """Read Spider's questions, or generate some below a folder.

    Raises:
        UserError: What the options name is not there.
    """
    if options.questions is not None and options.questions < 1:
        raise UserError(f"--questions {options.questions}: at least 1")
    root, file = folder_and_file(options.data_root, options.file)
    if root is not None:
        _, examples = find("spider-dev", root, file)
    elif file:
        raise UserError(f"--file {file}: no such file here; give its folder with --data-root")
    else:
        generate(made / "data", DemoConfig(train_databases=1, validation_databases=1))
        examples = read_all(SourceConfig(layout="spider", path=made / "data", split="test"))
    return examples[: options.questions]


def main() -> None:
    """Play all tricks and print what they earn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="with Spider's dev set")
    parser.add_argument("--file", default="", help="question file in place of dev.json")
    parser.add_argument("--questions", type=int, metavar="N", help="the first N (default: all)")
    try:
        _play_all(parser.parse_args())
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _play_all(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as made, Executor(ExecutorConfig()) as executor:
        read = questions(options, Path(made))
        counts = [count_rows(one, executor) for one in read]
        examples = [one for one, rows in zip(read, counts, strict=True) if rows is not None]
        if not examples:
            raise UserError(f"{len(read)} questions, and none has a gold query that runs")
        steps = track(TRICKS, description="tricks", console=Console(stderr=True))
        rows = [_row(trick, examples, executor) for trick in steps]
    print(markdown(_HEAD, rows))
    found = {"questions": len(examples), "left_out": counts.count(None), "empty": counts.count(0)}
    print(json.dumps({"cpu_count": os.cpu_count(), **found}))


def _row(trick: Trick, examples: Sequence[Example], executor: Executor) -> list[str]:
    now, closed = play(trick, _OPEN, examples, executor), trick.closed_by
    then = play(trick, closed, examples, executor) if closed else []
    settings = [f"{part}.{key}={value}" for part in closed for key, value in closed[part].items()]
    words = f"`{', '.join(settings)}`" if settings else "-"
    return [trick.family, trick.name, *_cells(now), words, *_cells(then)]


def _cells(pairs: Sequence[Pair]) -> list[str]:
    """Write how often a trick is right, and what it and an honest policy earn."""
    if not pairs:
        return ["-"] * 5
    earned, honest = (mean(score.total for score in scores) for scores in zip(*pairs, strict=True))
    wrong = [(trick.total, rival.total) for trick, rival in pairs if not trick.correct]
    where_wrong = f"{mean(total for total, _ in wrong):.2f}" if wrong else "-"
    shares = (len(pairs) - len(wrong), sum(total >= rival - 1e-9 for total, rival in wrong))
    right, as_much = (f"{100 * share / len(pairs):.1f}" for share in shares)
    return [right, f"{earned:.2f}", where_wrong, f"{honest:.2f}", as_much]


if __name__ == "__main__":
    main()
