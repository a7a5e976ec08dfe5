"""One of several servers: what is known of it, and how it comes to the weights of now."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minirl.config import SglangConfig
from minirl.sglang.client import NEEDED, RefusedError, Server, ServerError
from minirl.sglang.fanout import once_more
from minirl.sglang.processes import Child
from minirl.sglang.requirements import Wanted, check_facts
from minirl.sglang.transfer import Again, Parcel, Way

_MARK = uuid.uuid4().hex[:12]
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Weights:
    """What all servers should sample with.

    Attributes:
        again: Makes their parcels once more, for a server that missed them; None where that waits
            for the next ones.
        name: As servers call them; no others ever have this name.
        version: As the learner counts them.
        probe: The learner's log-probabilities of the probe's last ids, at temperature 1.
    """

    again: Again | None
    name: str
    version: int
    probe: Sequence[float]


class Member:
    """A server and what is known of it. To be made in a running event loop.

    Args:
        server: The server.
        child: The process that it is, if this one started it.
        config: Deadlines.
        wanted: What it has to be.
        way: How weights come to it.
        parallel: Requests that it gets at a time.
    """

    def __init__(
        self,
        server: Server,
        child: Child | None,
        config: SglangConfig,
        wanted: Wanted,
        way: Way,
        *,
        parallel: int,
    ) -> None:
        self.server, self.child = server, child
        self._config, self._wanted, self._way = config, wanted, way
        self.slots = asyncio.Semaphore(parallel)
        self.is_used = True
        self.is_loading = False
        self.lock = asyncio.Lock()  # of whoever brings it weights, or mends it
        self.is_waiting = False  # left out and well, until the next weights
        self.weights = ""  # name of those that it was last brought to
        self.asked = 0  # requests that wait for it or are under way
        self.left_at = 0.0
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ranks = 1
        self.gap = 0.0  # largest in `compare`, with the weights that it was last compared with
        self._compared = ""

    async def check_health(self) -> None:
        """See that it samples, also if a run left it paused.

        Raises:
            ServerError: It does not.
            RefusedError: It is no SGLang server.
        """
        await self.server.go_on()
        await self.server.check_health(timeout_s=self._config.health_s)

    async def meet(self) -> None:
        """Ask it what it is.

        Raises:
            UserError: Nothing that can serve this model.
            ServerError: It does not answer.
            RefusedError: It is no SGLang server.
        """
        facts = await self.server.facts((*NEEDED, *self._way.endpoints))
        check_facts(facts, self._wanted, self.server.url, one_group=self._way.one_group)
        self._ranks = facts.ranks

    async def restart(self, *, is_hung: bool) -> bool:
        """Start it anew, if it is ours and has ended or hangs; tell whether that was so."""
        if self.child is None or (self.child.is_running and not is_hung):
            return False
        await asyncio.to_thread(self.child.start)
        return True

    async def load(
        self, current: Callable[[], Weights | None], parcels: AsyncIterator[Parcel] | None = None
    ) -> None:
        """Bring it to the weights of now, and compare it with the learner.

        Args:
            current: Tells which they are, None before the first; others may come meanwhile.
            parcels: Of these weights; None to make them for it alone.

        Raises:
            ServerError: It does not take them, or computes something else with them.
            RefusedError: It will never take them.
        """
        self.is_loading = True
        try:
            weights = None
            while (now := current()) is not None and now is not weights:
                weights = now
                taking = self._way.taking(
                    self.server, weights.name, ranks=self._ranks, timeout_s=self._config.push_s
                )
                await self.server.load(parcels or once_more(weights.again), weights.name, taking)
                parcels = None
                await self.compare(weights)
                self.weights = weights.name
        finally:
            self.is_loading = False

    async def has(self, weights: Weights) -> bool:
        """Tell whether it has these weights: one that failed may have missed none."""
        try:
            await self.compare(weights)
        except (ServerError, RefusedError):
            return False
        self.weights = weights.name
        return True

    async def compare(self, weights: Weights) -> None:
        """See that it computes what the learner does with these weights.

        Raises:
            ServerError: It has others, or computes something else.
            RefusedError: It does not take the probe.
        """
        values, name = await self.server.score(
            self._wanted.probe_ids, rid=request_name(), timeout_s=self._config.push_s
        )
        if name != weights.name:
            raise ServerError("stale", f"has weights {name}, not {weights.name}")
        probe = np.asarray(weights.probe)
        gap = float(np.mean(np.abs(np.asarray(values[-len(probe) :]) - probe)))
        self.gap = gap if name != self._compared else max(self.gap, gap)
        self._compared = name
        if not gap <= self._wanted.tolerance:
            raise ServerError(
                "differs",
                f"log-probabilities of a probe differ from the learner's by {gap:.3g} on average, "
                f"with the same weights; rollout.sglang.tolerance is {self._wanted.tolerance:g}",
            )


def request_name() -> str:
    """Return a name that no other request has."""
    return f"minirl-{_MARK}-{next(_numbers)}"
