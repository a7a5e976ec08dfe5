"""Settings of the reward families. Defaults are the papers' values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sqlenv.config import Settings

Qualify = Literal["resolve", "bare", "raw"]


class TreeWeights(Settings):
    """Weights of the clauses of a SELECT (Progress-SQL, table 5); only their ratios matter."""

    join: float = Field(default=0.22, ge=0)
    """Join conditions."""
    where: float = Field(default=0.20, ge=0)
    """WHERE predicates."""
    select: float = Field(default=0.16, ge=0)
    """SELECT items."""
    tables: float = Field(default=0.12, ge=0)
    """Tables of FROM and JOIN."""
    group: float = Field(default=0.10, ge=0)
    """GROUP BY columns."""
    counts: float = Field(default=0.10, ge=0)
    """Numbers of joins and of SELECT items."""
    order: float = Field(default=0.06, ge=0)
    """ORDER BY items and whether rows are limited."""
    distinct: float = Field(default=0.04, ge=0)
    """SELECT DISTINCT."""
    having: float = Field(default=0.0, ge=0)
    """HAVING predicates, which the paper extracts and does not weigh."""


class TagThresholds(Settings):
    """Similarities below which a tag is emitted (Progress-SQL, table 6), each in [0, 1]."""

    join: float = Field(default=0.60, ge=0, le=1)
    """JOIN_KEY_MISMATCH."""
    where: float = Field(default=0.60, ge=0, le=1)
    """WHERE_ERROR."""
    select: float = Field(default=0.60, ge=0, le=1)
    """SELECT_ERROR."""
    group: float = Field(default=0.65, ge=0, le=1)
    """GROUP_BY_ERROR."""
    order: float = Field(default=0.65, ge=0, le=1)
    """ORDER_BY_MISMATCH."""
    tables: float = Field(default=0.70, ge=0, le=1)
    """FROM_OR_JOIN_TABLE_MISMATCH."""


class TreeConfig(Settings):
    """The oracle-guided diagnostic tree (Progress-SQL, appendix D)."""

    weights: TreeWeights = TreeWeights()
    """Weights of the clauses."""

    thresholds: TagThresholds = TagThresholds()
    """Thresholds of the tags."""

    alpha: float = Field(default=0.70, ge=0, le=1)
    """Share of a SELECT's own clauses in its score; the rest is its nested queries'."""

    empty_child: Literal["one", "renorm"] = "one"
    """Without nested queries on either side: count them as agreeing, or drop their share."""

    cte_match: Literal["name", "name_then_any"] = "name"
    """Match CTEs by name only, or unmatched ones with whatever CTE is left."""

    setop_match: Literal["ignored", "same"] = "ignored"
    """Whether UNION, INTERSECT and EXCEPT match one another, or only their like."""

    qualify: Qualify = "resolve"
    """Columns as base table and name, as name only, or with the qualifier as written."""

    join_type: Literal["ignored", "included"] = "ignored"
    """Whether LEFT and its like are part of a join condition's signature."""

    lift_implicit: bool = False
    """Whether `a.x = b.y` in WHERE counts as a join condition instead."""

    join_missing: Literal["fewer", "differs"] = "fewer"
    """Emit JOIN_MISSING when the prediction has fewer joins, or another number of them."""

    tag_exclusive: bool = True
    """Whether a missing clause keeps that clause's mismatch tag silent."""


class ProgressiveConfig(Settings):
    """Progress-SQL's reward (section 4.2): format, execution status, latency, alignment."""

    kind: Literal["progressive"] = "progressive"
    """Tag of the union."""

    format_weight: float = 0.5
    """Reward of the required `<think>…</think> <sql>…</sql>`."""

    accuracy_weight: float = 2.0
    """Reward of a match at the first turn."""

    decay: float = Field(default=0.5, gt=0, le=1)
    """Factor on the reward of a match for every turn it comes later (gamma)."""

    align_gain: float = 1.0
    """Factor on the rise of alignment from the first to the last query."""

    align_stagnation: float = -0.25
    """Reward when alignment does not rise."""

    align_k1: Literal["literal", "zero"] = "literal"
    """A match at the first turn cannot rise: stagnation as equation 1 has it, or no reward."""

    keep: float = 0.5
    """Reward when the first and the last query run."""

    recovery: float = 0.25
    """Reward when only the last query runs."""

    deterioration: float = -0.25
    """Reward when only the first query runs."""

    fmt_scope: Literal["final", "all"] = "final"
    """Whether the last reply alone or every reply must follow the format."""

    gold_unparsed: Literal["half", "lexical"] = "half"
    """Alignment when the gold has no tree: half the lexical one (as if no structure agreed), or
    all of it."""

    tree: TreeConfig = TreeConfig()
    """The diagnostic tree."""


class OneShotConfig(Settings):
    """Progress-SQL's one-shot baseline: match, executable, format of the last reply."""

    kind: Literal["one_shot"] = "one_shot"
    """Tag of the union."""

    match_weight: float = 2.0
    """Reward of a match."""

    executable_weight: float = 0.5
    """Reward of a query that runs."""

    format_weight: float = 0.5
    """Reward of the required format."""


RewardConfig = Annotated[ProgressiveConfig | OneShotConfig, Field(discriminator="kind")]


class JudgeConfig(Settings):
    """Verbal RL (PaVeRL-SQL, section III-B): candidates, and a model's judgement of them."""

    candidates: int = Field(default=10, ge=1)
    """Executable candidates of a question (K)."""

    attempts: int = Field(default=200, ge=1)
    """Most answers asked for to find them."""

    count: Literal["distinct", "all"] = "distinct"
    """Whether candidates count once, however often the model writes them, or every time. A model
    that is sure of its answer uses all attempts with `distinct`, K with `all`; judged are the
    distinct ones in either case."""

    require_rows: bool = False
    """Whether a candidate must return a row, as the released code asks, or only run."""

    judgements: int = Field(default=20, ge=1)
    """Judgements of the whole set of candidates."""

    judge_retries: int = Field(default=2, ge=0)
    """How often a judgement that cannot be parsed is asked for again, before it is left out."""

    normalise: Literal["none", "z_score"] = "none"
    """Scores as they are, or standardised within each judgement."""
