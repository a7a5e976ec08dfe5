"""What fits: the memory of a job, and the largest micro-batch, on devices here or described.

A phase of a job is built as the run builds it, of weights that are shapes: nothing is allocated.
The devices' compiler says what its programs need, and what lies there between them is known from
shapes. An update and a rollout take turns, and so does what they need: the gradient for the one,
the sampler's copy of the weights and its cache for the other. A warm start comes before both, and
has given back what it took when they begin.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import yaml
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Lowered
from pydantic import BaseModel, PositiveInt

from minirl.config import (
    MOST_TOKENS,
    BatchingConfig,
    LoraConfig,
    ModelSource,
    SamplerConfig,
    SftConfig,
    TrainConfig,
)
from minirl.exchange import UserError
from minirl.exchange.memory import trim
from minirl.model.config import ModelConfig, parse_config
from minirl.model.decoder import Decoder
from minirl.model.lora import described, split, trained
from minirl.model.sharding import device_bytes, row_parts, with_shardings
from minirl.plan.compile import Program, compile_program
from minirl.run import memory
from minirl.sample.cache import GB, CacheShape, cache_room, cache_shapes, plan_cache
from minirl.sample.decode import lowered_programs
from minirl.sample.weights import copy_shapes, local_mesh
from minirl.train import supervised, trainer
from minirl.train.batching import BatchShape, largest_shape
from minirl.train.rollouts import needed_slots
from minirl.train.update import Learner
from minirl.types import Progress

FILLED = 0.95
"""Share of a device's memory that a plan fills; the rest is the runtime's or lost between buffers.
Commands let JAX take as much of a GPU (`XLA_CLIENT_MEM_FRACTION`)."""
# How much a compiler does to make a program fast: so libtpu compiles two to three times as quickly.
# With more it also fills memory that is left (a gradient of the 0.5B model: 9.1 GiB, and not 8.1).
_LEVELS = {"tpu": "O1"}
# A CPU's compiler has planned the memory before it writes machine code, and need not write good one
# of what the run does not run.
_UNRUN = {"cpu": {"xla_backend_optimization_level": 0}}
# Those of a sampler and of an update.
_PROGRAMS = 4
# A CPU's process keeps its compiled programs in memory: about six of rollouts, six of evaluations,
# and after forty steps the update's, in 24 sizes, which take as much as these together.
_KEPT_PROGRAMS = 12
# Sizes of a micro-batch that are tried, up to the largest.
_SIZES = 8
_GIB = 2**30

Section = Literal["train", "warm_start"]
SECTIONS: dict[Section, str] = {"train": "learning", "warm_start": "the warm start"}
"""The phases of a job by their sections of the settings."""

# Bytes of a device by kind.
Memory = dict[str, float]


class Plan(BaseModel, frozen=True):
    """What a phase takes of a device, in bytes by kind.

    Attributes:
        micro_batch_tokens: Tokens of a micro-batch: the largest that fit for `auto`.
        update_memory_bytes: While the update runs; empty for a model too small to be planned.
        generation_memory_bytes: While the native sampler works; empty where others sample.
        cache_gb: 10^9 bytes that the native sampler's cache may take.
        sampler_mesh: How it shares a process's devices; None where the job has no mesh.
    """

    micro_batch_tokens: PositiveInt
    update_memory_bytes: Memory = {}
    generation_memory_bytes: Memory = {}
    cache_gb: float | None = None
    sampler_mesh: dict[str, int] | None = None

    @property
    def largest(self) -> Memory:
        """Return the most that is needed at a time."""
        return max(self.update_memory_bytes, self.generation_memory_bytes, key=_total)

    def __str__(self) -> str:
        """Say it in a line."""
        memory = _describe(self.largest) if self.largest else "little"
        return f"{memory}; micro-batches of up to {self.micro_batch_tokens:,} tokens"


class Devices(NamedTuple):
    """The devices of one process, here or described; the bytes of each that may be filled, and
    those of them that a CPU's process has taken before it plans.
    """

    own: Sequence[Any]
    room: float
    taken: float = 0.0


def published_shape(name: str) -> ModelConfig:
    """Return the shape of a model of `shapes.yaml`, for example qwen2.5-coder-7b."""
    shapes = yaml.safe_load((Path(__file__).parent / "shapes.yaml").read_text())
    key = name.lower().removeprefix("qwen/").removesuffix("-instruct")
    if key not in shapes:
        raise UserError(
            f"{name}: no such model among the published shapes ({', '.join(shapes)}); "
            "for another one set model.path to a folder with its config.json"
        )
    return parse_config(shapes[key], where=key)


def abstract_model(
    config: ModelConfig, source: ModelSource, mesh: Mesh | None, *, lora: LoraConfig | None = None
) -> Decoder:
    """Return a model whose weights are shapes, with their places on a mesh."""
    dtype = jnp.dtype(source.dtype)
    # As they are read: frozen weights need no more precision than the computation has.
    kinds = {"dtype": dtype, "param_dtype": jnp.float32 if lora is None else dtype}
    model = described(config, lora=lora, mesh=mesh, remat=source.remat, **kinds)
    graph, weights = nnx.split(model)
    return nnx.merge(graph, with_shardings(weights, mesh))


class Phase:
    """A phase of a job, and what it takes of a device.

    Attributes:
        learner: The run's own, of weights that are shapes.
        state: What an update changes, as shapes with their places.
        parameters: How many the model has.
        memory: Bytes that the learner holds all the time, by kind.
    """

    section: ClassVar[Section]
    # Tokens that a part of the mesh has of an update.
    _most: int
    # Whether micro-batches have the largest shapes of the run, and not of shapes that bound those.
    _is_exact = False

    def __init__(
        self,
        model: Decoder,
        learner: Learner,
        config: TrainConfig | SftConfig,
        limits: SamplerConfig,
        devices: Devices,
    ) -> None:
        self._model, self._config, self._devices = model, config, devices
        # Answers begin with the last token of a prompt.
        self._longest = limits.max_prompt_tokens - 1, limits.max_response_tokens
        self.learner, weights = learner, nnx.state(model)
        self.state = with_shardings(jax.eval_shape(learner.init, trained(model)), model.mesh)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(weights))
        self.memory: Memory = {
            "weights": device_bytes(weights),
            "optimizer": device_bytes(self.state.opt_state),
        }
        self._gradient = {"gradient": device_bytes(self.state.params)}
        self._programs: dict[str, Program] = {}

    def fit(self, progress: Progress) -> Plan:
        """Compile the programs for the devices, and find the largest micro-batch.

        Raises:
            UserError: The phase needs more than there is.
        """
        self._progress, taken = progress, self._devices.taken
        held = ({"process": taken} if taken else {}) | self.memory
        # Compiling takes minutes, and what a large model does not fit by is known without it.
        self._refuse(held | self._gradient)
        beside, sampler = self._beside(held)
        held |= beside

        @cache
        def needed(tokens: int) -> Memory:
            return held | self._of_update(tokens)

        # The largest alone is compiled where it fits, as it does most often.
        room, (*smaller, tokens) = self._devices.room, self._sizes()
        if smaller and _total(needed(tokens)) > room:
            fitting = bisect(smaller, room, key=lambda size: _total(needed(size)))
            tokens = smaller[max(fitting - 1, 0)]
        plan = Plan(
            micro_batch_tokens=tokens,
            update_memory_bytes=needed(tokens),
            **sampler,
        )
        # Of larger micro-batches, which need not fit, the compiler says nothing.
        tried = [name for name in self._programs if not name.startswith("gradient")]
        problems = (self._programs[name].problem for name in (*tried, _gradient(tokens)))
        self._refuse(plan.largest, next(filter(None, problems), ""))
        return plan

    def largest_shape(self, tokens: int) -> BatchShape:
        """Return the shape that takes the most of micro-batches of so many tokens."""
        return largest_shape(*self._longest, self._batching(tokens))

    def _beside(self, held: Memory) -> tuple[Memory, dict[str, Any]]:
        """Return what lies beside what the learner holds while the update runs, and what the plan
        says of the native sampler.
        """
        raise NotImplementedError

    def _sizes(self) -> Sequence[int]:
        """Return the sizes of a micro-batch to choose from, in tokens and rising: the one that is
        set, or from a single trajectory to all that a part of the mesh has.
        """
        tokens = self._config.batching.micro_batch_tokens
        if tokens != "auto":
            return [tokens]
        least, most = sum(self._longest), min(MOST_TOKENS, self._most)
        return sorted({max(most * n // _SIZES, least) for n in range(1, _SIZES + 1)})

    def _batching(self, tokens: int) -> BatchingConfig:
        return self._config.batching.model_copy(update={"micro_batch_tokens": tokens})

    def _of_update(self, tokens: int) -> Memory:
        """Compile an update's programs for micro-batches of so many tokens, and return what they
        need besides the learner's state.
        """
        lowered = self.learner.lower(self.state, self.largest_shape(tokens))
        program = self._compiled(_gradient(tokens), lowered["gradient"], is_run=self._is_exact)
        apply = self._compiled("apply", lowered["apply"])
        given = self.memory["weights"] + self._gradient["gradient"]
        return self._gradient | {
            "batch": program.arguments - given,
            # The gradient of the micro-batch among them.
            "temporaries": max(program.temporaries, apply.temporaries),
        }

    def _compiled(self, name: str, lowered: Lowered, *, is_run: bool = True) -> Program:
        """Compile a program once: as the run will, which then finds it compiled, or with less
        effort.
        """
        if name not in self._programs:
            done, platform = len(self._programs), self._devices.own[0].platform
            self._progress(done, max(done + 1, _PROGRAMS), f"compiling {name}")
            self._programs[name] = compile_program(
                lowered,
                level=_LEVELS.get(platform, "UNKNOWN"),
                options=None if is_run else _UNRUN.get(platform),
            )
        return self._programs[name]

    def _refuse(self, needed: Memory, problem: str = "") -> None:
        """Raise a `UserError` if more is needed than there is; `problem` is the compiler's word
        where an empty device is too small.
        """
        room, config, section = self._devices.room, self._config, self.section
        if _total(needed) <= room:
            return
        reason = problem or _describe(needed)
        settings = {
            "model.remat=full": self._model.remat != "full",
            f"{section}.batching.micro_batch_tokens=auto": (
                config.batching.micro_batch_tokens != "auto"
            ),
            f"{section}.lora.rank=16": config.lora is None,
        }
        helpful = " or ".join(name for name, is_unset in settings.items() if is_unset)
        advice = f"set {helpful}, or " if helpful else ""
        raise UserError(
            f"{SECTIONS[section]} does not fit: {reason}, of {room / _GIB:.1f} GiB free; {advice}"
            "take fewer sampler.slots, shorter lengths, a smaller model or more devices"
        )


class Learning(Phase):
    """Reinforcement learning, with the native sampler unless others sample.

    `first` is the model that samples first, where it is another: a trained one is measured before
    its warm start, without adapters.
    """

    section = "train"

    def __init__(
        self,
        model: Decoder,
        config: TrainConfig,
        limits: SamplerConfig,
        devices: Devices,
        *,
        evaluation: SamplerConfig,
        first: Decoder | None = None,
        has_sampler: bool = True,
    ) -> None:
        learner = trainer.learner_of(model, config, temperature=limits.temperature)
        super().__init__(model, learner, config, limits, devices)
        if config.average is not None:
            self.memory["average"] = device_bytes(self.state.params)
        if config.has_reference:
            start = copy_shapes(self.state.params, model.mesh, model.dtype)
            self.memory["start weights"] = device_bytes(start)
        groups = -(-config.prompts_per_step // (config.mini_batches * row_parts(model.mesh)))
        prompt, answer = self._longest
        self._most = groups * (prompt + config.group_size * answer)
        processes = model.mesh.size // len(devices.own) if model.mesh else 1
        rollouts = needed_slots(limits, config, processes=processes)
        self._first, self._has_sampler = first or model, has_sampler
        self._sampled = [(rollouts, config.group_size), (evaluation, 1)]
        # Where one of the processes that sample has its own copy. A job of one device has no mesh,
        # and its programs name none: the run finds these compiled.
        self._sampler_mesh = None
        if model.mesh is not None:
            own, room = devices.own, devices.room
            self._sampler_mesh = local_mesh(
                nnx.state(model), own, dtype=model.dtype, memory_bytes=room
            )

    def place_sampler(self, *, held_bytes: float) -> tuple[Decoder, CacheShape, float]:
        """Place the native sampler beside a learner that holds so much of each device.

        Returns:
            The model that samples first; its cache, the larger of those of rollouts and of
            evaluations; and the bytes that the cache may take.
        """
        mesh, model, first = self._sampler_mesh, self._model, self._first
        held_bytes += device_bytes(copy_shapes(nnx.state(model), mesh, model.dtype))
        own = self._devices.own[0].platform
        room = cache_room(self._devices.room, held_bytes=held_bytes, platform=own)
        plan = partial(plan_cache, model.config, dtype=model.dtype, mesh=mesh, room=room)
        caches = (plan(config, group_size=group) for config, group in self._sampled)
        cache = max(caches, key=lambda one: one.tokens)
        # On no mesh the sampler's own program makes the copy, of the learner's weights.
        if mesh is not None:
            graph, weights = nnx.split(first)
            first = nnx.merge(graph, copy_shapes(weights, mesh, first.dtype))
            first.mesh = mesh
        return first, cache, room

    def _beside(self, held: Memory) -> tuple[Memory, dict[str, Any]]:
        if not self._has_sampler:
            return {}, {}
        mesh, whole = self._sampler_mesh, self._model.mesh
        copies = partial(copy_shapes, target=mesh, dtype=self._model.dtype)
        params, frozen = (device_bytes(copies(part)) for part in split(self._model)[1:])
        # On a single device the learner's own weights are read. Several have a copy of the frozen
        # ones all the time, and receive the others before a rollout.
        is_copied = whole is not None and whole.size > 1
        received = params if is_copied else 0.0
        beside = {"sampler's frozen weights": frozen} if is_copied and frozen else Memory()
        first, cache, room = self.place_sampler(held_bytes=_total(held | beside))
        trim()
        before = memory.resident_bytes()
        lowered = lowered_programs(first, cache).items()
        programs = {name: self._compiled(name, program) for name, program in lowered}
        trim()
        if self._devices.taken:
            grown = max(memory.resident_bytes() - before, 0.0)
            beside["compiled programs"] = _KEPT_PROGRAMS * grown
        size = device_bytes(cache_shapes(cache, first.config, dtype=first.dtype, mesh=mesh))
        # Those that later models have.
        adapters = params + frozen - device_bytes(copies(nnx.state(self._first)))
        decode = programs["decode"]
        temporaries = [program.temporaries + program.outputs for program in programs.values()]
        # While the copy is made there is no cache yet.
        temporaries.append(received - size)
        generation = {
            "sampler's weights": decode.arguments + adapters - size,
            "cache": size,
            "sampler's temporaries": max(temporaries),
        }
        return beside, {
            "generation_memory_bytes": held | beside | generation,
            # One longest episode may need more than a cache's share, and a byte for rounding.
            "cache_gb": max(room, size + 1) / GB if math.isfinite(room) else None,
            "sampler_mesh": None if mesh is None else dict(mesh.shape),
        }


class WarmStart(Phase):
    """The warm start; without lessons these may be as long as the longest prompt and response."""

    section = "warm_start"

    def __init__(
        self,
        model: Decoder,
        config: SftConfig,
        limits: SamplerConfig,
        devices: Devices,
        lessons: supervised.Lessons | None = None,
    ) -> None:
        super().__init__(model, supervised.learner_of(model, config), config, limits, devices)
        groups = -(-config.groups_per_step // row_parts(model.mesh))
        self._most = groups * config.group_size * sum(self._longest)
        self._sft, self._lessons, self._is_exact = config, lessons, lessons is not None

    def largest_shape(self, tokens: int) -> BatchShape:
        """Return the shape that takes the most of those of the lessons."""
        if self._lessons is None:
            return super().largest_shape(tokens)
        config = self._sft.model_copy(update={"batching": self._batching(tokens)})
        shapes = self._lessons.shapes(config, parts=row_parts(self._model.mesh))
        return max(shapes, key=lambda shape: (shape.tokens, shape.cells))

    def _beside(self, held: Memory) -> tuple[Memory, dict[str, Any]]:
        del held
        config, lessons = self._sft, self._lessons
        steps = lessons.steps(config) if lessons else config.steps or math.inf
        # A CPU's checkpoint is a copy, which is written while the next updates run; the first one
        # is waited for.
        if self._devices.own[0].platform == "cpu" and steps > 2 * config.checkpoint_every:
            return {"checkpoint": device_bytes(self.state)}, {}
        return {}, {}


def _gradient(tokens: int) -> str:
    return f"gradient of {tokens} tokens"


def _total(needed: Memory) -> float:
    return sum(needed.values())


def _describe(needed: Memory) -> str:
    kinds = " + ".join(f"{name} {size / _GIB:.1f}" for name, size in needed.items())
    return f"{kinds} = {_total(needed) / _GIB:.1f} GiB a device"
