"""Progress-SQL's environment: several attempts, with a diagnosis between them (algorithm 1)."""

from __future__ import annotations

from dataclasses import replace

from sqlenv.config import DiagnosedConfig
from sqlenv.envs.single_turn import BaseEnvironment
from sqlenv.types import Episode, Message, Observation


class Diagnosed(BaseEnvironment[DiagnosedConfig]):
    """Gives the model several turns and ends at the first match."""

    def step(self, episode: Episode, reply: str) -> tuple[Episode, Observation | None]:
        """Judge a reply; the diagnosis is the next message, None after a match or the last turn."""
        config, example = self._config, episode.example
        attempt = self._judge(example, reply)
        if attempt.correct or len(episode.attempts) + 1 >= config.turns:
            return replace(episode, attempts=(*episode.attempts, attempt)), None
        tags, text = self._feedback(example, attempt)
        attempt = replace(attempt, tags=tags)
        return replace(episode, attempts=(*episode.attempts, attempt)), (Message("user", text),)
