"""From trajectories to the arrays of the update: prompts once a group, few shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from minirl.config import Aggregation, BatchingConfig

Group = TypeVar("Group")


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


class Batch(NamedTuple):
    """Arrays of one micro-batch; a pytree.

    The shared prefix is the prompt without its last token; each answer row starts with that token,
    so that every trained token is predicted by its own row.

    Attributes:
        prefix_NP: Token ids, padded on the right.
        prefix_length_N: True lengths.
        input_BC: Ids of the answer rows, B = N x G, groups side by side.
        target_BC: The id after each input.
        is_action_BC: True where the target was sampled by the policy.
        old_logp_BC: Log-probability of the target under the sampler.
        advantage_BC: Advantage of the target.
        weight_BC: Share of the target in the mean over the whole batch (0 in padding); sums to 1
            over all micro-batches, but where sums over tokens are divided by something else than
            their number.
        start_logp_BC: Log-probability of the target under the learner at the weights that sampled;
            None where these are the weights at hand.
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


def round_up(length: int, *, multiple: int) -> int:
    """Round a length up to one of few sizes: multiples, then powers of two times the multiple.

    Sizes grow by at most a quarter, so that padding stays small and compilations few.
    """
    steps = max(1, -(-length // multiple))
    power = max(0, steps.bit_length() - 3)
    return -(-steps // 2**power) * 2**power * multiple


def micro_batches(
    groups: Sequence[Sequence[TokenRow]],
    *,
    aggregation: Aggregation,
    sizes: BatchingConfig,
    pad_id: int,
    divisor: int = 1,
) -> Iterator[Batch]:
    """Cut a batch of groups into micro-batches whose gradients add up to the batch's.

    Groups of like length go together; every micro-batch holds whole groups, and the last one is
    filled up with empty rows, so that only padded lengths tell shapes apart.

    Args:
        groups: Trajectories, those of one prompt together; all groups of one size.
        aggregation: How tokens are averaged, over the whole batch.
        sizes: Groups of a micro-batch, and the granularity of padded lengths.
        pad_id: What padding is written as.
        divisor: The constant of `aggregation="constant"`.
    """
    lengths = [row_length(row, aggregation=aggregation) for group in groups for row in group]
    weights = iter(token_weights(lengths, aggregation=aggregation, divisor=divisor))
    weight_of = [[next(weights) for _ in group] for group in groups]
    for chosen in _chosen(groups, sizes):
        yield _pack(
            [groups[n] for n in chosen], [weight_of[n] for n in chosen], sizes=sizes, pad_id=pad_id
        )


def read_back(
    groups: Sequence[Sequence[TokenRow]], values: Iterable[Array], *, sizes: BatchingConfig
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
    for chosen, array in zip(_chosen(groups, sizes), values, strict=True):
        rows_BC = iter(np.asarray(array))
        for n in chosen:
            found[n] = [_unpack(row, next(rows_BC)) for row in groups[n]]
    return [found[n] for n in range(len(groups))]


def _unpack(row: TokenRow, values_C: np.ndarray) -> np.ndarray:
    own = len(row.ids) - row.prompt_length
    return np.concatenate([np.zeros(row.prompt_length, values_C.dtype), values_C[:own]])


def _chosen(groups: Sequence[Sequence[TokenRow]], sizes: BatchingConfig) -> list[list[int]]:
    """Return the numbers of the groups of each micro-batch."""
    order = sorted(range(len(groups)), key=lambda n: _answer_length(groups[n]))
    size = sizes.groups_per_batch
    return [order[start : start + size] for start in range(0, len(order), size)]


def _answer_length(group: Sequence[TokenRow]) -> int:
    return max(len(row.ids) - row.prompt_length for row in group)


def _pack(
    groups: Sequence[Sequence[TokenRow]],
    weights: Sequence[Sequence[float]],
    *,
    sizes: BatchingConfig,
    pad_id: int,
) -> Batch:
    N, G = sizes.groups_per_batch, len(groups[0])
    longest_prefix = max(group[0].prompt_length - 1 for group in groups)
    P = round_up(longest_prefix, multiple=sizes.prompt_multiple)
    C = round_up(max(map(_answer_length, groups)), multiple=sizes.answer_multiple)
    prefix_NP = np.full((N, P), pad_id, np.int32)
    prefix_length_N = np.zeros(N, np.int32)
    input_BC, target_BC = np.full((2, N * G, C), pad_id, np.int32)
    is_action_BC = np.zeros((N * G, C), bool)
    old_logp_BC, advantage_BC, weight_BC, start_logp_BC = np.zeros((4, N * G, C), np.float32)
    for n, group in enumerate(groups):
        start = group[0].prompt_length - 1
        prefix_length_N[n] = start
        prefix_NP[n, :start] = group[0].ids[:start]
        for g, row in enumerate(group):
            b, length = n * G + g, len(row.ids) - start - 1
            input_BC[b, :length] = row.ids[start:-1]
            target_BC[b, :length] = row.ids[start + 1 :]
            is_action_BC[b, :length] = row.is_action[start + 1 :]
            old_logp_BC[b, :length] = row.logprobs[start + 1 :]
            advantage_T = np.broadcast_to(row.advantage, len(row.ids))
            advantage_BC[b, :length] = advantage_T[start + 1 :]
            weight_BC[b] = weights[n][g] * is_action_BC[b]
            if row.start_logprobs is not None:
                start_logp_BC[b, :length] = row.start_logprobs[start + 1 :]
    tokens = (prefix_NP, prefix_length_N, input_BC, target_BC)
    arrays = (*tokens, is_action_BC, old_logp_BC, advantage_BC, weight_BC)
    has_start = groups[0][0].start_logprobs is not None
    return Batch(*map(jnp.asarray, (*arrays, start_logp_BC) if has_start else arrays))
