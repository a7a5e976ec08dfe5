"""What the demo's YAML files say: `words.yaml`, `domains.yaml` and `questions.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import yaml

Difficulty = Literal["easy", "medium", "hard", "extra"]

LABELS = ("name", "title")  # columns that tell the rows of a table apart


class Number(NamedTuple):
    """A column of numbers. Words are empty where English has none."""

    low: int
    high: int
    step: float = 1
    synonym: str = ""
    extremes: Sequence[str] = ("", "")
    comparisons: Sequence[str] = ("", "")
    can_add: bool = False
    can_average: bool = True


class Category(NamedTuple):
    """A column of text with few values, each in several rows."""

    pool: str
    synonym: str = ""
    before: Sequence[str] = ()


class Entity(NamedTuple):
    """A table that a database of a domain may have; None where a column has its usual values."""

    names: Sequence[str]
    columns: Mapping[str, str | None]
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


WORDS = _read("words")
NUMBERS = {name: Number(**number) for name, number in WORDS["numbers"].items()}
CATEGORIES = {name: Category(**category) for name, category in WORDS["categories"].items()}
SPARSE: Mapping[str, str] = WORDS["sparse"]
PLURALS = WORDS["plurals"].split()
COUNTRY_OF_CITY = {city: country for country, some in WORDS["cities"].items() for city in some}
POOLS = {name: words.split() for name, words in WORDS["pools"].items()}
POOLS |= {"city": [*COUNTRY_OF_CITY], "country": [*WORDS["cities"]]}
DOMAINS = {
    domain: [Entity(**entity) for entity in entities]
    for domain, entities in _read("domains").items()
}
KINDS = [
    QuestionKind(difficulty=difficulty, **kind)
    for difficulty, kinds in _read("questions").items()
    for kind in kinds
]


def synonyms(concept: str) -> tuple[str, ...]:
    """List the other names of a column."""
    meaning = NUMBERS.get(concept) or CATEGORIES.get(concept)
    return (meaning.synonym,) if meaning and meaning.synonym else ()


def plural(noun: str) -> str:
    """Write the plural of a noun of the vocabulary."""
    if noun in PLURALS:
        return noun
    if noun.endswith("y") and noun[-2] not in "aeou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")
