"""The SGLang servers of a process, from their start to their end, and the loop that talks to them.

Everything that waits for a server runs in one event loop, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import resource
import zlib
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic, perf_counter
from typing import Any, TypeVar
from weakref import ReferenceType

import jax
import numpy as np

from minirl.config import SamplerConfig, SglangConfig, check_installed
from minirl.errors import UserError
from minirl.model.decoder import read_config
from minirl.run import distributed, preemption
from minirl.run.reading import read_json
from minirl.sglang.client import Clients, RefusedError, Server, ServerError
from minirl.sglang.fanout import Belt
from minirl.sglang.pool import Fleet
from minirl.sglang.processes import Child, close, launch
from minirl.sglang.push import remove_versions
from minirl.sglang.replica import Weights
from minirl.sglang.requirements import PROBE_PROMPT, Wanted
from minirl.sglang.transfer import WAYS, Parcel

_PAUSE_S = 0.5
_CLOSE_S = 10.0
# Files of a process that are no connections to servers: data, databases, logs, devices.
_OTHER_FILES = 512
_PROBE_TOKENS = 64
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Held:
    """The weights that servers have.

    Attributes:
        arrays: Of the learner; others after each update.
        version: Their version.
        numbers: What bringing them took, for the metrics.
    """

    arrays: Sequence[ReferenceType[Any]]
    version: int
    numbers: Mapping[str, float]

    def are(self, weights: Any, version: int) -> bool:
        """Tell whether they are these."""
        pairs = zip(self.arrays, jax.tree.leaves(weights), strict=True)
        return version == self.version and all(array() is leaf for array, leaf in pairs)


class Servers:
    """The servers of this process, in use between `__enter__` and `__exit__`.

    Args:
        config: Which, or how many to launch.
        model: Hugging Face folder of the model that they serve.
        sampler: Longest prompts and responses.
        dtype: What the learner computes in.
        seed: Decides the probe, and what launched servers draw.
        folder: Run folder.
    """

    def __init__(
        self,
        config: SglangConfig,
        model: Path,
        sampler: SamplerConfig,
        *,
        dtype: str,
        seed: int,
        folder: Path,
    ) -> None:
        check_installed(config)
        if config.urls:
            _check_enough(config, "urls", len(config.urls))
        self._config, self._model, self._dtype = config, model, dtype
        self._seed, self._folder = seed, folder
        self.place = (folder / "weights").absolute()
        if config.weights is not None:
            # Other runs may write there too.
            mark = zlib.crc32(str(folder.absolute()).encode())
            self.place = config.weights.absolute() / f"{folder.name}-{mark:08x}"
        self.way = WAYS[config.push](self.place, dtype)
        self.vocab_size = read_config(model).vocab_size
        described = read_json(model / "config.json", dict[str, Any], advice="copy it again")
        kind = described["model_type"].capitalize()
        ids = np.random.default_rng(seed).integers(0, self.vocab_size, _PROBE_TOKENS)
        context = sampler.max_prompt_tokens + sampler.max_response_tokens
        self._wanted = Wanted(
            architectures=tuple(described.get("architectures") or [f"{kind}ForCausalLM"]),
            vocab_size=self.vocab_size,
            context=context,
            probe_ids=tuple(ids[: max(context - 1, PROBE_PROMPT + 1)].tolist()),
            tolerance=config.tolerance or _TOLERANCE[dtype],
        )
        self._loop = asyncio.new_event_loop()
        self._clients: Clients | None = None
        self._stack = ExitStack()
        self._fleet: Fleet | None = None
        self.held: Held | None = None

    @property
    def fleet(self) -> Fleet:
        """Return the servers in use."""
        assert self._fleet is not None
        return self._fleet

    @property
    def probe_ids(self) -> tuple[int, ...]:
        """Return the tokens that servers are compared with the learner by."""
        return self._wanted.probe_ids

    def __enter__(self) -> Servers:
        """Start what is to be launched, and see that all serve the model.

        Raises:
            UserError: A server is not there, or serves something else.
        """
        remove_versions(self.place)  # of a run that was killed
        with ExitStack() as stack:
            children: list[Child] = []
            if self._config.launch:
                children = launch(
                    self._config, self._model, dtype=self._dtype, seed=self._seed,
                    logs=self._folder,
                )  # fmt: skip
            stack.callback(close, children)
            thread = Thread(target=self._loop.run_forever, name="sglang", daemon=True)
            thread.start()
            stack.callback(self._stop, thread)
            self.run(self._open(children))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def run(self, work: Coroutine[Any, Any, _Made]) -> _Made:
        """Do something in the loop, and wait for it.

        Raises:
            Preempted: A signal came; the work is abandoned.
        """
        return self._result(self.start(work))

    def start(self, work: Coroutine[Any, Any, _Made]) -> Future[_Made]:
        """Do something in the loop; returns at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def push(self, weights: Weights, parcels: Iterator[Parcel]) -> tuple[int, float]:
        """Bring all servers to new weights; all processes have to ask.

        Args:
            weights: Which.
            parcels: Made by all processes together; each is asked for while those before it are on
                their way.

        Returns:
            Bytes, and seconds that making the parcels took.

        Raises:
            UserError: A server computes something else with them.
            ServersLostError: No server took them.
            Preempted: A signal came; the work is abandoned.
        """
        belt, size, made_s = Belt(), 0, 0.0
        pushed = self.start(self.fleet.push(weights, belt))

        def bring(parcel: Parcel | None) -> None:
            self.run(belt.put(parcel))
            if parcel is None or pushed.done():
                self._result(pushed)

        try:
            parcel: Parcel | None = None
            is_over = False
            while not is_over:
                begun = perf_counter()
                parcel = next(parcels, None)
                made_s += perf_counter() - begun
                is_over = parcel is None
                size += 0 if parcel is None else parcel.nbytes
                distributed.gather(partial(bring, parcel))
            # All processes' servers have them.
            self.run(self.fleet.settle(weights))
        finally:
            pushed.cancel()
        return size, made_s

    def _result(self, future: Future[_Made]) -> _Made:
        while True:
            try:
                return future.result(preemption.LOOK_S)
            except TimeoutError:
                if future.done():
                    return future.result()
                try:
                    preemption.check()
                except BaseException:
                    future.cancel()
                    raise

    async def _open(self, children: Sequence[Child]) -> None:
        clients = self._clients = Clients()
        config, router, share = self._config, None, slice(None)
        found: list[tuple[Server, Child | None]]
        found = [(Server(child.url, clients), child) for child in children]
        found += [(Server(url, clients), None) for url in _own(config.urls)]
        if config.router is not None:
            router = Server(config.router, clients)
            behind = await _find_workers(router, timeout_s=config.start_s)
            _check_enough(config, "router", len(behind))
            found = [(server, None) for server in behind]
            # It may choose any for each process; new weights come to each from one.
            share = slice(jax.process_index(), None, distributed.count())
        # What goes through a router may go to its servers too.
        ways = 1 if router is None else 2
        _allow_connections(ways * len(found) * config.parallel)
        self._fleet = Fleet(found, config, self._wanted, self.way, router=router, share=share)
        await self._fleet.check()

    def _stop(self, thread: Thread) -> None:
        async def end() -> None:
            own = asyncio.current_task()
            others = [task for task in asyncio.all_tasks() if task is not own]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if self._clients is not None:
                await self._clients.close()

        # What is slow to end must not hide why all ends.
        with suppress(TimeoutError):
            self.start(end()).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join(_CLOSE_S)
        self._loop.close()
        remove_versions(self.place)


def _own(urls: Sequence[str]) -> list[str]:
    """Share servers out to the processes; of fewer servers than processes several share one."""
    here = jax.process_index()
    return list(urls[here :: distributed.count()] or urls[here % max(len(urls), 1) :][:1])


def _check_enough(config: SglangConfig, key: str, servers: int) -> None:
    """Refuse fewer servers than processes where each brings weights to its own.

    Raises:
        UserError: There are fewer.
    """
    if config.push != "disk" and servers < distributed.count():
        raise UserError(
            f"rollout.sglang.push: {config.push} needs a server for each of the "
            f"{distributed.count()} processes, and {key} has {servers}; give more, or use disk"
        )


def _allow_connections(count: int) -> None:
    """Let this process have so many connections at once, besides its other files.

    Raises:
        UserError: The system does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"rollout.sglang.parallel: {count} requests at once, over all servers of a process, "
            f"need {needed} open files, and the system allows {hard}; lower it, or raise ulimit -n"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


async def _find_workers(router: Server, *, timeout_s: float) -> list[Server]:
    """Return the servers behind a router, in an order that is the same for all who ask.

    Args:
        router: SGLang's.
        timeout_s: Longest wait for it to know of any.

    Raises:
        UserError: It is not there, or no router.
    """
    end, where = monotonic() + timeout_s, f"rollout.sglang.router: {router.url}"
    while True:
        problem = "has no workers"
        try:
            if found := await router.workers():
                return sorted(found, key=lambda server: server.url)
        except ServerError as error:
            problem = f"does not answer ({error})"
        except RefusedError as error:
            raise UserError(f"{where} is no router of SGLang ({error})") from None
        if monotonic() > end:
            raise UserError(f"{where} {problem} after start_s = {timeout_s:g} s")
        await asyncio.sleep(_PAUSE_S)
