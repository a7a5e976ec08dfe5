"""Settings of the reward families: what a paper ablates, or leaves open in a way that matters.

Defaults are the papers' values. Constants that a paper prints and does not vary stand beside the
equation that uses them.
"""

from __future__ import annotations

from functools import reduce
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, Field

from sqlenv.config import EnvConfig, Settings


class ProgressiveConfig(Settings):
    """Progress-SQL's reward (section 4.2): format, execution status, latency, alignment."""

    kind: Literal["progressive"] = "progressive"
    """Tag of the union."""

    decay: float = Field(default=0.5, gt=0, le=1)
    """Factor on the reward of a match for each turn before it (gamma)."""

    alignment: Literal["both", "structural", "lexical"] = "both"
    """What F measures: the mean of structure and words, or one of them alone (table 3)."""

    align_k1: Literal["literal", "zero"] = "literal"
    """Alignment reward of a match at the first turn: stagnation (equation 1), or 0."""

    keep: float = 0.5
    """Reward when the first and the last query run."""

    recovery: float = 0.25
    """Reward when only the last query runs."""

    deterioration: float = -0.25
    """Reward when only the first query runs."""


class ExecutionConfig(Settings):
    """Execution accuracy as the reward: 1 if the answer is right, else 0."""

    kind: Literal["execution"] = "execution"
    """Tag of the union."""


class OneShotConfig(Settings):
    """Progress-SQL's one-shot baseline: match, executable, format of the last reply."""

    kind: Literal["one_shot"] = "one_shot"
    """Tag of the union."""


class ExpoConfig(Settings):
    """EXPO-SQL's clause-level reward (sections 3.2 and 6, appendix A)."""

    kind: Literal["expo"] = "expo"
    """Tag of the union."""

    gap_scale: float = Field(default=1.0, ge=0)
    """Factor on the gap between the rewards of blamed and other clauses, which keeps their mean
    (table 11). With 0 all clauses of a query have one reward."""

    clause_level: Literal["both", "incorrect", "error"] = "both"
    """For which failures clauses are told apart (table 4): wrong results, failing queries, or both.
    The other kind has its uniform reward."""

    outside_tokens: Literal["zero", "query"] = "zero"
    """Credit of tokens outside the SQL, such as the thinking: `zero` (equation 4 sums over the
    tokens of clauses), or `query`: the reward of a blamed clause, or of a match, so that the
    thinking is trained too."""

    attribution: Literal["both", "types", "execution"] = "both"
    """How the clauses of a wrong result are found (table 5): by the types of difference and
    clause-wise execution (algorithm 1); by `types` alone, where only one clause can cause them; or
    by `execution` alone, which blames the steps that lead away from the gold result."""

    tracing: bool = True
    """Trace an error to the clauses that caused it, or blame only those that the message points at
    (table 6)."""


class PaverlConfig(Settings):
    """PaVeRL-SQL's reward (section III-C), by the share of gold columns that a result has."""

    kind: Literal["paverl"] = "paverl"
    """Tag of the union."""

    ex_f: Literal["paper", "code"] = "paper"
    """Columns compared as the paper says, or as its released program does."""

    payoff: Literal["fraction", "binary"] = "fraction"
    """Reward the share of gold columns (EX_f), or only all of them (EX_b)."""

    extra_columns: int = Field(default=5, ge=1)
    """As many columns that are none of the gold's are too many for EX_b (tau)."""

    all_columns: float = 10.0
    """Reward of all gold columns; EX_f of it for some."""

    executed: float = 0.5
    """Reward of a query that runs, and has no gold column."""


class AtrConfig(Settings):
    """SQL-ASTRA's aggregated trajectory reward."""

    kind: Literal["paper", "fig2"] = "paper"
    """Constants of the paper's text (equation 2, table 2), or of its figure 2."""

    high_low: float = -1.5
    """Factor on a fall; -1.0 is the paper's symmetric ablation."""


class AstraConfig(Settings):
    """SQL-ASTRA's reward: a score for every step of an episode, and what they come to."""

    kind: Literal["astra"] = "astra"
    """Tag of the union."""

    step_score: Literal["csmr", "binary"] = "csmr"
    """Score of a step: CSMR, or 1 for a match and 0 for anything else."""

    alpha: float = Field(default=0.8, ge=0, lt=1)
    """Upper bound of CSMR for anything but a match."""

    aggregate: Literal["atr", "last", "steps"] = "atr"
    """One reward for the episode (ATR), the last step's score alone (no ATR), or the score of each
    step as the advantage of its own tokens (the step-wise ablation)."""

    atr: AtrConfig = AtrConfig()
    """How the scores of steps are aggregated."""

    final_step: Literal["dedup", "always", "never"] = "dedup"
    """Whether the final query is a step: unless the last call ran the same, always, or never."""


RewardConfig = Annotated[
    ProgressiveConfig | OneShotConfig | ExpoConfig | PaverlConfig | AstraConfig | ExecutionConfig,
    Field(discriminator="kind"),
]


class JudgeConfig(Settings):
    """Verbal RL (PaVeRL-SQL, section III-B): candidates, and a model's judgement of them."""

    candidates: int = Field(default=10, ge=1)
    """Executable candidates of a question (K), all of them different."""

    attempts: int = Field(default=200, ge=1)
    """Largest number of answers that are sampled to find them: as many as a model is asked for that
    always writes the same query."""

    judgements: int = Field(default=20, ge=1)
    """Judgements of the whole set of candidates."""

    judge_retries: int = Field(default=2, ge=0)
    """How often a judgement that cannot be parsed is sampled again before it is left out."""


class Clash(NamedTuple):
    """Two settings that may not go together: their keys, whether they do not, and what to do."""

    keys: tuple[str, str]
    is_there: bool
    advice: str

    def told(self, settings: BaseModel) -> str:
        """Name both settings with their values."""
        pairs = (f"{key}={_shown(reduce(getattr, key.split('.'), settings))}" for key in self.keys)
        return f"{' and '.join(pairs)}: {self.advice}"


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return "{...}" if isinstance(value, BaseModel) else str(value)


def clashes(reward: RewardConfig, env: EnvConfig) -> list[Clash]:
    """List the pairs of settings of a reward and an environment that may not go together."""
    is_agentic = env.kind == "agentic"
    return [
        Clash(
            ("reward.kind", "env.kind"),
            reward.kind == "progressive" and is_agentic,
            "a call with the right result would pay for a wrong answer after it; use "
            "reward.kind=astra",
        ),
        Clash(
            ("reward.kind", "env.kind"),
            reward.kind == "expo" and is_agentic,
            "expo credits the clauses of answers, not of calls; use reward.kind=astra",
        ),
        Clash(
            ("reward.final_step", "env.kind"),
            reward.kind == "astra" and reward.final_step != "dedup" and not is_agentic,
            "without calls of a tool every step is a final one; use reward.final_step=dedup",
        ),
    ]
