"""What the demo's YAML files say: `words.yaml`, `domains.yaml` and `questions.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter

Difficulty = Literal["easy", "medium", "hard", "extra"]
Scene = Literal["one", "pair", "chain", "link", "twins"]
Pair = tuple[str, str]
Words = Annotated[tuple[str, ...], BeforeValidator(str.split)]

# Columns that tell the rows of a table apart.
LABELS = ("name", "title")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Number(_Record):
    """A column of numbers. Words are empty where English has none."""

    low: int
    high: int
    step: float = 1
    synonym: str = ""
    extremes: Pair = ("", "")
    comparisons: Pair = ("", "")
    can_add: bool = False
    can_average: bool = True


class Category(_Record):
    """A column of text with few values, each in several rows."""

    pool: str
    synonym: str = ""
    before: tuple[str, ...] = ()


class Entity(_Record):
    """A table that a database of a domain may have; None where a column has its usual values."""

    names: tuple[str, ...]
    parents: dict[str, str] = {}
    columns: dict[str, str | None]


class QuestionKind(_Record):
    """A family of questions with one shape of SQL."""

    name: str
    difficulty: Difficulty
    scene: Scene
    weight: int
    sql: str
    weaker: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    wordings: tuple[str, ...]


class _Vocabulary(_Record):
    cities: dict[str, tuple[str, ...]]
    pools: dict[str, Words]
    numbers: dict[str, Number]
    categories: dict[str, Category]
    sparse: dict[str, str]
    plurals: Words
    show: tuple[str, ...]
    functions: dict[str, tuple[str, ...]]
    compare: dict[str, tuple[str, ...]]
    beyond: dict[str, tuple[str, ...]]
    sorted: dict[str, tuple[str, ...]]
    extreme: dict[str, tuple[str, ...]]


_T = TypeVar("_T")
_PAIR = "{t1} AS t1 JOIN {t2} AS t2 ON t1.{f2} = t2.id"
_JOINED = {
    "{PAIR}": _PAIR,
    "{CHAIN}": f"{_PAIR} JOIN {{t3}} AS t3 ON t2.{{f3}} = t3.id",
    "{LINK}": f"{_PAIR} JOIN {{t3}} AS t3 ON t1.{{f3}} = t3.id",
}


def _read(kind: type[_T], name: str, joined: dict[str, str] | None = None) -> _T:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    for slot, tables in (joined or {}).items():
        text = text.replace(slot, tables)
    return TypeAdapter(kind).validate_python(yaml.safe_load(text))


VOCABULARY = _read(_Vocabulary, "words.yaml")
DOMAINS = _read(dict[str, tuple[Entity, ...]], "domains.yaml")
KINDS = _read(tuple[QuestionKind, ...], "questions.yaml", _JOINED)
NUMBERS, CATEGORIES, SPARSE = VOCABULARY.numbers, VOCABULARY.categories, VOCABULARY.sparse
COUNTRY_OF_CITY = {city: country for country, some in VOCABULARY.cities.items() for city in some}
POOLS = VOCABULARY.pools | {"city": tuple(COUNTRY_OF_CITY), "country": tuple(VOCABULARY.cities)}


def synonyms(concept: str) -> tuple[str, ...]:
    """List the other names of a column."""
    meaning = NUMBERS.get(concept) or CATEGORIES.get(concept)
    return (meaning.synonym,) if meaning and meaning.synonym else ()


def plural(noun: str) -> str:
    """Write the plural of a noun of the vocabulary."""
    if noun in VOCABULARY.plurals:
        return noun
    if noun.endswith("y") and noun[-2] not in "aeou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")
