"""What the demo's YAML files say: `words.yaml`, `domains.yaml` and `questions.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import yaml

Difficulty = Literal["easy", "medium", "hard", "extra"]

ColumnKind = Literal["key", "label", "number", "category", "sparse"]
"""`label` tells the rows of a table apart, a `category` has few values, each in several rows, and
`sparse` has gaps."""


class Concept(NamedTuple):
    """What a column holds; of what it may be called a database takes the first name.

    Values are of a pool or, numbers, of a range. Words are empty where English has none.
    """

    names: tuple[str, ...]
    kind: ColumnKind
    pool: str = ""
    low: int = 0
    high: int = 0
    step: float = 1
    before: Sequence[str] = ()
    extremes: Sequence[str] = ("", "")
    comparisons: Sequence[str] = ("", "")
    can_add: bool = False
    can_average: bool = True

    @property
    def name(self) -> str:
        """Give the name in SQL."""
        return self.names[0]

    @property
    def type(self) -> str:
        """Name the SQLite type."""
        if self.kind == "number" and self.step == 0.5:
            return "REAL"
        return "INTEGER" if self.kind in ("key", "number") else "TEXT"

    def of(self, values: str | None) -> Concept:
        """Take another pool, or another range such as 6-18; None for its own."""
        if values is None or self.kind != "number":
            return self._replace(pool=values or self.pool)
        low, high = map(int, values.split("-"))
        return self._replace(low=low, high=high)


class Entity(NamedTuple):
    """A table that a database of a domain may have."""

    names: Sequence[str]
    columns: Sequence[Concept]
    parents: Mapping[str, str] = MappingProxyType({})


class QuestionKind(NamedTuple):
    """A family of questions with one shape of SQL."""

    name: str
    difficulty: Difficulty
    scene: str
    weight: int
    sql: str
    wordings: Sequence[str]
    weaker: Sequence[str] = ()
    keys: Sequence[str] = ()


_PAIR = "{t1} AS t1 JOIN {t2} AS t2 ON t1.{f2} = t2.id"
_JOINED = {
    "{PAIR}": _PAIR,
    "{CHAIN}": f"{_PAIR} JOIN {{t3}} AS t3 ON t2.{{f3}} = t3.id",
    "{LINK}": f"{_PAIR} JOIN {{t3}} AS t3 ON t1.{{f3}} = t3.id",
}


def _read(name: str) -> Any:
    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    for slot, tables in _JOINED.items():
        text = text.replace(slot, tables)
    return yaml.safe_load(text)


def _entity(columns: Mapping[str, str | None], **given: Any) -> Entity:
    return Entity(columns=[CONCEPTS[name].of(values) for name, values in columns.items()], **given)


WORDS = _read("words")
_KINDS: tuple[ColumnKind, ...] = ("label", "number", "category", "sparse")
CONCEPTS = {
    name: Concept((name, *given.pop("synonyms", ())), kind, **given)
    for kind in _KINDS
    for name, given in WORDS[kind].items()
}
PLURALS = WORDS["plurals"].split()
COUNTRY_OF_CITY = {city: country for country, some in WORDS["cities"].items() for city in some}
POOLS = {name: words.split() for name, words in WORDS["pools"].items()}
POOLS |= {"city": [*COUNTRY_OF_CITY], "country": [*WORDS["cities"]]}
POOLS["phone"] = [*map(str, range(1000, 10_000))]
DOMAINS = {
    domain: [_entity(**entity) for entity in entities]
    for domain, entities in _read("domains").items()
}
KINDS = [
    QuestionKind(difficulty=difficulty, **kind)
    for difficulty, kinds in _read("questions").items()
    for kind in kinds
]


def plural(noun: str) -> str:
    """Write the plural of a noun of the vocabulary."""
    if noun in PLURALS:
        return noun
    if noun.endswith("y") and noun[-2] not in "aeou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")
