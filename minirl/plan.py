"""What a step would take on chips that are not here: memory, and the largest micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Lowered

from minirl.ahead import Program, abstract_batch, at_depth, compile_program
from minirl.chips import Topology
from minirl.config import ModelSource, SamplerConfig, TrainConfig
from minirl.costs import (
    abstract_model,
    abstract_opt_state,
    count_parameters,
    device_bytes,
)
from minirl.decode import abstract_calls, pool_shapes
from minirl.errors import UserError
from minirl.model import ModelConfig
from minirl.packing import round_up
from minirl.pages import MEMORY_SHARE, Pools, plan_pools
from minirl.sharding import row_parts
from minirl.update import Learner, TrainState, make_optimizer, policy_objective
from minirl.vocabulary import LOGITS_BYTES

# Share of a chip's memory that a plan fills: the rest is the runtime's, and lost between buffers.
FILLED = 0.95
# Copies of the weights that samplers hold: the trainer's own, and the evaluation's.
_SAMPLERS = 2
# Programs compiled at least: the sampler's three at two depths, the update's three.
_PROGRAMS = 9
# XLA's least effort to make a program fast: it compiles two to three times as quickly, and plans a
# fifth more memory (7B on v5p:4x4x4: 51 s in place of 104, 5.5 GB of temporaries in place of 4.4).
_QUICK = {"exec_time_optimization_effort": -1.0}

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What is planned.

    Attributes:
        model: The model's shape.
        source: Its types, and what is computed again.
        sampler: Slots and lengths.
        train: Batch, algorithm, optimizer.
        prompt: Mean length of the prompts, in tokens.
        response: Mean length of the responses.
    """

    model: ModelConfig
    source: ModelSource
    sampler: SamplerConfig
    train: TrainConfig
    prompt: float
    response: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """How much one micro-batch holds.

    Attributes:
        groups: Groups for each part of the devices that has rows of its own.
        answers: Trajectories of each.
        count: Micro-batches of a step.
    """

    groups: int
    answers: int
    count: int


@dataclass(frozen=True, slots=True)
class Fit:
    """What was compiled, and what it takes of a device.

    Attributes:
        batch: The largest micro-batch that fits.
        pools: The sampler's cache.
        fill_tokens: Prompt tokens that the sampler computes at once, on all devices.
        sampler_weights: Bytes of a sampler's copy of the weights.
        memory: Bytes by kind, while the update runs.
        generation_bytes: All bytes while the sampler works.
        room: Bytes that may be filled.
        programs: By name.
        parameters: Numbers of the model.
        seconds: How long compiling took.
    """

    batch: MicroBatch
    pools: Pools
    fill_tokens: int
    sampler_weights: float
    memory: dict[str, float]
    generation_bytes: float
    room: float
    programs: dict[str, Program]
    parameters: int
    seconds: float

    @property
    def update_bytes(self) -> float:
        """Return all bytes while the update runs."""
        return sum(self.memory.values())


def pools_of(job: Job, mesh: Mesh | None, *, memory_bytes: float) -> Pools:
    """Return the sizes of the sampler's cache on devices of so much memory."""
    sampler = job.sampler
    if sampler.cache_gb is None:
        # What the sampler would find itself to be the most.
        most = min(MEMORY_SHARE * memory_bytes / 1e9, 1e9)
        sampler = sampler.model_copy(update={"cache_gb": most})
    return plan_pools(
        job.model,
        sampler,
        group_size=job.train.group_size,
        itemsize=jnp.dtype(job.source.dtype).itemsize,
        mesh=mesh,
    )


def cache_bytes(job: Job, pools: Pools, mesh: Mesh | None) -> float:
    """Return the bytes of a sampler's cache on each device."""
    dtype = jnp.dtype(job.source.dtype)
    return sum(
        device_bytes(pool_shapes(pool, job.model, dtype=dtype, mesh=mesh))
        for pool in (pools.prompts, pools.own)
    )


def resident_bytes(job: Job, mesh: Mesh | None, *, memory_bytes: float) -> dict[str, float]:
    """Count, without compiling, what a run holds on each device for certain, by kind.

    Returns:
        Bytes of the weights and of what is kept for each of them, of the sampler's cache, and of
        the logits that are held at once.
    """
    _, params = abstract_model(job.model, job.source, mesh)
    optimizer = make_optimizer(job.train.optimizer, steps=job.train.steps)
    weights, item = device_bytes(params), jnp.dtype(job.source.dtype).itemsize
    cache = cache_bytes(job, pools_of(job, mesh, memory_bytes=memory_bytes), mesh)
    return {
        "weights": weights,
        "optimizer": device_bytes(abstract_opt_state(optimizer, params, mesh)),
        # What the KL is measured against, whatever its coefficient.
        "start weights": weights,
        "gradient": weights,
        "sampler's weights": _SAMPLERS * weights * item / 4,
        "cache": cache,
        "logits": min(LOGITS_BYTES, 4.0 * job.sampler.max_response_tokens * job.model.vocab_size),
    }


@dataclass(slots=True)
class _Compiler:
    """Compiles the programs of a job for a mesh, and keeps what is known of them."""

    job: Job
    pools: Pools
    mesh: Mesh
    progress: Progress
    seconds: float = 0.0
    done: int = 0
    fill_tokens: int = 0
    learner: Learner = field(init=False)
    state: TrainState = field(init=False)

    def __post_init__(self) -> None:
        job = self.job
        train = job.train
        graph, params = abstract_model(job.model, job.source, self.mesh)
        optimizer = make_optimizer(train.optimizer, steps=train.steps)
        objective = policy_objective(train.algorithm, temperature=job.sampler.temperature)
        self.learner = Learner(graph, objective, optimizer, mesh=self.mesh)
        self.state = TrainState(params, abstract_opt_state(optimizer, params, self.mesh))

    def compile(self, name: str, lowered: Lowered) -> Program:
        self.progress(self.done, max(self.done + 1, _PROGRAMS), f"compiling {name}")
        is_tpu = self.mesh.devices.flat[0].platform == "tpu"
        program = compile_program(name, lowered, options=_QUICK if is_tpu else None)
        self.seconds += program.seconds
        self.done += 1
        return program

    def update(self, batch: MicroBatch) -> Iterator[Program]:
        """Compile gradient, accumulate and apply, one as each is asked for."""
        job, sizes = self.job, self.job.train.batching
        shapes = abstract_batch(
            groups=batch.groups * row_parts(self.mesh),
            group_size=batch.answers,
            prompt=round_up(job.sampler.max_prompt_tokens - 1, multiple=sizes.prompt_multiple),
            answer=round_up(job.sampler.max_response_tokens, multiple=sizes.answer_multiple),
            mesh=self.mesh,
        )
        for name, lowered in self.learner.lower(self.state, shapes):
            yield self.compile(name, lowered)

    def sampler(self) -> tuple[dict[str, Program], float]:
        """Compile the sampler's programs for one layer and for two, and tell of all from them.

        Its layers are not a loop: compiling a deep model's takes many minutes.

        Returns:
            The programs by name, and the bytes of a copy of the weights on each device.
        """
        (one, weights_one), (two, weights_two) = map(self._shallow, (1, 2))
        depth = self.job.model.num_hidden_layers
        weights = weights_one + (weights_two - weights_one) * (depth - 1)
        return {name: at_depth(one[name], two[name], depth) for name in one}, weights

    def _shallow(self, depth: int) -> tuple[dict[str, Program], float]:
        job = self.job
        config = replace(job.model, num_hidden_layers=depth)
        graph, params = abstract_model(config, job.source, self.mesh)
        dtype = jnp.dtype(job.source.dtype)
        # All is trained: adapters would be merged before.
        model = (graph, params, nnx.State({}))
        calls = abstract_calls(model, self.pools, config=config, dtype=dtype, mesh=self.mesh)
        programs = {
            name: self.compile(name, call.program.lower(*call.arguments))
            for name, call in calls.items()
        }
        prepared, *_, chunk = calls["fill"].arguments
        self.fill_tokens = chunk.tokens_BT.size
        return programs, device_bytes(prepared)


def fit(job: Job, topology: Topology, mesh: Mesh, progress: Progress) -> Fit:
    """Compile a job for a mesh, and find the largest micro-batch that there is memory for.

    Args:
        job: What is planned.
        topology: The chips.
        mesh: Of their devices.
        progress: Called with (programs compiled, of how many at least, a line on it).

    Raises:
        UserError: Nothing fits.
    """
    pools = pools_of(job, mesh, memory_bytes=topology.chip.memory_bytes)
    compiler = _Compiler(job, pools, mesh, progress)
    room = FILLED * topology.chip.memory_bytes
    weights = device_bytes(compiler.state.params)
    memory = {
        "weights": weights,
        "optimizer": device_bytes(compiler.state.opt_state),
        # What the KL is measured against, whatever its coefficient.
        "start weights": weights,
    }
    _refuse(memory | {"gradient": weights}, room)
    sampler, copy = compiler.sampler()
    memory["sampler's weights"] = _SAMPLERS * copy
    memory["cache"] = cache_bytes(job, pools, mesh)
    at_work = max(sampler[name].temporaries + sampler[name].outputs for name in ("fill", "decode"))
    _refuse(memory | {"sampler at work": at_work}, room)
    resident = sum(memory.values())
    batch, update = _largest_batch(compiler, room=room - resident)
    if batch is None:
        memory |= {"gradients": weights, "activations": update["gradient"].temporaries}
        _refuse(memory, room, always=True)
        raise AssertionError
    memory |= _update_memory(update, batch, weights)
    return Fit(
        batch=batch,
        pools=pools,
        fill_tokens=compiler.fill_tokens,
        sampler_weights=copy,
        memory=memory,
        generation_bytes=resident + at_work,
        room=room,
        programs=sampler | update,
        parameters=count_parameters(compiler.state.params),
        seconds=compiler.seconds,
    )


def _refuse(memory: dict[str, float], room: float, *, always: bool = False) -> None:
    """Raise a `UserError` if this is more than there is room for."""
    total = sum(memory.values())
    if total <= room and not always:
        return
    parts = " + ".join(f"{name} {size / 2**30:.1f}" for name, size in memory.items())
    raise UserError(
        f"nothing fits: {parts} = {total / 2**30:.1f} GiB a device, and {room / 2**30:.1f} may be "
        "filled; take more chips, a mesh with more of them on tensor, shorter lengths, fewer "
        "sampler.slots, or train.optimizer.moments=bfloat16"
    )


def _update_memory(
    update: dict[str, Program], batch: MicroBatch, weights: float
) -> dict[str, float]:
    """Return what an update takes besides what is always there, by kind."""
    # Several micro-batches: their sum beside the gradient of the one at work.
    gradients = weights * min(batch.count, 2)
    work = max(update["gradient"].temporaries, update["apply"].temporaries - gradients + weights)
    return {
        "gradients": gradients,
        "batch": update["gradient"].arguments - weights,
        "activations": work,
    }


def _largest_batch(
    compiler: _Compiler, *, room: float
) -> tuple[MicroBatch | None, dict[str, Program]]:
    """Find the most groups of a micro-batch; where not even one fits, the most of its answers.

    Returns:
        The micro-batch and its programs; None and what was tried last where nothing fits.
    """
    train = compiler.job.train
    weights = device_bytes(compiler.state.params)
    most = -(-train.prompts_per_step // (train.mini_batches * row_parts(compiler.mesh)))
    tried: dict[MicroBatch, dict[str, Program]] = {}
    rest: dict[str, Program] = {}

    def need(batch: MicroBatch) -> float:
        if batch not in tried:
            programs = compiler.update(batch)
            tried[batch] = {"gradient": next(programs)}
            if not rest and tried[batch]["gradient"].fits:
                rest.update({program.name: program for program in programs})
            tried[batch] |= rest
        found = tried[batch]
        if not found["gradient"].fits:
            return math.inf
        return sum(_update_memory(found, batch, weights).values())

    last, at_last = {}, 0
    for answers in _halves(train.batching.answers_per_batch or train.group_size):
        # What is needed grows by as much for each answer, beside what does not grow.
        if last and last["gradient"].temporaries * answers > room * at_last:
            continue
        parts = train.group_size // answers

        def of(groups: int, answers: int = answers, parts: int = parts) -> MicroBatch:
            return MicroBatch(groups, answers, -(-most * parts // groups))

        found = largest(lambda groups: need(of(groups)), room=room, most=most * parts)
        if found:
            return of(found), tried[of(found)]
        last, at_last = tried[of(1)], answers
    return None, last


def _halves(answers: int) -> list[int]:
    """List how many answers of a group a micro-batch may hold: all, a half, ..., one."""
    found = [answers]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return found if found[-1] == 1 else [*found, 1]


def largest(need: Callable[[int], float], *, room: float, most: int) -> int:
    """Return the largest number that there is room for, by few trials; 0 where one is too many.

    What is needed is taken to grow by the same for each one more: two trials tell the largest
    number, and what is returned has been tried. Numbers that would need as many micro-batches as a
    smaller one are not.

    Args:
        need: The room that a number needs; slow.
        room: What there is.
        most: More are of no use.
    """

    def even(number: int) -> int:
        return -(-most // -(-most // number))

    one = need(1)
    if one > room:
        return 0
    best, at_best = 1, one
    # If all that one needs were needed again for each; but some of it is needed once.
    guess = even(max(min(2, most), int(min(most, room / one))))
    while guess > best:
        found = need(guess)
        if found <= room:
            slope = max((found - at_best) / (guess - best), 1.0)
            best, at_best = guess, found
            guess = even(int(min(most, best + (room - found) / slope)))
        else:
            guess = even((best + guess) // 2)
    return best


def check_lengths(job: Job, names: Sequence[str] = ("prompt", "response")) -> None:
    """Raise a `UserError` unless mean lengths lie within the longest."""
    longest = {"prompt": job.sampler.max_prompt_tokens, "response": job.sampler.max_response_tokens}
    for name in names:
        mean = getattr(job, name)
        if not 1 <= mean <= longest[name]:
            raise UserError(
                f"--{name}-tokens {mean:g}: a mean length lies between 1 and "
                f"sampler.max_{name}_tokens = {longest[name]}"
            )
