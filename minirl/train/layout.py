"""Where the tokens of an update stand: micro-batches within a budget of tokens.

A micro-batch computes the tokens of its prompts and answers as one flat list for each part of the
mesh's rows (`minirl.model.attention.Rows`), so that only the end of the list is padding. Groups of
like lengths go together, and a group that is too long is cut: each piece of it has its own prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from minirl.config import BatchingConfig
from minirl.types import TokenRow

# Shapes are few, for each compiles a program. Flat lists, on whose length the time of a micro-batch
# depends, have one of so many lengths; the numbers of rows and columns, which matter in attention
# alone, grow by a half or a third.
_LIST_LENGTHS = 16
# Cells of rows, in tokens of the budget: rows exist in one layer's attention alone.
_CELLS = 2

Groups = Sequence[Sequence[TokenRow]]


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


class Piece(NamedTuple):
    """Rows of a group that are computed beside one copy of its prompt.

    Attributes:
        prompt: Length of their shared prefix.
        answers: Lengths of what each row adds.
    """

    rows: Sequence[TokenRow]
    prompt: int
    answers: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Count the tokens."""
        return self.prompt + sum(self.answers)


class Layout(NamedTuple):
    """A micro-batch: its shape, and the pieces of each part of the mesh's rows."""

    shape: Shape
    parts: Sequence[Sequence[Piece]]


def layouts(groups: Groups, sizes: BatchingConfig, *, parts: int = 1) -> list[Layout]:
    """Share groups out to the fewest micro-batches within the budget, and those out evenly."""
    budget = sizes.budget
    pieces = sorted(
        (piece for group in groups for piece in _cut(group, sizes)),
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
    return [Layout(_shape(chunk, sizes), chunk) for chunk in _chunks(pieces, sizes, parts, high)]


def padding(micro_batches: Sequence[Layout]) -> float:
    """Return the share of the lists of micro-batches that holds no token; 0 for no micro-batch."""
    used = sum(piece.tokens for layout in micro_batches for part in layout.parts for piece in part)
    length = sum(layout.shape.tokens * len(layout.parts) for layout in micro_batches)
    return 1 - used / length if length else 0.0


def largest_shape(prompt: int, answer: int, sizes: BatchingConfig) -> Shape:
    """Return the shape that takes the most memory, of the longest prefix and the longest answer."""
    tokens = max(sizes.budget, prompt + answer)
    prompt = round_up(prompt, multiple=sizes.prompt_multiple)
    answer = round_up(answer, multiple=sizes.answer_multiple)
    answers = max((_CELLS * tokens - prompt) // answer, 1)
    return Shape(_list_length(tokens, sizes), 1, prompt, answers, answer)


def round_up(length: int, *, multiple: int) -> int:
    """Round a length up to one of few sizes: 1, 2, 3, 4, 6, 8, 12, 16, ... multiples."""
    steps = max(1, -(-length // multiple))
    power = max(0, steps.bit_length() - 2)
    return -(-steps // 2**power) * 2**power * multiple


def _cut(group: Sequence[TokenRow], sizes: BatchingConfig) -> Sequence[Piece]:
    """Cut a group into the fewest pieces within the budget, answers of like length together."""
    order = sorted(group, key=lambda row: len(row.ids))
    for count in range(1, len(order) + 1):
        bounds = [len(order) * n // count for n in range(count + 1)]
        pieces = [_piece(order[start:end]) for start, end in pairwise(bounds)]
        if all(_cost([[piece]], sizes) <= sizes.budget for piece in pieces):
            break
    return pieces


def _piece(rows: Sequence[TokenRow]) -> Piece:
    length = rows[0].prompt_length
    return Piece(rows, length - 1, tuple(len(row.ids) - length for row in rows))


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
    return (
        round_up(max(piece.prompt for piece in pieces), multiple=sizes.prompt_multiple),
        round_up(max(max(piece.answers) for piece in pieces), multiple=sizes.answer_multiple),
    )


def _longest_list(chunk: Sequence[Sequence[Piece]]) -> int:
    return max(sum(piece.tokens for piece in part) for part in chunk)


def _list_length(tokens: int, sizes: BatchingConfig) -> int:
    multiple = max(sizes.budget // _LIST_LENGTHS, 1)
    return -(-tokens // multiple) * multiple
