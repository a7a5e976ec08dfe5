"""The native sampler: a fixed number of slots that decode side by side.

A slot is taken as soon as it is free. A prompt is computed once for all the episodes that share it,
from where it differs from another one in the cache; a later turn computes only its new tokens, and
tokens are drawn in a loop on the device. Each episode draws from its own random stream, so what it
says does not depend on its slot or its neighbours (but for rounding).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from threading import Event

import jax
import numpy as np
from flax import nnx

from minirl.config import SamplerConfig
from minirl.exchange import UserError
from minirl.exchange.memory import trim
from minirl.model.decoder import Decoder
from minirl.model.sharding import device_bytes, platform_of
from minirl.sample import decode
from minirl.sample.cache import (
    GB,
    Cache,
    cache_room,
    cache_shapes,
    device_memory,
    empty_cache,
    plan_cache,
)
from minirl.sample.slots import SlotEpisode, Slots, SlotState
from minirl.sample.weights import copy_shapes, local_model, local_params
from minirl.types import Reply, Request, Tokenizer

_log = logging.getLogger(__name__)
# A stop signal is heard between two waits.
_LONGEST_WAIT_S = 0.5


class NativeSampler:
    """Sample replies with a `Decoder` on this process's devices.

    Attributes:
        work: `steps` of the decode loop so far, slots that these went over (`decoded`), also
            without a reply or after its end, and tokens computed ahead of the loop (`filled`).
    """

    def __init__(
        self,
        model: Decoder,
        config: SamplerConfig,
        tokenizer: Tokenizer,
        *,
        group_size: int,
        seed: int,
    ) -> None:
        """Compile nothing yet; `set_weights` comes before the first reply.

        Args:
            model: The learner's: structure, weights that are not trained, and mesh.
            config: Slots, lengths and the memory of the cache.
            tokenizer: Tells stop tokens, and the text of a reply.
            group_size: Episodes that share one kept prompt; more keep it again.
            seed: With an episode's number it decides the episode's random stream.

        Raises:
            UserError: The cache's memory does not hold one longest episode.
        """
        self.work = Counter[str]()
        self._tokenizer, self._dtype = tokenizer, model.dtype
        self._stop_ids = frozenset(tokenizer.stop_ids)
        # Keys need no end, so one program serves all tokenizers, and a plan, which has none.
        self._ends_of_states = tuple(sorted(self._stop_ids)) if model.config.hybrid else ()
        self._key = jax.random.key(seed)
        self._graph, self._frozen, self._mesh = local_model(model)
        known = config.repeatable
        self.is_repeatable = platform_of(self._mesh) == "cpu" if known is None else known
        self._woken = Event()
        weights, kind = nnx.state(model), {"dtype": model.dtype, "mesh": self._mesh}
        room = cache_room(
            device_memory(self._mesh),
            held_bytes=device_bytes((weights, copy_shapes(weights, self._mesh, model.dtype))),
            platform=platform_of(self._mesh),
        )
        shape = plan_cache(model.config, config, group_size=group_size, room=room, **kind)
        self._arrays = cache_shapes(shape, model.config, **kind)
        if (slots := shape.parts * shape.slots) < config.slots:
            _log.info(
                "sampler: %d of %d slots fit into the cache, %.3g GB on each device; set "
                "sampler.cache_gb, or lower sampler.max_response_tokens, for more",
                slots, config.slots, device_bytes(self._arrays) / GB,
            )  # fmt: skip
        self._slots = Slots(shape)
        self._episodes: dict[int, SlotEpisode] = {}
        self._queue: deque[SlotEpisode] = deque()
        # Once a nucleus is asked for, all programs are those that know of it.
        self._any_top_p = config.top_p < 1
        self._cache: Cache | None = None
        self._model: Decoder | None = None
        self._version = 0
        self._compiled = decode.compilations()

    def set_weights(self, weights: nnx.State, *, version: int) -> None:
        """Sample with a copy of these weights, in the type of the computation.

        They are those of the learner that are trained (`lora.trained`). All processes have to call
        it. Running episodes go on with them: what they have so far is computed again.
        """
        # The old copy goes before there is a new one, of which there are two for a moment; and so
        # does the cache, whose keys are of old weights.
        self._cache = self._model = None
        local = local_params(weights, self._mesh, self._dtype)
        self._model = decode.prepare(nnx.merge(self._graph, local, self._frozen))
        self._version = version
        self._slots.forget()

    def send_weights(self, weights: nnx.State, *, version: int) -> None:
        """Do nothing: the copy takes memory that the learner may need."""

    def numbers(self) -> dict[str, float]:
        """Return metrics since the weights were set, and the programs compiled so far."""
        return {"time/sampler_compilations": float(decode.compilations() - self._compiled)}

    def free_memory(self) -> None:
        """Give the memory of the copy and of the cache back; `set_weights` takes it again."""
        if self._episodes:
            raise RuntimeError("memory freed while episodes were being sampled")
        self._cache = self._model = None
        self._slots.forget()
        trim()

    def apart(self) -> NativeSampler:
        """Raise: it takes turns with the learner, which `rollout.lag` is refused for."""
        raise NotImplementedError

    def submit(self, request: Request) -> None:
        """Ask for a reply: the first of an episode waits for a slot, a later one has its own."""
        known = self._episodes.get(request.episode)
        # The last token of a prompt is fed by the decode loop: that draws the first token.
        episode = known or SlotEpisode(request.episode, request.ids[:-1])
        if not self._episodes:
            # What is sampled now does not depend on what was sampled before.
            self._slots.forget()
        episode.start(request)
        self._any_top_p |= request.top_p < 1
        if known is None:
            self._episodes[episode.number] = episode
            self._queue.append(episode)

    def advance(self, *, max_steps: int) -> list[tuple[int, Reply]]:
        """Fill free slots, then decode up to `max_steps` tokens each; return ended replies.

        With nothing to decode it waits for `wake`, if the sampler is not repeatable.
        """
        if self._model is None:
            raise RuntimeError("no weights to sample with: call set_weights first")
        while self._queue and self._slots.assign(self._queue[0]):
            self._queue.popleft()
        prompts, slots = self._cache or empty_cache(self._arrays)
        while True:
            if (copy := self._slots.next_copy()) is not None:
                prompts = decode.copy(self._model, prompts, *copy)
            if (new := self._slots.fill_prompts()) is None:
                break
            prompts = decode.fill(self._model, prompts, None, *new)
        while (new := self._slots.fill_slots()) is not None:
            slots = decode.fill(self._model, slots, prompts, *new)
        self.work["filled"] = self._slots.tokens_filled
        self._cache = Cache(prompts, slots)
        state, active = self._slots.state()
        if active:
            return self._decode(self._model, self._cache, state, active, max_steps)
        if not self.is_repeatable:
            self._woken.wait(_LONGEST_WAIT_S)
        self._woken.clear()
        return []

    def wake(self) -> None:
        """Let an `advance` that has nothing to decode return."""
        self._woken.set()

    def release(self, episode: int) -> None:
        """Forget an episode wherever it is; its slot is free."""
        known = self._episodes.pop(episode, None)
        if known is None:
            return
        if known.slot is None:
            self._queue.remove(known)
        else:
            self._slots.leave(known)

    def _decode(
        self,
        model: Decoder,
        cache: Cache,
        state: SlotState,
        active: Sequence[tuple[int, SlotEpisode]],
        max_steps: int,
    ) -> list[tuple[int, Reply]]:
        # A slot that ends is soon taken where episodes wait for one; else it can as well idle.
        last = min if self._queue else max
        steps = min(max_steps, decode.MAX_STEPS, last(episode.left for _, episode in active))
        slots, *drawn = decode.decode(
            model,
            cache.slots,
            cache.prompts,
            state,
            self._key,
            np.int32(steps),
            any_top_p=self._any_top_p,
            stop_ids=self._ends_of_states,
        )
        self._cache = cache._replace(slots=slots)
        ids_SW, logprobs_SW = (np.asarray(array_WS)[:steps].T for array_WS in drawn)
        self.work["steps"] += steps
        self.work["decoded"] += steps * len(state.token_S)
        replies = []
        for s, episode in active:
            reply = self._extend(episode, ids_SW[s].tolist(), logprobs_SW[s].tolist())
            if reply is not None:
                replies.append((episode.number, reply))
        return replies

    def _extend(self, episode: SlotEpisode, ids: list[int], logprobs: list[float]) -> Reply | None:
        """Append what an episode drew, up to a stop token or the last token asked for; return its
        reply if that is the end of it.

        Raises:
            UserError: The model gives no numbers, of which no token can be drawn.
        """
        end = next((at + 1 for at, i in enumerate(ids) if i in self._stop_ids), len(ids))
        end = min(end, episode.left)
        ids, logprobs = ids[:end], logprobs[:end]
        if not np.isfinite(logprobs).all():
            raise UserError(
                f"the model gives no numbers to draw from: its weights are NaN or infinite, or too "
                f"large for {np.dtype(self._dtype).name}; copy them anew, or set "
                "model.dtype=float32"
            )
        episode.ids += ids
        episode.logprobs += logprobs
        episode.versions += [self._version] * len(ids)
        episode.filled += len(ids)
        episode.left -= len(ids)
        is_stopped = ids[-1] in self._stop_ids
        if episode.left and not is_stopped:
            return None
        episode.left = 0
        new_ids = tuple(episode.ids[-len(episode.logprobs) :])
        text = self._tokenizer.decode(new_ids[:-1] if is_stopped else new_ids)
        finish = "stop" if is_stopped else "length"
        return Reply(new_ids, tuple(episode.logprobs), text, finish, tuple(episode.versions))
