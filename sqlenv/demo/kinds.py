"""The kinds of question, as `kinds.txt` describes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

Difficulty = Literal["easy", "medium", "hard", "extra"]
Scene = Literal["one", "pair", "chain", "link", "twins"]

_PAIR = "{t1} AS t1 JOIN {t2} AS t2 ON t1.{f2} = t2.id"
_FROM = {
    "{PAIR}": _PAIR,
    "{CHAIN}": _PAIR + " JOIN {t3} AS t3 ON t2.{f3} = t3.id",
    "{LINK}": _PAIR + " JOIN {t3} AS t3 ON t1.{f3} = t3.id",
}


@dataclass(frozen=True, slots=True)
class QuestionKind:
    """A family of questions with one shape of SQL; `kinds.txt` says what the parts are for."""

    difficulty: Difficulty
    name: str
    scene: Scene
    weight: int
    sql: str
    weaker: tuple[str, ...]
    keys: tuple[str, ...]
    wordings: tuple[str, ...]


def blocks(path: Path) -> dict[str, list[str]]:
    """Read a text of headers, each followed by its indented lines; # opens a comment."""
    found: dict[str, list[str]] = {}
    header = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            found[header].append(line.strip())
        elif line and not line.startswith("#"):
            header = line
            found[header] = []
    return found


def _kind(header: str, lines: list[str]) -> QuestionKind:
    difficulty, name, scene, weight = header.split()
    parts: dict[str, list[str]] = {"sql": [], "not": [], "key": [], "ask": []}
    for line in lines:
        part, _, text = line.partition(" ")
        for slot, tables in _FROM.items():
            text = text.replace(slot, tables)
        parts[part].append(text)
    return QuestionKind(
        difficulty=cast("Difficulty", difficulty),
        name=name,
        scene=cast("Scene", scene),
        weight=int(weight),
        sql=parts["sql"][0],
        weaker=tuple(parts["not"]),
        keys=tuple(parts["key"]),
        wordings=tuple(parts["ask"]),
    )


KINDS = tuple(
    _kind(header, lines) for header, lines in blocks(Path(__file__).with_name("kinds.txt")).items()
)
