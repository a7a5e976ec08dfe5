"""Progress-SQL's environment: several attempts, with a diagnosis between them (algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from minirl.exchange import Message
from sqlenv.config import DiagnosedConfig
from sqlenv.envs.single_turn import BaseEnvironment, FirstPrompt, Runner
from sqlenv.types import Attempt, Episode, Example, Observation
from sqlenv.witness.store import WitnessStore

Feedback = Callable[[Example, Attempt], tuple[tuple[str, ...], str]]
"""From an example and the attempt to the tags and the text of the next message."""


class Diagnosed(BaseEnvironment[DiagnosedConfig]):
    """Gives the model several turns and ends at the first match."""

    def __init__(
        self,
        config: DiagnosedConfig,
        *,
        executor: Runner,
        first_prompt: FirstPrompt,
        feedback: Feedback,
        witnesses: WitnessStore | None = None,
    ) -> None:
        super().__init__(config, executor=executor, first_prompt=first_prompt, witnesses=witnesses)
        self._feedback = feedback

    def step(self, episode: Episode, reply: str) -> tuple[Episode, Observation | None]:
        """Judge a reply; the diagnosis is the next message, None after a match or the last turn."""
        config, example = self._config, episode.example
        attempt = self._judge(example, reply)
        if attempt.correct or len(episode.attempts) + 1 >= config.turns:
            return replace(episode, attempts=(*episode.attempts, attempt)), None
        tags, text = self._feedback(example, attempt)
        attempt = replace(attempt, tags=tags)
        return replace(episode, attempts=(*episode.attempts, attempt)), (Message("user", text),)
