"""verl's form of a reward: `compute_score`, named in `reward.custom_reward_function`.

`compute_scores` is the same for reward managers that ask for a whole batch at once, such as `batch`
of earlier versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minirl.exchange import UserError, reply_text
from rewards.adapters.scoring import example_of, plain, read_settings, scorer_of

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
    """Score one response; see `compute_scores`."""
    rows = ([data_source], [solution_str], [ground_truth], [extra_info])
    return compute_scores(*rows, settings=settings)[0]


def compute_scores(
    data_sources: Sequence[str],
    solution_strs: Sequence[Any],
    ground_truths: Sequence[str],
    extra_infos: Sequence[ExtraInfo],
    *,
    settings: Mapping[str, Any] | None = None,
    **_more: Any,
) -> list[dict[str, Any]]:
    """Score responses on all workers, in order.

    verl gives a response as one text, so it is an episode of one turn; multi-turn families see the
    last query of it. `ground_truths` are gold queries; of `extra_infos`, `database` is the path of
    a SQLite file; `settings` are those of `AdapterConfig`, from
    `reward.custom_reward_function.reward_kwargs`.

    Returns:
        Of each, `score`, which verl maximises; `acc`, execution accuracy, which it validates by;
        the reward's parts, named `reward/…`; and why: `status`, `sql`, `sql_found`.
    """
    config = read_settings(settings)
    if config.env.kind == "agentic":
        raise UserError(
            "settings of the SQL reward: env.kind: verl gives an episode as one text, whose calls "
            "and answer cannot be told apart; use single_turn"
        )
    rows = zip(solution_strs, ground_truths, extra_infos, strict=True)
    episodes = [
        (example_of(row, gold_sql=gold), [reply_text(plain(reply))]) for reply, gold, row in rows
    ]
    return [
        {
            "score": one.total,
            "acc": float(one.correct),
            **{f"reward/{name}": value for name, value in one.parts.items()},
            **one.why(),
        }
        for one in scorer_of(config).score_many(episodes)
    ]
