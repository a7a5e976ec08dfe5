"""The native sampler: a fixed number of slots that decode side by side.

A slot is taken as soon as it is free. A prompt is computed once for all the episodes that share it,
a later turn computes only its new tokens, and tokens are drawn in a loop on the device that comes
back when a reply ends. Each episode draws from its own random stream, so what it says does not
depend on its slot or its neighbours (but for rounding).

Keys and values lie in pages, as many as there is memory set aside for. When they run out, the
youngest episode gives its pages back and waits; what was in them is computed again later.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from minirl.config import SamplerConfig
from minirl.model.decoder import Decoder
from minirl.model.lora import split
from minirl.model.sharding import mesh_of
from minirl.sample.decode import (
    MAX_STEPS,
    DecodeSizes,
    Draws,
    Job,
    Segments,
    chunks,
    empty_pool,
    pool_shapes,
    programs,
)
from minirl.sample.pages import plan_pools
from minirl.sample.slots import Episode, Seats
from minirl.types import Reply, Request, Tokenizer

TOP_P_CUT = "sampler/top_p_cut"
"""Metric: the mean probability of the tokens that `top_p` keeps from being drawn."""


@dataclass(slots=True)
class Work:
    """What a sampler has done so far, in tokens unless said otherwise.

    Attributes:
        sampled: Tokens drawn.
        steps: Passes of the decode loop, each over all slots.
        calls: Runs of the decode loop.
        filled: Observation tokens computed ahead of the decode loop.
        preemptions: Episodes whose pages were taken away, to be computed again.
        most_pages: Most pages in use at once since the weights were set.
    """

    sampled: int = 0
    steps: int = 0
    calls: int = 0
    filled: int = 0
    preemptions: int = 0
    most_pages: int = 0


class NativeSampler:
    """Sample replies with a `Decoder` in this process."""

    is_repeatable = True

    def __init__(
        self,
        model: Decoder,
        config: SamplerConfig,
        tokenizer: Tokenizer,
        *,
        group_size: int,
        seed: int,
    ) -> None:
        """Compile nothing and allocate nothing yet.

        Args:
            model: Gives the structure, the first weights and the mesh that they lie on.
            config: Slots, lengths and the memory of the cache.
            tokenizer: Knows the stop tokens and the text of a reply.
            group_size: Episodes that share one kept prompt; more keep it again.
            seed: With an episode's number it decides the episode's random stream.

        Raises:
            UserError: The cache's memory does not hold one longest episode.
        """
        self.work = Work()
        self._config, self._tokenizer = config, tokenizer
        self._model_config, self._dtype = model.config, model.dtype
        self._key = jax.random.key(seed)
        graphdef, weights, self._frozen = split(model)
        self._mesh = mesh_of(weights)
        self._programs = programs(graphdef, tuple(tokenizer.stop_ids), self._mesh)
        self._pools = plan_pools(
            model.config,
            config,
            group_size=group_size,
            itemsize=np.dtype(model.dtype).itemsize,
            mesh=self._mesh,
        )
        self._seats = Seats(self._pools)
        self._episodes: dict[int, Episode] = {}
        self._queue: list[Episode] = []
        self._arrivals = 0
        self._prompt_pool: Segments = []
        self._own_pool: Segments = []
        self._preemptions_before = 0
        # Probability outside of nuclei, summed over tokens, and how many those are.
        self._cut, self._cut_tokens = 0.0, 0
        self._weights: Any = None
        # Copied when they are needed: whoever sets others first does without a copy of these.
        self._first: tuple[Any, int] | None = (weights, 0)

    @property
    def compilations(self) -> int:
        """Count the programs compiled so far, for this model by all its samplers."""
        return self._programs.count()

    def set_weights(self, weights: Any, *, version: int) -> None:
        """Sample with a copy of these weights, in the type of the computation.

        Args:
            weights: Those of the model that are trained (`lora.split`).
            version: Their version.
        """
        if self._episodes:
            raise RuntimeError("weights changed while episodes were being sampled")
        self._copy(weights, version)
        self._seats.forget_prompts()
        self._preemptions_before, self.work.most_pages = self.work.preemptions, 0
        self._cut, self._cut_tokens = 0.0, 0

    def numbers(self) -> dict[str, float]:
        """Give what is worth a metric since the weights were set; programs since the start."""
        cut = {TOP_P_CUT: self._cut / max(self._cut_tokens, 1)} if self._config.top_p < 1 else {}
        return cut | {
            "sampler/preemptions": float(self.work.preemptions - self._preemptions_before),
            "sampler/pages": float(self.work.most_pages),
            "time/sampler_compilations": float(self.compilations),
        }

    def free_memory(self) -> None:
        """Give the memory of the copy and of the caches back; `set_weights` takes it again."""
        if self._episodes:
            raise RuntimeError("memory freed while episodes were being sampled")
        self._prompt_pool, self._own_pool = [], []
        self._first = self._weights = None
        self._seats.forget_prompts()

    def submit(self, request: Request) -> None:
        """Ask for a reply: the first of an episode waits for a slot, a later one has its own."""
        if not request.ids or request.max_tokens < 1:
            raise ValueError(f"episode {request.episode}: an empty prompt or reply was asked for")
        episode = self._episodes.get(request.episode)
        if episode is None:
            episode = self._arrive(request)
        elif request.ids[: len(episode.ids)] != tuple(episode.ids):
            raise ValueError(f"episode {request.episode}: the request rewrites its history")
        response = len(request.ids) - len(episode.prompt_ids) - 1 + request.max_tokens
        if response > self._config.max_response_tokens:
            raise ValueError(
                f"episode {request.episode}: {response} response tokens over max_response_tokens"
            )
        self._episodes[episode.number] = episode
        episode.start(request)
        if episode.slot is None:
            self._wait(episode)

    def advance(self, *, max_steps: int) -> list[tuple[int, Reply]]:
        """Fill free slots, then decode until a reply ends or for `max_steps` tokens each.

        Returns:
            Ended replies by slot; empty when none ended or nothing was asked for.
        """
        steps = min(max_steps, MAX_STEPS)
        if self._first is not None:
            self._copy(*self._first)
        if self._weights is None:
            raise RuntimeError("no weights to sample with: call set_weights first")
        if not self._own_pool:
            self._allocate()
        self._admit()
        self._reserve(steps)
        self._fill_slots()
        active = [episode for episode in self._seats.seated() if episode.left]
        return self._decode(active, steps) if active else []

    def wake(self) -> None:
        """Do nothing: `advance` waits for nobody."""

    def release(self, episode: int) -> None:
        """Forget an episode wherever it is; its slot is free."""
        known = self._episodes.pop(episode, None)
        if known is not None and known.slot is not None:
            self._seats.leave(known)
        self._queue = [waiting for waiting in self._queue if waiting is not known]

    def _copy(self, weights: Any, version: int) -> None:
        # The old copy goes before there is a new one.
        self._first = self._weights = None
        self._weights, self._version = self._programs.prepare(weights, self._frozen), version

    def _arrive(self, request: Request) -> Episode:
        if len(request.ids) > self._config.max_prompt_tokens:
            raise ValueError(f"episode {request.episode}: prompt over max_prompt_tokens")
        self._arrivals += 1
        # The last token of a prompt is fed by the decode loop: that draws the first token.
        return Episode(request.episode, self._arrivals, request.ids[:-1])

    def _wait(self, episode: Episode) -> None:
        bisect.insort(self._queue, episode, key=lambda episode: episode.order)

    def _admit(self) -> None:
        """Give free slots to the queue in its order, and compute the prompts not yet kept."""
        missing: list[Job] = []
        while self._queue:
            jobs = self._seats.seat(self._queue[0])
            if jobs is None:
                break
            del self._queue[0]
            missing += jobs
        self._prompt_pool = self._computed(self._prompt_pool, missing)

    def _reserve(self, steps: int) -> None:
        """Give pages to all who will draw, the oldest first; the youngest go when there are none.

        The oldest of those who draw never goes, so that something always ends.
        """
        active = [episode for episode in self._seats.seated() if episode.left]
        for episode in sorted(active, key=lambda episode: episode.order):
            # Ids come first, all but the last: that one is fed, and then those that are drawn.
            known = len(episode.ids) - 1 - len(episode.prompt_ids)
            while episode.slot is not None and not self._seats.reserve(
                episode, known + min(steps, episode.left)
            ):
                self._preempt(self._seats.youngest(self._seats.part(episode)))
        self.work.most_pages = max(self.work.most_pages, self._seats.pages_in_use())

    def _preempt(self, episode: Episode) -> None:
        """Take an episode's pages away; what it has drawn stays."""
        self._seats.leave(episode)
        self.work.preemptions += 1
        if episode.left:
            self._wait(episode)

    def _fill_slots(self) -> None:
        """Compute the new tokens of later turns, all but the last of each."""
        self._own_pool = self._computed(self._own_pool, self._seats.unfilled())

    def _allocate(self) -> None:
        """Allocate the pools at their first use."""
        self._prompt_pool, self._own_pool = (
            empty_pool(pool_shapes(size, self._model_config, dtype=self._dtype, mesh=self._mesh))
            for size in (self._pools.prompts, self._pools.own)
        )

    def _computed(self, pool: Segments, jobs: Sequence[Job]) -> Segments:
        """Return one of the pools with what jobs add to it."""
        is_prompts = pool is self._prompt_pool
        for chunk in chunks(jobs, self._pools):
            # A prompt's later pieces look back at its earlier ones.
            prompts, own = (pool, self._own_pool) if is_prompts else (self._prompt_pool, pool)
            new = self._programs.fill(self._weights, prompts, own, chunk)
            pool = self._programs.write(pool, new, chunk.pages_BT, chunk.columns_BT)
        self.work.filled += sum(len(job.ids) for job in jobs)
        return pool

    def _decode(self, active: Sequence[Episode], steps: int) -> list[tuple[int, Reply]]:
        prompts, own = self._seats.owners()
        draws = self._seats.draws()
        self._own_pool, ids_WS, logprobs_WS, cut_WS, taken = self._programs.decode(
            self._sizes(draws, own_segments=len(own)),
            self._weights,
            self._prompt_pool[: len(prompts)],
            self._own_pool,
            [*prompts, *own],
            draws,
            self._key,
            np.int32(steps),
        )
        ids_WS = np.asarray(ids_WS)[: int(taken)]
        logprobs_WS = np.asarray(logprobs_WS)[: int(taken)]
        of_nucleus_S = draws.is_active_S & (draws.top_p_S < 1)
        if of_nucleus_S.any():
            self._cut += float(np.asarray(cut_WS)[: int(taken), of_nucleus_S].sum())
            self._cut_tokens += int(taken) * int(of_nucleus_S.sum())
        self.work.calls += 1
        self.work.steps += len(ids_WS)
        self.work.sampled += len(ids_WS) * len(active)
        ended = [
            self._extend(episode, ids_WS[:, s].tolist(), logprobs_WS[:, s].tolist())
            for episode in active
            if (s := episode.slot) is not None
        ]
        return [one for one in ended if one is not None]

    def _sizes(self, draws: Draws, *, own_segments: int) -> DecodeSizes:
        active = draws.is_active_S
        return DecodeSizes(
            own_segments=own_segments,
            any_greedy=bool((draws.temperature_S[active] == 0).any()),
            any_top_p=bool((draws.top_p_S[active] < 1).any()),
            over_nucleus=self._config.logprobs == "nucleus",
        )

    def _extend(
        self, episode: Episode, ids: list[int], logprobs: list[float]
    ) -> tuple[int, Reply] | None:
        """Append what an episode drew; return its reply if that is the end of it."""
        episode.ids += ids
        episode.new_ids += ids
        episode.logprobs += logprobs
        episode.cached += len(ids)
        episode.left -= len(ids)
        is_stopped = episode.ids[-1] in self._tokenizer.stop_ids
        if episode.left and not is_stopped:
            return None
        episode.left = 0
        new_ids = tuple(episode.new_ids)
        text = self._tokenizer.decode(new_ids[:-1] if is_stopped else new_ids)
        finish = "stop" if is_stopped else "length"
        versions = (self._version,) * len(new_ids)
        reply = Reply(new_ids, tuple(episode.logprobs), text, finish, versions)
        return episode.number, reply
