"""Advantages: rewards of groups, credit spans and KL become one number a token.

The loss sees none of what ends here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from minirl.config.algorithms import AlgorithmConfig, Estimator, TokenCredit
from minirl.exchange import CreditSpan
from minirl.types import TokenRow, Trajectory

Detokenize = Callable[[Sequence[int]], str]

_EPSILON = 1e-6
# What a decoder writes for bytes that are no character, or not yet one.
_BROKEN = "\ufffd"
# Tokens that another one is decoded with: a character has four bytes at most, so it begins in one
# of the three tokens before the one that ends it; and decoders join neighbours.
_CONTEXT = 4


def group_normalised(rewards_NG: np.ndarray) -> np.ndarray:
    """Standardise rewards within their group: (R - mean) / (std + 1e-6).

    GRPO (arXiv:2402.03300, section 4.1.2; Progress-SQL, appendix E.6), the variance divided by
    G - 1. A group of equal rewards has 0.
    """
    return group_centred(rewards_NG) / (rewards_NG.std(axis=1, ddof=1, keepdims=True) + _EPSILON)


def group_centred(rewards_NG: np.ndarray) -> np.ndarray:
    """Subtract the group's mean (Dr.GRPO, arXiv:2503.20783, section 3.2)."""
    return rewards_NG - rewards_NG.mean(axis=1, keepdims=True)


_ESTIMATORS: dict[Estimator, Callable[[np.ndarray], np.ndarray]] = {
    "group_normalised": group_normalised,
    "group_centred": group_centred,
    "direct": lambda rewards_NG: rewards_NG,
}


def groups_to_train(
    rewards_NG: np.ndarray,
    correct_NG: np.ndarray,
    *,
    equal_groups: Literal["keep", "drop"],
    correctness_filter: Literal["none", "mixed"],
) -> Sequence[int]:
    """Choose the groups that take part in the update; return their numbers in order, if any.

    `mixed` looks at execution match, not at the reward: shaping alone would else push groups that
    are wrong throughout.
    """
    if not len(rewards_NG):
        return []
    keep_N = np.ones(len(rewards_NG), bool)
    if equal_groups == "drop":
        keep_N &= np.ptp(rewards_NG, axis=1) > 0
    if correctness_filter == "mixed":
        keep_N &= correct_NG.any(axis=1) & ~correct_NG.all(axis=1)
    return np.flatnonzero(keep_N).tolist()


class SpanCredit(NamedTuple):
    """Credit of each id of a trajectory, 0 outside of spans, and whether a span covers the id."""

    value: np.ndarray
    is_covered: np.ndarray


def token_advantages(
    rows: Sequence[TokenRow],
    rewards_NG: np.ndarray,
    algorithm: AlgorithmConfig,
    *,
    spans: Sequence[SpanCredit | None] | None = None,
    kl: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Turn rewards and credit spans of a batch into the advantages of its rows.

    Args:
        rows: Group by group; their advantages are not read.
        rewards_NG: Total reward of each row.
        algorithm: The settings.
        spans: Credit of each row, None for a row without spans; for `direct` alone.
        kl: KL to the reference of each row's ids, if it is in the credit.

    Returns:
        For each row an array over its ids; 0 where the policy did not sample.
    """
    totals_NG = _ESTIMATORS[algorithm.estimator](np.asarray(rewards_NG, np.float64))
    if algorithm.estimator != "direct" or spans is None:
        spans = [None] * len(rows)
    penalties = [None] * len(rows) if kl is None else [algorithm.kl_coef * k for k in kl]
    parts = zip(rows, totals_NG.flat, spans, penalties, strict=True)
    credit = [_row_credit(*part, form=algorithm.token_credit) for part in parts]
    if algorithm.whiten:
        credit = whiten(credit, [row.is_action for row in rows])
    return credit


def _row_credit(
    row: TokenRow,
    total: float,
    spans: SpanCredit | None,
    penalty_T: np.ndarray | None,
    *,
    form: TokenCredit,
) -> np.ndarray:
    """Return the credit of each id of a row: its own, or the sum from it on; 0 off the actions.

    In a sum the total counts once, on the last action. A KL counts where there is credit (EXPO-SQL,
    Eq. 4; REINFORCE++, arXiv:2501.03262: the return less the KL from the token on).
    """
    has_credit = row.is_action if spans is None else row.is_action & spans.is_covered
    credit = np.where(has_credit, total if spans is None else spans.value, 0.0)
    if spans is None and form == "return_to_go":
        credit[np.flatnonzero(row.is_action)[:-1]] = 0.0
    if penalty_T is not None:
        credit = credit - penalty_T * has_credit
    if form == "return_to_go":
        credit = np.cumsum(credit[::-1])[::-1] * row.is_action
    return credit


def whiten(credit: Sequence[np.ndarray], is_action: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Standardise credit over all sampled tokens of a batch (REINFORCE++, arXiv:2501.03262).

    It is (A - mean) / (std + 1e-6) on the actions, all 0 where all are equal, and 0 elsewhere.
    """
    chosen = np.concatenate([row[mask] for row, mask in zip(credit, is_action, strict=True)])
    mean, std = 0.0, 0.0
    if len(chosen):
        mean, std = float(chosen.mean()), float(chosen.std(ddof=min(1, len(chosen) - 1)))
    return [
        np.where(mask, (row - mean) / (std + _EPSILON), 0.0)
        for row, mask in zip(credit, is_action, strict=True)
    ]


def span_credit(
    trajectory: Trajectory, spans: Sequence[CreditSpan], decode: Detokenize
) -> SpanCredit:
    """Give each token of a trajectory the value of the span that it lies in.

    A token lies where its first non-blank character does, or its first character if all are blank
    (EXPO-SQL, section 3.3; the paper leaves the border open). A token without text in the reply,
    as the stop token, goes with the reply's last character. Of overlapping spans the later counts.
    Sampled ids are never encoded again: other ids could come out.

    Raises:
        ValueError: A span is of no turn, or ends outside of its reply.
    """
    # Of each token, and of each character of a reply: credit, and whether a span covers it.
    turns = trajectory.turns
    values = [np.zeros((2, len(turn.observation_ids) + len(turn.reply.ids))) for turn in turns]
    characters = [np.zeros((2, len(turn.reply.text))) for turn in turns]
    for span in spans:
        is_turn = 0 <= span.turn < len(turns)
        if not is_turn or not 0 <= span.start <= span.end <= len(turns[span.turn].reply.text):
            raise ValueError(f"the reward's {span} is not within a reply of {len(turns)} turns")
        characters[span.turn][:, span.start : span.end] = [[span.value], [1]]
    for turn, text_XC, value_XT in zip(turns, characters, values, strict=True):
        if text_XC[1].any():
            ranges = character_ranges(turn.reply.ids, decode)
            firsts = [first_character(turn.reply.text, *pair) for pair in ranges]
            value_XT[:, len(turn.observation_ids) :] = text_XC[:, firsts]
    value_T, is_covered_T = np.concatenate(values, axis=1)
    return SpanCredit(value_T, is_covered_T > 0)


def all_spans(trajectories: Sequence[Trajectory], decode: Detokenize) -> list[SpanCredit | None]:
    """Return the credit of scored trajectories; None for those without spans."""
    spans = [trajectory.episode.score.spans for trajectory in trajectories]
    pairs = zip(trajectories, spans, strict=True)
    return [span_credit(*pair, decode) if pair[1] else None for pair in pairs]


def first_character(text: str, start: int, end: int) -> int:
    """Return where a token lies: at its first non-blank character, else its first or the last."""
    piece = text[start:end]
    blank = len(piece) - len(piece.lstrip())
    offset = start + (blank if blank < len(piece) else 0)
    return min(offset, len(text) - 1)


def character_ranges(ids: Sequence[int], decode: Detokenize) -> list[tuple[int, int]]:
    """Return the half-open range of `decode(ids)` that each id has a part in.

    Byte-level tokens may hold a part of a character: each of them has that character in its range.
    An id without text has an empty range.
    """
    ids = [int(token) for token in ids]
    ranges = _ranges(ids, decode, context=_CONTEXT)
    if ranges and ranges[-1][1] != len(decode(ids)):
        # A decoder that looks back further: decode everything before each token.
        ranges = _ranges(ids, decode, context=len(ids))
    return ranges


def _ranges(ids: list[int], decode: Detokenize, *, context: int) -> list[tuple[int, int]]:
    """Decode each token with so many before it, and return what it adds to their text."""
    ranges, end = [], 0
    for number in range(len(ids)):
        first = max(0, number - context)
        before, after = decode(ids[first:number]), decode(ids[first : number + 1])
        start = end - len(before) + _first_new(before, after)
        end += len(after) - len(before)
        ranges.append((min(start, end), end))
    return ranges


def _first_new(before: str, after: str) -> int:
    # A token begins after what was there without it, or goes on with a character.
    if after.startswith(before) and (len(after) > len(before) or not before.endswith(_BROKEN)):
        return len(before)
    # It goes on with a character that others began.
    return max(0, min(len(before), len(after)) - 1)
