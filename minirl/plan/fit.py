"""What fits: the memory of a job, and the largest micro-batch, on devices here or described.

The compiler of those devices says what programs need; what lies there between them is known from
shapes: nothing is allocated. An update and a rollout take turns, and so does what they need: the
gradient for the one, the sampler's copy of the weights and its cache for the other. A warm start
comes before both, and has given back what it took when they begin.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Lowered

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
from minirl.model.config import ModelConfig, parse_config
from minirl.model.decoder import Decoder
from minirl.model.lora import described, split, trained
from minirl.model.sharding import axes_sharding, device_bytes, row_parts, with_shardings
from minirl.plan.compile import Program, compile_program
from minirl.run import memory
from minirl.sample.cache import CacheShape, cache_room, cache_shapes, plan_cache
from minirl.sample.decode import lowered_programs
from minirl.sample.weights import copy_shapes, local_mesh
from minirl.train.batching import Batch, BatchShape, empty_batch, largest_shape
from minirl.train.losses import policy_loss
from minirl.train.optimizer import make_optimizer
from minirl.train.rollouts import needed_slots
from minirl.train.supervised import Lessons, learner_of
from minirl.train.update import Learner, TrainState
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
_PROGRAMS = 5
# A CPU's process keeps its compiled programs in memory: a run has the sampler's two in about three
# sizes, as many again to evaluate, and small ones for the update.
_KEPT_PROGRAMS = 6
# Sizes of a micro-batch that are tried, up to the largest.
_SIZES = 8

# Bytes of a device by kind.
Memory = dict[str, float]


@dataclass(frozen=True, slots=True)
class Workload:
    """The settings of a job that decide its memory; None for a job without evaluations, and without
    a warm start.
    """

    model: ModelConfig
    source: ModelSource
    sampler: SamplerConfig
    train: TrainConfig
    evaluation: SamplerConfig | None = None
    warm_start: SftConfig | None = None

    @property
    def dtype(self) -> Any:
        """Return the type of the computation."""
        return jnp.dtype(self.source.dtype)

    @property
    def first_sampled(self) -> LoraConfig | None:
        """Return the adapters of the model that samples first: a trained one is measured before its
        warm start, without any.
        """
        has_base = self.warm_start is not None and self.source.path is not None
        return None if has_base else self.train.lora

    @property
    def longest_prefix(self) -> int:
        """Return the most tokens of a prompt without its last one, with which answers begin."""
        return self.sampler.max_prompt_tokens - 1


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a job, here or described: how the learner arranges them (None for a single
    one), those of one process, the bytes of each that may be filled, and those of them that a CPU's
    process has taken before it plans.
    """

    mesh: Mesh | None
    local: Sequence[Any]
    room: float
    taken: float = 0.0

    @property
    def held(self) -> Memory:
        """Return what is taken before anything of a phase is there."""
        return {"process": self.taken} if self.taken else {}


@dataclass(frozen=True, slots=True)
class Fit:
    """What a job needs on a device while the update runs and while the sampler works (nothing where
    others sample), with micro-batches of so many tokens: the largest that fit where the settings
    say `auto`. `cache_room` is what the sampler's cache may take, and `problem` the compiler's word
    where an empty device is too small.
    """

    tokens: int
    cache_room: float | None
    parameters: int
    sampler_mesh: Mesh | None
    update: Memory
    generation: Memory
    programs: dict[str, Program]
    problem: str

    @property
    def largest(self) -> Memory:
        """Return the most that is needed at a time."""
        return max(self.update, self.generation, key=_total)

    @property
    def bytes(self) -> float:
        """Return how much that is."""
        return _total(self.largest)


def fit(work: Workload, devices: Devices, progress: Progress, *, has_sampler: bool = True) -> Fit:
    """Compile the programs of learning for its devices, and say what they need.

    With `has_sampler=False` others sample.
    """
    training = training_of(work, devices.mesh)
    compiler = _Compiler(devices, progress)
    held = devices.held | training.memory
    generation, sampler_mesh, room = Memory(), None, None
    if has_sampler:
        sampling = sampling_of(
            work, devices.mesh, devices.local, memory_bytes=devices.room, held_bytes=_total(held)
        )
        room = sampling.cache_room
        held |= {"sampler's frozen weights": sampling.frozen} if sampling.frozen else {}
        memory.trim()
        before = memory.resident_bytes()
        generation, sampler_mesh = _of_sampler(sampling, compiler), sampling.model.mesh
        memory.trim()
        if devices.taken:
            grown = max(memory.resident_bytes() - before, 0.0)
            held |= {"compiled programs": _KEPT_PROGRAMS * grown}
        generation = held | generation

    @cache
    def needed(tokens: int) -> Memory:
        return held | _of_update(training, devices.mesh, tokens, compiler)

    tokens, update = _largest(training.sizes, devices.room, needed)
    needs, problem = (update, generation), compiler.problem(tokens)
    return Fit(tokens, room, training.parameters, sampler_mesh, *needs, compiler.programs, problem)


def fit_warm_start(
    work: Workload, devices: Devices, progress: Progress, lessons: Lessons | None = None
) -> Fit:
    """Compile the programs of the warm start for its devices, and say what they need.

    Without lessons these may be as long as the longest prompt and response.
    """
    training = warm_start_of(work, devices.mesh, lessons)
    compiler = _Compiler(devices, progress)
    held, config = devices.held | training.memory, work.warm_start
    assert config is not None
    # A CPU's checkpoint is a copy, which is written while the next updates run; the first one is
    # waited for.
    steps = lessons.steps(config) if lessons else config.steps or math.inf
    if devices.local[0].platform == "cpu" and steps > 2 * config.checkpoint_every:
        held["checkpoint"] = device_bytes(training.state)

    @cache
    def needed(tokens: int) -> Memory:
        update = held | _of_update(training, devices.mesh, tokens, compiler)
        # The run compiles programs of other shapes too, and a C library keeps what that took.
        return update | ({"compiler": compiler.grown} if devices.taken else {})

    tokens, update = _largest(training.sizes, devices.room, needed)
    problem = compiler.problem(tokens)
    return Fit(tokens, None, training.parameters, None, update, {}, compiler.programs, problem)


class _Compiler:
    """Compiles programs by name, each once, for the devices of a job: as the run will, which then
    finds them compiled, or with less effort where it has none of that shape (`is_run=False`).

    `grown` is the most that one of them took of this process's memory, in bytes.
    """

    def __init__(self, devices: Devices, progress: Progress) -> None:
        platform = devices.local[0].platform
        self._level, self._unrun = _LEVELS.get(platform, "UNKNOWN"), _UNRUN.get(platform)
        self._progress, self.programs, self.grown = progress, dict[str, Program](), 0.0

    def __call__(self, name: str, lowered: Lowered, *, is_run: bool = True) -> Program:
        if name not in self.programs:
            done = len(self.programs)
            self._progress(done, max(done + 1, _PROGRAMS), f"compiling {name}")
            memory.trim()
            before = memory.resident_bytes()
            options = None if is_run else self._unrun
            self.programs[name] = compile_program(lowered, level=self._level, options=options)
            self.grown = max(self.grown, memory.resident_bytes() - before)
        return self.programs[name]

    def problem(self, tokens: int) -> str:
        """Return the compiler's word of what an empty device is too small for, if anything."""
        # Of larger micro-batches, which need not fit, it says nothing.
        tried = [name for name in self.programs if not name.startswith("gradient")]
        problems = (self.programs[name].problem for name in (*tried, _gradient(tokens)))
        return next(filter(None, problems), "")


def _of_sampler(sampling: Sampling, compiled: _Compiler) -> Memory:
    """Compile a sampler's programs, and return what it needs."""
    lowered = lowered_programs(sampling.model, sampling.cache)
    programs = {name: compiled(name, program) for name, program in lowered.items()}
    prepare, decode, size = programs.pop("prepare"), programs["decode"], sampling.cache_bytes
    temporaries = [program.temporaries + program.outputs for program in programs.values()]
    # While the copy is made there is no cache yet.
    temporaries.append(sampling.received + prepare.temporaries - size)
    return {
        "sampler's weights": decode.arguments + sampling.adapters - size,
        "cache": size,
        "sampler's temporaries": max(temporaries),
    }


def _of_update(training: Training, mesh: Mesh | None, tokens: int, compiled: _Compiler) -> Memory:
    """Compile an update's programs for micro-batches of so many tokens, and return what they need
    besides the learner's state.
    """
    batch = abstract_batch(training.largest_shape(tokens), mesh)
    lowered = dict(training.learner.lower(training.state, batch))
    program = compiled(_gradient(tokens), lowered["gradient"], is_run=training.is_exact)
    apply = compiled("apply", lowered["apply"])
    gradient = training.least["gradient"]
    return {
        "gradient": gradient,
        "batch": program.arguments - training.memory["weights"] - gradient,
        # The gradient of the micro-batch among them.
        "temporaries": max(program.temporaries, apply.temporaries),
    }


def _gradient(tokens: int) -> str:
    return f"gradient of {tokens} tokens"


def _sizes(batching: BatchingConfig, *, least: int, most: int) -> Sequence[int]:
    """Return the sizes of a micro-batch to choose from, in tokens and rising: the one that is set,
    or from a single trajectory to all that a part of the mesh has of an update.
    """
    tokens = batching.micro_batch_tokens
    if tokens != "auto":
        return [tokens]
    most = min(MOST_TOKENS, most)
    return sorted({max(most * n // _SIZES, least) for n in range(1, _SIZES + 1)})


def _largest(
    sizes: Sequence[int], room: float, needed: Callable[[int], Memory]
) -> tuple[int, Memory]:
    """Return the largest size that there is room for, and what it needs; the smallest where there
    is room for none.
    """

    def needs(size: int) -> float:
        return _total(needed(size))

    # The largest alone is compiled where it fits, as it does most often.
    *smaller, size = sizes
    if smaller and needs(size) > room:
        size = smaller[max(bisect(smaller, room, key=needs) - 1, 0)]
    return size, needed(size)


def _total(memory: Memory) -> float:
    return sum(memory.values())


@dataclass(frozen=True, slots=True)
class Training:
    """The learner's side of a phase: shapes and places of the trained weights and of the
    optimizer's state, bytes of a device by kind that it holds all the time, and the model's
    parameters; the sizes of a micro-batch to choose from, in tokens and rising, and the shape that
    takes the most of each, which is one that the run has (`is_exact`) or bounds them.
    """

    learner: Learner
    state: TrainState
    memory: Memory
    parameters: int
    sizes: Sequence[int]
    largest_shape: Callable[[int], BatchShape]
    is_exact: bool = False

    @property
    def least(self) -> Memory:
        """Return what an update takes, whatever its programs need."""
        return self.memory | {"gradient": device_bytes(self.state.params)}


@dataclass(frozen=True, slots=True)
class Sampling:
    """The native sampler's side, on the devices of one of the processes that sample: the model that
    samples first, with its cache.

    Bytes are those of a device: of the cache and of what it may take (`cache_room`), of the copy of
    frozen weights that it holds all the time (`frozen`), of the trained weights that come from
    other devices before a rollout (`received`), and of the `adapters` that later models have.
    """

    model: Decoder
    cache: CacheShape
    cache_bytes: float
    cache_room: float
    frozen: float
    received: float
    adapters: float


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


def training_of(work: Workload, mesh: Mesh | None) -> Training:
    """Describe the learner's side of reinforcement learning on a mesh of all devices."""
    train, sampler = work.train, work.sampler
    model = abstract_model(work.model, work.source, mesh, lora=train.lora)
    optimizer = make_optimizer(train.optimizer)
    loss, temperature = partial(policy_loss, train.algorithm), sampler.temperature
    learner = Learner(model, loss, optimizer, temperature=temperature)
    state, held, parameters = _held(model, learner, mesh)
    if train.average is not None:
        held["average"] = device_bytes(state.params)
    if train.has_reference:
        held["start weights"] = device_bytes(copy_shapes(state.params, mesh, work.dtype))
    prompt, answer = work.longest_prefix, sampler.max_response_tokens
    groups = -(-train.prompts_per_step // (train.mini_batches * row_parts(mesh)))
    sizes = _sizes(
        train.batching, least=prompt + answer, most=groups * (prompt + train.group_size * answer)
    )

    def largest(tokens: int) -> BatchShape:
        return largest_shape(prompt, answer, _of_tokens(train.batching, tokens))

    return Training(learner, state, held, parameters, sizes, largest)


def warm_start_of(work: Workload, mesh: Mesh | None, lessons: Lessons | None = None) -> Training:
    """Describe the learner's side of the warm start on a mesh of all devices; without lessons these
    may be as long as the longest prompt and response.
    """
    config, parts = work.warm_start, row_parts(mesh)
    assert config is not None
    model = abstract_model(work.model, work.source, mesh, lora=config.lora)
    learner = learner_of(model, config)
    state, held, parameters = _held(model, learner, mesh)
    prompt, answer = work.longest_prefix, work.sampler.max_response_tokens
    rows = -(-config.groups_per_step // parts) * config.group_size
    sizes = _sizes(config.batching, least=prompt + answer, most=rows * (prompt + answer))

    def largest(tokens: int) -> BatchShape:
        batching = _of_tokens(config.batching, tokens)
        if lessons is None:
            return largest_shape(prompt, answer, batching)
        shapes = lessons.shapes(config.model_copy(update={"batching": batching}), parts=parts)
        return max(shapes, key=lambda shape: (shape.tokens, shape.cells))

    exact = lessons is not None
    return Training(learner, state, held, parameters, sizes, largest, exact)


def _of_tokens(batching: BatchingConfig, tokens: int) -> BatchingConfig:
    return batching.model_copy(update={"micro_batch_tokens": tokens})


def _held(model: Decoder, learner: Learner, mesh: Mesh | None) -> tuple[TrainState, Memory, int]:
    """Return a learner's state as shapes, what it and the weights take, and how many these are."""
    weights, params = nnx.state(model), trained(model)
    opt_state = jax.eval_shape(learner.init, params).opt_state
    state = TrainState(params, with_shardings(opt_state, mesh))
    held = {"weights": device_bytes(weights), "optimizer": device_bytes(state.opt_state)}
    return state, held, sum(leaf.size for leaf in jax.tree.leaves(weights))


def sampling_of(
    work: Workload,
    mesh: Mesh | None,
    devices: Sequence[Any],
    *,
    memory_bytes: float,
    held_bytes: float,
) -> Sampling:
    """Describe the native sampler's side of a workload; `devices` are those of one
    process, of so much memory each, of which the learner holds some.
    """
    learned, first = (
        abstract_model(work.model, work.source, None, lora=lora)
        for lora in (work.train.lora, work.first_sampled)
    )
    weights = nnx.state(learned)
    # A job of one device has no mesh, and its programs name none: the run finds these compiled.
    local = None
    if mesh is not None:
        local = local_mesh(weights, devices, dtype=work.dtype, memory_bytes=memory_bytes)

    def copied(model: Decoder) -> Decoder:
        graph, weights = nnx.split(model)
        copy = nnx.merge(graph, copy_shapes(weights, local, work.dtype))
        copy.mesh = local
        return copy

    model, (_, params, frozen) = copied(first), split(copied(learned))
    is_copied = mesh is not None and mesh.size > 1
    # On a single device the learner's own weights are read.
    held_frozen, received = (device_bytes(one) if is_copied else 0.0 for one in (frozen, params))
    copy_bytes = device_bytes((params, frozen))
    held_bytes += copy_bytes + held_frozen
    room = cache_room(memory_bytes, held_bytes=held_bytes, platform=devices[0].platform)
    cache = _largest_cache(work, mesh, local, room=room)
    arrays = cache_shapes(cache, work.model, dtype=work.dtype, mesh=local)
    adapters = copy_bytes - device_bytes(nnx.state(model))
    # On no mesh the sampler's own program makes the copy, of the learner's weights.
    model = first if local is None else model
    return Sampling(model, cache, device_bytes(arrays), room, held_frozen, received, adapters)


def _largest_cache(
    work: Workload, mesh: Mesh | None, local: Mesh | None, *, room: float
) -> CacheShape:
    """Return the larger of the caches of rollouts and of evaluations."""
    processes = 1 if mesh is None or local is None else mesh.size // local.size
    uses = [(needed_slots(work.sampler, work.train, processes=processes), work.train.group_size)]
    if work.evaluation is not None:
        uses.append((work.evaluation, 1))
    caches = [
        plan_cache(
            work.model, config, group_size=size, itemsize=work.dtype.itemsize, mesh=local, room=room
        )
        for config, size in uses
    ]
    return max(caches, key=lambda cache: cache.tokens)


def abstract_batch(shape: BatchShape, mesh: Mesh | None) -> Batch:
    """Return the shapes and shardings of a micro-batch, on all devices (`empty_batch`)."""

    def abstract(array: Any) -> Any:
        axes = ("batch", *("position",) * (array.ndim - 1))
        sharding = None if mesh is None else axes_sharding(axes, array.shape, mesh, name="batch")
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(abstract, empty_batch(shape, parts=row_parts(mesh)))
