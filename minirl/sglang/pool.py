"""Several SGLang servers as one: which of them answers, which is left out and taken back.

A server that fails in any way is left out, and its requests are asked elsewhere, whole: a request
holds all tokens of its episode so far. Meanwhile the server is watched, brought to the current
weights, and taken back. All of this runs in one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from minirl.config import SglangConfig
from minirl.exchange import LostError, UserError
from minirl.sglang import EVENTS, IN_USE
from minirl.sglang.server import Generated, PushedWeights, RejectedError, Server, ServerError
from minirl.types import Request

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_TRIES = 12
"""Of a request, before the run stops."""

_log = logging.getLogger(__name__)


class ServerPool:
    """The servers of one process. To be used in a running event loop."""

    def __init__(self, servers: Sequence[Server], config: SglangConfig) -> None:
        self._servers, self._config = servers, config
        self._pushed: dict[str, PushedWeights] = {}
        self._weights: PushedWeights | None = None
        self._any_used = asyncio.Event()
        self._any_used.set()
        self._last_problem: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: Counter[str] = Counter()

    @property
    def is_loading(self) -> bool:
        """Tell whether a server that goes on after this process is being brought to weights."""
        return any(server.lock.locked() and server.child is None for server in self._servers)

    async def check(self) -> None:
        """Wait until all servers are ready, and refuse what serves something else."""
        await asyncio.gather(*map(self._check_first, self._servers))
        for server in self._servers:
            self._spawn(self._look_after(server))

    async def push(self, weights: PushedWeights) -> float:
        """Bring all servers in use to new weights; those that fail are left out.

        Returns:
            The seconds that it took.

        Raises:
            UserError: A server does not take the first ones.
            LostError: No server has taken them.
        """
        is_first, begun = self._weights is None, time.monotonic()
        self._weights = self._pushed[weights.name] = weights
        used = (server for server in self._servers if server.is_used)
        await asyncio.gather(*(self._push_to(each, weights, is_first=is_first) for each in used))
        await self._wait_for_any()
        return time.monotonic() - begun

    def version_of(self, name: str) -> int:
        """Return the learner's version of weights that were pushed."""
        return self._pushed[name].version

    async def sample(self, request: Request, stop_ids: Sequence[int]) -> Generated:
        """Let a server sample a reply: the one of the episode's number, which has its beginning in
        its cache, or another one if that is not in use.

        Weights may change meanwhile: the reply goes on with the new ones.

        Raises:
            LostError: No server is left, none has answered, or they refuse the request.
        """
        places, failures = itertools.count(request.episode), 0
        while True:
            await self._wait_for_any()
            # By number among those in use, so that a lost server's episodes go to all of them.
            used = [server for server in self._servers if server.is_used]
            server = used[next(places) % len(used)]
            try:
                async with server.slots:
                    if server.is_used:  # still
                        return await self._ask(server, request, stop_ids)
            except RejectedError as error:  # others would refuse it, too
                raise LostError(f"{error}; the server's log says why") from None
            except ServerError as error:
                failures += 1
                self._events["retries"] += 1
                self._leave_out(server, error)
                if failures == _TRIES:
                    raise LostError(
                        f"a request failed {failures} times, at last by {error}"
                    ) from None

    async def numbers(self) -> dict[str, float]:
        """Return metrics of what happened since this was last asked."""
        used = [server for server in self._servers if server.is_used]
        numbers = {name: float(self._events[name.removeprefix("sglang/")]) for name in EVENTS}
        numbers[IN_USE] = float(len(used))
        numbers["sglang/cached_share"] = self._events["cached"] / max(self._events["tokens"], 1)
        self._events.clear()
        return numbers

    async def _ask(self, server: Server, request: Request, stop_ids: Sequence[int]) -> Generated:
        # Newer weights may be on their way: until they are there, these are right.
        rid, oldest = uuid.uuid4().hex, server.weights.number if server.weights else 0
        failed_loads = server.failed_loads
        try:
            generated = await server.generate(request, stop_ids, rid=rid)
        except (ServerError, asyncio.CancelledError):  # the server would go on with it
            self._spawn(server.abort(rid))
            raise
        if server.failed_loads != failed_loads:
            raise server.error("stale", "nobody knows with which weights it replies")
        for name in set(generated.versions):
            if name not in self._pushed or self._pushed[name].number < oldest:
                raise server.error("stale", f"replies with weights {name}")
        self._events["requests"] += 1
        self._events["tokens"] += len(request.ids)
        self._events["cached"] += generated.cached
        return generated

    def _leave_out(self, server: Server, error: ServerError) -> None:
        self._events[f"failed_{error.kind}"] += 1
        self._last_problem = error
        server.weights = None
        if not server.is_used:
            return
        server.left_out.set()
        self._events["left_out"] += 1
        _log.warning("a server is left out: %s", error)
        if not any(other.is_used for other in self._servers):
            self._any_used.clear()

    async def _look_after(self, server: Server) -> None:
        """Bring a server back whenever it is left out; start a child anew that has ended."""
        child, pause_s = server.child, _FIRST_PAUSE_S
        while True:
            await server.left_out.wait()
            await asyncio.sleep(pause_s)
            try:
                if child is not None and not child.is_running:
                    await asyncio.to_thread(child.start)
                    self._events["restarted"] += 1
                await self._bring_back(server)
                pause_s = _FIRST_PAUSE_S
            except (ServerError, UserError, OSError) as error:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self._last_problem = error

    async def _bring_back(self, server: Server) -> None:
        """Take a server back if it is well and takes the current weights."""
        async with server.lock:
            await server.check_ready()
            while server.weights is not (weights := self._weights):  # newer ones may come meanwhile
                assert weights is not None  # before the first push no server is left out
                await server.load(weights)
        server.left_out.clear()
        self._any_used.set()
        self._events["taken_back"] += 1
        _log.warning("%s is taken back", server.url)

    async def _check_first(self, server: Server) -> None:
        """Wait until a server is ready."""
        child, wait_s = server.child, self._config.wait_s
        deadline = time.monotonic() + wait_s
        while True:
            if child is not None and not child.is_running:
                raise UserError(f"rollout.sglang.launch: a server ended: {child.log_tail()}")
            try:
                return await server.check_ready()
            except RejectedError as error:
                raise UserError(f"rollout.sglang: this is no SGLang server: {error}") from None
            except ServerError as error:
                if time.monotonic() >= deadline:
                    advice = child.log_tail() if child else "start it, or take it out of the list"
                    raise UserError(
                        f"rollout.sglang: a server serves nothing after wait_s = {wait_s:g} s "
                        f"({error}); {advice}"
                    ) from None
            await asyncio.sleep(_FIRST_PAUSE_S)

    async def _push_to(self, server: Server, weights: PushedWeights, *, is_first: bool) -> None:
        """Bring a server to new weights; leave it out if it does not take them."""
        try:
            async with server.lock:
                await server.load(weights)
        except ServerError as error:
            if is_first and isinstance(error, RejectedError):
                raise UserError(
                    f"a server does not take the learner's weights ({error}); it has to serve the "
                    "same model, and to see rollout.sglang.weights at the same path"
                ) from None
            self._leave_out(server, error)

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
