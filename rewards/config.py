"""Settings of the reward families. Defaults are the papers' values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sqlenv.config import EnvConfig, Settings
from sqlenv.types import MatchMode

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

    alignment: Literal["both", "structural", "lexical"] = "both"
    """What F measures: the mean of structure and words, or one of them alone (table 3)."""

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
    """Alignment by both when the gold has no tree: half the lexical one (as if no structure
    agreed), or all of it."""

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


FromCheck = Literal["fewer", "differs", "full"]


class ExpoConfig(Settings):
    """EXPO-SQL's clause-level reward (sections 3.2 and 6, appendix A)."""

    kind: Literal["expo"] = "expo"
    """Tag of the union."""

    correct: float = 1.5
    """Reward of every clause of a query that matches (equation 1)."""

    incorrect_blamed: float = -0.5
    """Reward of a blamed clause where the result is wrong (equation 2)."""

    incorrect_other: float = 0.5
    """Reward of the other clauses where the result is wrong (equation 2)."""

    error_blamed: float = -1.5
    """Reward of a blamed clause where the query fails (equation 3; figures 7 and 8 show -1.0)."""

    error_other: float = -0.5
    """Reward of the other clauses where the query fails (equation 3)."""

    gap_scale: float = Field(default=1.0, ge=0)
    """Factor on the gap between blamed and other clauses, about its middle (table 11); 0 rewards
    all clauses of a query alike."""

    incorrect_uniform: float | None = None
    """Reward of every clause where the result is wrong and clauses are not told apart; null: the
    middle of the two rewards above. The paper prints no value."""

    error_uniform: float | None = None
    """Reward of every clause where the query fails and clauses are not told apart; null: the middle
    of the two rewards above. The paper prints no value."""

    clause_level: Literal["both", "incorrect", "error"] = "both"
    """Which failures are rewarded by the clause (table 4): wrong results, failing queries, or both.
    The other gets its uniform reward."""

    format_fail: float = -1.5
    """Reward of a whole reply that breaks the format."""

    format: Literal["sql", "think_sql"] = "sql"
    """What the format asks for: a complete SQL block, wherever it is; or one think block, then one
    SQL block, and nothing else but blanks."""

    outside_tokens: Literal["zero", "mean", "query"] = "query"
    """Credit of what is not SQL, such as the thinking: none as equation 4 has it, the mean of the
    clauses, or the reward that a blamed clause has (of a match, any clause)."""

    incremental: bool = True
    """Find blamed clauses by clause-wise execution; without it by the types alone, where a single
    clause of the query can cause them, and else reward all clauses alike (table 5)."""

    type_map: Literal["fallback", "intersect", "none"] = "fallback"
    """Use of the types of difference: a step is blamed for one that the result has (algorithm 1),
    and where none is, the clauses that can cause one (table 12); those clauses also narrow down
    what is blamed; or no types, and a step is blamed that leads away from the gold result."""

    empty_cerr: Literal["map", "all", "none"] = "map"
    """Who is to blame for a wrong result when clause-wise execution finds none: the clauses of
    `type_map`, then all; all at once; or nobody, which rewards a wrong query everywhere."""

    row_partial: Literal["computed", "shared_column"] = "computed"
    """When as many rows of as many columns are the same structure with wrong values: a column
    agrees or the query computes every output, or only where a column agrees."""

    row_disjoint: Literal["same_columns", "any"] = "same_columns"
    """What a result without a row of the gold result is sought in. Where its columns are right:
    steps that change rows, filters that take some away among them. `any` is algorithm 1 to the
    letter: SELECT too, since rows of another width are disjoint, and no HAVING."""

    from_check: FromCheck = "fewer"
    """When FROM and JOINs are blamed: they give fewer columns than the gold result, the only
    reading that agrees with figure 5; another number; or any difference of the final result."""

    setop_dstar: Literal["whole", "operand"] = "whole"
    """Differences sought in the operands of a set operation: the whole result's, or their own."""

    tracing: bool = True
    """Follow an error back to the clauses that caused it; without, blame those that the message
    points at (table 6)."""

    max_step_rows: int = Field(default=200, ge=1)
    """Rows of an intermediate result that are compared; of larger ones filters are judged by
    counts, other steps by the first rows."""

    max_steps: int = Field(default=20_000_000, gt=0, lt=2**31)
    """Steps of SQLite's virtual machine that an intermediate query may take: 0.1 to 0.2 s."""


class PaverlConfig(Settings):
    """PaVeRL-SQL's reward (section III-C): 10 for all gold columns, a share of it for some."""

    kind: Literal["paverl"] = "paverl"
    """Tag of the union."""

    ex_f: Literal["paper", "code"] = "paper"
    """Columns compared as the paper says, or as its released program does."""

    payoff: Literal["fraction", "binary"] = "fraction"
    """What is paid for: the share of gold columns (EX_f), or all of them or nothing (EX_b)."""

    columns_weight: float = Field(default=10.0, gt=0)
    """Reward of all gold columns."""

    executed: float = Field(default=0.5, ge=0)
    """Reward of a query that runs and has no gold column."""

    extra_columns: int = Field(default=5, ge=1)
    """EX_b is 0 from so many columns more than the gold has (tau)."""

    row_cutoff: int = Field(default=5, ge=0)
    """The released program's largest difference of numbers of rows."""


class AtrSettings(Settings):
    """SQL-ASTRA's aggregated trajectory reward; its presets differ in their defaults only."""

    low_low: float = 0.0
    """Reward of a step that stays low."""

    low_high: float = 1.0
    """Factor on a rise."""

    high_low: float = -1.5
    """Factor on a fall; -1.0 is the paper's symmetric ablation."""

    high_high: float = 0.0
    """Reward of a step that stays high."""

    turn_cost: float = Field(default=0.0001, ge=0)
    """Cost of every step after the first (C_turn)."""

    bound: float = Field(default=2.0, gt=0)
    """Largest reward, and its negative the smallest (B)."""

    threshold: float = Field(default=0.6, ge=0, le=1)
    """Scores above are high (tau)."""

    state: Literal["gradient", "threshold"] = "gradient"
    """A rise ends high and a fall low, or what is above the threshold is high."""


class PaperAtr(AtrSettings):
    """The constants of the paper's text (equation 2, table 2)."""

    kind: Literal["paper"] = "paper"
    """Tag of the union."""


class Fig2Atr(AtrSettings):
    """The constants that the paper's figure 2 was drawn with."""

    kind: Literal["fig2"] = "fig2"
    """Tag of the union."""

    high_high: float = -0.2
    """Reward of a step that stays high."""

    turn_cost: float = Field(default=0.1, ge=0)
    """Cost of every step after the first (C_turn)."""


class AstraConfig(Settings):
    """SQL-ASTRA's reward: a score for every step of an episode, and what they come to."""

    kind: Literal["astra"] = "astra"
    """Tag of the union."""

    step_score: Literal["csmr", "binary"] = "csmr"
    """Score of a step: CSMR, or 1 for a match and 0 for anything else."""

    alpha: float = Field(default=0.8, ge=0, lt=1)
    """The most that CSMR gives for anything but a match."""

    match: MatchMode = "set"
    """What CSMR takes for a match."""

    aggregate: Literal["atr", "last", "steps"] = "atr"
    """One reward for the episode (ATR), the last step's score alone (no ATR), or the score of each
    step as the advantage of its own tokens (the step-wise ablation)."""

    atr: Annotated[PaperAtr | Fig2Atr, Field(discriminator="kind")] = PaperAtr()
    """How scores of steps are added up."""

    final_step: Literal["dedup", "always", "never"] = "dedup"
    """Whether the final query is a step: unless the last call ran the same, always, or never."""

    bad_call: Literal["zero", "skip"] = "zero"
    """A call that cannot be read is a step of score 0, or no step."""


RewardConfig = Annotated[
    ProgressiveConfig | OneShotConfig | ExpoConfig | PaverlConfig | AstraConfig,
    Field(discriminator="kind"),
]


def contradictions(reward: RewardConfig, env: EnvConfig) -> list[tuple[bool, str]]:
    """List rules that a reward and an environment may break: whether they do, and what to write."""
    return [
        (
            reward.kind == "progressive" and env.wrapping != "sql_tag",
            "env.wrapping: the progressive reward judges the <sql> tag; use sql_tag",
        ),
        (
            reward.kind == "expo" and env.kind == "agentic",
            "reward.kind: expo credits the clauses of replies that are answers; with tool calls "
            "use astra",
        ),
    ]


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


def tree_of(reward: RewardConfig) -> TreeConfig:
    """Return the tree that episodes are diagnosed by; but for a progressive reward the paper's."""
    return reward.tree if isinstance(reward, ProgressiveConfig) else TreeConfig()
