"""verl's form of a reward: `compute_score`, named in `reward.custom_reward_function`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewards.adapters.scoring import example_of, read_settings, scorer_of
from sqlenv.errors import UserError


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    **_more: Any,
) -> dict[str, float]:
    """Score one response.

    verl gives the response as one text, so it is an episode of one turn; multi-turn families see
    the last query of it. `ground_truth` is the gold query, `extra_info` the row's own fields
    (`database` is the path of a SQLite file), `settings` those of `AdapterConfig`, from
    `reward.custom_reward_function.reward_kwargs`.

    Returns:
        `score`, which verl maximises; `acc`, execution accuracy, which it validates by; and the
        reward's parts, named `reward/…`.
    """
    config = read_settings(settings)
    if config.env.kind == "agentic":
        raise UserError(
            "settings of the SQL reward: env.kind: verl gives an episode as one text, whose calls "
            "and answer cannot be told apart; use single_turn"
        )
    example = example_of(extra_info or {}, gold_sql=ground_truth)
    reply = solution_str if isinstance(solution_str, str) else ""
    score = scorer_of(config).score(example, [reply])
    parts = {f"reward/{name}": value for name, value in score.parts.items()}
    return {"score": score.total, "acc": float(score.correct), **parts}
