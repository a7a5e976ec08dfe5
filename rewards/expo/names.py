"""What the FROMs and JOINs of a query read."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from sqlglot import exp

from sqlenv.memory import cached
from sqlenv.sql.extraction import parse


class Relation(NamedTuple):
    """What a FROM or JOIN reads, at any depth: a table (empty for a subquery) and its alias."""

    table: str
    alias: str
    start: int


@cached(maxsize=512)
def sources(sql: str) -> tuple[Relation, ...]:
    """List what the FROMs and JOINs of a query read, those of nested queries too.

    Text that does not parse reads nothing.
    """
    tree, found = parse(sql), []
    for node in tree.find_all(exp.Table, exp.Subquery) if tree else ():
        table = node.name.lower() if isinstance(node, exp.Table) else ""
        named = node.find(exp.Identifier, exp.Func) if table else node.args.get("alias")
        if named is not None:
            start = named.this.meta if isinstance(named, exp.TableAlias) else named.meta
            found.append(Relation(table, node.alias.lower() or table, start.get("start", 0)))
    return tuple(sorted(found, key=attrgetter("start")))
