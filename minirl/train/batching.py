"""From trajectories to the arrays of the update: prompts once a group, in few shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax.sharding import Mesh

from minirl.config import BatchingConfig
from minirl.config.algorithms import Aggregation
from minirl.model.sharding import row_parts
from minirl.train.packing import Extent, Layout, layouts, padding
from minirl.types import TokenRow

Item = TypeVar("Item")
Groups = Sequence[Sequence[TokenRow]]


class Packed(NamedTuple):
    """What tells the tokens of a packed micro-batch apart: numbers of groups in each unit and of
    trajectories (own) in each row, from 1, 0 in padding; and positions in a trajectory.
    """

    group_NP: Any
    position_NP: Any
    group_BC: Any
    own_BC: Any
    position_BC: Any


class Batch(NamedTuple):
    """Arrays of one micro-batch, made with NumPy; a pytree.

    The shared prefix is the prompt without its last token; each answer starts with that token, so
    that every trained token is predicted by its own answer.

    Attributes:
        prefix_NP: Token ids of each unit's prompts, padded on the right.
        prefix_length_N: How many they are.
        input_BC: Ids of the answer rows, B = N x R, those of a unit side by side.
        target_BC: The id after each input, which what follows is of (see `TokenRow`).
        weight_BC: Its share in the mean over the whole batch (`token_weights`), 0 in padding.
        packed: Where groups share rows; None where each unit is one group, and each answer a row.
    """

    prefix_NP: Any
    prefix_length_N: Any
    input_BC: Any
    target_BC: Any
    is_action_BC: Any
    old_logp_BC: Any
    advantage_BC: Any
    weight_BC: Any
    start_logp_BC: Any = None
    packed: Packed | None = None


def mini_batches(groups: Sequence[Item], *, count: int) -> list[Sequence[Item]]:
    """Share groups out in order to `count` mini-batches of like size, none of them empty."""
    count = min(count, len(groups))
    bounds = [len(groups) * n // count for n in range(count + 1)] if count else []
    return [groups[start:end] for start, end in pairwise(bounds)]


def row_length(row: TokenRow, *, aggregation: Aggregation) -> int:
    """Count a row's sampled tokens; for `response_mean` everything after the prompt."""
    if aggregation == "response_mean":
        return len(row.ids) - row.prompt_length
    return int(row.is_action.sum())


def token_weights(
    lengths: Sequence[int], *, aggregation: Aggregation, divisor: int = 1
) -> list[float]:
    """Return the weight of each sampled token of a row, from the rows' lengths (`row_length`).

    `sequence_mean` is GRPO's mean over rows of the mean over tokens, 1 / (B |y_i|), and so is
    `response_mean`, of which |y_i| counts observations too (SQL-ASTRA, arXiv:2603.16161, Eq. 7);
    `token_mean` is the mean over all sampled tokens, 1 / sum |y_i| (DAPO, arXiv:2503.14476, Eq. 8);
    `constant` is 1 / (B divisor): the length that a row could have (Dr.GRPO, arXiv:2503.20783,
    section 3.2), or 1 for the sum over a row's tokens.
    """
    if aggregation == "token_mean":
        total = max(sum(lengths), 1)
        return [1.0 / total for _ in lengths]
    if aggregation == "constant":
        return [1.0 / (len(lengths) * divisor) for _ in lengths]
    return [1.0 / (len(lengths) * max(length, 1)) for length in lengths]


def token_mean(values: Sequence[np.ndarray], rows: Sequence[TokenRow]) -> float:
    """Return the mean of numbers of ids over all ids that are trained on; 0 for none."""
    total = sum(float(value[row.is_action].sum()) for value, row in zip(values, rows, strict=True))
    return total / max(sum(int(row.is_action.sum()) for row in rows), 1)


def sizes_on(sizes: BatchingConfig, mesh: Mesh | None) -> BatchingConfig:
    """Return the sizes of a micro-batch of all devices together."""
    return sizes.model_copy(update={"groups_per_batch": sizes.groups_per_batch * row_parts(mesh)})


def micro_batches(
    groups: Groups,
    *,
    aggregation: Aggregation,
    sizes: BatchingConfig,
    pad_id: int,
    divisor: int = 1,
    longest: Extent | None = None,
) -> Iterator[Batch]:
    """Cut groups of one size into micro-batches whose gradients add up to the batch's.

    The last one is filled up with empty rows, so that only padded lengths, or numbers of rows where
    groups are packed, tell shapes apart. `sizes` and `longest` are those of `packing.layouts`.
    """
    lengths = [row_length(row, aggregation=aggregation) for group in groups for row in group]
    weights = token_weights(lengths, aggregation=aggregation, divisor=divisor)
    rows = (row for group in groups for row in group)
    weight_of = {id(row): weight for row, weight in zip(rows, weights, strict=True)}
    parts = _parts(groups, sizes)
    for layout in layouts(_extents(parts), sizes, longest=longest):
        yield _fill(layout, parts, weight_of, pad_id=pad_id, is_packed=sizes.pack)


def read_back(
    groups: Groups,
    values: Iterable[Any],
    *,
    sizes: BatchingConfig,
    longest: Extent | None = None,
) -> list[list[np.ndarray]]:
    """Bring numbers of the targets of `micro_batches`, BC each, back to the rows.

    Returns:
        For each row of each group an array over its ids; 0 on the prompt.
    """
    found, parts = {}, _parts(groups, sizes)
    arranged = layouts(_extents(parts), sizes, longest=longest)
    for layout, array in zip(arranged, values, strict=True):
        values_NRC = np.asarray(array).reshape(layout.units, layout.rows, -1)
        for place in layout.places:
            for row, at in zip(parts[place.group], place.answers, strict=True):
                own = slice(at.start, at.start + len(row.ids) - row.prompt_length)
                own_C = values_NRC[place.unit, at.row, own]
                found[id(row)] = np.pad(own_C, (row.prompt_length, 0))
    return [[found[id(row)] for row in group] for group in groups]


def _parts(groups: Groups, sizes: BatchingConfig) -> list[Sequence[TokenRow]]:
    """Cut groups into parts of so many answers, those of like length together."""
    found: list[Sequence[TokenRow]] = []
    for group in groups:
        size = sizes.answers_per_batch or len(group)
        if size < len(group):
            group = sorted(group, key=lambda row: len(row.ids))
        found += [group[start : start + size] for start in range(0, len(group), size)]
    return found


def padded_share(groups: Groups, sizes: BatchingConfig, *, longest: Extent | None = None) -> float:
    """Return the share of the update's arrays that holds no token; 0 for no group."""
    return padding(_extents(_parts(groups, sizes)), sizes, longest=longest)


def _extents(parts: Sequence[Sequence[TokenRow]]) -> list[Extent]:
    return [
        Extent(part[0].prompt_length - 1, tuple(len(r.ids) - r.prompt_length for r in part))
        for part in parts
    ]


def empty_batch(shape: Layout, *, is_packed: bool) -> Batch:
    """Return a batch of a shape without tokens."""
    return _fill(shape, [], {}, pad_id=0, is_packed=is_packed)


def _fill(
    layout: Layout,
    parts: Sequence[Sequence[TokenRow]],
    weight_of: Mapping[int, float],
    *,
    pad_id: int,
    is_packed: bool,
) -> Batch:
    """Write rows to the places of a layout, with weights by their identity."""
    N, B = layout.units, layout.units * layout.rows
    P, C = layout.prompt_columns, layout.answer_columns
    prefix_NP = np.full((N, P), pad_id, np.int32)
    input_BC, target_BC = np.full((2, B, C), pad_id, np.int32)
    group_NP, position_NP = np.zeros((2, N, P), np.int32)
    group_BC, own_BC, position_BC = np.zeros((3, B, C), np.int32)
    is_action_BC = np.zeros((B, C), bool)
    old_logp_BC, advantage_BC, weight_BC, start_logp_BC = np.zeros((4, B, C), np.float32)
    for place in layout.places:
        first = parts[place.group][0]
        length = first.prompt_length - 1
        prompt = place.unit, slice(place.start, place.start + length)
        prefix_NP[prompt] = first.ids[:length]
        group_NP[prompt], position_NP[prompt] = place.number, np.arange(length)
        for row, at in zip(parts[place.group], place.answers, strict=True):
            own = len(row.ids) - 1 - length
            cells = place.unit * layout.rows + at.row, slice(at.start, at.start + own)
            new = slice(length + 1, None)
            input_BC[cells], target_BC[cells] = row.ids[length:-1], row.ids[new]
            group_BC[cells], own_BC[cells] = place.number, at.number
            position_BC[cells] = np.arange(length, length + own)
            is_action_BC[cells] = row.is_action[new]
            old_logp_BC[cells] = row.logprobs[new]
            advantage_BC[cells] = np.broadcast_to(row.advantage, len(row.ids))[new]
            weight_BC[cells] = weight_of[id(row)] * row.is_action[new]
            if row.start_logprobs is not None:
                start_logp_BC[cells] = row.start_logprobs[new]
    has_start = any(row.start_logprobs is not None for part in parts for row in part)
    segments = Packed(group_NP, position_NP, group_BC, own_BC, position_BC)
    return Batch(
        prefix_NP=prefix_NP,
        prefix_length_N=(group_NP > 0).sum(axis=1, dtype=np.int32),
        input_BC=input_BC,
        target_BC=target_BC,
        is_action_BC=is_action_BC,
        old_logp_BC=old_logp_BC,
        advantage_BC=advantage_BC,
        weight_BC=weight_BC,
        start_logp_BC=start_logp_BC if has_start else None,
        packed=segments if is_packed else None,
    )
