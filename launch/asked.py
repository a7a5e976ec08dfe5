"""Who is asked, a policy or an endpoint, and the desk where every answer is asked for once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launch.config import JobConfig
from launch.journal import Answer, Journal, Request
from launch.measured import weights
from launch.policy import PolicySource, find_policy
from launch.run_folder import PLACES
from rewards.verbal import Ask


@dataclass(frozen=True, slots=True)
class Asked:
    """Who is asked.

    Attributes:
        name: Short, for the names of folders.
        identity: What decides the answers: the endpoint's model, not its address, since a server
            may move; of a policy the digest of its weights, not their path.
        url: Of the endpoint; empty for a policy in this process.
        policy: That policy.
    """

    name: str
    identity: str
    url: str = ""
    policy: PolicySource | None = None

    def sampled_by(self, config: JobConfig) -> dict[str, str]:
        """Name the sampler of a policy, for a result; empty for an endpoint."""
        return {} if self.policy is None else {"sampler": config.rollout.backend}

    def differs_by(self, config: JobConfig) -> dict[str, str]:
        """Name the sampler where it is not the native one: what results before were made with."""
        found = self.sampled_by(config)
        return {} if found == {"sampler": "native"} else found

    def settings(self, config: JobConfig) -> dict[str, Any]:
        """Return the same as a setting: answers of two samplers do not go into one folder."""
        is_told = bool(self.differs_by(config))
        return {"rollout": {"backend": config.rollout.backend}} if is_told else {}

    def weights(self) -> dict[str, str]:
        """Return the digest of a policy's weights, for a result; empty for an endpoint."""
        return {} if self.policy is None else {"weights": self.identity}

    @property
    def place(self) -> str:
        """Say where weights are read from, or the endpoint's name of the model."""
        if self.policy is None:
            return self.identity
        return str((self.policy.checkpoint or self.policy.model).resolve())

    def places(self, config: JobConfig) -> dict[str, Any]:
        """Say where everything lies, as settings that decide nothing."""
        return {PLACES: {"model": self.place, "data": str(config.data.root)}}

    @classmethod
    def find(
        cls, config: JobConfig, url: str | None, model: str | None, checkpoint: Path | None
    ) -> Asked:
        """Find whom the command line names.

        Raises:
            UserError: There is no such policy.
        """
        if url and model:
            return cls(model.replace("/", "-"), model, url=url)
        source = find_policy(config, checkpoint)
        return cls(source.name, weights(source), policy=source)


class Source(Protocol):
    """Whoever answers."""

    def answer(
        self, requests: Sequence[Request], record: Callable[[Request, Answer], None], /
    ) -> None:
        """Answer requests, recording each answer as soon as it is there."""
        ...


class Desk:
    """Turns the asks of a question into requests, and pays only for those not answered before."""

    def __init__(
        self,
        source: Source,
        journal: Journal,
        asked: Asked,
        config: JobConfig,
        *,
        top_p: float = 1.0,
    ) -> None:
        self._source, self._journal, self._seed = source, journal, config.seed
        verbal = config.verbal
        self._settings = (
            ("model", asked.identity),
            ("temperature", verbal.temperature),
            ("max_tokens", verbal.max_tokens),
            *((("top_p", top_p),) if top_p < 1 else ()),
        )

    def texts(self, wishes: Sequence[tuple[str, Sequence[Ask]]]) -> list[list[str | None]]:
        """Get the answers to asks, by question.

        Args:
            wishes: The question's name and what is asked about it.
        """
        requests = [[self._request(name, ask) for ask in asks] for name, asks in wishes]
        new = [one for each in requests for one in each if self._journal.get(one) is None]
        self._source.answer(new, self._journal.put)
        return [[self._text(request) for request in each] for each in requests]

    def _request(self, name: str, ask: Ask) -> Request:
        stream = f"{self._seed} {name} {ask.kind} {ask.number}"
        seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:4]) % 2**31
        return Request(ask.kind, ask.messages, seed, self._settings)

    def _text(self, request: Request) -> str | None:
        answer = self._journal.get(request)
        assert answer is not None
        return answer.text
