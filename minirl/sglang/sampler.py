"""Sampling by SGLang servers: the sampler of a learner whose rollouts others compute.

Token ids go in, token ids and log-probabilities come back; text is only made of what came. New
weights go to all servers, and are compared there with the learner's.
"""

from __future__ import annotations

import copy
import itertools
import queue
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from weakref import ref

import jax
import numpy as np
from flax import nnx

from minirl.model.decoder import Decoder
from minirl.model.lora import merged, split
from minirl.run import distributed
from minirl.sglang.client import Sampled, Wish
from minirl.sglang.push import remove_versions, version_folder
from minirl.sglang.replica import Weights
from minirl.sglang.requirements import PROBE_PROMPT
from minirl.sglang.servers import Held, Servers
from minirl.types import Reply, Request, Tokenizer, TokenRow

# Longest wait for a reply before others may go on.
_PAUSE_S = 0.2
# Samplers of one process, told apart.
_marks = itertools.count()
# Pushes of one process, told apart; all processes make the same ones.
_pushes = itertools.count()
Rows = Sequence[Sequence[TokenRow]]
# Of the learner: log-probabilities of the ids of rows, under weights and at a temperature.
Logprobs = Callable[[nnx.State, Rows, float], list[list[np.ndarray]]]


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
        self._name = distributed.from_first(lambda: uuid.uuid4().hex[:8])
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
        sent = Weights(again, name, version, wanted[PROBE_PROMPT:].tolist())
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
            item = self._ended.get(timeout=_PAUSE_S)
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
    is_action = np.arange(len(ids)) >= PROBE_PROMPT
    none = np.zeros(len(ids), np.float32)
    return TokenRow(np.array(ids, np.int32), is_action, none, 0.0, PROBE_PROMPT)


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
