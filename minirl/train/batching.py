"""From trajectories to the arrays of the update: micro-batches within a budget of tokens.

A micro-batch computes the tokens of its prompts and answers as one flat list for each part of the
mesh's rows (`minirl.model.attention.Rows`), so that only the end of the list is padding. Groups of
like lengths go together, and a group that is too long is cut: each piece of it has its own prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from minirl.config import BatchingConfig
from minirl.config.algorithms import Aggregation
from minirl.model.attention import Rows
from minirl.types import TokenRow, Trajectory

Item = TypeVar("Item")
Groups = Sequence[Sequence[TokenRow]]

# Shapes are few, for each compiles a program. Flat lists, on whose length the time of a micro-batch
# depends, have one of so many lengths; the numbers of rows and columns, which matter in attention
# alone, grow by a half or a third.
_LIST_LENGTHS = 16
# Cells of rows, in tokens of the budget: rows exist in one layer's attention alone.
_CELLS = 2


class Batch(NamedTuple):
    """Arrays of one micro-batch, made with NumPy; a pytree.

    Tokens are computed as flat lists, one for each of the X parts of the mesh's rows, and the loss
    looks at answers by row. The shared prefix is the prompt without its last token; each answer
    starts with that token, so that every trained token is predicted by its own answer.

    Attributes:
        ids_XT: Token ids of prefixes and answers, padded on the right.
        position_XT: Their positions in their trajectories.
        target_XT: The id after each token that is trained on; -1 elsewhere.
        rows: Where the tokens stand in rows of prefixes, NP, and of answers, BC.
        is_action_BC: Whether the id after each token is trained on, and so in what follows.
        weight_BC: Its share in the mean over the whole batch (`token_weights`).
        old_logp_BC: Of the learner before the step's first update; None where it is the only one.
    """

    ids_XT: Any
    position_XT: Any
    target_XT: Any
    rows: Rows
    is_action_BC: Any
    sampler_logp_BC: Any
    advantage_BC: Any
    weight_BC: Any
    old_logp_BC: Any = None


def split_evenly(items: Sequence[Item], *, count: int) -> list[Sequence[Item]]:
    """Share items out in order to `count` parts of like size, none of them empty."""
    count = min(count, len(items))
    bounds = [len(items) * n // count for n in range(count + 1)] if count else []
    return [items[start:end] for start, end in pairwise(bounds)]


def token_weights(
    rows: Sequence[TokenRow], *, aggregation: Aggregation, divisor: int = 1
) -> list[float]:
    """Return the weight of each sampled token of a row; y_i are the sampled tokens of row i.

    `sequence_mean` is GRPO's mean over rows of the mean over tokens, 1 / (B |y_i|), and so is
    `response_mean`, of which |y_i| counts observations too (SQL-ASTRA, arXiv:2603.16161, Eq. 7);
    `token_mean` is the mean over all sampled tokens, 1 / sum |y_i| (DAPO, arXiv:2503.14476, Eq. 8);
    `constant` is 1 / (B divisor): the length that a row could have (Dr.GRPO, arXiv:2503.20783,
    section 3.2), or 1 for the sum over a row's tokens.
    """
    lengths = [int(row.is_action.sum()) for row in rows]
    if aggregation == "response_mean":
        lengths = [len(row.ids) - row.prompt_length for row in rows]
    if aggregation == "token_mean":
        total = max(sum(lengths), 1)
        return [1.0 / total for _ in lengths]
    if aggregation == "constant":
        return [1.0 / (len(lengths) * divisor) for _ in lengths]
    return [1.0 / (len(lengths) * max(length, 1)) for length in lengths]


def without_cut_off(rows: Sequence[TokenRow], trajectories: Sequence[Trajectory]) -> list[TokenRow]:
    """Train on no token of trajectories that a token limit cut off (DAPO, arXiv:2503.14476, 3.4).

    `token_mean` then leaves them out of its count; a mean over rows still counts them. So do
    advantages, in the means of groups and of whitening: the paper masks the loss alone, and what
    the policy earns includes what was cut off.
    """
    return [
        replace(row, is_action=np.zeros_like(row.is_action)) if trajectory.is_cut_off else row
        for row, trajectory in zip(rows, trajectories, strict=True)
    ]


def token_mean(values: Sequence[np.ndarray], rows: Sequence[TokenRow]) -> float:
    """Return the mean of numbers of ids over all ids that are trained on; 0 for none."""
    total = sum(float(value[row.is_action].sum()) for value, row in zip(values, rows, strict=True))
    return total / max(sum(int(row.is_action.sum()) for row in rows), 1)


class MicroBatches:
    """The micro-batches of groups, in order: their gradients add up to that of the whole batch.

    `parts` are those of the mesh's rows (`sharding.row_parts`); see `token_weights` for
    `aggregation` and `divisor`.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        aggregation: Aggregation,
        sizes: BatchingConfig,
        pad_id: int,
        divisor: int = 1,
        parts: int = 1,
    ) -> None:
        rows = [row for group in groups for row in group]
        weights = token_weights(rows, aggregation=aggregation, divisor=divisor)
        # Rows are compared by identity: two may hold the same.
        self._weight_of = {id(row): weight for row, weight in zip(rows, weights, strict=True)}
        self._groups, self._pad_id = groups, pad_id
        self._layouts = layouts(groups, sizes, parts=parts)

    def __iter__(self) -> Iterator[Batch]:
        for layout in self._layouts:
            yield fill(layout, self._weight_of, pad_id=self._pad_id)

    def read_back(self, values: Iterable[Any]) -> list[list[np.ndarray]]:
        """Bring numbers of the targets of all micro-batches, BC each, back to the rows.

        Returns:
            For each row of each group an array over its ids; 0 on the prompt.
        """
        values_of = {}
        for layout, array_BC in zip(self._layouts, values, strict=True):
            for _, b, row in _answers(layout):
                values_C = np.asarray(array_BC)[b, : len(row.ids) - row.prompt_length]
                values_of[id(row)] = np.pad(values_C, (row.prompt_length, 0))
        return [[values_of[id(row)] for row in group] for group in self._groups]

    @property
    def padding(self) -> float:
        """Return the share of the lists of tokens that holds none; 0 for no group."""
        pieces = (piece for layout in self._layouts for part in layout.parts for piece in part)
        length = sum(layout.shape.tokens * len(layout.parts) for layout in self._layouts)
        return 1 - sum(piece.tokens for piece in pieces) / length if length else 0.0


def _answers(layout: BatchLayout) -> Iterator[tuple[int, int, TokenRow]]:
    """Yield the number of the prompt's row, that of the answer's row, and the trajectory."""
    for part, pieces in enumerate(layout.parts):
        for n, piece in enumerate(pieces, part * layout.shape.prompts):
            for b, row in enumerate(piece.rows, n * layout.shape.answers):
                yield n, b, row


def fill(layout: BatchLayout, weight_of: Mapping[int, float], *, pad_id: int) -> Batch:
    """Write trajectories to the rows of a layout, with weights by their identity."""
    shape, X = layout.shape, len(layout.parts)
    N, B = X * shape.prompts, X * shape.prompts * shape.answers
    ids_NP, position_NP = np.zeros((2, N, shape.prompt_columns), np.int32)
    ids_BC, position_BC, target_BC = np.zeros((3, B, shape.answer_columns), np.int32)
    length_N, length_B = np.zeros(N, np.int32), np.zeros(B, np.int32)
    is_action_BC = np.zeros(ids_BC.shape, bool)
    sampler_logp_BC, advantage_BC, weight_BC, old_logp_BC = np.zeros((4, *ids_BC.shape), np.float32)
    has_old = False
    for n, b, row in _answers(layout):
        start, length = row.prompt_length - 1, len(row.ids) - row.prompt_length
        length_N[n], length_B[b] = start, length
        ids_NP[n, :start], position_NP[n, :start] = row.ids[:start], np.arange(start)
        ids_BC[b, :length], target_BC[b, :length] = row.ids[start:-1], row.ids[start + 1 :]
        position_BC[b, :length] = np.arange(start, start + length)
        new = slice(start + 1, None)
        is_action_BC[b, :length] = row.is_action[new]
        sampler_logp_BC[b, :length] = row.logprobs[new]
        advantage_BC[b, :length] = np.broadcast_to(row.advantage, len(row.ids))[new]
        weight_BC[b, :length] = weight_of[id(row)] * row.is_action[new]
        if row.old_logprobs is not None:
            has_old, old_logp_BC[b, :length] = True, row.old_logprobs[new]
    rows = _rows(length_N, length_B, shape, parts=X)
    target_BC = np.where(is_action_BC, target_BC, -1)
    return Batch(
        ids_XT=_listed(rows, ids_NP, ids_BC, padding=pad_id),
        position_XT=_listed(rows, position_NP, position_BC, padding=0),
        target_XT=_listed(rows, np.full_like(ids_NP, -1), target_BC, padding=-1),
        rows=rows,
        is_action_BC=is_action_BC,
        sampler_logp_BC=sampler_logp_BC,
        advantage_BC=advantage_BC,
        weight_BC=weight_BC,
        old_logp_BC=old_logp_BC if has_old else None,
    )


def _rows(length_N: np.ndarray, length_B: np.ndarray, shape: BatchShape, *, parts: int) -> Rows:
    """Number the tokens of every part's rows in order."""
    columns = np.arange(shape.prompt_columns), np.arange(shape.answer_columns)
    is_token = columns[0] < length_N[:, None], columns[1] < length_B[:, None]
    cells = [mask.reshape(parts, -1) for mask in is_token]
    is_token_XR = np.concatenate(cells, axis=1)
    token_XR = np.where(is_token_XR, is_token_XR.cumsum(axis=1) - 1, shape.tokens)
    cell_XT = np.full((parts, shape.tokens), is_token_XR.shape[1], np.int32)
    for x, is_token_R in enumerate(is_token_XR):
        cell_T = np.flatnonzero(is_token_R)
        cell_XT[x, : len(cell_T)] = cell_T
    token_NP, token_BC = np.split(token_XR.astype(np.int32), [cells[0].shape[1]], axis=1)
    return Rows(token_NP.reshape(is_token[0].shape), token_BC.reshape(is_token[1].shape), cell_XT)


def _listed(rows: Rows, cells_NP: np.ndarray, cells_BC: np.ndarray, *, padding: int) -> np.ndarray:
    """Bring what cells hold to flat lists, XT."""
    X = len(rows.cell_XT)
    last = np.full((X, 1), padding, np.int32)
    cells = [cells_NP.reshape(X, -1), cells_BC.reshape(X, -1), last]
    return np.take_along_axis(np.concatenate(cells, axis=1), rows.cell_XT, axis=1)


class BatchShape(NamedTuple):
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


class BatchLayout(NamedTuple):
    """A micro-batch: its shape, and the pieces of each part of the mesh's rows."""

    shape: BatchShape
    parts: Sequence[Sequence[Piece]]


def layouts(groups: Groups, sizes: BatchingConfig, *, parts: int = 1) -> list[BatchLayout]:
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
    return [
        BatchLayout(_shape(chunk, sizes), chunk) for chunk in _chunks(pieces, sizes, parts, high)
    ]


def largest_shape(prompt: int, answer: int, sizes: BatchingConfig) -> BatchShape:
    """Return the shape that takes the most memory, of the longest prefix and the longest answer."""
    tokens = max(sizes.budget, prompt + answer)
    prompt = round_up(prompt, multiple=sizes.prompt_multiple)
    answer = round_up(answer, multiple=sizes.answer_multiple)
    answers = max((_CELLS * tokens - prompt) // answer, 1)
    return BatchShape(_list_length(tokens, sizes), 1, prompt, answers, answer)


def round_up(length: int, *, multiple: int) -> int:
    """Round a length up to one of few sizes: 1, 2, 3, 4, 6, 8, 12, 16, ... multiples."""
    steps = max(1, -(-length // multiple))
    power = max(0, steps.bit_length() - 2)
    return -(-steps // 2**power) * 2**power * multiple


def _cut(group: Sequence[TokenRow], sizes: BatchingConfig) -> Sequence[Piece]:
    """Cut a group into the fewest pieces within the budget, answers of like length together."""
    order = sorted(group, key=lambda row: len(row.ids))
    for count in range(1, len(order) + 1):
        pieces = [_piece(part) for part in split_evenly(order, count=count)]
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


def _shape(chunk: Sequence[Sequence[Piece]], sizes: BatchingConfig) -> BatchShape:
    pieces = [piece for part in chunk for piece in part]
    prompt, answer = _columns(pieces, sizes)
    return BatchShape(
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
