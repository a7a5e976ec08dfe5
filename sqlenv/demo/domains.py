"""The domains, as `domains.txt` describes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sqlenv.demo.kinds import blocks

# Columns that tell the rows of a table apart.
LABELS = ("name", "title")

_LINE = re.compile(r"(?P<names>[\w|]+)(?: < (?P<parents>[\w: ]+?))? : (?P<columns>.+)")


@dataclass(frozen=True, slots=True)
class Entity:
    """A table that a database of the domain may have.

    Attributes:
        names: Its name, then synonyms.
        parents: Name of each table it refers to, with the preposition that leads there.
        columns: Name of each column, with the pool or range that replaces the usual one, or "".
    """

    names: tuple[str, ...]
    parents: tuple[tuple[str, str], ...]
    columns: tuple[tuple[str, str], ...]


def _entity(line: str) -> Entity:
    match = _LINE.fullmatch(line)
    assert match, line
    parents = [parent.split(":") for parent in (match["parents"] or "").split()]
    columns = [column.partition("=") for column in match["columns"].split()]
    return Entity(
        names=tuple(match["names"].split("|")),
        parents=tuple((table, preposition) for table, preposition in parents),
        columns=tuple((name, override) for name, _, override in columns),
    )


DOMAINS = {
    domain: tuple(_entity(line) for line in lines)
    for domain, lines in blocks(Path(__file__).with_name("domains.txt")).items()
}
