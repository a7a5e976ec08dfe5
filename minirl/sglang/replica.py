"""One of several SGLang servers: what it has to be, its state, and how it comes to new weights."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minirl.config import SglangConfig
from minirl.errors import UserError
from minirl.sglang.client import TESTED, Server, ServerError, ServerInfo
from minirl.sglang.process import ChildServer
from minirl.sglang.transfer import Backend

# Of a push, in order; None after the last.
Buckets = asyncio.Queue[Any]
_OLDEST = (0, 5)
_rid_start, _rids = uuid.uuid4().hex[:12], itertools.count()


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a server has to be: the model's architectures (one of them), rows of the embedding,
    tokens of the longest episode; and how its log-probabilities of some tokens may differ.

    With `is_one_group`, new weights reach the ranks of one tensor-parallel group alone.
    """

    architectures: tuple[str, ...]
    vocab_size: int
    context: int
    probe_ids: tuple[int, ...]
    tolerance: float
    is_one_group: bool

    def check(self, info: ServerInfo, url: str) -> None:
        """Raise a `UserError` for a server that cannot serve the model."""
        found, own = info.architectures or self.architectures, self.architectures
        version = tuple(int(part) for part in info.version.split(".")[:2] if part.isdigit())
        flaws = {
            f"is SGLang {info.version}; use {TESTED}": version < _OLDEST,
            f"serves a {', '.join(found)}, and the learner's model is a {', '.join(own)}": (
                not set(found) & set(own)
            ),
            f"takes {info.context} tokens, and episodes have up to {self.context}; start it with "
            "a larger --context-length, or a larger cache (--max-total-tokens, "
            "--mem-fraction-static)": info.context < self.context,
            "has ranks besides those of --tp-size, which only rollout.sglang.push=disk reaches": (
                self.is_one_group and info.pp_size * info.dp_size > 1
            ),
        }
        for words, is_so in flaws.items():
            if is_so:
                raise UserError(f"rollout.sglang: {url} {words}")


@dataclass(frozen=True, slots=True)
class PushedWeights:
    """Weights of the learner: as servers call them, each name used once; in the order of pushes; as
    the learner counts them; and its log-probabilities of the probe's last ids, at temperature 1.
    """

    name: str
    number: int
    version: int
    probe: Sequence[float]


@dataclass(eq=False)
class Replica:
    """A server and what the pool knows of it. To be made in a running event loop.

    Methods that ask the server raise as those of `Server` do.

    Attributes:
        child: Its process, if this process started it.
        asked: Requests under way, and those that wait for one of the `slots`.
        requests: Of those under way, what can end the waiting.
        lock: Held while weights are brought to it.
        left_out: Set while it is not in use.
        is_waiting: Whether it is left out and well, and waits for the next weights.
        weights: Last ones that it was compared with.
        gap: Its difference to the learner with these.
    """

    server: Server
    child: ChildServer | None
    config: SglangConfig
    requirements: Requirements
    transfer: Backend
    asked: int = 0
    requests: set[asyncio.Timeout] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    left_out: asyncio.Event = field(default_factory=asyncio.Event)
    is_waiting: bool = False
    hung_checks: int = 0
    weights: PushedWeights | None = None
    gap: float = 0.0

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.config.parallel)

    @property
    def is_used(self) -> bool:
        """Tell whether it is asked."""
        return not self.left_out.is_set()

    def give_up_requests(self) -> None:
        """Let what it was asked fail now, unless it is in use."""
        for waiting in () if self.is_used else self.requests:
            if not waiting.expired():
                waiting.reschedule(0)

    async def check_health(self) -> None:
        """See that it samples."""
        await self.server.check_health(timeout_s=self.config.health_s)

    async def check_ready(self) -> None:
        """See that it samples, also if a run that was killed left it paused, and what."""
        await self.server.resume()
        await self.check_health()
        self.requirements.check(await self.server.info(), self.server.url)

    async def load(self, weights: PushedWeights, buckets: Buckets) -> None:
        """Bring it to these weights; it samples until the first bucket is there."""
        first = await buckets.get()

        async def stream() -> AsyncIterator[Any]:
            bucket = first
            while bucket is not None:
                yield bucket
                bucket = await buckets.get()

        timeout_s = self.config.push_s
        await self.transfer.send(self.server, weights.name, stream(), timeout_s=timeout_s)
        await self.compare(weights)

    async def compare(self, weights: PushedWeights) -> None:
        """See that it computes what the learner does with these weights.

        Raises:
            ServerError: `stale`: it has others; `differs`: it does not.
        """
        ids, tolerance = self.requirements.probe_ids, self.requirements.tolerance
        values, name = await self.server.score(ids, rid=new_rid(), timeout_s=self.config.push_s)
        if name != weights.name:
            raise ServerError("stale", f"has weights {name}, not {weights.name}")
        probe = np.asarray(weights.probe)
        gap = float(np.mean(np.abs(np.asarray(values[-len(probe) :]) - probe)))
        self.gap, self.weights = gap, weights
        if not gap <= tolerance:
            raise ServerError(
                "differs",
                f"log-probabilities of a probe differ from the learner's by {gap:.3g} on average, "
                f"with the same weights; rollout.sglang.tolerance is {tolerance:g}",
            )


def new_rid() -> str:
    """Return a name that no other request has."""
    return f"minirl-{_rid_start}-{next(_rids)}"
