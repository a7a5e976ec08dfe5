"""How long a step takes, from what its programs compute, move and take from one another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from minirl.model.sharding import row_parts
from minirl.plan.ahead import Program
from minirl.plan.chips import Topology
from minirl.plan.memory import Tokens, decode_bytes, model_flops, update_flops
from minirl.plan.plan import Fit
from minirl.plan.resident import Job

# Shares of the peaks that programs reach. Products: large dense models without their collectives
# (MaxText's published runs on TPUs reach 0.55 to 0.67 with them; Llama 3, arXiv:2407.21783,
# table 4, 0.38 to 0.43 on H100s with all that a cluster costs). Memory and links: what long copies
# reach.
EFFICIENCY = {"tpu": 0.65, "gpu": 0.55, "cpu": 0.65}
MEMORY_EFFICIENCY = LINK_EFFICIENCY = 0.8


@dataclass(frozen=True, slots=True)
class Phase:
    """One kind of work of a step; all numbers are of one device, over the whole step.

    Attributes:
        flops: Operations.
        moved: Bytes of memory.
        taken: Bytes from other devices.
        compute_s: Seconds that the operations take alone.
        memory_s: Seconds that the bytes of memory take alone.
        hidden_s: Seconds of collectives during which the program computes.
        link_s: Seconds of collectives that everything waits for.
    """

    flops: float
    moved: float
    taken: float
    compute_s: float
    memory_s: float
    hidden_s: float
    link_s: float

    @property
    def seconds(self) -> float:
        """Return how long it takes."""
        return max(self.compute_s, self.memory_s, self.hidden_s) + self.link_s

    @property
    def collective_share(self) -> float:
        """Return the share of the time in which there are only collectives; 0 for no time."""
        alone = max(self.compute_s, self.memory_s)
        return 1 - alone / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long a step takes.

    Attributes:
        phases: `weights` on their way to the samplers, `prompts` and `decoding` there, `update`.
        tokens: Computed by the update.
        mfu: Of the update: 6 operations a weight and computed token, attention and repetition left
            out, over what the chips could do.
    """

    phases: dict[str, Phase]
    tokens: int
    mfu: float

    @property
    def step_s(self) -> float:
        """Return the seconds of a step."""
        return sum(phase.seconds for phase in self.phases.values())


def estimate(job: Job, topology: Topology, mesh: Mesh, found: Fit) -> Estimate:
    """Estimate a step of the job at its mean lengths.

    Args:
        job: What is planned.
        topology: The chips.
        mesh: Of their devices.
        found: What was compiled for it.
    """

    def phase(
        parts: Iterable[tuple[Program, float]],
        *,
        flops: float,
        moved: float,
        on: tuple[Topology, Mesh],
    ) -> Phase:
        seconds = {True: 0.0, False: 0.0}
        taken = 0.0
        chips, devices = on[0], list(on[1].devices.flat)
        for program, times in parts:
            for one in program.collectives:
                speed = LINK_EFFICIENCY * chips.bytes_s([devices[i] for i in one.devices])
                seconds[one.is_hidden] += times * one.bytes / speed
                taken += times * one.bytes
        return Phase(
            flops=flops,
            moved=moved,
            taken=taken,
            compute_s=flops / (EFFICIENCY[topology.chip.kind] * topology.chip.flops_s),
            memory_s=moved / (MEMORY_EFFICIENCY * topology.chip.memory_bytes_s),
            hidden_s=seconds[True],
            link_s=seconds[False],
        )

    own = topology.host, found.sampling.mesh
    phases = {
        "weights": _copying(topology, mesh, found),
        "prompts": phase(**_prompts(job, found), on=own),
        "decoding": phase(**_decoding(job, found), on=own),
        "update": phase(**_update(job, mesh, found), on=(topology, mesh)),
    }
    tokens = _computed(job, found, job.train.prompts_per_step)
    seconds = phases["update"].seconds
    mfu = model_flops(job.model, tokens) / (seconds * topology.size * topology.chip.flops_s)
    return Estimate(phases, tokens.computed, mfu)


def _computed(job: Job, found: Fit, groups: int) -> Tokens:
    """Count what an update computes of so many groups, at the mean lengths."""
    repeats = job.train.group_size // found.batch.answers
    prompts = groups * repeats
    return Tokens(prompts, round(job.prompt), prompts * found.batch.answers, round(job.response))


def _update(job: Job, mesh: Mesh, found: Fit) -> dict[str, Any]:
    batch, programs = found.batch, found.programs
    gradient = programs["gradient"]
    # With fewer groups than places the rest is padding, which is computed too.
    repeats = job.train.group_size // batch.answers
    places = batch.groups * row_parts(mesh) * batch.count
    tokens = _computed(job, found, -(-places // repeats))
    is_kernel = mesh.devices.flat[0].platform != "cpu"
    longest = Tokens(
        tokens.prompts,
        job.sampler.max_prompt_tokens,
        tokens.answers,
        job.sampler.max_response_tokens,
    )
    shorter = tokens.computed / longest.computed
    parts = [(gradient, batch.count), (programs["accumulate"], batch.count - 1)]
    parts.append((programs["apply"], 1))
    moved = [program.moved * times for program, times in parts]
    flops = update_flops(job.model, tokens, remat=job.source.remat, causal=is_kernel)
    return {
        "parts": parts,
        "flops": flops / mesh.size,
        "moved": moved[0] * shorter + sum(moved[1:]),
    }


def _copying(topology: Topology, mesh: Mesh, found: Fit) -> Phase:
    """Time the copy of the weights that a sampler takes from all devices, every step."""
    copy, taken = found.sampling.memory["sampler's weights"], found.sampling.arriving
    speed = LINK_EFFICIENCY * topology.bytes_s(list(mesh.devices.flat))
    memory_s = 2 * copy / (MEMORY_EFFICIENCY * topology.chip.memory_bytes_s)
    return Phase(0.0, 2 * copy, taken, 0.0, memory_s, 0.0, taken / speed)


def _share(job: Job, found: Fit) -> int:
    """Return the prompts of the process that has the most."""
    return -(-job.train.prompts_per_step // found.sampling.processes)


def _prompts(job: Job, found: Fit) -> dict[str, Any]:
    """Count the pieces of prompts that a sampler computes."""
    fill = found.programs["fill"]
    pieces = _share(job, found) * job.prompt / found.fill_tokens
    return {"parts": [(fill, pieces)], "flops": fill.flops * pieces, "moved": fill.moved * pieces}


def _decoding(job: Job, found: Fit) -> dict[str, Any]:
    """Count the steps of the decode loop: all slots work until the longest response ends."""
    decode, sampling = found.programs["decode"], found.sampling
    shape = sampling.cache
    episodes = _share(job, found) * job.train.group_size
    slots = shape.parts * shape.slots
    steps = max(episodes / slots, 1.0) * job.response
    cached = decode_bytes(
        job.model,
        slots=slots,
        prompts=slots / shape.group_size,
        prompt=job.prompt,
        answer=job.response / 2,
        item=job.dtype.itemsize,
    )
    read = sampling.memory["sampler's weights"] + cached / sampling.mesh.size
    return {"parts": [(decode, steps)], "flops": decode.flops * steps, "moved": read * steps}
