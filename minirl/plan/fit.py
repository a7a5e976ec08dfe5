"""What fits: the memory of a job, and the largest micro-batch, on devices here or described.

The compiler of those devices says what programs need; what lies there between them is known from
shapes: nothing is allocated. An update and a rollout take turns, and so does what they need: the
gradient for the one, the sampler's copy of the weights and its cache for the other.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Lowered

from exchange import UserError
from minirl.config import MOST_TOKENS, LoraConfig, ModelSource, SamplerConfig, TrainConfig
from minirl.model.config import ModelConfig, parse_config
from minirl.model.decoder import Decoder
from minirl.model.lora import described, split, trained
from minirl.model.sharding import MESH_AXES, axes_sharding, device_bytes, row_parts, with_shardings
from minirl.plan.compile import Program, compile_program
from minirl.run import memory
from minirl.sample.cache import CacheShape, cache_room, cache_shapes, plan_cache
from minirl.sample.decode import lowered_programs
from minirl.sample.weights import copy_shapes, local_mesh
from minirl.train.batching import Batch, BatchShape, empty_batch, largest_shape
from minirl.train.losses import policy_loss
from minirl.train.optimizer import make_optimizer
from minirl.train.rollouts import needed_slots
from minirl.train.update import Learner, TrainState
from minirl.types import Progress

FILLED = 0.95
"""Share of a device's memory that a plan fills; the rest is the runtime's or lost between buffers.
Commands let JAX take as much of a GPU (`XLA_CLIENT_MEM_FRACTION`)."""
# How much a compiler does to make a program fast: so libtpu compiles two to three times as quickly.
# With more it also fills memory that is left (a gradient of the 0.5B model: 9.1 GiB, and not 8.1).
_LEVELS = {"tpu": "O1"}
# Those of a sampler and of an update.
_PROGRAMS = 5
# A CPU's process keeps its compiled programs in memory: a run has the sampler's two in about three
# sizes, as many again to evaluate, and small ones for the update.
_KEPT_PROGRAMS = 6
# Sizes of a micro-batch that are tried, up to the largest.
_SIZES = 8

# Bytes of a device by kind.
Memory = dict[str, float]
Compiler = Callable[[str, Lowered], Program]


@dataclass(frozen=True, slots=True)
class Workload:
    """The settings of a job that decide its memory; None for a job without evaluations."""

    model: ModelConfig
    source: ModelSource
    sampler: SamplerConfig
    train: TrainConfig
    evaluation: SamplerConfig | None = None

    @property
    def dtype(self) -> Any:
        """Return the type of the computation."""
        return jnp.dtype(self.source.dtype)

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
    """Compile the programs of a job for its devices, and say what they need.

    With `has_sampler=False` others sample.
    """
    training, programs = training_of(work, devices.mesh), dict[str, Program]()

    def compiled(name: str, lowered: Lowered) -> Program:
        if name in programs:
            return programs[name]
        progress(len(programs), max(len(programs) + 1, _PROGRAMS), f"compiling {name}")
        level = _LEVELS.get(devices.local[0].platform, "UNKNOWN")
        programs[name] = compile_program(lowered, level=level)
        return programs[name]

    held = ({"process": devices.taken} if devices.taken else {}) | training.memory
    generation, sampler_mesh, room = Memory(), None, None
    if has_sampler:
        sampling = sampling_of(
            work, devices.mesh, devices.local, memory_bytes=devices.room, held_bytes=_total(held)
        )
        room = sampling.cache_room
        held |= {"sampler's frozen weights": sampling.frozen} if sampling.frozen else {}
        memory.trim()
        before = memory.resident_bytes()
        generation, sampler_mesh = _of_sampler(sampling, compiled), sampling.model.mesh
        memory.trim()
        if devices.taken:
            grown = max(memory.resident_bytes() - before, 0.0)
            held |= {"compiled programs": _KEPT_PROGRAMS * grown}
        generation = held | generation

    @cache
    def update(tokens: int) -> Memory:
        return held | _of_update(work, training, devices.mesh, tokens, compiled)

    sizes = _sizes(work, devices.mesh)
    tokens = _largest(sizes, devices.room, lambda tokens: _total(update(tokens)))
    # Of larger micro-batches, which need not fit, it says nothing.
    tried = [name for name in programs if not name.startswith("gradient")]
    problems = (programs[name].problem for name in (*tried, _gradient(tokens)))
    problem = next(filter(None, problems), "")
    needs = update(tokens), generation
    return Fit(tokens, room, training.parameters, sampler_mesh, *needs, programs, problem)


def _of_sampler(sampling: Sampling, compiled: Compiler) -> Memory:
    """Compile a sampler's programs, and return what it needs."""
    lowered = lowered_programs(sampling.model, sampling.cache)
    programs = {name: compiled(name, program) for name, program in lowered.items()}
    prepare, decode, size = programs.pop("prepare"), programs["decode"], sampling.cache_bytes
    temporaries = [program.temporaries + program.outputs for program in programs.values()]
    # While the copy is made there is no cache yet.
    temporaries.append(sampling.received + prepare.temporaries - size)
    return {
        "sampler's weights": decode.arguments - size,
        "cache": size,
        "sampler's temporaries": max(temporaries),
    }


def _of_update(
    work: Workload, training: Training, mesh: Mesh | None, tokens: int, compiled: Compiler
) -> Memory:
    """Compile an update's programs for micro-batches of so many tokens, and return what they need
    besides the learner's state.
    """
    sizes = work.train.batching.model_copy(update={"micro_batch_tokens": tokens})
    shape = largest_shape(work.longest_prefix, work.sampler.max_response_tokens, sizes)
    batch = abstract_batch(shape, mesh)
    lowered = dict(training.learner.lower(training.state, batch))
    program = compiled(_gradient(tokens), lowered["gradient"])
    apply = compiled("apply", lowered["apply"])
    gradient = device_bytes(training.state.params)
    return {
        "gradient": gradient,
        "batch": program.arguments - training.memory["weights"] - gradient,
        # The gradient of the micro-batch among them.
        "temporaries": max(program.temporaries, apply.temporaries),
    }


def _gradient(tokens: int) -> str:
    return f"gradient of {tokens} tokens"


def _sizes(work: Workload, mesh: Mesh | None) -> Sequence[int]:
    """Return the sizes of a micro-batch to choose from, in tokens and rising: the one that is set,
    or from a single trajectory to all that a part of the mesh has of an update.
    """
    train, prompt, answer = work.train, work.longest_prefix, work.sampler.max_response_tokens
    tokens = train.batching.micro_batch_tokens
    if tokens != "auto":
        return [tokens]
    groups = -(-train.prompts_per_step // (train.mini_batches * row_parts(mesh)))
    most = min(MOST_TOKENS, groups * (prompt + train.group_size * answer))
    return sorted({max(most * n // _SIZES, prompt + answer) for n in range(1, _SIZES + 1)})


def _largest(sizes: Sequence[int], room: float, needs: Callable[[int], float]) -> int:
    """Return the largest size that there is room for; the smallest where there is for none."""
    # The largest alone is compiled where it fits, as it does most often.
    *smaller, most = sizes
    if needs(most) <= room or not smaller:
        return most
    return smaller[max(bisect(smaller, room, key=needs) - 1, 0)]


def _total(memory: Memory) -> float:
    return sum(memory.values())


@dataclass(frozen=True, slots=True)
class Training:
    """The learner's side: shapes and places of the trained weights and of the optimizer's state,
    bytes of a device by kind that it holds all the time, and the model's parameters.
    """

    learner: Learner
    state: TrainState
    memory: dict[str, float]
    parameters: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """The native sampler's side, on the devices of one of the processes that sample.

    Bytes are those of a device: of the cache and of what it may take (`cache_room`), of the copy of
    frozen weights that it holds all the time (`frozen`), and of the trained weights that come from
    other devices before a rollout (`received`).
    """

    model: Decoder
    cache: CacheShape
    cache_bytes: float
    cache_room: float
    frozen: float
    received: float


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
    """Describe the learner's side of a workload on a mesh of all devices."""
    train = work.train
    model = abstract_model(work.model, work.source, mesh, lora=train.lora)
    weights, params = nnx.state(model), trained(model)
    optimizer = make_optimizer(train.optimizer)
    loss, temperature = partial(policy_loss, train.algorithm), work.sampler.temperature
    learner = Learner(model, loss, optimizer, temperature=temperature)
    state = TrainState(params, with_shardings(jax.eval_shape(optimizer.init, params), mesh))
    held = {"weights": device_bytes(weights), "optimizer": device_bytes(state.opt_state)}
    if train.average is not None:
        held["average"] = device_bytes(params)
    if train.has_reference:
        held["start weights"] = device_bytes(copy_shapes(params, mesh, work.dtype))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(weights))
    return Training(learner, state, held, parameters)


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
    graph, weights = nnx.split(abstract_model(work.model, work.source, None, lora=work.train.lora))
    local = local_mesh(weights, devices, dtype=work.dtype, memory_bytes=memory_bytes)
    if local is None:
        local = Mesh(np.array(devices).reshape(1, 1, 1), MESH_AXES)
    model = nnx.merge(graph, copy_shapes(weights, local, work.dtype))
    model.mesh = local
    _, params, frozen = split(model)
    is_copied = mesh is not None and mesh.size > 1
    # On a single device the learner's own weights are read.
    copied = [device_bytes(part) if is_copied else 0.0 for part in (frozen, params)]
    held_bytes += device_bytes((params, frozen)) + copied[0]
    room = cache_room(memory_bytes, held_bytes=held_bytes, platform=devices[0].platform)
    cache = _largest_cache(work, mesh, local, room=room)
    arrays = cache_shapes(cache, work.model, dtype=work.dtype, mesh=local)
    return Sampling(model, cache, device_bytes(arrays), room, *copied)


def _largest_cache(work: Workload, mesh: Mesh | None, local: Mesh, *, room: float) -> CacheShape:
    """Return the larger of the caches of rollouts and of evaluations."""
    processes = 1 if mesh is None else mesh.size // local.size
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
