"""Where the tokens of an update stand: micro-batches within a budget of tokens.

A micro-batch computes the tokens of its prompts and answers as one flat list for each part of the
mesh's rows (`minirl.model.attention.Rows`), so that only the end of the list is padding. Groups of
like lengths go together, and a group that is too long is cut: each piece of it has its own prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from minirl.config import BatchingConfig

# Shapes are few, for each compiles a program. Flat lists, on whose length the time of a micro-batch
# depends, have one of so many lengths; the numbers of rows and columns, which matter in attention
# alone, grow by a half or a third.
_LIST_LENGTHS = 16
# Cells of rows, in tokens of the budget: rows exist in one layer's attention alone.
_CELLS = 2


class Extent(NamedTuple):
    """The lengths of a group: of its shared prefix, and of what each trajectory adds."""

    prompt: int
    answers: tuple[int, ...]


class Shape(NamedTuple):
    """The sizes of a micro-batch on each part of the mesh's rows.

    Attributes:
        tokens: Length of the flat list.
        prompts: Rows of prompts, of `prompt_columns` each.
        answers: Rows of answers to each prompt, of `answer_columns` each.
    """

    tokens: int
    prompts: int
    prompt_columns: int
    answers: int
    answer_columns: int

    @property
    def cells(self) -> int:
        """Count the cells of all rows."""
        return self.prompts * (self.prompt_columns + self.answers * self.answer_columns)


@dataclass(frozen=True, slots=True)
class Piece:
    """Trajectories of a group of the update that are computed beside one copy of its prompt."""

    group: int
    answers: tuple[int, ...]
    extent: Extent

    @property
    def tokens(self) -> int:
        """Count the tokens."""
        return self.extent.prompt + sum(self.extent.answers)


@dataclass(frozen=True, slots=True)
class Layout:
    """A micro-batch: its shape, and the pieces of each part of the mesh's rows."""

    shape: Shape
    parts: tuple[tuple[Piece, ...], ...]


@lru_cache(maxsize=8)
def layouts(
    extents: tuple[Extent, ...], sizes: BatchingConfig, *, parts: int = 1
) -> tuple[Layout, ...]:
    """Share groups out to the fewest micro-batches within the budget, and those out evenly."""
    budget = sizes.budget
    pieces = sorted(
        (piece for n, extent in enumerate(extents) for piece in _cut(n, extent, sizes)),
        key=lambda piece: (len(piece.answers), *_columns([piece], sizes), piece.tokens),
        reverse=True,
    )
    chunks = list(_chunks(pieces, sizes, parts, budget))
    low, high = 0, budget
    # With a smaller budget and no more micro-batches, the last one is as full as the others.
    while high - low > budget // 16:
        middle = (low + high) // 2
        even = list(_chunks(pieces, sizes, parts, middle))
        low, high = (low, middle) if len(even) == len(chunks) else (middle, high)
    return tuple(_layout(chunk, sizes) for chunk in _chunks(pieces, sizes, parts, high))


def padding(micro_batches: Sequence[Layout]) -> float:
    """Return the share of the lists of micro-batches that holds no token; 0 for no micro-batch."""
    used = sum(piece.tokens for layout in micro_batches for part in layout.parts for piece in part)
    length = sum(layout.shape.tokens * len(layout.parts) for layout in micro_batches)
    return 1 - used / length if length else 0.0


def largest_shape(longest: Extent, sizes: BatchingConfig) -> Shape:
    """Return the shape that takes the most memory, of a group's longest prompt and answers."""
    tokens = max(sizes.budget, longest.prompt + max(longest.answers))
    prompt = round_up(longest.prompt, multiple=sizes.prompt_multiple)
    answer = round_up(max(longest.answers), multiple=sizes.answer_multiple)
    answers = max((_CELLS * tokens - prompt) // answer, 1)
    return Shape(_list_length(tokens, sizes), 1, prompt, answers, answer)


def round_up(length: int, *, multiple: int) -> int:
    """Round a length up to one of few sizes: 1, 2, 3, 4, 6, 8, 12, 16, ... multiples."""
    steps = max(1, -(-length // multiple))
    power = max(0, steps.bit_length() - 2)
    return -(-steps // 2**power) * 2**power * multiple


def _cut(group: int, extent: Extent, sizes: BatchingConfig) -> Sequence[Piece]:
    """Cut a group into the fewest pieces within the budget, answers of like length together."""
    order = sorted(range(len(extent.answers)), key=lambda g: extent.answers[g])
    for count in range(1, len(order) + 1):
        bounds = [len(order) * n // count for n in range(count + 1)]
        pieces = [
            Piece(group, tuple(part), Extent(extent.prompt, tuple(extent.answers[g] for g in part)))
            for part in (order[start:end] for start, end in pairwise(bounds))
        ]
        if all(_cost([[piece]], sizes) <= sizes.budget for piece in pieces):
            break
    return pieces


def _chunks(
    pieces: Sequence[Piece], sizes: BatchingConfig, parts: int, budget: int
) -> Iterator[list[list[Piece]]]:
    """Cut pieces, in order, into micro-batches; each goes to the part that has the least."""
    chunk: list[list[Piece]] = [[] for _ in range(parts)]
    for piece in pieces:
        least = min(chunk, key=lambda part: sum(other.tokens for other in part))
        least.append(piece)
        if sum(map(len, chunk)) > 1 and _cost(chunk, sizes) > budget:
            least.pop()
            yield chunk
            chunk = [[piece], *([] for _ in range(parts - 1))]
    if any(chunk):
        yield chunk


def _cost(chunk: Sequence[Sequence[Piece]], sizes: BatchingConfig) -> int:
    """Return the tokens of the budget that a micro-batch takes."""
    shape = _shape(chunk, sizes)
    return max(_longest_list(chunk), shape.cells // _CELLS)


def _layout(chunk: Sequence[Sequence[Piece]], sizes: BatchingConfig) -> Layout:
    return Layout(_shape(chunk, sizes), tuple(map(tuple, chunk)))


def _shape(chunk: Sequence[Sequence[Piece]], sizes: BatchingConfig) -> Shape:
    pieces = [piece for part in chunk for piece in part]
    prompt, answer = _columns(pieces, sizes)
    return Shape(
        _list_length(_longest_list(chunk), sizes),
        round_up(max(map(len, chunk)), multiple=1),
        prompt,
        max(len(piece.answers) for piece in pieces),
        answer,
    )


def _columns(pieces: Sequence[Piece], sizes: BatchingConfig) -> tuple[int, int]:
    """Return the columns of the rows of prompts and of answers."""
    extents = [piece.extent for piece in pieces]
    return (
        round_up(max(extent.prompt for extent in extents), multiple=sizes.prompt_multiple),
        round_up(max(max(extent.answers) for extent in extents), multiple=sizes.answer_multiple),
    )


def _longest_list(chunk: Sequence[Sequence[Piece]]) -> int:
    return max(sum(piece.tokens for piece in part) for part in chunk)


def _list_length(tokens: int, sizes: BatchingConfig) -> int:
    multiple = max(sizes.budget // _LIST_LENGTHS, 1)
    return -(-tokens // multiple) * multiple
