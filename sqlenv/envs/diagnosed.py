"""Progress-SQL's environment: several attempts, with a diagnosis between them (algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

from minirl.exchange import Message
from sqlenv.config import DiagnosedConfig
from sqlenv.envs.single_turn import BaseEnvironment
from sqlenv.types import Attempt, Episode, Example, Observation

Feedback = Callable[[Example, Attempt], tuple[tuple[str, ...], str]]
"""From an example and the attempt to the tags and the text of the next message."""


@dataclass(frozen=True)
class Diagnosed(BaseEnvironment[DiagnosedConfig]):
    """Gives the model several turns and ends at the first match; `feedback` says what is wrong."""

    _: KW_ONLY
    feedback: Feedback

    def step(self, episode: Episode, reply: str) -> tuple[Episode, Observation | None]:
        """Judge a reply; the diagnosis is the next message, None after a match or the last turn."""
        attempt, following = self._judge(episode.example, reply), None
        if not attempt.correct and len(episode.attempts) + 1 < self.config.turns:
            tags, text = self.feedback(episode.example, attempt)
            attempt, following = replace(attempt, tags=tags), (Message("user", text),)
        return replace(episode, attempts=(*episode.attempts, attempt)), following
