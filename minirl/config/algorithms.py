"""The settings of the one objective, and the algorithms as presets of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from minirl.exchange.settings import Settings, contradiction

Estimator = Literal["group_normalised", "group_centred", "direct"]
TokenCredit = Literal["own", "return_to_go"]
RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["clipped", "cispo"]
Aggregation = Literal["sequence_mean", "response_mean", "token_mean", "constant"]
KlEstimator = Literal["k1", "k3"]
KlPlace = Literal["loss", "credit"]
Correction = Literal["none", "truncated", "masked"]


Kind = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp", "expo"]


PRESETS: Mapping[Kind, tuple[str, Mapping[str, Any]]] = {
    "grpo": ("GRPO (arXiv:2402.03300) as Progress-SQL uses it (appendix E.6).", {}),
    "dr_grpo": (
        "Dr.GRPO (arXiv:2503.20783, section 3.2).",
        {"estimator": "group_centred", "aggregation": "constant"},
    ),
    "dapo": (
        "DAPO (arXiv:2503.14476, Eqs. 8, 10 and 11), filtered by execution match.",
        {
            "clip_high": 0.28,
            "aggregation": "token_mean",
            "correctness_filter": "mixed",
            "max_rounds": 10,
        },
    ),
    # GSPO's own bounds are far closer, clip_low=3e-4 and clip_high=4e-4 (section 5.1); with more
    # than one update a step it needs them (docs/training.md).
    "gspo": (
        "GSPO (arXiv:2507.18071), with GRPO's clip bounds as Progress-SQL prints them.",
        {"ratio_level": "sequence", "correction_level": "sequence"},
    ),
    "cispo": (
        "CISPO (MiniMax-M1, arXiv:2506.13585); its bound of 1 + 4 is ScaleRL's (arXiv:2510.13786).",
        {"surrogate": "cispo", "clip_high": 4.0, "aggregation": "token_mean"},
    ),
    # A_t = R - kl_coef * sum over i >= t of k1_i, then less the batch's mean and over its std.
    "reinforce_pp": (
        "REINFORCE++ (arXiv:2501.03262), without its KL unless kl_coef is set.",
        {
            "estimator": "direct",
            "token_credit": "return_to_go",
            "whiten": True,
            "aggregation": "token_mean",
            "kl_estimator": "k1",
            "kl_in": "credit",
        },
    ),
    "expo": (
        "EXPO-SQL (Eq. 4): each token's own credit less a KL, summed.",
        {
            "estimator": "direct",
            "aggregation": "constant",
            "aggregation_divisor": 1,
            "kl_coef": 0.01,
            "kl_estimator": "k1",
            "kl_in": "credit",
        },
    ),
}
"""The algorithms: where each is from, and what it sets in the one objective."""


class AlgorithmConfig(Settings):
    """The one objective; algorithms differ in their defaults only."""

    kind: Kind = "grpo"
    """The algorithm."""
    estimator: Estimator = "group_normalised"
    """Advantage relative to the group; `direct`: the credit of each token's span, or the total
    reward."""
    token_credit: TokenCredit = "own"
    """A token's own credit, or the sum from it to the end (`return_to_go`)."""
    whiten: bool = False
    """Standardise advantages over the batch's sampled tokens."""
    surrogate: Surrogate = "clipped"
    """PPO's clipped objective, or CISPO's clipped weights (`cispo`)."""
    ratio_level: RatioLevel = "token"
    """Importance ratio of each token, or of the row (`sequence`)."""
    clip_low: float = Field(default=0.2, gt=0)
    """Largest fall of the ratio below 1 that has a gradient."""
    clip_high: float = Field(default=0.2, gt=0)
    """Largest rise of the ratio above 1 that has a gradient."""
    aggregation: Aggregation = "sequence_mean"
    """Mean over rows of token means, of means over whole responses (`response_mean`), over all
    tokens (`token_mean`), or of sums over a divisor (`constant`)."""
    aggregation_divisor: PositiveInt | None = None
    """Divisor of `constant`; None for `sampler.max_response_tokens`."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference; 0 disables it."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of the KL."""
    kl_in: KlPlace = "loss"
    """Add the KL to the `loss`, or to the `credit` of each token."""
    correction: Correction = "truncated"
    """Correction of the gap between sampler and learner (docs/training.md)."""
    correction_level: RatioLevel = "token"
    """Ratio of each token, or the geometric mean of a row (`sequence`)."""
    correction_low: float = Field(default=0.5, gt=0, le=1)
    """Lower bound of the ratio."""
    correction_high: float = Field(default=2.0, ge=1)
    """Upper bound of the ratio."""
    mask_cut_off: bool = False
    """Exclude truncated replies from the loss (DAPO's overlong filtering); the means of groups, and
    of `whiten`, still count them."""
    equal_groups: Literal["keep", "drop"] = "keep"
    """Keep groups of equal rewards, which have no gradient, or `drop` them."""
    correctness_filter: Literal["none", "mixed"] = "none"
    """`mixed` trains only on groups with both correct and wrong trajectories."""
    max_rounds: PositiveInt = 1
    """Dynamic sampling: maximum number of rollouts until enough groups pass the filters."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Take the algorithm's values where none are given."""
        if isinstance(given, dict) and (kind := given.get("kind", "grpo")) in [*PRESETS]:
            return {**PRESETS[kind][1], **given}
        return given

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        has_kl = self.kl_coef > 0
        by_token = self.estimator == "direct" or self.token_credit == "return_to_go"
        by_token |= has_kl and self.kl_in == "credit"
        if has_kl and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise contradiction(
                "kl_estimator", "k1 in the loss has no gradient on average; use k3 or kl_in"
            )
        if by_token and self.ratio_level == "sequence":
            raise contradiction("ratio_level", "sequence needs one advantage a row; use token")
        corrects_tokens = self.correction != "none" and self.correction_level == "token"
        if corrects_tokens and self.ratio_level == "sequence":
            raise contradiction(
                "correction_level", "ratio_level=sequence needs one weight a row; use sequence"
            )
        if self.aggregation_divisor is not None and self.aggregation != "constant":
            raise contradiction("aggregation_divisor", "set it to null: aggregation is no constant")
        return self
