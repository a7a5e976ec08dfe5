"""Where the tokens of an update stand: which prompts share a row, and which answers.

A micro-batch has N units, each a row of prompts and R rows of answers. Apart, a unit holds one
group and a row one answer. Packed, a unit holds as many groups as there is room for, answers one
after the other, and the room is the same in the whole run: a token budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from minirl.config import BatchingConfig

# Numbers of answer rows that packed units have, as shares of a group's size.
_ROW_SHARES = (4, 2, 1)


class Extent(NamedTuple):
    """The lengths of a group: of its shared prefix, and of what each trajectory adds."""

    prompt: int
    answers: tuple[int, ...]


class AnswerPlace(NamedTuple):
    """A row of a unit, the first column there, and the answer's number in the row, from 1."""

    row: int
    start: int
    number: int


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A group of the update (from 0): its unit, its prompt's first column there, its number in the
    unit (from 1), and where each trajectory stands.
    """

    group: int
    unit: int
    start: int
    number: int
    answers: tuple[AnswerPlace, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A micro-batch: its groups' places, units (N), answer rows of each (R), and columns (P, C)."""

    places: tuple[GroupPlace, ...]
    units: int
    rows: int
    prompt_columns: int
    answer_columns: int

    @property
    def cells(self) -> int:
        """Count the tokens that there is room for."""
        return self.units * (self.prompt_columns + self.rows * self.answer_columns)


def layouts(
    extents: Sequence[Extent], sizes: BatchingConfig, *, longest: Extent | None = None
) -> list[Layout]:
    """Share groups out to micro-batches of few shapes; units of like size go together.

    Packed units have room for the longest lengths of the run, or else of `extents`.
    """
    shapes: list[Layout] = []
    if sizes.pack and extents:
        shapes = packed_shapes(longest or _longest(extents), sizes)
    units = _packed(extents, shapes[-1]) if shapes else _apart(extents)
    found, count = [], sizes.groups_per_batch
    for first in range(0, len(units), count):
        chosen = units[first : first + count]
        places = tuple(
            replace(place, unit=n) for n, unit in enumerate(chosen) for place in unit.places
        )
        rows = max(len(unit.rows) for unit in chosen)
        own = Layout((), count, rows, *_columns([extents[place.group] for place in places], sizes))
        shape = next((shape for shape in shapes if shape.rows >= rows), own)
        found.append(replace(shape, places=places))
    return found


def padding(
    extents: Sequence[Extent], sizes: BatchingConfig, *, longest: Extent | None = None
) -> float:
    """Return the share of the update's arrays that holds no token; 0 for no group."""
    used = sum(extent.prompt + sum(extent.answers) for extent in extents)
    cells = sum(layout.cells for layout in layouts(extents, sizes, longest=longest))
    return 1 - used / cells if cells else 0.0


def round_up(length: int, *, multiple: int) -> int:
    """Round a length up to one of few sizes: multiples, then powers of two times the multiple.

    Sizes grow by at most a quarter, so that padding stays small and compilations few.
    """
    steps = max(1, -(-length // multiple))
    power = max(0, steps.bit_length() - 3)
    return -(-steps // 2**power) * 2**power * multiple


def _longest(extents: Sequence[Extent]) -> Extent:
    prompts, answers = zip(*extents, strict=True)
    return Extent(max(prompts), (max(map(max, answers)),) * max(map(len, answers)))


def _columns(extents: Sequence[Extent], sizes: BatchingConfig) -> tuple[int, int]:
    prompt, answers = _longest(extents)
    return (
        round_up(prompt, multiple=sizes.prompt_multiple),
        round_up(answers[0], multiple=sizes.answer_multiple),
    )


def packed_shapes(longest: Extent, sizes: BatchingConfig) -> list[Layout]:
    """Return the shapes of packed micro-batches, from few answer rows to many: the token budget."""
    columns = _columns([longest], sizes)
    most = len(longest.answers)
    rows = sorted({-(-most // share) for share in _ROW_SHARES})
    return [Layout((), sizes.groups_per_batch, count, *columns) for count in rows]


@dataclass(slots=True)
class _Unit:
    """A unit that is being filled: used columns of its prompt row, and of each answer row."""

    prompt: int = 0
    rows: list[AnswerPlace] = field(default_factory=list)  # the next answer's place in each
    places: list[GroupPlace] = field(default_factory=list)

    def take(self, group: int, extent: Extent, room: Layout) -> bool:
        """Place a group here if there is room for all of it: each answer in the first row that
        has room, the longest first (first-fit decreasing).
        """
        if self.prompt + extent.prompt > room.prompt_columns:
            return False
        rows, chosen = list(self.rows), dict[int, AnswerPlace]()
        for g in sorted(range(len(extent.answers)), key=lambda g: -extent.answers[g]):
            length = extent.answers[g]
            fits = (at for at in rows if at.start + length <= room.answer_columns)
            chosen[g] = place = next(fits, AnswerPlace(len(rows), 0, 1))
            if place.row == room.rows:
                return False
            after = AnswerPlace(place.row, place.start + length, place.number + 1)
            rows[place.row : place.row + 1] = [after]
        answers = tuple(chosen[g] for g in range(len(chosen)))
        self.places.append(GroupPlace(group, 0, self.prompt, len(self.places) + 1, answers))
        self.prompt, self.rows = self.prompt + extent.prompt, rows
        return True


def _apart(extents: Sequence[Extent]) -> list[_Unit]:
    """Give every group a unit of its own, and every answer a row."""
    units = []
    for n in sorted(range(len(extents)), key=lambda n: max(extents[n].answers)):
        rows = [AnswerPlace(g, 0, 1) for g in range(len(extents[n].answers))]
        units.append(_Unit(rows=rows, places=[GroupPlace(n, 0, 0, 1, tuple(rows))]))
    return units


def _packed(extents: Sequence[Extent], room: Layout) -> list[_Unit]:
    """Put groups into as few units as first-fit finds."""
    units: list[_Unit] = []
    for n in sorted(range(len(extents)), key=lambda n: -sum(extents[n].answers)):
        # An empty unit has room for any group: it is as large as the largest.
        if not any(unit.take(n, extents[n], room) for unit in units):
            fresh = _Unit()
            fresh.take(n, extents[n], room)
            units.append(fresh)
    return sorted(units, key=lambda unit: len(unit.rows))
