"""Sampling by SGLang servers: the sampler of a learner whose rollouts others compute.

Token ids go in, token ids and log-probabilities come back; text is only made of what came. New
weights go to all servers, and are compared there with the learner's.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import queue
import resource
import uuid
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, TypeVar
from weakref import ReferenceType, ref

import aiohttp
import jax
import numpy as np
from flax import nnx

from minirl import hosts, preemption
from minirl.batching import TokenRow
from minirl.belt import Belt
from minirl.children import Child, launch
from minirl.config import SamplerConfig, SglangConfig
from minirl.errors import UserError
from minirl.fleet import Fleet, Wanted, Weights, find_workers
from minirl.lora import merged, split
from minirl.model import Decoder, read_config
from minirl.push import remove_versions, version_folder
from minirl.reading import read_json
from minirl.rules import check_installed
from minirl.server import Sampled, Server, Wish
from minirl.types import Reply, Request, Tokenizer
from minirl.ways import WAYS, Parcel

# Longest wait between two looks for a signal.
_LOOK_S = 0.2
_CONNECT_S = 10.0
_CLOSE_S = 10.0
# Files of a process that are no connections to servers: data, databases, logs, devices.
_OTHER_FILES = 512
# Servers close connections that nobody used for 5 s; one that is being closed takes no request.
_IDLE_S = 2.0
_PROBE_TOKENS = 64
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
_Made = TypeVar("_Made")
# Samplers of one process, told apart.
_marks = itertools.count()
# Pushes of one process, told apart; all processes make the same ones.
_pushes = itertools.count()

# Ids of the probe that are a prompt: its last token is fed with the answer.
_PROBE_PROMPT = 2
Rows = Sequence[Sequence[TokenRow]]
# Of the learner: log-probabilities of the ids of rows, under weights and at a temperature.
Logprobs = Callable[[nnx.State, Rows, float], list[list[np.ndarray]]]


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
            probe_ids=tuple(ids[: max(context - 1, _PROBE_PROMPT + 1)].tolist()),
            tolerance=config.tolerance or _TOLERANCE[dtype],
        )
        self._loop = asyncio.new_event_loop()
        self._client: aiohttp.ClientSession | None = None
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
            for child in children:
                stack.callback(child.close)
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
                hosts.gather(partial(bring, parcel))
            # All processes' servers have them.
            self.run(self.fleet.settle(weights))
        finally:
            pushed.cancel()
        return size, made_s

    def _result(self, future: Future[_Made]) -> _Made:
        while True:
            try:
                return future.result(_LOOK_S)
            except TimeoutError:
                if future.done():
                    return future.result()
                try:
                    preemption.check()
                except BaseException:
                    future.cancel()
                    raise

    async def _open(self, children: Sequence[Child]) -> None:
        # Deadlines are those of each request; a proxy of the world outside is none of a cluster's.
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        config, router, share = self._config, None, slice(None)
        found: list[tuple[Server, Child | None]]
        found = [(Server(child.url, self._client), child) for child in children]
        found += [(Server(url, self._client), None) for url in _own(config.urls)]
        if config.router is not None:
            router = Server(config.router, self._client)
            behind = await find_workers(router, timeout_s=config.start_s)
            _check_enough(config, "router", len(behind))
            found = [(server, None) for server in behind]
            # It may choose any for each process; new weights come to each from one.
            share = slice(jax.process_index(), None, hosts.count())
        _allow_connections((len(found) + len(found) * (router is not None)) * config.parallel)
        self._fleet = Fleet(found, config, self._wanted, self.way, router=router, share=share)
        await self._fleet.check()

    def _stop(self, thread: Thread) -> None:
        async def end() -> None:
            own = asyncio.current_task()
            others = [task for task in asyncio.all_tasks() if task is not own]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if self._client is not None:
                await self._client.close()

        self.start(end()).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join(_CLOSE_S)
        self._loop.close()
        remove_versions(self.place)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that has its answer, or failed."""

    episode: int
    answer: Future[Sampled]


class SglangSampler:
    """Samples with SGLang servers. What they draw is not repeatable.

    Args:
        model: Structure, type of the computation, and weights that are not trained.
        tokenizer: Its tokenizer.
        servers: In use.
        logprobs: Asks the learner; all processes have to.
    """

    is_repeatable = False

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, servers: Servers, *, logprobs: Logprobs
    ) -> None:
        self._fleet, self._servers = servers.fleet, servers
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._graph, _, self._frozen = split(model)
        # Servers may still have weights of another run.
        self._name = hosts.from_first(lambda: uuid.uuid4().hex[:8])
        self._begin()

    def _begin(self) -> None:
        self._mark = next(_marks)
        self._asked: dict[int, Future[Sampled]] = {}
        self._ended: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()

    def apart(self) -> SglangSampler:
        """Return another sampler of the same servers and their weights, for another thread."""
        other = copy.copy(self)
        other._begin()
        return other

    def set_weights(self, weights: Any, *, version: int) -> None:
        """Bring the servers to these weights of the learner, wherever they lie.

        What is being sampled goes on with them.

        Raises:
            UserError: A server computes something else with them.
            ServersLostError: No server took them.
        """
        held = self._servers.held
        if held is not None and held.are(weights, version):
            return  # another sampler of these servers has brought them
        self._servers.held = None
        begun = perf_counter()
        wanted = self._logprobs(weights, [[_probe_row(self._servers.probe_ids)]], 1.0)[0][0]
        probed = perf_counter()
        # A version may come twice: as it was trained, and from its checkpoint.
        name = f"{self._name}-{version}-{next(_pushes)}"
        way, alive = self._servers.way, _while_alive(weights)
        whole = lambda: _whole(self._graph, alive(), self._frozen)  # noqa: E731
        again = way.again(whole if _is_apart(weights, self._frozen) else None, name)
        sent = Weights(again, name, version, wanted[_PROBE_PROMPT:].tolist())
        size, made_s = self._servers.push(sent, way.parcels(whole(), name))
        remove_versions(self._servers.place, but=version_folder(self._servers.place, name))
        numbers = {
            "sglang/push_bytes": float(size),
            "time/push_probe_s": probed - begun,
            "time/push_write_s": made_s,
            "time/push_load_s": perf_counter() - probed - made_s,
        }
        self._servers.held = Held(tuple(map(ref, jax.tree.leaves(weights))), version, numbers)

    def numbers(self) -> dict[str, float]:
        """Give what is worth a metric since it was last asked."""

        async def told() -> dict[str, float]:
            return self._fleet.numbers()

        held = self._servers.held
        pushed = {} if held is None else held.numbers
        return {**self._servers.run(told()), **pushed}

    def free_memory(self) -> None:
        """Give nothing back: servers keep their memory."""

    def submit(self, request: Request) -> None:
        """Ask for a reply; returns at once."""
        highest = max(request.ids, default=-1)
        if not request.ids or request.max_tokens < 1:
            raise ValueError(f"episode {request.episode}: an empty prompt or reply was asked for")
        # A server dies of an id that its embedding has not.
        if min(request.ids) < 0 or highest >= self._servers.vocab_size:
            raise ValueError(f"episode {request.episode}: ids outside of the model's vocabulary")
        wish = Wish(
            request.ids,
            request.max_tokens,
            request.decoding,
            tuple(self._tokenizer.stop_ids),
            self._servers.vocab_size,
        )
        work = self._fleet.sample((self._mark, request.episode), wish)
        future = self._asked[request.episode] = self._servers.start(work)
        future.add_done_callback(lambda ended: self._ended.put(_Ended(request.episode, ended)))

    def advance(self, *, max_steps: int) -> list[tuple[int, Reply]]:
        """Wait for replies, or for `wake`, a moment at most; `max_steps` does not matter here.

        Raises:
            UserError: Servers refuse a request.
            ServersLostError: None is left.
        """
        del max_steps
        found: list[tuple[int, Reply]] = []
        try:
            item = self._ended.get(timeout=_LOOK_S)
            while True:
                if item is not None:
                    found += self._taken(item)
                item = self._ended.get_nowait()
        except queue.Empty:
            return found

    def wake(self) -> None:
        """Let `advance` return; from any thread."""
        self._ended.put(None)

    def release(self, episode: int) -> None:
        """Forget an episode, and what was asked for it."""
        future = self._asked.pop(episode, None)
        if future is not None:
            future.cancel()

        async def forget() -> None:
            self._fleet.forget((self._mark, episode))

        self._servers.start(forget())

    def _taken(self, ended: _Ended) -> list[tuple[int, Reply]]:
        episode = ended.episode
        if self._asked.get(episode) is not ended.answer:
            return []  # it was released meanwhile
        del self._asked[episode]
        sampled = ended.answer.result()
        ids = sampled.ids
        is_stopped = ids[-1] in self._tokenizer.stop_ids
        text = self._tokenizer.decode(ids[:-1] if is_stopped else ids)
        finish = "stop" if is_stopped else "length"
        versions = tuple(map(self._fleet.version_of, sampled.versions))
        return [(episode, Reply(ids, sampled.logprobs, text, finish, versions))]


def _probe_row(ids: Sequence[int]) -> TokenRow:
    is_action = np.arange(len(ids)) >= _PROBE_PROMPT
    none = np.zeros(len(ids), np.float32)
    return TokenRow(np.array(ids, np.int32), is_action, none, 0.0, _PROBE_PROMPT)


def _own(urls: Sequence[str]) -> list[str]:
    """Share servers out to the processes; of fewer servers than processes several share one."""
    here = jax.process_index()
    return list(urls[here :: hosts.count()] or urls[here % max(len(urls), 1) :][:1])


def _check_enough(config: SglangConfig, key: str, servers: int) -> None:
    """Refuse fewer servers than processes where each brings weights to its own.

    Raises:
        UserError: There are fewer.
    """
    if config.push != "disk" and servers < hosts.count():
        raise UserError(
            f"rollout.sglang.push: {config.push} needs a server for each of the {hosts.count()} "
            f"processes, and {key} has {servers}; give more, or use disk"
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


def _whole(graph: nnx.GraphDef, params: nnx.State, frozen: nnx.State) -> nnx.State:
    """Return all weights of a model, adapters merged."""
    if not jax.tree.leaves(frozen):
        return params

    def whole(params: nnx.State, frozen: nnx.State) -> nnx.State:
        return nnx.state(merged(nnx.merge(graph, params, frozen)), nnx.Param)

    return jax.jit(whole)(params, frozen)


def _while_alive(params: nnx.State) -> Callable[[], nnx.State]:
    """Return what gives weights that somebody else keeps in memory, for as long as that is so."""
    leaves, tree = jax.tree.flatten(params)
    arrays = tuple(map(ref, leaves))

    def alive() -> nnx.State:
        found = [array() for array in arrays]
        if any(array is None for array in found):
            raise RuntimeError("the learner has other ones")
        return jax.tree.unflatten(tree, found)

    return alive


def _is_apart(params: nnx.State, frozen: nnx.State) -> bool:
    """Tell whether all weights can be had without a program over several devices: those of another
    thread would wait for it, and it for them.
    """
    leaves = jax.tree.leaves((params, frozen))
    is_merged = bool(jax.tree.leaves(frozen))
    return all(
        leaf.is_fully_addressable and not (is_merged and len(leaf.sharding.device_set) > 1)
        for leaf in leaves
    )
