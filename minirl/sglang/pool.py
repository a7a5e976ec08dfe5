"""Several SGLang servers as one: who is in use, which weights they have, who answers what.

A server that fails in any way is left out, and what it was asked is asked elsewhere, whole: a
request holds all tokens of its episode so far. Meanwhile it is probed, brought to the current
weights, and taken back. All of this runs in one event loop.

Where a router is given, it chooses who answers, as long as all servers behind it are well. A bad
answer does not tell whose it is: then all are looked at, and requests go straight to them until the
router has none left to choose that is not well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Hashable, Sequence
from functools import partial
from typing import Any, get_args

from minirl.config import SglangConfig
from minirl.errors import ServersLostError, UserError
from minirl.sglang.client import Kind, RefusedError, Sampled, Server, ServerError, Wish
from minirl.sglang.fanout import Belt
from minirl.sglang.processes import Child
from minirl.sglang.replica import Member, Weights, request_name
from minirl.sglang.requirements import Wanted
from minirl.sglang.transfer import Way

_HEARTBEAT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
# Tries of one request, and refusals of it, before the run stops.
_TRIES, _REFUSALS = 12, 3
# Health checks that a launched server may keep waiting before it is started anew: one that is
# only starting refuses at once.
_CHANCES, _AT_ONCE_S = 2, 5.0
_COUNTED = ("requests", "retries", "left_out", "taken_back", "restarted")
EVENTS = tuple(f"sglang/{name}" for name in (*_COUNTED, *(f"failed_{k}" for k in get_args(Kind))))
"""Metrics that are counts, which add up over processes."""
IN_USE = ("sglang/servers", "sglang/router")
OUT_S, PROBE_GAP = "time/sglang_out_s", "sglang/probe_gap"

_log = logging.getLogger(__name__)


class Fleet:
    """The servers of one process. To be made and used in a running event loop.

    Args:
        servers: Each with the child that it is, if this process started it.
        config: Deadlines.
        wanted: What they have to be.
        way: How weights come to them.
        router: Chooses among them, if there is one.
        share: Those that this process brings new weights to; others have theirs from others.
    """

    def __init__(
        self,
        servers: Sequence[tuple[Server, Child | None]],
        config: SglangConfig,
        wanted: Wanted,
        way: Way,
        *,
        router: Server | None = None,
        share: slice = slice(None),
    ) -> None:
        self._config, self._way, self._share = config, way, share
        self._member = partial(Member, config=config, wanted=wanted, way=way)
        self._members = [self._member(*pair, parallel=config.parallel) for pair in servers]
        self._router: Member | None = None
        if router is not None:
            room = config.parallel * len(self._members)
            self._router = self._member(router, None, parallel=room)
        self._weights: Weights | None = None
        self._versions: dict[str, int] = {}  # in the order in which they came
        self._has_pushed = False
        self._homes: dict[Hashable, Member] = {}
        self._some = asyncio.Event()
        self._some.set()
        self._last_problem = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._events: Counter[str] = Counter()
        self._out_s = 0.0
        self._later_tokens = self._later_cached = 0  # of prompts that extend an earlier one

    async def check(self) -> None:
        """Wait until all are ready, and see that they serve the model.

        Raises:
            UserError: One is not there, or serves something else.
        """
        await asyncio.gather(*map(self._check_first, self._members))
        for member in self._all:
            self._spawn(self._watch(member))

    async def push(self, weights: Weights, belt: Belt) -> None:
        """Bring all that are in use to new weights; those that fail are left out.

        Args:
            weights: Which.
            belt: Brings their parcels.

        Raises:
            UserError: One computes something else with them than the learner.
            ServersLostError: None has taken them.
        """
        self._weights, self._versions[weights.name] = weights, weights.version
        if self._router is not None:
            await self._follow(self._router)
        share = self._members[self._share]
        takers = [member for member in share if member.is_used or member.is_waiting]
        belt.expect(len(takers))
        await asyncio.gather(*(self._push_to(member, belt) for member in takers))
        await self._wait_for_any()
        self._has_pushed = True

    async def settle(self, weights: Weights) -> None:
        """Take note that all servers have these weights, also those of other processes."""
        if weights is self._weights:
            for member in self._all:
                if member.is_used and not member.is_loading:
                    member.weights = weights.name

    def version_of(self, name: str) -> int:
        """Return the learner's version of weights that were pushed."""
        return self._versions[name]

    async def sample(self, episode: Hashable, wish: Wish) -> Sampled:
        """Let a server write: that of the episode's last reply, if it is in use.

        Weights may change meanwhile: the reply goes on with the new ones.

        Raises:
            UserError: Servers refuse the request.
            ServersLostError: None is left, or none has met the request.
        """
        problem, refusals = "", 0
        is_later = episode in self._homes
        for tried in range(_TRIES):
            self._events["retries"] += tried > 0
            member = await self._seat(episode)
            try:
                sampled = await self._ask(member, wish)
            except ServerError as error:
                problem = f"{member.server.url}: {error}"
                self._leave_out(member, error)
            except RefusedError as error:
                problem, refusals = f"{member.server.url}: {error}", refusals + 1
                if refusals == _REFUSALS:
                    break
            else:
                self._events["requests"] += 1
                if is_later:
                    self._later_tokens += len(wish.ids)
                    self._later_cached += sampled.cached
                return sampled
            finally:
                member.asked -= 1
                member.slots.release()
            self._homes.pop(episode, None)
        if refusals == _REFUSALS:
            raise UserError(f"{problem}; servers refuse this request, see their logs")
        raise ServersLostError(f"a request failed {_TRIES} times, the last time at {problem}")

    def forget(self, episode: Hashable) -> None:
        """Give up an episode's place."""
        self._homes.pop(episode, None)

    def numbers(self) -> dict[str, float]:
        """Give what happened since this was last asked."""
        found = {name: float(self._events[name.removeprefix("sglang/")]) for name in EVENTS}
        found["sglang/servers"] = float(sum(member.is_used for member in self._members))
        if self._router is not None:
            found["sglang/router"] = float(self._router.is_used)
        found[PROBE_GAP] = max((one.gap for one in self._all if one.is_used), default=0.0)
        found["sglang/cached_share"] = self._later_cached / max(self._later_tokens, 1)
        found[OUT_S] = self._out_s
        self._events.clear()
        self._out_s = 0.0
        self._later_tokens = self._later_cached = 0
        return found

    @property
    def _all(self) -> list[Member]:
        return [*self._members, *([] if self._router is None else [self._router])]

    def _home(self, episode: Hashable) -> Member | None:
        """Return who is asked: the router, the server of before, or the least busy one."""
        home = self._homes.get(episode)
        if self._router is not None and self._router.is_used:
            home = self._router
        elif home is None or not home.is_used:
            used = (member for member in self._members if member.is_used)
            home = min(used, key=lambda member: member.asked, default=None)
        if home is not None:
            self._homes[episode] = home
        return home

    async def _seat(self, episode: Hashable) -> Member:
        """Take a place at a server; the caller gives it back."""
        while True:
            member = self._home(episode)
            if member is None:
                await self._wait_for_any()
                continue
            member.asked += 1
            try:
                await member.slots.acquire()
            except asyncio.CancelledError:
                member.asked -= 1
                raise
            if member.is_used:
                return member
            member.asked -= 1
            member.slots.release()

    async def _ask(self, member: Member, wish: Wish) -> Sampled:
        # Newer ones may be on their way: until they are there, these are right.
        rid, since = request_name(), member.weights
        timeout_s = self._config.timeout_s
        answer = asyncio.create_task(member.server.sample(wish, rid=rid, timeout_s=timeout_s))
        is_met = False
        try:
            await asyncio.wait({answer, member.lost}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ServerError("hung", "hangs, and with it this request")
            sampled = answer.result()
            is_met = True
        finally:
            # The server would go on without us.
            if not is_met:
                answer.cancel()
                for one in self._members if member is self._router else [member]:
                    self._spawn(one.server.abort(rid))
        pushed = list(self._versions)
        for name in dict.fromkeys(sampled.versions):
            if name not in pushed[pushed.index(since) :]:
                raise ServerError("stale", f"replies with weights {name}, not {since}")
        return sampled

    def _leave_out(self, member: Member, error: ServerError) -> None:
        self._events[f"failed_{error.kind}"] += 1
        self._last_problem = f"{member.server.url}: {error}"
        if not member.is_used:
            return
        member.is_used, member.left_at = False, time.monotonic()
        _log.warning("%s is left out: %s", member.server.url, error)
        router = self._router
        if member is router:
            self._spawn(self._mend_router(router))
            return
        self._events["left_out"] += 1
        if not any(member.is_used for member in self._members):
            self._some.clear()
        self._spawn(self._mend(member))
        if router is not None and router.is_used:
            # It may still choose this server.
            router.is_used, router.left_at = False, time.monotonic()
            self._spawn(self._mend_router(router))

    async def _mend(self, member: Member) -> None:
        """Take a server back when it is well."""
        pause, chances = _FIRST_PAUSE_S, _CHANCES
        at_once_s = min(_AT_ONCE_S, self._config.health_s / 2)
        while member in self._members:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            try:
                self._events["restarted"] += await member.restart(is_hung=not chances)
                chances = chances or _CHANCES
                async with member.lock:
                    begun = time.monotonic()
                    try:
                        await member.check_health()
                    except ServerError:
                        chances -= time.monotonic() - begun > at_once_s
                        raise
                    chances = _CHANCES
                    await member.meet()
                    weights = self._weights
                    if weights is None or weights.again is not None:
                        await member.load(self._current)
                    elif not await member.has(weights) or weights is not self._weights:
                        member.is_waiting = True
                        return
            except (ServerError, RefusedError, UserError, OSError) as error:
                self._last_problem = f"{member.server.url}: {error}"
                self._lose(member)
                continue
            self._take_back(member)
            return

    async def _follow(self, router: Member) -> None:
        """Take in servers that the router has got, and let those go that it has no more."""
        try:
            listed = {server.url: server for server in await router.server.workers()}
        except (ServerError, RefusedError) as error:
            self._leave_out(router, ServerError("connection", str(error)))
            return
        known = {member.server.url: member for member in self._members}
        for url in known.keys() - listed.keys():
            self._members.remove(known[url])
            known[url].is_used = False
            self._lose(known[url])
        for url in listed.keys() - known.keys():
            member = self._member(listed[url], None, parallel=self._config.parallel)
            self._members.append(member)
            self._spawn(self._watch(member))
            self._leave_out(member, ServerError("stale", "is new, and has no weights yet"))
        # All processes have them in one order.
        self._members.sort(key=lambda member: member.server.url)
        if not any(member.is_used for member in self._members):
            self._last_problem = f"{router.server.url} has no worker that is well"
            self._some.clear()

    async def _mend_router(self, router: Member) -> None:
        """Take the router back when none that it may choose is left out, and it passes on."""
        pause = _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            await asyncio.gather(*map(self._look, self._members))
            weights = self._weights
            # A router without servers passes nothing on.
            used = [member.is_used for member in self._members]
            if weights is None or not used or not all(used):
                continue
            try:
                await router.compare(weights)
            except (ServerError, RefusedError) as error:
                self._last_problem = f"{router.server.url}: {error}"
                self._lose(router)
                continue
            held = {member.weights for member in self._members}
            # The oldest that any may answer with.
            router.weights = next(name for name in self._versions if name in held)
            self._take_back(router)
            return

    async def _look(self, member: Member) -> None:
        """Leave a server out that is not well, or has other weights than it should."""
        weights = self._weights
        if weights is None or not member.is_used or member.weights != weights.name:
            return
        try:
            await member.server.check_health(timeout_s=self._config.health_s)
            await member.compare(weights)
        except (ServerError, RefusedError) as error:
            found = error if isinstance(error, ServerError) else ServerError("status", str(error))
            if weights is self._weights and not member.is_loading:
                self._leave_out(member, found)
                self._lose(member)

    def _lose(self, member: Member) -> None:
        """Let what a server was asked be asked elsewhere."""
        # Nobody knows where a router has sent a request.
        for one in {member, self._router or member}:
            if not one.is_used and not one.lost.done():
                one.lost.set_result(None)

    def _take_back(self, member: Member) -> None:
        member.is_used = True
        member.lost = asyncio.get_running_loop().create_future()
        out_s = time.monotonic() - member.left_at
        if member in self._members:
            self._some.set()
            self._out_s += out_s
            self._events["taken_back"] += 1
        _log.warning("%s is taken back after %.1f s", member.server.url, out_s)

    async def _watch(self, member: Member) -> None:
        """Notice that a server hangs: requests to it would wait for their own deadline."""
        while member in self._all:
            await asyncio.sleep(_HEARTBEAT_S)
            asked = sum(one.asked for one in {member, self._router or member})
            if not (member.is_used and asked) or member.is_loading:
                continue
            try:
                await member.server.check_health(timeout_s=self._config.health_s)
            except ServerError as error:
                if member.is_used and not member.is_loading:
                    self._leave_out(member, ServerError("hung", f"is not well: {error}"))
                    self._lose(member)

    async def _check_first(self, member: Member) -> None:
        end = time.monotonic() + self._config.start_s
        url, child = member.server.url, member.child
        while True:
            try:
                await member.meet()
                await member.check_health()
                return
            except ServerError as error:
                problem = str(error)
            except RefusedError as error:
                raise UserError(f"rollout.sglang: {url} is no SGLang server ({error})") from None
            if child is not None and not child.is_running:
                raise UserError(f"rollout.sglang.launch: a server ended: {child.last_words()}")
            if time.monotonic() > end:
                words = child.last_words() if child else "start it, or take it out of the list"
                raise UserError(
                    f"rollout.sglang: {url} serves nothing after start_s = "
                    f"{self._config.start_s:g} s ({problem}); {words}"
                )
            await asyncio.sleep(_FIRST_PAUSE_S)

    async def _push_to(self, member: Member, belt: Belt) -> None:
        was_used, member.is_waiting = member.is_used, False
        try:
            async with belt.line() as parcels, member.lock:
                await member.load(self._current, parcels)
        except ServerError as error:
            if error.kind == "differs":
                raise UserError(f"{member.server.url}: {error}") from None
            self._has_missed(member, error, was_used=was_used)
        except RefusedError as error:
            if not self._has_pushed:
                raise UserError(
                    f"{member.server.url} does not take the learner's weights ({error}); "
                    f"{self._way.advice}"
                ) from None
            self._has_missed(member, ServerError("status", str(error)), was_used=was_used)
        else:
            if not was_used:
                self._take_back(member)

    def _has_missed(self, member: Member, error: ServerError, *, was_used: bool) -> None:
        if was_used:  # a request may have failed meanwhile: then it is being mended
            self._leave_out(member, error)
            # Nobody knows what it samples with now.
            self._lose(member)
        else:  # it had waited for these weights
            self._events[f"failed_{error.kind}"] += 1
            self._spawn(self._mend(member))

    def _current(self) -> Weights | None:
        return self._weights

    async def _wait_for_any(self) -> None:
        try:
            async with asyncio.timeout(self._config.wait_s):
                await self._some.wait()
        except TimeoutError:
            raise ServersLostError(
                f"no SGLang server came back within rollout.sglang.wait_s = "
                f"{self._config.wait_s:g} s ({self._last_problem})"
            ) from None

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a fault of ours", exc_info=task.exception())
