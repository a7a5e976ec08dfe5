"""Names in the text of a query: what its FROMs and JOINs read, and names that stand alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from sqlglot import exp

from sqlenv.memory import cached
from sqlenv.sql.extraction import parse
from sqlenv.sql.lexer import Token, tokenize


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


def replace_names(sql: str, start: int, texts: Mapping[str, str]) -> str:
    """Replace names without a qualifier, from some place on, by bracketed texts."""
    parts, at = [], 0
    words = [Token("sign", "", 0, 0, 0), *tokenize(sql), Token("sign", "", 0, 0, 0)]
    for (before, token), (_, after) in pairwise(pairwise(words)):
        is_bare = not before.is_sign(".") and not (after.is_sign(".") or after.is_sign("("))
        is_name = token.kind in ("word", "name") and token.text in texts
        if is_name and is_bare and token.start >= start:
            parts += [sql[at : token.start], f"({texts[token.text]})"]
            at = token.end
    return "".join([*parts, sql[at:]])
