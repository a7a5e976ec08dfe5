"""Syntax trees out of SQL.

Predictions are hostile input here too: sqlglot's compiled parser overflows the C stack on deep
nesting and takes exponential time on a few patterns (each found by fuzzing, each in the tests), so
a scan over the tokens refuses such text before sqlglot sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from operator import attrgetter
from typing import Literal, NamedTuple

import sqlglot
from sqlglot import exp
from sqlglot.dialects.sqlite import SQLite
from sqlglot.errors import ErrorLevel, SqlglotError

from sqlenv.cache import cached
from sqlenv.sql.lexer import MAX_CHARS, strip_comments, tokens

QueryTree = exp.Select | exp.SetOperation | exp.Subquery

MAX_BRACKETS = 64
"""Open brackets and CASEs at one place. A level costs the parser about 2 kB of C stack."""
MAX_PREFIXES = 32  # prefix operators in a row (`NOT NOT …`, `- - …`), each one a level of recursion
MAX_RETRIED = 6  # nested brackets that sqlglot parses twice: time doubles with each
MAX_BARE_JOINS = 8  # JOINs without ON or USING: time doubles with each
MAX_REPEATS = 200
"""FROMs, `<` signs and STRUCTs: the first two may recurse, time grows with the third's square."""
MAX_TREE_DEPTH = 200
"""Levels of a tree, so that recursive readers of trees stay within Python's limit."""

_CLOSED_BY = {"(": ")", "case": "end"}
_REFUSED = frozenset({";", "?", "[", "{"})  # outside quotes no part of one SQLite query
_PREFIX = frozenset(
    {"not", "-", "+", "~", "!", "@", ":", "*", "any", "all", "some", "array", "interval"}
    | {"exists", "distinct", "prior"}
)
_RETRIED = frozenset(
    {"union", "except", "intersect", "limit", "offset", "fetch"}
    | {"struct", "table", "lateral", "map", "array"}
)
_TYPES = frozenset(
    tokens(word)[-1]  # of `double precision` the one before the bracket
    for word, token in SQLite.Tokenizer.KEYWORDS.items()
    if token in SQLite.Parser.TYPE_TOKENS
)
_REPEATED = ("from", "<", "struct")
_AFTER_FROM = frozenset(
    {"where", "group", "having", "order", "limit", "window", "union", "except", "intersect", ","}
)
_START = frozenset({"select", "with", "("})
_NUMERIC = {exp.DType.BOOLEAN, exp.DType.DECIMAL, *exp.DataType.TEMPORAL_TYPES}  # to SQLite
# What sqlglot cannot parse it logs too; a policy that writes nonsense would fill the run's log.
logging.getLogger("sqlglot").setLevel(logging.ERROR)
# What sqlglot raises on text that is no SQL: its own errors, and slips of its own code.
PARSE_FAILURES = (SqlglotError, RecursionError, ValueError, TypeError, AttributeError, LookupError)


@cached(maxsize=512)
def parse(sql: str) -> QueryTree | None:
    """Parse one SQLite query.

    Returns:
        The tree, shared between callers: never change it; places in it are those of the text. None
        for whatever is not one query (another statement, two statements, broken syntax), or is none
        to sqlglot, or lies beyond the limits above.
    """
    if len(sql) > MAX_CHARS or "\0" in sql or not is_within_limits(tokens(sql)):
        return None
    try:
        tree = sqlglot.parse_one(
            strip_comments(sql).rstrip("; \t\r\n"), read="sqlite", error_level=ErrorLevel.IMMEDIATE
        )
    except PARSE_FAILURES:
        return None
    if not isinstance(tree, QueryTree):
        return None
    if len(sql) > MAX_TREE_DEPTH and depth(tree) > MAX_TREE_DEPTH:
        return None
    return tree if tree.selects else None  # sqlglot takes `SELECT FROM t` for a query


def parse_copy(sql: str) -> QueryTree | None:
    """Parse one query into a tree of the caller's own, which is written with the casts that it was
    read with: sqlglot would write other types, and functions of dates.
    """
    tree = parse(sql)
    tree = tree and tree.copy()
    for cast in tree.find_all(exp.Cast) if tree else ():
        if cast.to.this in _NUMERIC:
            cast.set("to", exp.DataType(this=exp.DType.USERDEFINED, kind="NUMERIC"))
    return tree


def is_within_limits(words: tuple[str, ...]) -> bool:
    """Tell whether sqlglot parses these tokens, one query's, in bounded stack and time."""
    if not words or words[0] not in _START or not _REFUSED.isdisjoint(words):
        return False
    if max(words.count(word) for word in _REPEATED) > MAX_REPEATS:
        return False
    return _count_bare_joins(words) <= MAX_BARE_JOINS and _nests_little(words)


def _count_bare_joins(words: tuple[str, ...]) -> int:
    """Count the JOINs that no ON or USING follows before their FROM clause ends."""
    if words.count("join") + words.count("straight_join") <= MAX_BARE_JOINS:
        return 0
    bare = waiting = 0
    outside: list[int] = []  # of each open bracket, the JOINs waiting before it
    for word in words:
        if word in ("join", "straight_join"):
            waiting += 1
        elif word in ("on", "using"):
            waiting = max(0, waiting - 1)
        elif word == "(":
            outside.append(waiting)
            waiting = 0
        elif word == ")":
            bare += waiting
            waiting = outside.pop() if outside else 0
        elif word in _AFTER_FROM:
            bare += waiting
            waiting = 0
    return bare + waiting + sum(outside)


def _nests_little(words: tuple[str, ...]) -> bool:
    """Follow the brackets; see `MAX_BRACKETS`, `MAX_PREFIXES`, `MAX_RETRIED`."""
    levels: list[tuple[str, bool, bool]] = []  # word that closes it, parsed twice, state around it
    retried_here = False
    prefixes = 0
    before = ""
    for word in words:
        prefixes = prefixes + 1 if word in _PREFIX else 0
        if word in _CLOSED_BY:
            levels.append((_CLOSED_BY[word], retried_here or before in _TYPES, retried_here))
            retried_here = False
            if len(levels) > MAX_BRACKETS or sum(level[1] for level in levels) > MAX_RETRIED:
                return False
        elif levels and word == levels[-1][0]:
            retried_here = levels.pop()[2]
        elif word == ")" or (word == "from" and before == "("):  # the latter: time doubles
            return False
        elif word in _RETRIED:
            retried_here = True
        if prefixes > MAX_PREFIXES:
            return False
        before = word
    return True


def depth(tree: exp.Expression) -> int:
    """Measure the levels of a tree without recursion."""
    count, level = 0, [tree]
    while level:
        count += 1
        level = [child for node in level for child in node.iter_expressions()]
    return count


def clause(
    select: exp.Select, name: Literal["from_", "where", "group", "having", "order"]
) -> list[exp.Expression]:
    """List the expressions of a clause, of FROM the first source; empty where it is absent."""
    found = select.args.get(name)
    if not found:
        return []
    return found.expressions if name in ("group", "order") else [found.this]


def bare(node: exp.Expression) -> exp.Expression:
    """Take off brackets: `((x))` gives x, `(SELECT …)` the query unless it carries a WITH."""
    while isinstance(node, exp.Paren) or (
        isinstance(node, exp.Subquery) and not node.args.get("with_")
    ):
        node = node.this
    return node


def split(node: exp.Expression, kind: type[exp.And] | type[exp.Or]) -> Iterator[exp.Expression]:
    """Yield the operands of a chain of ANDs (or ORs), left to right, brackets taken off."""
    stack = [node]
    while stack:
        node = stack.pop()
        while isinstance(node, exp.Paren):
            node = node.this
        if isinstance(node, kind):
            stack += [node.expression, node.this]
        else:
            yield node


class Relation(NamedTuple):
    """What a FROM or JOIN reads, at any depth: a table (empty for a subquery) and its alias, both
    in lower case, and the table's name as it is written.
    """

    table: str
    alias: str
    start: int
    name: str


@cached(maxsize=512)
def sources(sql: str) -> tuple[Relation, ...]:
    """List what the FROMs and JOINs of a query read, those of nested queries too.

    Text that does not parse reads nothing.
    """
    tree, found = parse(sql), []
    for node in tree.find_all(exp.Table, exp.Subquery) if tree else ():
        name = node.name if isinstance(node, exp.Table) else ""
        table = name.lower()
        named = node.find(exp.Identifier, exp.Func) if table else node.args.get("alias")
        if named is not None:
            start = named.this.meta if isinstance(named, exp.TableAlias) else named.meta
            found.append(Relation(table, node.alias.lower() or table, start.get("start", 0), name))
    return tuple(sorted(found, key=attrgetter("start")))


def tables_of(sql: str) -> tuple[str, ...]:
    """Name the tables that a query reads, in the text's order; none of one that does not parse."""
    tree = parse(sql)
    own = {cte.alias.lower() for cte in tree.find_all(exp.CTE)} if tree else set()
    names = (source.name for source in sources(sql))
    return tuple(name for name in dict.fromkeys(names) if name and name.lower() not in own)
