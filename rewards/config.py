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
    """Factor on the reward of a match for each earlier turn (gamma)."""

    alignment: Literal["both", "structural", "lexical"] = "both"
    """F: the mean of structural and lexical alignment, or one of them (table 3)."""

    align_k1: Literal["literal", "zero"] = "literal"
    """Alignment reward of a match at the first turn: stagnation (Eq. 1), or `zero`."""

    keep: float = 0.5
    """Reward if the first and the last query run."""

    recovery: float = 0.25
    """Reward if only the last query runs."""

    deterioration: float = -0.25
    """Reward if only the first query runs."""


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
    """Factor on the gap between blamed and other clauses around their mean (table 11); 0 gives all
    clauses one reward."""

    clause_level: Literal["both", "incorrect", "error"] = "both"
    """Failures with clause-level rewards (table 4): wrong results (`incorrect`), failing queries
    (`error`), or both."""

    attribution: Literal["both", "types", "execution"] = "both"
    """Find the clauses of a wrong result by `types` of difference, by clause-wise `execution`, or
    both (table 5)."""

    tracing: bool = True
    """Trace an error to the clauses that caused it, not only to those that its message names (table
    6)."""


class PaverlConfig(Settings):
    """PaVeRL-SQL's reward (section III-C)."""

    kind: Literal["paverl"] = "paverl"
    """Tag of the union."""

    ex_f: Literal["paper", "code"] = "paper"
    """Compare columns as the paper says, or as its released `code` does."""

    payoff: Literal["fraction", "binary"] = "fraction"
    """Reward the share of gold columns (EX_f), or only all of them (`binary`, EX_b)."""

    extra_columns: int = Field(default=5, ge=1)
    """Number of extra columns at which EX_b is 0 (tau)."""


class AtrConfig(Settings):
    """SQL-ASTRA's aggregated trajectory reward."""

    kind: Literal["paper", "fig2"] = "paper"
    """Constants of the text (Eq. 2, table 2), or of figure 2 (`fig2`)."""

    high_low: float = -1.5
    """Factor on a fall; -1.0 is the symmetric ablation."""


class AstraConfig(Settings):
    """SQL-ASTRA's reward: scores of steps, aggregated."""

    kind: Literal["astra"] = "astra"
    """Tag of the union."""

    step_score: Literal["csmr", "binary"] = "csmr"
    """Score of a step: CSMR, or 1 for a match and else 0 (`binary`)."""

    alpha: float = Field(default=0.8, ge=0, lt=1)
    """Upper bound of CSMR without a match."""

    aggregate: Literal["atr", "last", "steps"] = "atr"
    """Reward of the episode: ATR, the last step's score (`last`), or each step's score as the
    advantage of its tokens (`steps`)."""

    atr: AtrConfig = AtrConfig()
    """How the scores of steps are aggregated."""


RewardConfig = Annotated[
    ProgressiveConfig | OneShotConfig | ExpoConfig | PaverlConfig | AstraConfig | ExecutionConfig,
    Field(discriminator="kind"),
]


class JudgeConfig(Settings):
    """Verbal RL (PaVeRL-SQL, section III-B): candidates, and a model's judgement of them."""

    candidates: int = Field(default=10, ge=1)
    """Distinct executable candidates of a question (K)."""

    attempts: int = Field(default=200, ge=1)
    """Maximum number of answers sampled to find them."""

    judgements: int = Field(default=20, ge=1)
    """Judgements of the set of candidates."""

    judge_retries: int = Field(default=2, ge=0)
    """Retries of an unreadable judgement before it is left out."""


class Clash(NamedTuple):
    """Two settings that can contradict each other: their keys, whether they do, and what to do."""

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
    """List the settings of a reward and of an environment that can contradict each other."""
    of_calls = {
        "progressive": "a call with the right result would pay for a wrong answer after it",
        "expo": "expo credits the clauses of answers, not of calls",
    }
    keys, is_agentic = ("reward.kind", "env.kind"), env.kind == "agentic"
    return [
        Clash(keys, is_agentic and reward.kind == kind, f"{why}; use reward.kind=astra")
        for kind, why in of_calls.items()
    ]
