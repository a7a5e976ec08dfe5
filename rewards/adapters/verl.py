"""verl's form of a reward: `compute_score`, named in `reward.custom_reward_function`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minirl.exchange import UserError
from rewards.adapters.scoring import example_of, plain, read_settings, scorer_of
from sqlenv.sql.answers import reply_text

ExtraInfo = Mapping[str, Any] | str | None
"""The row's own fields, `extra_info`: a mapping, or one as JSON text."""


def compute_score(
    data_source: str,
    solution_str: Any,
    ground_truth: str,
    extra_info: ExtraInfo = None,
    *,
    settings: Mapping[str, Any] | None = None,
    **_more: Any,
) -> dict[str, Any]:
    """Score one response.

    verl gives a response as one text, so it is an episode of one turn; multi-turn families see the
    last query of it. `ground_truth` is the gold query; of `extra_info`, `database` is the path of a
    SQLite file; `settings` are those of `AdapterConfig`, from
    `reward.custom_reward_function.reward_kwargs`.

    Returns:
        `score`, which verl maximises; `acc`, execution accuracy, which it validates by; the
        reward's parts, named `reward/…`; and why: `status`, `sql`, `sql_found`.
    """
    config = read_settings(settings)
    if config.env.kind == "agentic":
        raise UserError(
            "settings of the SQL reward: env.kind: verl gives an episode as one text, whose calls "
            "and answer cannot be told apart; use single_turn"
        )
    example = example_of(extra_info, gold_sql=ground_truth)
    found = scorer_of(config).score(example, [reply_text(plain(solution_str))])
    return {
        "score": found.total,
        "acc": float(found.correct),
        **{f"reward/{name}": value for name, value in found.parts.items()},
        **found.why(),
    }
