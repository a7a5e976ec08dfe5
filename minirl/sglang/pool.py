"""Several SGLang servers as one: which of them answers, which is left out and taken back.

A server that fails in any way is left out, and its requests are asked elsewhere, whole: a request
holds all tokens of its episode so far. Meanwhile the server is probed, brought to the current
weights, and taken back. All of this runs in one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
    wait_fixed,
)

from minirl.config import SglangConfig
from minirl.errors import ServersLostError, UserError
from minirl.sglang.client import (
    Failure,
    Generated,
    RefusedError,
    Requirements,
    Server,
    ServerError,
)
from minirl.sglang.process import ChildServer
from minirl.sglang.transfer import Backend
from minirl.types import Request

_HEARTBEAT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
# Tries of a request before the run stops.
_TRIES = 12
# Health checks that a launched server may keep waiting before it is started anew. One that is
# only starting refuses them at once.
_HUNG_CHECKS, _AT_ONCE_S = 2, 5.0
_COUNTED = ("requests", "retries", "left_out", "taken_back", "restarted")
EVENTS = tuple(f"sglang/{n}" for n in (*_COUNTED, *(f"failed_{k}" for k in get_args(Failure))))
"""Metrics that are counts, which add up over processes."""
IN_USE = "sglang/servers"
OUT_S, PROBE_GAP = "time/sglang_out_s", "sglang/probe_gap"

_log = logging.getLogger(__name__)
_rid_start, _rids = uuid.uuid4().hex[:12], itertools.count()


@dataclass(frozen=True, slots=True)
class PushedWeights:
    """Weights of the learner that servers sample with.

    Attributes:
        name: As servers call them, used once.
        number: Larger than those of all weights that were pushed earlier.
        version: As the learner counts them.
        probe: The learner's log-probabilities of the probe's last ids, at temperature 1.
    """

    name: str
    number: int
    version: int
    probe: Sequence[float]


@dataclass(eq=False)
class Replica:
    """A server and what the pool knows of it. To be made in a running event loop.

    Attributes:
        server: Its endpoints.
        child: Its process, if this process started it.
        slots: Requests that it may have at a time.
        asked: Requests under way, and those that wait for a slot.
        requests: Of those under way, what can end the waiting.
        lock: Held while weights are brought to it.
        left_out: Set while it is not in use.
        is_waiting: Whether it is left out and well, and waits for the next weights.
        weights: Last ones that it was compared with.
        gap: Largest difference to the learner with these.
        ranks: Tensor-parallel ones.
    """

    server: Server
    child: ChildServer | None
    slots: asyncio.Semaphore
    asked: int = 0
    requests: set[asyncio.Timeout] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    left_out: asyncio.Event = field(default_factory=asyncio.Event)
    left_at: float = 0.0
    is_waiting: bool = False
    hung_checks: int = 0
    weights: PushedWeights | None = None
    gap: float = 0.0
    ranks: int = 1

    @property
    def is_used(self) -> bool:
        """Tell whether it is asked."""
        return not self.left_out.is_set()

    def give_up_requests(self) -> None:
        """Let what it was asked fail now, unless it is in use."""
        for waiting in () if self.is_used else self.requests:
            if not waiting.expired():
                waiting.reschedule(0)


class Pool:
    """The servers of one process. To be made and used in a running event loop.

    Args:
        servers: Each with its process, if this one started it.
        config: Deadlines.
        requirements: What they have to be.
        transfer: How weights come to them.
    """

    def __init__(
        self,
        servers: Sequence[tuple[Server, ChildServer | None]],
        config: SglangConfig,
        requirements: Requirements,
        transfer: Backend,
    ) -> None:
        self._config, self._requirements, self._transfer = config, requirements, transfer
        self._replicas = [
            Replica(server, child, asyncio.Semaphore(config.parallel)) for server, child in servers
        ]
        self._pushed: dict[str, PushedWeights] = {}
        self._weights: PushedWeights | None = None
        self._homes: dict[Hashable, Replica] = {}
        self._any_used = asyncio.Event()
        self._any_used.set()
        self._last_problem = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: Counter[str] = Counter()
        self._out_s = 0.0
        self._later_tokens = self._later_cached = 0  # of prompts that extend an earlier one

    async def check(self) -> None:
        """Wait until all servers are ready, and see that they serve the model.

        Raises:
            UserError: One is not there, or serves something else.
        """
        await asyncio.gather(*map(self._check_first, self._replicas))
        for replica in self._replicas:
            self._spawn(self._look_after(replica))

    async def push(self, weights: PushedWeights, buckets: asyncio.Queue[Any]) -> None:
        """Bring all servers in use to new weights; those that fail are left out.

        Args:
            weights: Which.
            buckets: Of the transfer, None after the last. Servers sample until the first is there.

        Raises:
            UserError: A server computes something else with them than the learner.
            ServersLostError: No server has taken them.
        """
        bucket, is_first = await buckets.get(), self._weights is None
        self._weights = self._pushed[weights.name] = weights
        queues: dict[asyncio.Task[None], asyncio.Queue[Any]] = {}
        for replica in self._replicas:
            if replica.is_used or replica.is_waiting:
                queue: asyncio.Queue[Any] = asyncio.Queue(1)
                work = self._push_to(replica, weights, queue, is_first=is_first)
                queues[asyncio.create_task(work)] = queue
        try:
            while True:
                await asyncio.gather(*(_put(queue, bucket, task) for task, queue in queues.items()))
                if bucket is None:
                    break
                bucket = await buckets.get()
            await asyncio.gather(*queues)
        finally:
            for task in queues:
                task.cancel()
        await self._wait_for_any()

    def version_of(self, name: str) -> int:
        """Return the learner's version of weights that were pushed."""
        return self._pushed[name].version

    async def sample(
        self, episode: Hashable, request: Request, stop_ids: Sequence[int]
    ) -> Generated:
        """Let a server sample a reply: the one of the episode's last reply, if it is in use.

        Weights may change meanwhile: the reply goes on with the new ones.

        Raises:
            UserError: Servers refuse the request.
            ServersLostError: No server is left, or none has answered.
        """
        is_later = episode in self._homes
        failures = retry_if_exception_type((ServerError, RefusedError))
        retrying = AsyncRetrying(retry=failures, stop=stop_after_attempt(_TRIES), reraise=True)
        try:
            generated = await retrying(self._try, episode, request, stop_ids)
        except RefusedError as error:
            raise UserError(f"{error}; servers refuse this request, see their logs") from None
        except ServerError as error:
            raise ServersLostError(f"a request failed {_TRIES} times, at last by {error}") from None
        self._events["requests"] += 1
        if is_later:
            self._later_tokens += len(request.ids)
            self._later_cached += generated.cached
        return generated

    def forget(self, episode: Hashable) -> None:
        """Give up an episode's place."""
        self._homes.pop(episode, None)

    def numbers(self) -> dict[str, float]:
        """Return metrics of what happened since this was last asked."""
        found = {name: float(self._events[name.removeprefix("sglang/")]) for name in EVENTS}
        found[IN_USE] = float(sum(replica.is_used for replica in self._replicas))
        found[PROBE_GAP] = max((one.gap for one in self._replicas if one.is_used), default=0.0)
        found["sglang/cached_share"] = self._later_cached / max(self._later_tokens, 1)
        found[OUT_S] = self._out_s
        self._events.clear()
        self._out_s = 0.0
        self._later_tokens = self._later_cached = 0
        return found

    async def _try(self, episode: Hashable, request: Request, stop_ids: Sequence[int]) -> Generated:
        """Ask one server; leave it out if it fails."""
        while True:
            replica = await self._choose(episode)
            replica.asked += 1
            try:
                async with replica.slots:
                    if replica.is_used:
                        return await self._ask(replica, request, stop_ids)
            except (ServerError, RefusedError) as error:
                self._homes.pop(episode, None)
                self._events["retries"] += 1
                if isinstance(error, ServerError):
                    self._leave_out(replica, error)
                error.args = (f"{replica.server.url}: {error}",)
                raise
            finally:
                replica.asked -= 1

    async def _choose(self, episode: Hashable) -> Replica:
        """Return the server of the episode's last reply, or else the least busy one."""
        home = self._homes.get(episode)
        while home is None or not home.is_used:
            await self._wait_for_any()
            used = (replica for replica in self._replicas if replica.is_used)
            home = min(used, key=lambda replica: replica.asked, default=None)
        self._homes[episode] = home
        return home

    async def _ask(self, replica: Replica, request: Request, stop_ids: Sequence[int]) -> Generated:
        # Newer weights may be on their way: until they are there, these are right.
        rid, oldest = _new_rid(), replica.weights.number if replica.weights else 0
        waiting, generated = asyncio.timeout(None), None
        try:
            async with waiting:
                replica.requests.add(waiting)
                generated = await replica.server.generate(
                    request,
                    rid=rid,
                    stop_ids=stop_ids,
                    vocab_size=self._requirements.vocab_size,
                    timeout_s=self._config.timeout_s,
                )
        except TimeoutError:
            raise ServerError("hung", "hangs, and with it this request") from None
        finally:
            replica.requests.discard(waiting)
            if generated is None:  # the server would go on with it
                self._spawn(replica.server.abort(rid))
        for name in set(generated.versions):
            if name not in self._pushed or self._pushed[name].number < oldest:
                raise ServerError("stale", f"replies with weights {name}")
        return generated

    def _leave_out(self, replica: Replica, error: ServerError) -> None:
        self._events[f"failed_{error.kind}"] += 1
        self._last_problem = f"{replica.server.url}: {error}"
        if not replica.is_used:
            return
        replica.left_out.set()
        replica.left_at = time.monotonic()
        self._events["left_out"] += 1
        _log.warning("%s is left out: %s", replica.server.url, error)
        if not any(one.is_used for one in self._replicas):
            self._any_used.clear()

    def _take_back(self, replica: Replica) -> None:
        out_s = time.monotonic() - replica.left_at
        replica.left_out.clear()
        self._any_used.set()
        self._out_s += out_s
        self._events["taken_back"] += 1
        _log.warning("%s is taken back after %.1f s", replica.server.url, out_s)

    async def _look_after(self, replica: Replica) -> None:
        """Check a server in use now and then; bring back one that is left out."""

        def note(state: RetryCallState) -> None:
            assert state.outcome is not None
            self._last_problem = f"{replica.server.url}: {state.outcome.exception()}"
            replica.give_up_requests()

        failures = retry_if_exception_type((ServerError, RefusedError, UserError, OSError))
        wait = wait_exponential(multiplier=2 * _FIRST_PAUSE_S, max=_LONGEST_PAUSE_S)
        retrying = AsyncRetrying(retry=failures, wait=wait, before_sleep=note)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT_S):
                    await replica.left_out.wait()
            if replica.is_used:
                await self._check_heartbeat(replica)
            else:
                await asyncio.sleep(_FIRST_PAUSE_S)
                if not replica.is_waiting:
                    await retrying(self._bring_back, replica)

    async def _check_heartbeat(self, replica: Replica) -> None:
        """Notice that a server hangs: requests to it would wait for their own deadline."""
        if not replica.requests or replica.lock.locked():
            return
        try:
            await replica.server.check_health(timeout_s=self._config.health_s)
        except (ServerError, RefusedError) as error:
            if replica.is_used and not replica.lock.locked():
                self._leave_out(replica, ServerError("hung", f"is not well: {error}"))
                replica.give_up_requests()

    async def _bring_back(self, replica: Replica) -> None:
        """Take a server back if it is well, and has or can get the current weights."""
        child = replica.child
        if child is not None and (not child.is_running or replica.hung_checks >= _HUNG_CHECKS):
            await asyncio.to_thread(child.start)
            self._events["restarted"] += 1
            replica.hung_checks = 0
        async with replica.lock:
            begun = time.monotonic()
            try:
                await self._check_ready(replica)
            except ServerError:
                at_once_s = min(_AT_ONCE_S, self._config.health_s / 2)
                replica.hung_checks += time.monotonic() - begun > at_once_s
                raise
            replica.hung_checks = 0
            weights = self._weights
            if weights is not None and not await self._has(replica, weights):
                stored = self._transfer.stored(weights.name)
                if stored is None:
                    replica.is_waiting = True
                    return
                queue: asyncio.Queue[Any] = asyncio.Queue()
                for bucket in (stored, None):
                    queue.put_nowait(bucket)
                await self._load(replica, weights, queue)
            if weights is not self._weights:
                raise ServerError("stale", "newer weights came meanwhile")
        self._take_back(replica)

    async def _check_first(self, replica: Replica) -> None:
        url, child, start_s = replica.server.url, replica.child, self._config.start_s

        async def check() -> None:
            if child is not None and not child.is_running:
                raise UserError(f"rollout.sglang.launch: a server ended: {child.log_tail()}")
            await self._check_ready(replica)

        failures = retry_if_exception_type(ServerError)
        stop, wait = stop_after_delay(start_s), wait_fixed(_FIRST_PAUSE_S)
        try:
            await AsyncRetrying(retry=failures, stop=stop, wait=wait, reraise=True)(check)
        except RefusedError as error:
            raise UserError(f"rollout.sglang: {url} is no SGLang server ({error})") from None
        except ServerError as error:
            advice = child.log_tail() if child else "start it, or take it out of the list"
            raise UserError(
                f"rollout.sglang: {url} serves nothing after start_s = {start_s:g} s ({error}); "
                f"{advice}"
            ) from None

    async def _check_ready(self, replica: Replica) -> None:
        """See that a server samples, also if a run that was killed left it paused, and what."""
        server, is_limited = replica.server, self._transfer.only_tensor_parallel
        await server.resume()
        await server.check_health(timeout_s=self._config.health_s)
        info = await server.info()
        self._requirements.check(info, server.url, only_tensor_parallel=is_limited)
        replica.ranks = info.tp_size

    async def _push_to(
        self,
        replica: Replica,
        weights: PushedWeights,
        buckets: asyncio.Queue[Any],
        *,
        is_first: bool,
    ) -> None:
        """Bring a server to the current weights; leave it out if it does not take them."""
        was_used, replica.is_waiting = replica.is_used, False
        try:
            async with replica.lock:
                await self._load(replica, weights, buckets)
            if not was_used:
                self._take_back(replica)
        except (ServerError, RefusedError) as error:
            if isinstance(error, RefusedError):
                error = ServerError("status", str(error))
                if is_first:
                    raise UserError(
                        f"{replica.server.url} does not take the learner's weights ({error}); it "
                        f"has to serve the same model, and to {self._transfer.advice}"
                    ) from None
            if error.kind == "differs":
                raise UserError(f"{replica.server.url}: {error}") from None
            self._leave_out(replica, error)
            # Nobody knows what it samples with now.
            replica.give_up_requests()

    async def _load(
        self, replica: Replica, weights: PushedWeights, buckets: asyncio.Queue[Any]
    ) -> None:
        """Bring weights to a server, and compare it with the learner.

        Raises:
            ServerError: It does not take them, or computes something else with them.
            RefusedError: It will never take them.
        """
        server, timeout_s = replica.server, self._config.push_s
        stream = _until_none(await buckets.get(), buckets)
        async with server.paused():
            await self._transfer.send(
                server, weights.name, stream, ranks=replica.ranks, timeout_s=timeout_s
            )
        await self._compare(replica, weights)

    async def _has(self, replica: Replica, weights: PushedWeights) -> bool:
        """Tell whether a server has these weights: one that failed may have missed none."""
        try:
            await self._compare(replica, weights)
        except ServerError as error:
            if error.kind != "stale":
                raise
            return False
        return True

    async def _compare(self, replica: Replica, weights: PushedWeights) -> None:
        """See that a server computes what the learner does with these weights.

        Raises:
            ServerError: It has others, or computes something else.
            RefusedError: It does not take the probe.
        """
        ids, tolerance = self._requirements.probe_ids, self._requirements.tolerance
        timeout_s = self._config.push_s
        values, name = await replica.server.score(ids, rid=_new_rid(), timeout_s=timeout_s)
        if name != weights.name:
            raise ServerError("stale", f"has weights {name}, not {weights.name}")
        probe = np.asarray(weights.probe)
        gap = float(np.mean(np.abs(np.asarray(values[-len(probe) :]) - probe)))
        replica.gap = max(gap, replica.gap if replica.weights is weights else 0.0)
        replica.weights = weights
        if not gap <= tolerance:
            raise ServerError(
                "differs",
                f"log-probabilities of a probe differ from the learner's by {gap:.3g} on average, "
                f"with the same weights; rollout.sglang.tolerance is {tolerance:g}",
            )

    async def _wait_for_any(self) -> None:
        try:
            async with asyncio.timeout(self._config.wait_s):
                await self._any_used.wait()
        except TimeoutError:
            raise ServersLostError(
                f"no SGLang server came back within rollout.sglang.wait_s = "
                f"{self._config.wait_s:g} s ({self._last_problem})"
            ) from None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a fault of ours", exc_info=task.exception())


def _new_rid() -> str:
    return f"minirl-{_rid_start}-{next(_rids)}"


async def _put(queue: asyncio.Queue[Any], bucket: Any, task: asyncio.Task[None]) -> None:
    """Hand over a bucket, unless the task that would take it has ended."""
    putting = asyncio.ensure_future(queue.put(bucket))
    await asyncio.wait({putting, task}, return_when=asyncio.FIRST_COMPLETED)
    putting.cancel()


async def _until_none(bucket: Any, buckets: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while bucket is not None:
        yield bucket
        bucket = await buckets.get()
