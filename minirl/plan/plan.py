"""What a step would take on chips that are not here: memory, and the largest micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh
from jax.stages import Lowered

from minirl.errors import UserError
from minirl.model.sharding import row_parts
from minirl.plan.ahead import Program, abstract_batch, at_depth, compile_program
from minirl.plan.chips import Topology, described_devices
from minirl.plan.memory import abstract_model, device_bytes
from minirl.plan.resident import Job, Sampling, Training, sampling_of, training_of
from minirl.sample.decode import fill_tokens, lowered_programs
from minirl.sample.local import copy_shapes
from minirl.train.packing import round_up

# Share of a chip's memory that a plan fills: the rest is the runtime's, and lost between buffers.
FILLED = 0.95
# Programs compiled at least: the sampler's three at two depths, the update's three.
_PROGRAMS = 9
# XLA's least effort to make a program fast: it compiles two to three times as quickly, and plans a
# fifth more memory (7B on v5p:4x4x4: 51 s in place of 104, 5.5 GB of temporaries in place of 4.4).
_QUICK = {"exec_time_optimization_effort": -1.0}

Progress = Callable[[int, int, str], None]


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
        sampling: How one process samples.
        fill_tokens: Prompt tokens that a sampler computes at once, on all its devices.
        memory: Bytes by kind, while the update runs.
        generation: Bytes by kind, while the sampler works.
        room: Bytes that may be filled.
        programs: By name.
        parameters: Numbers of the model.
        seconds: How long compiling took.
    """

    batch: MicroBatch
    sampling: Sampling
    fill_tokens: int
    memory: dict[str, float]
    generation: dict[str, float]
    room: float
    programs: dict[str, Program]
    parameters: int
    seconds: float

    @property
    def update_bytes(self) -> float:
        """Return all bytes while the update runs."""
        return sum(self.memory.values())

    @property
    def generation_bytes(self) -> float:
        """Return all bytes while the sampler works."""
        return sum(self.generation.values())


@dataclass(slots=True)
class _Compiler:
    """Compiles the programs of a job for a mesh, and keeps what is known of them."""

    job: Job
    training: Training
    sampling: Sampling
    mesh: Mesh
    progress: Progress
    seconds: float = 0.0
    done: int = 0
    fill_tokens: int = 0

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
        for name, lowered in self.training.learner.lower(self.training.state, shapes):
            yield self.compile(name, lowered)

    def sampler(self) -> dict[str, Program]:
        """Compile the sampler's programs for one layer and for two, and tell of all from them.

        Its layers are not a loop: compiling a deep model's takes many minutes.
        """
        one, two = map(self._shallow, (1, 2))
        depth = self.job.model.num_hidden_layers
        return {name: at_depth(one[name], two[name], depth) for name in one}

    def _shallow(self, depth: int) -> dict[str, Program]:
        job, sampling = self.job, self.sampling
        config = replace(job.model, num_hidden_layers=depth)
        # Adapters are part of the copy.
        graph, params, frozen = abstract_model(config, job.source, sampling.mesh)
        calls = lowered_programs(
            (graph, copy_shapes(params, sampling.mesh, job.dtype), frozen),
            sampling.cache,
            config=config,
            dtype=job.dtype,
            mesh=sampling.mesh,
        )
        self.fill_tokens = fill_tokens(sampling.cache)
        return {name: self.compile(name, call) for name, call in calls.items()}


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
    training = training_of(job, mesh)
    memory_bytes = topology.chip.memory_bytes
    # Described apart: compilers know no part of a slice.
    own, _ = described_devices(topology.host)
    room = FILLED * memory_bytes
    gradient = device_bytes(training.state.params)
    _refuse(training.memory | {"gradients": gradient}, room)
    sampling = sampling_of(job, mesh, own, memory_bytes=memory_bytes)
    compiler = _Compiler(job, training, sampling, mesh, progress)
    programs = compiler.sampler()
    kept = training.memory | sampling.kept
    generation = kept | sampling.memory
    # Before there is a cache, what came from the other devices lies beside the copy.
    at_work = [programs[name].temporaries + programs[name].outputs for name in ("fill", "decode")]
    generation["sampler at work"] = max(*at_work, sampling.arriving - sampling.memory["cache"])
    _refuse(generation, room)
    batch, update = _largest_batch(compiler, room=room - sum(kept.values()))
    if batch is None:
        need = {"gradients": gradient, "activations": update["gradient"].temporaries}
        raise _nothing_fits(kept | need, room)
    return Fit(
        batch=batch,
        sampling=sampling,
        fill_tokens=compiler.fill_tokens,
        memory=kept | _update_memory(update, batch, training),
        generation=generation,
        room=room,
        programs=programs | update,
        parameters=training.parameters,
        seconds=compiler.seconds,
    )


def _refuse(memory: dict[str, float], room: float) -> None:
    """Raise a `UserError` if this is more than there is room for."""
    if sum(memory.values()) > room:
        raise _nothing_fits(memory, room)


def _nothing_fits(memory: dict[str, float], room: float) -> UserError:
    parts = " + ".join(f"{name} {size / 2**30:.1f}" for name, size in memory.items())
    return UserError(
        f"nothing fits: {parts} = {sum(memory.values()) / 2**30:.1f} GiB a device, and "
        f"{room / 2**30:.1f} may be filled; take more chips, a mesh with more of them on tensor, "
        "shorter lengths, a smaller sampler.cache_gb, or train.optimizer.moments=bfloat16"
    )


def _update_memory(
    update: dict[str, Program], batch: MicroBatch, training: Training
) -> dict[str, float]:
    """Return what an update takes besides what is always there, by kind."""
    gradient = device_bytes(training.state.params)
    # Several micro-batches: their sum beside the gradient of the one at work.
    gradients = gradient * min(batch.count, 2)
    work = max(update["gradient"].temporaries, update["apply"].temporaries - gradients + gradient)
    return {
        "gradients": gradients,
        "batch": update["gradient"].arguments - training.memory["weights"],
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
        return sum(_update_memory(found, batch, compiler.training).values())

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
