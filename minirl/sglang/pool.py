"""Several SGLang servers as one: which of them answers, which is left out and taken back.

A server that fails in any way is left out, and its requests are asked elsewhere, whole: a request
holds all tokens of its episode so far. Meanwhile the server is probed, brought to the current
weights, and taken back. All of this runs in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Coroutine, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_fixed,
)

from minirl.config import SglangConfig
from minirl.errors import LostError, UserError
from minirl.sglang.client import TESTED, Generated, RejectedError, Server, ServerError, ServerInfo
from minirl.sglang.metrics import EVENTS, IN_USE, PROBE_GAP
from minirl.sglang.process import ChildServer
from minirl.types import Request

_OLDEST = (0, 5)
_HEARTBEAT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_FAILURES = (ServerError, RejectedError)
_TRIES = 12
"""Of a request, before the run stops."""
# Health checks that a launched server may keep waiting before it is started anew. One that is
# only starting refuses them at once.
_HUNG_CHECKS, _AT_ONCE_S = 2, 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a server has to be: the model's architectures (one of them), rows of the embedding,
    tokens of the longest episode, whether it is given adapters; and how its log-probabilities of
    some tokens may differ.
    """

    architectures: tuple[str, ...]
    vocab_size: int
    context: int
    has_adapters: bool
    probe_ids: tuple[int, ...]
    tolerance: float

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
            "loads no adapters with --dp-size; start several servers in its place": (
                self.has_adapters and info.dp_size > 1
            ),
        }
        for words, is_so in flaws.items():
            if is_so:
                raise UserError(f"rollout.sglang: {url} {words}")


@dataclass(frozen=True, slots=True)
class PushedWeights:
    """Weights of the learner: as servers call them, each name used once; in the order of pushes; as
    the learner counts them; where servers read them; and its log-probabilities of the probe's last
    ids, at temperature 1.
    """

    name: str
    number: int
    version: int
    folder: Path
    probe: Sequence[float]


class Replica:
    """A server and what the pool knows of it. To be made in a running event loop.

    Methods that ask the server raise as those of `Server` do.

    Attributes:
        child: Its process, if this process started it.
        asked: Requests under way, and those that wait for one of the `slots`.
        requests: Of those under way, what can end the waiting.
        lock: Held while weights are brought to it.
        left_out: Set while it is not in use.
        hung_checks: Health checks that it kept waiting since it was last well.
        weights: Last ones that it was compared with.
        gap: Its difference to the learner with these.
    """

    def __init__(
        self,
        server: Server,
        child: ChildServer | None,
        config: SglangConfig,
        requirements: Requirements,
    ) -> None:
        self.server, self.child = server, child
        self._config, self._requirements = config, requirements
        self.asked, self.hung_checks, self.gap = 0, 0, 0.0
        self.requests: set[asyncio.Timeout] = set()
        self.slots, self.lock = asyncio.Semaphore(config.parallel), asyncio.Lock()
        self.left_out = asyncio.Event()
        self.weights: PushedWeights | None = None

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
        await self.server.check_health(timeout_s=self._config.health_s)

    async def check_ready(self) -> None:
        """See that it samples, also if a run that was killed left it paused, and what."""
        await self.server.resume()
        await self.check_health()
        self._requirements.check(await self.server.info(), self.server.url)

    async def load(self, weights: PushedWeights) -> None:
        """Bring it to these weights; it samples meanwhile, but for a moment."""
        server = self.server
        load = server.load_adapters if self._requirements.has_adapters else server.load_weights
        await load(weights.folder, weights.name, timeout_s=self._config.wait_s)
        await self.compare(weights)

    async def compare(self, weights: PushedWeights) -> None:
        """See that it computes what the learner does with these weights.

        Raises:
            ServerError: `stale`: it has others; `differs`: it does not.
        """
        ids, tolerance = self._requirements.probe_ids, self._requirements.tolerance
        values, name = await self.server.score(ids, timeout_s=self._config.wait_s)
        if name != weights.name:
            raise self.server.error("stale", f"has weights {name}, not {weights.name}")
        probe = np.asarray(weights.probe)
        self.gap = float(np.mean(np.abs(np.asarray(values[-len(probe) :]) - probe)))
        self.weights = weights
        if not self.gap <= tolerance:
            raise self.server.error(
                "differs",
                f"log-probabilities of a probe differ from the learner's by {self.gap:.3g} on "
                f"average, with the same weights; rollout.sglang.tolerance is {tolerance:g}",
            )


class ServerPool:
    """The servers of one process, each with its own process if this one started it.

    To be made and used in a running event loop.
    """

    def __init__(
        self,
        servers: Sequence[tuple[Server, ChildServer | None]],
        config: SglangConfig,
        requirements: Requirements,
    ) -> None:
        self._config, self._vocab_size = config, requirements.vocab_size
        self._replicas = [Replica(*pair, config, requirements) for pair in servers]
        self._pushed: dict[str, PushedWeights] = {}
        self._weights: PushedWeights | None = None
        self._homes: dict[Hashable, Replica] = {}
        self._any_used = asyncio.Event()
        self._any_used.set()
        self._last_problem: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: Counter[str] = Counter()

    async def check(self) -> None:
        """Wait until all servers are ready, and refuse what serves something else."""
        await asyncio.gather(*map(self._check_first, self._replicas))
        for replica in self._replicas:
            self._spawn(self._look_after(replica))

    async def push(self, weights: PushedWeights) -> None:
        """Bring all servers in use to new weights; those that fail are left out.

        Raises:
            UserError: A server computes something else with them than the learner.
            LostError: No server has taken them.
        """
        is_first = self._weights is None
        self._weights = self._pushed[weights.name] = weights
        used = (replica for replica in self._replicas if replica.is_used)
        await asyncio.gather(*(self._push_to(one, weights, is_first=is_first) for one in used))
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
        rid, oldest = uuid.uuid4().hex, replica.weights.number if replica.weights else 0
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
            raise replica.server.error("hung", "hangs, and with it this request") from None
        finally:
            replica.requests.discard(waiting)
            if generated is None:  # the server would go on with it
                self._spawn(replica.server.abort(rid))
        for name in set(generated.versions):
            if name not in self._pushed or self._pushed[name].number < oldest:
                raise replica.server.error("stale", f"replies with weights {name}")
        return generated

    def _leave_out(self, replica: Replica, error: ServerError) -> None:
        self._events[f"failed_{error.kind}"] += 1
        self._last_problem = error
        if not replica.is_used:
            return
        replica.left_out.set()
        self._events["left_out"] += 1
        _log.warning("a server is left out: %s", error)
        if not any(one.is_used for one in self._replicas):
            self._any_used.clear()

    def _take_back(self, replica: Replica) -> None:
        replica.left_out.clear()
        self._any_used.set()
        self._events["taken_back"] += 1
        _log.warning("%s is taken back", replica.server.url)

    async def _look_after(self, replica: Replica) -> None:
        """Check a server in use now and then; bring back one that is left out."""

        pause_s = _FIRST_PAUSE_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT_S):
                    await replica.left_out.wait()
            if replica.is_used:
                await self._check_heartbeat(replica)
                continue
            await asyncio.sleep(pause_s)
            try:
                await self._bring_back(replica)
                pause_s = _FIRST_PAUSE_S
            except (*_FAILURES, UserError, OSError) as error:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self._last_problem = error
                replica.give_up_requests()

    async def _check_heartbeat(self, replica: Replica) -> None:
        """Notice that a server hangs: requests to it would wait for their own deadline."""
        try:
            if replica.requests and not replica.lock.locked():
                await replica.check_health()
        except _FAILURES as error:
            if not replica.lock.locked():  # it is well, and paused for new weights
                self._leave_out(replica, ServerError("hung", str(error)))
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
            weights = self._weights
            assert weights is not None  # before the first push no server is left out
            try:
                await replica.compare(weights)
            except ServerError as error:
                if error.kind != "stale":
                    raise
                await replica.load(weights)
            if weights is not self._weights:
                raise replica.server.error("stale", "newer weights came meanwhile")
        self._take_back(replica)

    async def _check_first(self, replica: Replica) -> None:
        child, wait_s = replica.child, self._config.wait_s

        async def check() -> None:
            if child is not None and not child.is_running:
                raise UserError(f"rollout.sglang.launch: a server ended: {child.log_tail()}")
            await replica.check_ready()

        failures = retry_if_exception_type(ServerError)
        stop, wait = stop_after_delay(wait_s), wait_fixed(_FIRST_PAUSE_S)
        try:
            await AsyncRetrying(retry=failures, stop=stop, wait=wait, reraise=True)(check)
        except RejectedError as error:
            raise UserError(f"rollout.sglang: this is no SGLang server: {error}") from None
        except ServerError as error:
            advice = child.log_tail() if child else "start it, or take it out of the list"
            raise UserError(
                f"rollout.sglang: a server serves nothing after wait_s = {wait_s:g} s ({error}); "
                f"{advice}"
            ) from None

    async def _push_to(self, replica: Replica, weights: PushedWeights, *, is_first: bool) -> None:
        """Bring a server to new weights; leave it out if it does not take them."""
        try:
            async with replica.lock:
                await replica.load(weights)
        except _FAILURES as error:
            if isinstance(error, RejectedError):
                if is_first:
                    raise UserError(
                        f"a server does not take the learner's weights ({error}); it has to serve "
                        "the same model, and to see rollout.sglang.weights at the same path"
                    ) from None
                error = ServerError("status", str(error))
            if error.kind == "differs":
                raise UserError(str(error)) from None
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
