"""Spider's four levels of difficulty, from a query's text.

Levels are those of taoyds/test-suite-sql-eval (evaluation.py) at e97acc546ecb, which its parser
(process_sql.py) decides too, so the ways of both are kept: a comma before a digit does not end a
word; what follows a column on the right of a comparison is skipped as far as the next AND; set
operations lean to the right. No schema is at hand: any name may be that of a column or a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar

Hardness = Literal["easy", "medium", "hard", "extra"]

_OPERATORS = ("not", "between", "=", ">", "<", ">=", "<=", "!=", "in", "like", "is", "exists")
_AGGREGATES = ("none", "max", "min", "count", "sum", "avg")
_SIGNS = ("none", "-", "+", "*", "/")
_CLAUSES = frozenset(
    {"select", "from", "where", "group", "order", "limit", "intersect", "union", "except"}
)
_JOINS = frozenset({"join", "on", "as"})
_SETS = ("intersect", "union", "except")
_ENDS = frozenset({")", ";"})
_NAME = re.compile(r"\*|\w[\w.*]*")
_STRING = re.compile('"[^"]*"')
# nltk's rules for words, which are meant for English.
_APART = re.compile(
    r"[;@#$%&?!()\[\]{}<>] | [:,](?!\d) | -- | \.\.\. | (?<=[^.])\.(?=[\])}>]*\s*\Z)", re.VERBOSE
)

Item = TypeVar("Item")


@lru_cache(maxsize=16384)
def grade(sql: str) -> Hardness | None:
    """Grade the text of a query; None where Spider's parser cannot read it."""
    try:
        query = _SpiderParser(_words(sql)).query()
    except (IndexError, ValueError, RecursionError):
        return None
    return _level(query.clauses, query.nested, query.others)


def _level(clauses: int, nested: int, others: int) -> Hardness:
    if nested:
        return "hard" if clauses <= 1 and nested == 1 and others == 0 else "extra"
    if clauses <= 1 and others == 0:
        return "easy"
    if (clauses <= 1 and others == 2) or (clauses <= 2 and others < 2):
        return "medium"
    return "hard" if (clauses <= 2 < others) or (clauses == 3 and others <= 2) else "extra"


class _Condition(NamedTuple):
    is_negated: bool
    is_like: bool
    nested: int  # values that are queries


_Conditions = list[_Condition | str]
"""Conditions, and between them the words that connect them."""


class _Query(NamedTuple):
    """What decides a level; of items, groups and orders each whether it has an aggregate."""

    tables: int
    on: _Conditions
    items: list[bool]
    where: _Conditions
    groups: list[bool]
    having: _Conditions
    orders: list[bool] | None
    has_limit: bool
    set_operations: int

    @property
    def clauses(self) -> int:
        is_ordered = self.orders is not None
        present = sum(map(bool, (self.where, self.groups, is_ordered, self.has_limit)))
        ors = sum(part[1::2].count("or") for part in (self.on, self.where, self.having))
        likes = sum(condition.is_like for condition in self._conditions())
        return present + max(0, self.tables - 1) + ors + likes

    @property
    def nested(self) -> int:
        return self.set_operations + sum(condition.nested for condition in self._conditions())

    @property
    def others(self) -> int:
        # As in the original: a NOT in WHERE and a connector in HAVING count as aggregates.
        negated = [
            isinstance(one, str) or one.is_negated for one in (*self.where[::2], *self.having)
        ]
        aggregates = sum((*self.items, *self.groups, *(self.orders or ()), *negated))
        counts = (aggregates, len(self.items), len(self.where), len(self.groups))
        return sum(count > 1 for count in counts)

    def _conditions(self) -> Iterator[_Condition]:
        for part in (self.on, self.where, self.having):
            yield from (one for one in part[::2] if not isinstance(one, str))


def _words(sql: str) -> list[str]:
    text = sql.replace("'", '"')
    if text.count('"') % 2 or "\0" in text:
        raise ValueError("a string without an end")
    # A mark keeps the place of a string: what touches it is one word with it.
    marked = _APART.sub(r" \g<0> ", _STRING.sub("\0", text)).lower()
    strings = iter(_STRING.findall(text))
    words: list[str] = []
    for word in marked.split():
        whole = word
        while "\0" in whole:
            whole = whole.replace("\0", next(strings), 1)
        if whole == "=" and words and words[-1] in ("!", ">", "<"):
            words[-1] += "="
        else:
            words.append(whole)
    return words


class _SpiderParser:
    """Reads words of Spider's grammar, or raises IndexError or ValueError."""

    def __init__(self, words: Sequence[str]):
        self._words, self._at = words, 0

    def _peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _take(self, *expected: str) -> str:
        word = self._words[self._at]
        if expected and word not in expected:
            raise ValueError(word)
        self._at += 1
        return word

    def _takes(self, *words: str) -> bool:
        found = self._at < len(self._words) and self._words[self._at] in words
        self._at += found
        return found

    def _is_over(self, ends: frozenset[str]) -> bool:
        return self._at >= len(self._words) or self._words[self._at] in ends

    def query(self) -> _Query:
        is_block = self._takes("(")
        start = self._at
        self._at = self._words.index("from", start) + 1
        tables, on = self._from()
        after, self._at = self._at, start
        items = self._select()
        self._at = after
        where = self._conditions() if self._takes("where") else []
        groups = self._list(self._column) if self._by("group") else []
        having = self._conditions() if self._takes("having") else []
        orders = None
        if self._by("order"):
            orders = [aggregate for order in self._list(self._order) for aggregate in order]
        has_limit = self._takes("limit")
        self._at += has_limit  # a number
        while self._takes(";"):
            pass
        if is_block:
            self._take(")")
        while self._takes(";"):
            pass
        sets = self._takes(*_SETS)
        if sets:
            self.query()
        return _Query(tables, on, items, where, groups, having, orders, has_limit, sets)

    def _from(self) -> tuple[int, _Conditions]:
        tables = 0
        conditions: _Conditions = []
        while self._at < len(self._words):
            is_block = self._takes("(")
            if self._peek() == "select":
                self.query()
            else:
                self._takes("join")
                self._name()
                if self._takes("as"):
                    self._take()
            tables += 1
            if self._takes("on"):
                conditions += ["and"] * bool(conditions) + self._conditions()
            if is_block:
                self._take(")")
            if self._is_over(_CLAUSES | _ENDS):
                break
        return tables, conditions

    def _select(self) -> list[bool]:
        self._take("select")
        self._takes("distinct")
        items = []
        while not self._is_over(_CLAUSES):
            items.append(self._aggregate())
            self._value_unit()
            self._takes(",")
        return items

    def _aggregate(self) -> bool:
        return self._takes(*_AGGREGATES) and self._words[self._at - 1] != "none"

    def _order(self) -> list[bool]:
        aggregates = self._value_unit()
        self._takes("asc", "desc")
        return aggregates

    def _by(self, word: str) -> bool:
        return self._takes(word) and bool(self._take("by"))

    def _list(self, read: Callable[[], Item]) -> list[Item]:
        items: list[Item] = []
        while not self._is_over(_CLAUSES | _ENDS):
            items.append(read())
            if not self._takes(","):
                break
        return items

    def _conditions(self) -> _Conditions:
        conditions: _Conditions = []
        while self._at < len(self._words):
            self._value_unit()
            is_negated = self._takes("not")
            operator = self._take(*_OPERATORS)
            nested = self._value()
            if operator == "between":
                self._take("and")
                nested += self._value()
            conditions.append(_Condition(is_negated, operator == "like", nested))
            if self._is_over(_CLAUSES | _ENDS | _JOINS):
                break
            if self._peek() in ("and", "or"):
                conditions.append(self._take())
        return conditions

    def _value(self) -> int:
        """Read a value; tell whether it is a query."""
        is_block = self._takes("(")
        word = self._words[self._at]
        is_query = word == "select"
        if is_query:
            self.query()
        elif '"' in word or _is_number(word):
            self._take()
        else:
            self._column_value()
        if is_block:
            self._take(")")
        return is_query

    def _column_value(self) -> None:
        """Read a column, and skip whatever follows it."""
        start = self._at
        while not self._is_over(_CLAUSES | _JOINS | {",", ")", "and"}):
            self._at += 1
        _SpiderParser(self._words[start : self._at])._column()

    def _value_unit(self) -> list[bool]:
        """Read a column or two with a sign between them; tell of each if it has an aggregate."""
        is_block = self._takes("(")
        aggregates = [self._column()]
        if self._takes(*_SIGNS):
            aggregates.append(self._column())
        if is_block:
            self._take(")")
        return aggregates

    def _column(self) -> bool:
        """Read a column; tell whether it has an aggregate."""
        is_block = self._takes("(")
        if self._peek() in _AGGREGATES:
            has_aggregate = self._aggregate()
            self._take("(")
            self._takes("distinct")
            self._name()
            self._take(")")
            return has_aggregate
        self._takes("distinct")
        self._name()
        if is_block:
            self._take(")")
        return False

    def _name(self) -> str:
        word = self._take()
        if not _NAME.fullmatch(word) or word in _CLAUSES:
            raise ValueError(word)
        return word


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
