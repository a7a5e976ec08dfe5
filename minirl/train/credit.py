"""Everything that stands above an advantage, folded into one number for each token.

Rewards, groups, credit spans, penalties and a KL in reward or credit end here; the loss sees none
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minirl.config import AlgorithmConfig, KlEstimator, TokenCredit
from minirl.train.advantages import estimate
from minirl.train.batching import TokenRow

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Spans:
    """Credit of the ids of one trajectory.

    Attributes:
        value: Of each id; 0 where no span is.
        is_covered: Where a span is.
    """

    value: np.ndarray
    is_covered: np.ndarray


def overlong_penalty(lengths: np.ndarray, *, longest: int, cache: int) -> np.ndarray:
    """Return what DAPO adds to the reward of long responses (arXiv:2503.14476, Eq. 13).

    Args:
        lengths: Tokens of each response.
        longest: Tokens that a response may have.
        cache: The last so many of these are penalised; 0 for no penalty.

    Returns:
        0 up to `longest - cache`, then falling in even steps to -1 at `longest` and beyond.
    """
    if not cache:
        return np.zeros(np.shape(lengths))
    return -np.clip((np.asarray(lengths) - (longest - cache)) / cache, 0.0, 1.0)


def kl_numbers(
    logp: np.ndarray, reference_logp: np.ndarray, *, estimator: KlEstimator
) -> np.ndarray:
    """Estimate the KL of each sampled token; the NumPy twin of `losses.kl_divergence`."""
    k1 = logp.astype(np.float64) - reference_logp
    return {"k1": k1, "k2": np.square(k1) / 2, "k3": np.exp(-k1) + k1 - 1}[estimator]


def token_advantages(
    rows: Sequence[TokenRow],
    rewards_NG: np.ndarray,
    algorithm: AlgorithmConfig,
    *,
    penalty_NG: np.ndarray | float = 0.0,
    spans: Sequence[Spans | None] | None = None,
    kl: Sequence[np.ndarray] | None = None,
) -> list[float | np.ndarray]:
    """Turn rewards and credit spans of a batch into the advantages of its rows.

    Args:
        rows: The rows, group by group; their advantages are not read.
        rewards_NG: Total reward of each row.
        algorithm: The settings.
        penalty_NG: Added to the reward of each row, or to all of its spans.
        spans: Credit of each row's ids, None for a row without spans; read by `direct` alone.
        kl: KL to the reference of each row's ids, wherever it is not in the loss.

    Returns:
        One number a row where all its tokens have the same, else one for each of its ids.
    """
    shift_NG = np.zeros(np.shape(rewards_NG)) + penalty_NG
    if kl is not None and algorithm.kl_in == "reward":
        sums = [k[row.is_action].sum() for row, k in zip(rows, kl, strict=True)]
        shift_NG = shift_NG - algorithm.kl_coef * np.reshape(sums, shift_NG.shape)
    total_NG = np.asarray(rewards_NG, np.float64) + shift_NG
    if algorithm.estimator != "direct":
        total_NG = estimate(total_NG, estimator=algorithm.estimator, ddof=algorithm.adv_std_ddof)
        spans = None
    if kl is None or algorithm.kl_in != "credit":
        kl = None
    is_plain = algorithm.token_credit == "own" and not algorithm.whiten
    if is_plain and kl is None and not any(spans or ()):
        return [float(total) for total in total_NG.flat]
    found = [
        _row_credit(
            row,
            float(total_NG.flat[b]),
            float(shift_NG.flat[b]),
            spans[b] if spans else None,
            algorithm.kl_coef * kl[b] if kl else None,
            algorithm.token_credit,
        )
        for b, row in enumerate(rows)
    ]
    if algorithm.whiten:
        found = whiten(found, [row.is_action for row in rows], ddof=algorithm.adv_std_ddof)
    return [*found]


def _row_credit(
    row: TokenRow,
    total: float,
    shift: float,
    spans: Spans | None,
    penalty_T: np.ndarray | None,
    form: TokenCredit,
) -> np.ndarray:
    """Return the credit of each id of a row: its own, or the sum from it on; 0 off the actions.

    Own credit is the total on every action, or spans' values where they are; in a sum it is the
    total on the last action alone. A KL counts where there is credit (EXPO-SQL, Eq. 4; REINFORCE++,
    arXiv:2501.03262, the return less the KL from the token on).
    """
    has_credit = row.is_action if spans is None else row.is_action & spans.is_covered
    whole = total if spans is None else shift
    credit = np.zeros(len(row.ids)) if spans is None else np.where(has_credit, spans.value, 0.0)
    if form == "own":
        credit = credit + whole * has_credit
    elif row.is_action.any():
        credit[np.flatnonzero(row.is_action)[-1]] += whole
    if penalty_T is not None:
        credit = credit - penalty_T * has_credit
    if form == "return_to_go":
        credit = np.cumsum(credit[::-1])[::-1] * row.is_action
    return credit


def whiten(
    credit: Sequence[np.ndarray], is_action: Sequence[np.ndarray], *, ddof: int
) -> list[np.ndarray]:
    """Standardise numbers over all sampled tokens of a batch (REINFORCE++, arXiv:2501.03262).

    Args:
        credit: A number for each id, row by row.
        is_action: Which of them count.
        ddof: 1 divides the variance by the count less 1, 0 by the count.

    Returns:
        (A - mean) / (std + 1e-6) on the actions and 0 elsewhere; all 0 where all are equal or
        there is one only.
    """
    chosen = np.concatenate([row[mask] for row, mask in zip(credit, is_action, strict=True)])
    mean, std = 0.0, 0.0
    if len(chosen):
        mean, std = float(chosen.mean()), float(chosen.std(ddof=min(ddof, len(chosen) - 1)))
    return [
        np.where(mask, (row - mean) / (std + _EPSILON), 0.0)
        for row, mask in zip(credit, is_action, strict=True)
    ]
