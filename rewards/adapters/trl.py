"""TRL's form of a reward: a function of the completions and of the columns of the data set."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rewards.adapters.scoring import (
    AdapterConfig,
    RewardRow,
    Scored,
    example_of,
    plain,
    read_settings,
    scorer_of,
)
from sqlenv.sql.answers import reply_text

Completion = str | Sequence[Mapping[str, Any]]
"""What TRL gives: a text, or the messages after the prompt where prompts are conversations."""


class SqlReward:
    """An element of `GRPOTrainer(reward_funcs=…)`. It can be pickled, and called after a fork.

    The data set needs the columns `database` (path of a SQLite file) and `gold_sql`.

    Args:
        settings: Those of `AdapterConfig`, or a mapping; None for Progress-SQL's reward.
    """

    def __init__(self, settings: AdapterConfig | Mapping[str, Any] | None = None) -> None:
        self._config = read_settings(settings)
        # TRL's name of the metrics and of the column of rewards.
        self.__name__ = f"sql_{self._config.reward.kind}"

    def __call__(
        self,
        completions: Sequence[Completion],
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return the total of each completion; each assistant message of one is a turn.

        `log_metric` gets the means of the reward's parts, execution accuracy and the share of
        replies in which a query was found; `log_extra` the status and the query of each, which TRL
        shows beside the completions.

        Raises:
            UserError: A database or gold query is missing.
        """
        given = {name: [*columns[name]] for name in RewardRow.model_fields if name in columns}
        episodes = [
            (example_of({name: values[at] for name, values in given.items()}), replies_of(one))
            for at, one in enumerate(completions)
        ]
        scores = scorer_of(self._config).score_many(episodes)
        if log_metric is not None and scores:
            for name, value in means(scores).items():
                log_metric(f"sql/{name}", value)
        if log_extra is not None:
            for name in ("status", "sql"):
                log_extra(name, [one.why()[name] for one in scores])
        return [score.total for score in scores]


def replies_of(completion: Completion) -> list[str]:
    """List the texts that the policy wrote: the completion, or its assistant messages."""
    found = plain(completion)
    if isinstance(found, dict):
        found = [found]
    if not isinstance(found, list):
        return [reply_text(found)]
    messages = [message for message in found if isinstance(message, dict)]
    return [_text(message) for message in messages if message.get("role") == "assistant"]


def _text(message: Mapping[str, Any]) -> str:
    """Put together what TRL takes apart where there are tools: thinking, text, calls."""
    calls = (call.get("function") for call in message.get("tool_calls") or () if call)
    parts = [
        reply_text(message.get("content"), message.get("reasoning_content")),
        *(f"<tool_call>\n{json.dumps(call, default=str)}\n</tool_call>" for call in calls),
    ]
    return "\n".join(filter(None, parts))


def means(scores: Sequence[Scored]) -> dict[str, float]:
    """Average the parts of scores, and the shares of correct ones and of those with a query."""
    named = [{**one.parts, "correct": one.correct, "sql_found": bool(one.sql)} for one in scores]
    return {name: fmean(float(one[name]) for one in named) for name in named[0]}
