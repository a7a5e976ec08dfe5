"""Several SGLang servers as one: which of them answers, which is left out and taken back.

A server that fails in any way is left out, and its requests are asked elsewhere, whole: a request
holds all tokens of its episode so far. Meanwhile the server is probed, brought to the current
weights, and taken back. All of this runs in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

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
from minirl.errors import LostError, UserError
from minirl.sglang.client import Failure, Generated, RejectedError, Server, ServerError
from minirl.sglang.process import ChildServer
from minirl.sglang.replica import Buckets, PushedWeights, Replica, Requirements, new_rid
from minirl.sglang.transfer import Backend, Bucket
from minirl.types import Request

_HEARTBEAT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_FAILURES = (ServerError, RejectedError)
_TRIES = 12
"""Of a request, before the run stops."""
# Health checks that a launched server may keep waiting before it is started anew. One that is
# only starting refuses them at once.
_HUNG_CHECKS, _AT_ONCE_S = 2, 5.0
_COUNTED = ("requests", "retries", "left_out", "taken_back", "restarted")
EVENTS = tuple(f"sglang/{n}" for n in (*_COUNTED, *(f"failed_{k}" for k in get_args(Failure))))
"""Metrics that are counts, which add up over processes."""
IN_USE, PROBE_GAP = "sglang/servers", "sglang/probe_gap"

_log = logging.getLogger(__name__)


class ServerPool:
    """The servers of one process, each with its own process if this one started it.

    To be made and used in a running event loop.
    """

    def __init__(
        self,
        servers: Sequence[tuple[Server, ChildServer | None]],
        config: SglangConfig,
        requirements: Requirements,
        transfer: Backend,
    ) -> None:
        self._config, self._vocab_size = config, requirements.vocab_size
        self._replicas = [Replica(*pair, config, requirements, transfer) for pair in servers]
        self._pushed: dict[str, PushedWeights] = {}
        self._weights: PushedWeights | None = None
        self._stored: Path | None = None  # what a server that missed them can load
        self._pushing: dict[asyncio.Task[None], Buckets] = {}
        self._homes: dict[Hashable, Replica] = {}
        self._any_used = asyncio.Event()
        self._any_used.set()
        self._last_problem = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: Counter[str] = Counter()

    async def check(self) -> None:
        """Wait until all servers are ready, and refuse what serves something else."""
        await asyncio.gather(*map(self._check_first, self._replicas))
        for replica in self._replicas:
            self._spawn(self._look_after(replica))

    async def push(self, weights: PushedWeights, bucket: Path | Bucket | None) -> None:
        """Hand the next bucket of new weights to all servers in use; those that fail are left out.

        Returns when all have room for the bucket, so that the next can be made while this one is on
        its way, and after None, the last, when all servers have the weights.

        Raises:
            UserError: A server computes something else with them than the learner.
            LostError: No server has taken them.
        """
        if weights is not self._weights:
            is_first = self._weights is None
            self._weights = self._pushed[weights.name] = weights
            self._stored = bucket if isinstance(bucket, Path) else None
            self._pushing = {}
            for replica in self._replicas:
                if replica.is_used or replica.is_waiting:
                    queue: Buckets = asyncio.Queue(1)
                    work = self._push_to(replica, weights, queue, is_first=is_first)
                    self._pushing[asyncio.create_task(work)] = queue
        handed = (_put(queue, bucket, task) for task, queue in self._pushing.items())
        await asyncio.gather(*handed)
        if bucket is None:
            await asyncio.gather(*self._pushing)
            await self._wait_for_any()

    async def abandon_push(self) -> None:
        """Let servers go on with what they have."""
        for task in self._pushing:
            task.cancel()

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
            LostError: No server is left, or none has answered.
        """
        is_later = episode in self._homes
        stop, failures = stop_after_attempt(_TRIES), retry_if_exception_type(_FAILURES)
        retrying = AsyncRetrying(retry=failures, stop=stop, reraise=True)
        try:
            generated = await retrying(self._try, episode, request, stop_ids)
        except RejectedError as error:
            raise UserError(f"{error}; servers refuse this request, see their logs") from None
        except ServerError as error:
            raise LostError(f"a request failed {_TRIES} times, at last by {error}") from None
        self._events["requests"] += 1
        if is_later:
            # Of prompts that extend an earlier one.
            self._events["later tokens"] += len(request.ids)
            self._events["later cached"] += generated.cached
        return generated

    async def forget(self, episode: Hashable) -> None:
        """Forget which server has an episode's beginning in its cache."""
        self._homes.pop(episode, None)

    async def numbers(self) -> dict[str, float]:
        """Return metrics of what happened since this was last asked."""
        found = {name: float(self._events[name.removeprefix("sglang/")]) for name in EVENTS}
        found[IN_USE] = float(sum(replica.is_used for replica in self._replicas))
        found[PROBE_GAP] = max((one.gap for one in self._replicas if one.is_used), default=0.0)
        later = self._events["later cached"] / max(self._events["later tokens"], 1)
        found["sglang/cached_share"] = later
        self._events.clear()
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
            except _FAILURES as error:
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
        rid, oldest = new_rid(), replica.weights.number if replica.weights else 0
        waiting, generated = asyncio.timeout(None), None
        try:
            async with waiting:
                replica.requests.add(waiting)
                generated = await replica.server.generate(
                    request,
                    rid=rid,
                    stop_ids=stop_ids,
                    vocab_size=self._vocab_size,
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
        self._events["left_out"] += 1
        _log.warning("%s is left out: %s", replica.server.url, error)
        if not any(one.is_used for one in self._replicas):
            self._any_used.clear()

    def _take_back(self, replica: Replica) -> None:
        if replica.is_used:
            return
        replica.left_out.clear()
        self._any_used.set()
        self._events["taken_back"] += 1
        _log.warning("%s is taken back", replica.server.url)

    async def _look_after(self, replica: Replica) -> None:
        """Check a server in use now and then; bring back one that is left out."""

        def note(state: RetryCallState) -> None:
            assert state.outcome is not None
            self._last_problem = f"{replica.server.url}: {state.outcome.exception()}"
            replica.give_up_requests()

        retrying = AsyncRetrying(
            retry=retry_if_exception_type((*_FAILURES, UserError, OSError)),
            wait=wait_exponential(multiplier=2 * _FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
            before_sleep=note,
        )
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT_S):
                    await replica.left_out.wait()
            if not replica.is_used:
                await asyncio.sleep(_FIRST_PAUSE_S)
            if not replica.is_used and not replica.is_waiting:
                await retrying(self._bring_back, replica)
            elif replica.requests and not replica.lock.locked():
                await self._check_heartbeat(replica)

    async def _check_heartbeat(self, replica: Replica) -> None:
        """Notice that a server hangs: requests to it would wait for their own deadline."""
        try:
            await replica.check_health()
        except _FAILURES as error:
            if not replica.lock.locked():
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
                await replica.check_ready()
            except ServerError:
                at_once_s = min(_AT_ONCE_S, self._config.health_s / 2)
                replica.hung_checks += time.monotonic() - begun > at_once_s
                raise
            replica.hung_checks = 0
            weights, stored = self._weights, self._stored
            assert weights is not None  # before the first push no server is left out
            try:
                await replica.compare(weights)
            except ServerError as error:
                if error.kind != "stale":
                    raise
                if stored is None:
                    replica.is_waiting = True
                    return
                buckets: Buckets = asyncio.Queue()
                for bucket in (stored, None):
                    buckets.put_nowait(bucket)
                await replica.load(weights, buckets)
            if weights is not self._weights:
                raise ServerError("stale", "newer weights came meanwhile")
        self._take_back(replica)

    async def _check_first(self, replica: Replica) -> None:
        url, child, start_s = replica.server.url, replica.child, self._config.start_s

        async def check() -> None:
            if child is not None and not child.is_running:
                raise UserError(f"rollout.sglang.launch: a server ended: {child.log_tail()}")
            await replica.check_ready()

        failures = retry_if_exception_type(ServerError)
        stop, wait = stop_after_delay(start_s), wait_fixed(_FIRST_PAUSE_S)
        try:
            await AsyncRetrying(retry=failures, stop=stop, wait=wait, reraise=True)(check)
        except RejectedError as error:
            raise UserError(f"rollout.sglang: {url} is no SGLang server ({error})") from None
        except ServerError as error:
            advice = child.log_tail() if child else "start it, or take it out of the list"
            raise UserError(
                f"rollout.sglang: {url} serves nothing after start_s = {start_s:g} s ({error}); "
                f"{advice}"
            ) from None

    async def _push_to(
        self, replica: Replica, weights: PushedWeights, buckets: Buckets, *, is_first: bool
    ) -> None:
        """Bring a server to the current weights; leave it out if it does not take them."""
        replica.is_waiting = False
        try:
            async with replica.lock:
                await replica.load(weights, buckets)
            self._take_back(replica)
        except _FAILURES as error:
            if isinstance(error, RejectedError):
                error = ServerError("status", str(error))
                if is_first:
                    raise UserError(
                        f"{replica.server.url} does not take the learner's weights ({error}); it "
                        "has to serve the same model, and to see rollout.sglang.weights at the "
                        "same path (push=disk) or to reach this host (push=nccl)"
                    ) from None
            if error.kind == "differs":
                raise UserError(f"{replica.server.url}: {error}") from None
            self._leave_out(replica, error)
            # Nobody knows what it samples with now.
            replica.give_up_requests()

    async def _wait_for_any(self) -> None:
        try:
            async with asyncio.timeout(self._config.wait_s):
                await self._any_used.wait()
        except TimeoutError:
            raise LostError(
                f"no SGLang server came back within rollout.sglang.wait_s = "
                f"{self._config.wait_s:g} s ({self._last_problem})"
            ) from None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._tasks.discard)


async def _put(queue: Buckets, bucket: Any, task: asyncio.Task[None]) -> None:
    """Hand over a bucket, unless the task that would take it has ended."""
    putting = asyncio.ensure_future(queue.put(bucket))
    await asyncio.wait({putting, task}, return_when=asyncio.FIRST_COMPLETED)
    putting.cancel()
