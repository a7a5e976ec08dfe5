"""Reward families: text in, numbers out. No JAX below this line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewards.adapters.scoring import Scored


def score(
    database: str | Path,
    gold: str,
    reply: str | Sequence[str],
    reward: str | Mapping[str, Any] = "progressive",
    env: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Scored:
    """Score a reply, or the replies of several turns, beside a gold query.

    Args:
        database: Path of a SQLite file.
        gold: The query that answers.
        reply: Text with a query in `<sql>…</sql>`, in a fence, or alone.
        reward: A family (`reward.kind`), or a mapping of its settings with `kind`.
        env: Changed settings of the environment; by default queries are read as `any` and compared
            as sets of rows (`expo`: `bag_ordered`).
        settings: Other sections of `rewards.adapters.scoring.AdapterConfig`: `executor`.

    Returns:
        Total, parts, whether it is right, credit of clauses, feedback, status and query.

    Raises:
        UserError: A setting is wrong, or there is no database or gold query.
    """
    # Who imports the package for a module of it needs none of this.
    from rewards.adapters.scoring import example_of, plain, read_settings, scorer_of
    from sqlenv.sql.answers import reply_text

    family = {"kind": reward} if isinstance(reward, str) else reward
    env = {"kind": "single_turn", "wrapping": "any", **(env or {})}
    scorer = scorer_of(read_settings({"env": env, **settings, "reward": family}))
    example = example_of({"database": database, "gold_sql": gold})
    replies = reply if isinstance(reply, list | tuple) else [reply]
    found = scorer.score(example, [reply_text(plain(one)) for one in replies])
    if found.last is None or found.last.correct:
        return found
    return replace(found, feedback=scorer.feedback(example, found.last)[1])
