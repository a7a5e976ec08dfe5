"""Put a filled question in words: nouns and their synonyms, phrases for conditions and orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlenv.demo.databases import DemoColumn
from sqlenv.demo.slots import Draw, slot_names
from sqlenv.demo.vocabulary import CATEGORIES, NUMBERS, VOCABULARY, plural, synonyms

_SYNONYM_RATE = 0.1


def put_in_words(draw: Draw, wording: str) -> str:
    """Fill the slots of a wording; every slot keeps its words throughout the question."""
    for name in slot_names(wording):
        if name not in draw.words:
            draw.words[name] = _phrase(draw, name)
    return wording.format(**draw.words)


def _phrase(draw: Draw, name: str) -> str:
    if name in ("show", "lowshow"):
        show = draw.rng.choice(VOCABULARY.show)
        return show if name == "show" else show.lower()
    stem, number = name[:-1], name[-1]
    if stem in _PHRASES:
        return draw.rng.choice(_PHRASES[stem](draw, number))
    if len(stem) > 1:
        return plural(_noun(draw, stem[0] + number))
    return _noun(draw, name)


# Nouns


def _noun(draw: Draw, name: str) -> str:
    if name not in draw.words:
        column = draw.columns.get(name)
        draw.words[name] = _column_words(draw, column) if column else draw.sql[name]
    return draw.words[name]


def _column_words(draw: Draw, column: DemoColumn) -> str:
    others = [name for name in (column.concept, *synonyms(column.concept)) if name != column.name]
    swap = bool(others) and draw.rng.random() < _SYNONYM_RATE
    return (draw.rng.choice(others) if swap else column.name).replace("_", " ")


def _table_noun(draw: Draw, number: str) -> str:
    name = "S" + number
    if name not in draw.words:
        names = draw.tables[int(number) - 1].names
        swap = len(names) > 1 and draw.rng.random() < _SYNONYM_RATE
        draw.words[name] = names[int(swap)].replace("_", " ")
    return draw.words[name]


def _preposition(draw: Draw, number: str) -> Sequence[str]:
    parent = draw.parents[int(number) - 1]
    assert parent
    return (parent.preposition,)


# Phrases: all the ways to say one thing


def _is(draw: Draw, number: str, *, column: str = "x", value: str = "v") -> Sequence[str]:
    noun, literal = _noun(draw, column + number), draw.sql[value + number]
    meaning = CATEGORIES[draw.columns[column + number].concept]
    short = tuple(f"{before} {literal}" for before in meaning.before)
    return (f"with {noun} {literal}", f"whose {noun} is {literal}", *short)


def _is_or(draw: Draw, number: str) -> Sequence[str]:
    return [f"{phrase} or {draw.sql['w' + number]}" for phrase in _is(draw, number)]


def _compare(draw: Draw, number: str) -> Sequence[str]:
    sign, threshold = draw.sql["o" + number], draw.sql["k" + number]
    noun, meaning = _noun(draw, "n" + number), NUMBERS[draw.columns["n" + number].concept]
    be = "are" if noun in VOCABULARY.plurals else "is"
    plain = [text.format(n=noun, be=be, k=threshold) for text in VOCABULARY.compare[sign]]
    special = dict(zip("><", meaning.comparisons, strict=True)).get(sign)
    return [*plain, *[f"{special} {threshold}"] * len(plain)] if special else plain


def _sorted(draw: Draw, number: str) -> Sequence[str]:
    noun = _noun(draw, "n" + number)
    return [text.format(n=noun) for text in VOCABULARY.sorted[draw.sql["r" + number]]]


def _best(draw: Draw, number: str) -> Sequence[str]:
    return [f"the {words}" for words in _extremes(draw, number, _table_noun(draw, number))]


def _top(draw: Draw, number: str) -> Sequence[str]:
    nouns, limit = plural(_table_noun(draw, number)), draw.sql["q" + number]
    return [f"the {limit} {words}" for words in _extremes(draw, number, nouns)]


def _extremes(draw: Draw, number: str, noun: str) -> list[str]:
    spoken = _noun(draw, "n" + number)
    plain = [
        f"{noun} with the {word} {spoken}" for word in VOCABULARY.extreme[draw.sql["r" + number]]
    ]
    adjective = _adjective(draw, number)
    return [*plain, *[f"{adjective} {noun}"] * len(plain)] if adjective else plain


def _adjective(draw: Draw, number: str) -> str:
    """Find the superlative of the column, unless another column of the table has the same."""
    column, ascending = draw.columns["n" + number], draw.sql["r" + number] == "ASC"

    def superlative(column: DemoColumn) -> str:
        return NUMBERS[column.concept].extremes[int(ascending)]

    numbers = draw.tables[int(number) - 1].of_kind("number")
    taken = [superlative(other) for other in numbers if other != column]
    return "" if superlative(column) in taken else superlative(column)


def _like(draw: Draw, number: str) -> Sequence[str]:
    pattern = draw.sql["m" + number]
    letter = pattern.strip("%")
    if not pattern.startswith("%"):
        return (f"starts with {letter}", f"begins with {letter}")
    if not pattern.endswith("%"):
        return (f"ends with {letter}",)
    return (f"contains {letter}", f"contains the letter {letter}")


_PHRASES: dict[str, Callable[[Draw, str], Sequence[str]]] = {
    "S": lambda draw, number: (_table_noun(draw, number),),
    "T": lambda draw, number: (plural(_table_noun(draw, number)),),
    "P": _preposition,
    "is": _is,
    "also": lambda draw, number: _is(draw, number, column="y", value="u"),
    "isor": _is_or,
    "cmp": _compare,
    "beyond": lambda draw, number: VOCABULARY.beyond[draw.sql["e" + number]],
    "sorted": _sorted,
    "best": _best,
    "top": _top,
    "like": _like,
    "g": lambda draw, number: VOCABULARY.functions[draw.sql["g" + number]],
}
