"""From trajectories to the arrays of the update: prompts once a group, few shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from minirl.config import Aggregation, BatchingConfig
from minirl.model.sharding import row_parts
from minirl.train.packing import Extent, Layout, layouts

Group = TypeVar("Group")
Member = TypeVar("Member")


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One trajectory as flat arrays; positions are those of its ids.

    Attributes:
        ids: All ids, the prompt first.
        is_action: True on the ids that are trained on.
        logprobs: Log-probability under the sampler where `is_action`, else 0.
        advantage: One number for the whole row, or one for each of its ids.
        prompt_length: How many ids the group shares.
        start_logprobs: Log-probability under the learner at the weights that sampled, where
            `is_action`; None where these are the weights at hand.
    """

    ids: np.ndarray
    is_action: np.ndarray
    logprobs: np.ndarray
    advantage: float | np.ndarray
    prompt_length: int
    start_logprobs: np.ndarray | None = None


class Packed(NamedTuple):
    """What tells the tokens of a packed micro-batch apart; 0 on padding.

    Attributes:
        group_NP: Number of the group of each prefix token, from 1 in each unit.
        position_NP: Its 0-based position in its trajectories.
        group_BC: Number of the group of each answer token, in its unit.
        own_BC: Number of its trajectory, from 1 in each row.
        position_BC: Its position.
    """

    group_NP: Array
    position_NP: Array
    group_BC: Array
    own_BC: Array
    position_BC: Array


class Batch(NamedTuple):
    """Arrays of one micro-batch; a pytree.

    The shared prefix is the prompt without its last token; each answer starts with that token, so
    that every trained token is predicted by its own answer. Where they stand is a `Layout`'s.

    Attributes:
        prefix_NP: Token ids of each unit's prompts, padded on the right.
        prefix_length_N: How many they are.
        input_BC: Ids of the answer rows, B = N x R, those of a unit side by side.
        target_BC: The id after each input.
        is_action_BC: True where the target was sampled by the policy.
        old_logp_BC: Log-probability of the target under the sampler.
        advantage_BC: Advantage of the target.
        weight_BC: Share of the target in the mean over the whole batch (0 in padding); sums to 1
            over all micro-batches, but where sums over tokens are divided by something else than
            their number.
        start_logp_BC: Log-probability of the target under the learner at the weights that sampled;
            None where these are the weights at hand.
        packed: Where groups share rows; None where each unit is one group, and each answer a row.
    """

    prefix_NP: Array
    prefix_length_N: Array
    input_BC: Array
    target_BC: Array
    is_action_BC: Array
    old_logp_BC: Array
    advantage_BC: Array
    weight_BC: Array
    start_logp_BC: Array | None = None
    packed: Packed | None = None


def mini_batches(groups: Sequence[Group], *, count: int) -> list[Sequence[Group]]:
    """Share groups out to mini-batches, in order; sizes differ by one at most, and none is empty.

    Returns:
        `count` parts, or one for each group where there are fewer.
    """
    count = min(count, len(groups))
    bounds = [len(groups) * n // count for n in range(count + 1)] if count else []
    return [groups[start:end] for start, end in pairwise(bounds)]


def row_length(row: TokenRow, *, aggregation: Aggregation) -> int:
    """Count the tokens of a row that `token_weights` asks for.

    Returns:
        Its sampled tokens; for `response_mean` everything after the prompt.
    """
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


def micro_batches(
    groups: Sequence[Sequence[TokenRow]],
    *,
    aggregation: Aggregation,
    sizes: BatchingConfig,
    pad_id: int,
    divisor: int = 1,
) -> Iterator[Batch]:
    """Cut a batch of groups into micro-batches whose gradients add up to the batch's.

    Every micro-batch holds whole groups, or as many answers of them as the sizes say, and the last
    one is filled up with empty rows, so that only padded lengths, and rows where groups are packed,
    tell shapes apart.

    Args:
        groups: Trajectories, those of one prompt together; all groups of one size.
        aggregation: How tokens are averaged, over the whole batch.
        sizes: See `packing.layouts`.
        pad_id: What padding is written as.
        divisor: The constant of `aggregation="constant"`.
    """
    lengths = [row_length(row, aggregation=aggregation) for group in groups for row in group]
    weights = iter(token_weights(lengths, aggregation=aggregation, divisor=divisor))
    weight_of = [[next(weights) for _ in group] for group in groups]
    groups, weight_of = split_groups(groups, sizes), split_groups(weight_of, sizes)
    for layout in layouts(extents(groups), sizes):
        yield _fill(layout, groups, weight_of, pad_id=pad_id, is_packed=sizes.pack)


def split_groups(
    groups: Sequence[Sequence[Member]], sizes: BatchingConfig
) -> Sequence[Sequence[Member]]:
    """Split groups into parts of as many answers as a micro-batch takes of one, in order."""
    size = sizes.answers_per_batch
    if size is None:
        return groups
    return [group[i : i + size] for group in groups for i in range(0, len(group), size)]


def extents(groups: Sequence[Sequence[TokenRow]]) -> list[Extent]:
    """Return the columns that each group takes."""
    return [
        Extent(group[0].prompt_length - 1, tuple(len(row.ids) - row.prompt_length for row in group))
        for group in groups
    ]


def sizes_on(sizes: BatchingConfig, mesh: Mesh | None) -> BatchingConfig:
    """Return the sizes of a micro-batch of all devices together."""
    return sizes.model_copy(update={"groups_per_batch": sizes.groups_per_batch * row_parts(mesh)})


def read_back(
    groups: Sequence[Sequence[TokenRow]],
    values: Iterable[Array | np.ndarray],
    *,
    sizes: BatchingConfig,
) -> list[list[np.ndarray]]:
    """Bring numbers of the targets of `micro_batches` back to the rows.

    Args:
        groups: What the micro-batches were made of.
        values: An array BC for each micro-batch, in order.
        sizes: Those that the micro-batches were made with.

    Returns:
        For each row of each group an array over its ids; 0 on the prompt.
    """
    found: dict[int, list[np.ndarray]] = {}
    parts = split_groups(groups, sizes)
    for layout, array in zip(layouts(extents(parts), sizes), values, strict=True):
        values_NRC = np.asarray(array).reshape(layout.units, layout.rows, -1)
        for place in layout.places:
            rows = zip(parts[place.group], place.answers, strict=True)
            found[place.group] = [
                _whole(row, values_NRC[place.unit, at.row, at.start :]) for row, at in rows
            ]
    in_order = iter([row for n in range(len(parts)) for row in found[n]])
    return [[next(in_order) for _ in group] for group in groups]


def _whole(row: TokenRow, values_C: np.ndarray) -> np.ndarray:
    own = len(row.ids) - row.prompt_length
    return np.concatenate([np.zeros(row.prompt_length, values_C.dtype), values_C[:own]])


def _fill(
    layout: Layout,
    groups: Sequence[Sequence[TokenRow]],
    weights: Sequence[Sequence[float]],
    *,
    pad_id: int,
    is_packed: bool,
) -> Batch:
    """Write groups to the places of a layout."""
    N, B = layout.units, layout.units * layout.rows
    P, C = layout.prompt_columns, layout.answer_columns
    prefix_NP, (input_BC, target_BC) = np.full((N, P), pad_id), np.full((2, B, C), pad_id)
    group_NP, position_NP = np.zeros((2, N, P), np.int32)
    group_BC, own_BC, position_BC = np.zeros((3, B, C), np.int32)
    is_action_BC = np.zeros((B, C), bool)
    old_logp_BC, advantage_BC, weight_BC, start_logp_BC = np.zeros((4, B, C), np.float32)
    for place in layout.places:
        group = groups[place.group]
        length = group[0].prompt_length - 1
        prompt = place.unit, slice(place.start, place.start + length)
        prefix_NP[prompt] = group[0].ids[:length]
        group_NP[prompt], position_NP[prompt] = place.number, np.arange(length)
        for row, weight, at in zip(group, weights[place.group], place.answers, strict=True):
            own = len(row.ids) - 1 - length
            cells = place.unit * layout.rows + at.row, slice(at.start, at.start + own)
            new = slice(length + 1, None)
            input_BC[cells], target_BC[cells] = row.ids[length:-1], row.ids[new]
            group_BC[cells], own_BC[cells] = place.number, at.number
            position_BC[cells] = np.arange(length, length + own)
            is_action_BC[cells] = row.is_action[new]
            old_logp_BC[cells] = row.logprobs[new]
            advantage_BC[cells] = np.broadcast_to(row.advantage, len(row.ids))[new]
            weight_BC[cells] = weight * row.is_action[new]
            if row.start_logprobs is not None:
                start_logp_BC[cells] = row.start_logprobs[new]
    used_N = (group_NP > 0).sum(axis=1)
    tokens = [ids.astype(np.int32) for ids in (prefix_NP, used_N, input_BC, target_BC)]
    numbers = (is_action_BC, old_logp_BC, advantage_BC, weight_BC)
    start = start_logp_BC if groups[0][0].start_logprobs is not None else None
    segments = (group_NP, position_NP, group_BC, own_BC, position_BC)
    arrays = jax.tree.map(jnp.asarray, (*tokens, *numbers, start, segments if is_packed else ()))
    return Batch(*arrays[:-1], Packed(*arrays[-1]) if is_packed else None)


def token_mean(values: Sequence[np.ndarray], rows: Sequence[TokenRow]) -> float:
    """Return the mean of numbers of ids over all ids that are trained on; 0 for none."""
    total = sum(float(value[row.is_action].sum()) for value, row in zip(values, rows, strict=True))
    return total / max(sum(int(row.is_action.sum()) for row in rows), 1)
