"""What does each reward pay a policy that does not answer the question?

    python benchmarks/tricks.py                                 # generated questions
    python benchmarks/tricks.py --data-root spider_data         # Spider's dev set

A cell is what a trick, which is given the gold query, earns where it is wrong; `as much` is the
share of questions on which it is wrong and earns no less than the gold query.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import sqlglot
from sqlglot import exp

from benchmarks import markdown
from rewards import score
from rewards.adapters.scoring import Scored
from sqlenv.config import DataConfig, DemoConfig, ExecutorConfig, SourceConfig
from sqlenv.data.loading import load
from sqlenv.demo import generate
from sqlenv.executor import Executor
from sqlenv.types import Table


class Question(NamedTuple):
    database: Path
    gold: str
    width: int


_ONCE, _TURNS, _CALLS = ({"kind": kind} for kind in ("single_turn", "diagnosed", "agentic"))
_ORDERED, _BAG = ({**_ONCE, "match": match} for match in ("bag_ordered", "bag"))
COLUMNS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "Progress-SQL": ({"kind": "progressive"}, _TURNS),
    "the same, `align_k1=zero`": ({"kind": "progressive", "align_k1": "zero"}, _TURNS),
    "EXPO-SQL": ({"kind": "expo"}, _ORDERED),
    "the same, `gap_scale=0`": ({"kind": "expo", "gap_scale": 0}, _ORDERED),
    "PaVeRL-SQL": ({"kind": "paverl"}, _ONCE),
    "the same, `payoff=binary`": ({"kind": "paverl", "payoff": "binary"}, _ONCE),
    "SQL-ASTRA": ({"kind": "astra"}, _CALLS),
    "0 and 1": ({"kind": "execution"}, _ONCE),
    "0 and 1, `match=bag`": ({"kind": "execution"}, _BAG),
}
"""The papers' rewards, and settings that close what they leave open."""


def one_column(sql: str) -> str:
    """Return the first column of a query, where it has several."""
    tree = sqlglot.parse_one(sql, dialect="sqlite")
    is_plain = isinstance(tree, exp.Select) and not tree.args.get("distinct")
    return (tree.select(*tree.expressions[:1], append=False) if is_plain else tree).sql("sqlite")


def _numbers(count: int) -> str:
    return ", ".join(map(str, range(count)))


def as_text(sql: str, width: int) -> str:
    """Return a query's values, all of them as text."""
    names = [f"c{number}" for number in range(width)]
    casts = ", ".join(f"CAST({name} AS TEXT)" for name in names)
    return f"WITH g({', '.join(names)}) AS ({sql}) SELECT {casts} FROM g"


TRICKS: Mapping[str, Callable[[str, int], Sequence[str]]] = {
    "a wrong query, then the gold": lambda sql, _: ("VALUES(1)", sql),
    "no query": lambda *_: ("",),
    "`SELECT NULL`": lambda *_: ("SELECT NULL",),
    "`SELECT 0, 1, …, 1999`": lambda *_: (f"SELECT {_numbers(2000)}",),
    "the gold with LIMIT 0": lambda sql, _: (
        re.sub("(?i)( limit [0-9]+)?$", " LIMIT 0", sql, count=1),
    ),
    "its first column alone": lambda sql, _: (one_column(sql),),
    "4 columns more": lambda sql, _: (f"SELECT g.*, {_numbers(4)} FROM ({sql}) AS g",),
    "20 columns more": lambda sql, _: (f"SELECT g.*, {_numbers(20)} FROM ({sql}) AS g",),
    "its values as text": lambda sql, width: (as_text(sql, width),),
    "its rows twice": lambda sql, _: (f"SELECT g.* FROM ({sql}) AS g, (VALUES (1), (2))",),
    "the gold": lambda sql, _: (sql,),
}
"""Each gives the queries of the turns, of the gold query and its number of columns."""


def play(trick: str, column: str, questions: Sequence[Question]) -> list[Scored]:
    """Score a trick on each question."""
    reward, env = COLUMNS[column]
    asked = [(one, replies(TRICKS[trick](one.gold, one.width), env["kind"])) for one in questions]
    limits = {"workers": 1}
    return [score(*one[:2], said, reward, env=env, executor=limits) for one, said in asked]


def replies(queries: Sequence[str], kind: str) -> list[str]:
    """Write queries as replies; a tool is called with each before the last one is the answer."""
    if kind != "agentic":
        return [f"<think>so</think><sql>{sql}</sql>" for sql in queries]
    call = '<tool_call>{{"name": "run_sql_remote", "arguments": {{"query": {}}}}}</tool_call>'
    return [*(call.format(json.dumps(sql)) for sql in queries), f"```sql\n{queries[-1]}\n```"]


def cell(found: Sequence[Scored], honest: Sequence[Scored]) -> str:
    """Write what a trick earns where it is wrong, and how often that is as much as the gold."""
    pairs = list(zip(found, honest, strict=True))
    wrong = [pair for pair in pairs if not pair[0].correct]
    earned = fmean(a.total for a, _ in wrong or pairs)
    share = 100 * sum(a.total >= b.total - 1e-9 for a, b in wrong) / len(pairs)
    notes = ("" if wrong else "right; ", f", as much {share:.0f} %" if share else "")
    return f"{earned:z.2f}".join(notes)


def read_questions(folder: Path, split: Literal["dev", "test"]) -> list[Question]:
    """Read the questions of a data set in Spider's layout whose gold query returns rows."""
    source = SourceConfig(layout="spider", path=folder, split=split)
    examples = load(DataConfig(sources=(source,), exclude=())).examples
    with Executor(ExecutorConfig()) as executor:
        golds = executor.gold_many([(one.database, one.gold_sql) for one in examples])
    return [
        Question(one.database, one.gold_sql.rstrip("; \n"), gold.width)
        for one, gold in zip(examples, golds, strict=True)
        if isinstance(gold, Table) and gold.rows
    ]


def main() -> None:
    """Play all tricks and print what they earn, and how often they are right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="with dev.json and database/")
    root = parser.parse_args().data_root
    with tempfile.TemporaryDirectory() as made:
        if root is None:
            generate(Path(made), DemoConfig(train_databases=1, validation_databases=1))
        questions = read_questions(root or Path(made), "dev" if root else "test")
        found = {name: {one: play(one, name, questions) for one in TRICKS} for name in COLUMNS}
    rows = []
    for trick in TRICKS:
        right = 100 * fmean(one.correct for one in found["0 and 1"][trick])
        cells = (cell(column[trick], column["the gold"]) for column in found.values())
        rows.append([trick, f"{right:.0f}", *cells])
    table = markdown(("trick", "right %", *COLUMNS), rows)
    print(table, json.dumps({"questions": len(questions)}), sep="\n")


if __name__ == "__main__":
    main()
