"""Gold queries that are wrong in one place, and other texts of right ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from sqlglot import exp

from sqlenv.witness.columns import ColumnNames
from sqlenv.witness.neighbours import CHANGES, Change, neighbours, with_argument

_ORDER_BY = re.compile("order by", re.IGNORECASE)
Shown = list[exp.Expression]


def _showing(
    node: exp.Expression, _columns: ColumnNames, *, change: Callable[[Shown], Shown]
) -> Iterator[exp.Expression]:
    if changed := change(node.expressions):
        yield with_argument(node, "expressions", [one.copy() for one in changed])


SHAPES: Mapping[str, Callable[[Shown], Shown]] = {
    "columns reversed": lambda shown: shown[::-1],
    "column dropped": lambda shown: shown[:-1],
    "column added": lambda shown: [*shown, exp.Literal.number(1)],
}
"""Changes of what a result shows, which no database is needed to see."""

SPELLINGS: Mapping[str, Callable[[str], str]] = {
    "semicolon": lambda sql: f"{sql.rstrip('; ')};",
    "two semicolons": lambda sql: f"{sql.rstrip('; ')};;",
    "a second query": lambda sql: f"{sql.rstrip('; ')}; SELECT 1",
    "comment behind": lambda sql: f"{sql.rstrip('; ')} -- distinct",
    "block comment before": lambda sql: f"/* it's DISTINCT */ {sql}",
    "comment alone": lambda _: "-- nothing",
    "upper case": lambda sql: sql.upper(),
    "blanks in ORDER BY": lambda sql: _ORDER_BY.sub("ORDER  BY", sql),
    "operators apart": lambda sql: re.sub("(>|<|!)=", r"\1 =", sql),
    "other quotes": lambda sql: sql.replace("'", '"'),
    "unknown column": lambda sql: re.sub("(?i)select", "SELECT no_such_column,", sql, count=1),
    "values as blobs": lambda sql: f"SELECT CAST(1 AS BLOB) FROM ({sql.rstrip('; ')})",
    "integers as floats": lambda sql: f"SELECT x.*, 1.0 FROM ({sql.rstrip('; ')}) AS x",
    "write": lambda sql: f"DELETE FROM sqlite_sequence WHERE 0; {sql}",
}
"""Other texts, many of the same meaning."""


_CHANGES = (
    *CHANGES,
    *(Change(name, (exp.Select,), partial(_showing, change=one)) for name, one in SHAPES.items()),
)


def mutants(sql: str, columns: ColumnNames) -> Iterator[tuple[str, str]]:
    """Yield every mutant of a query, each text once, with what was changed."""
    spelled = ((name, write(sql)) for name, write in SPELLINGS.items())
    seen = {sql}
    for name, text in (*neighbours(sql, columns, _CHANGES), *spelled):
        if text not in seen:
            seen.add(text)
            yield name, text
