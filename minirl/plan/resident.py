"""What a job keeps on each device: counted from shapes, activations estimated; nothing is compiled.

An update and a rollout take turns, and so do what they keep: gradients and activations in the one,
the sampler's copy of the weights and its cache in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from minirl.config import ModelSource, SamplerConfig, TrainConfig
from minirl.model.decoder import ModelConfig
from minirl.model.logprobs import LOGITS_BYTES
from minirl.model.sharding import MESH_AXES, row_parts
from minirl.plan.memory import (
    Tokens,
    abstract_model,
    abstract_opt_state,
    activation_bytes,
    count_parameters,
    device_bytes,
)
from minirl.sample.cache import MEMORY_SHARE, CacheShape, cache_shapes, plan_cache
from minirl.sample.episodes import own_slots
from minirl.sample.local import copy_shapes, local_mesh
from minirl.train.packing import round_up
from minirl.train.update import Learner, TrainState, make_optimizer, policy_objective


@dataclass(frozen=True, slots=True)
class Job:
    """What is planned.

    Attributes:
        model: The model's shape.
        source: Its types, and what is computed again.
        sampler: Slots and lengths.
        train: Batch, algorithm, optimizer, adapters.
        prompt: Mean length of the prompts, in tokens.
        response: Mean length of the responses.
    """

    model: ModelConfig
    source: ModelSource
    sampler: SamplerConfig
    train: TrainConfig
    prompt: float
    response: float

    @property
    def dtype(self) -> Any:
        """Return the type of the computation."""
        return jnp.dtype(self.source.dtype)


@dataclass(frozen=True, slots=True)
class Training:
    """The learner's side of a job.

    Attributes:
        learner: Its functions.
        state: Shapes and places of the weights that are trained, and of the optimizer's state.
        memory: Bytes of a device, by kind, that are there all the time.
        parameters: Numbers of the model, all of them.
    """

    learner: Learner
    state: TrainState
    memory: dict[str, float]
    parameters: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampler's side of a job, on the devices of one process.

    Attributes:
        processes: How many sample, each its share of the prompts.
        mesh: The process's own.
        config: Its slots, lengths and cache.
        cache: The size of its cache.
        memory: Bytes of a device, by kind, that are there while it samples.
        kept: Bytes of a device, by kind, that it keeps all the time.
        arriving: Bytes of a device that come from the learner before every rollout.
    """

    processes: int
    mesh: Mesh
    config: SamplerConfig
    cache: CacheShape
    memory: dict[str, float]
    kept: dict[str, float]
    arriving: float


def training_of(job: Job, mesh: Mesh | None) -> Training:
    """Describe the learner's side of a job on a mesh of all devices."""
    train = job.train
    graph, params, frozen = abstract_model(job.model, job.source, mesh, lora=train.lora)
    optimizer = make_optimizer(train.optimizer, steps=train.steps)
    objective = policy_objective(
        train.algorithm, temperature=job.sampler.temperature, top_p=job.sampler.ratio_top_p
    )
    state = TrainState(params, abstract_opt_state(optimizer, params, mesh))
    memory = {
        "weights": device_bytes(params) + device_bytes(frozen),
        "optimizer": device_bytes(state.opt_state),
    }
    if train.has_reference:
        memory["start weights"] = device_bytes(copy_shapes(params, mesh, job.dtype))
    learner = Learner(graph, objective, optimizer, frozen=frozen, mesh=mesh)
    return Training(learner, state, memory, count_parameters(params) + count_parameters(frozen))


def sampling_of(
    job: Job, mesh: Mesh | None, own: Sequence[Any], *, memory_bytes: float
) -> Sampling:
    """Describe the sampler's side of a job.

    Args:
        job: What is planned.
        mesh: Of all devices.
        own: The devices of one process.
        memory_bytes: Of one device.
    """
    _, *weights = abstract_model(job.model, job.source, mesh, lora=job.train.lora)
    local = local_mesh(nnx.merge_state(*weights), own, dtype=job.dtype, memory_bytes=memory_bytes)
    if local is None:
        local = Mesh(np.array(own).reshape(1, 1, 1), MESH_AXES)
    processes = 1 if mesh is None else mesh.size // len(own)
    config = own_slots(job.sampler, job.train, processes=processes)
    if config.cache_gb is None:
        # What the sampler would find itself to be the most.
        most = min(MEMORY_SHARE * memory_bytes / 1e9, 1e9)
        config = config.model_copy(update={"cache_gb": most})
    shape = plan_cache(
        job.model,
        config,
        group_size=job.train.group_size,
        itemsize=job.dtype.itemsize,
        mesh=local,
    )
    trained, frozen = (device_bytes(copy_shapes(part, local, job.dtype)) for part in weights)
    cache = device_bytes(cache_shapes(shape, job.model, dtype=job.dtype, mesh=local))
    # Adapters are added to frozen weights, and those are copied once for all rollouts.
    memory = {"sampler's weights": frozen or trained, "cache": cache}
    is_spread = mesh is not None and mesh.size > 1
    kept = {"sampler's frozen weights": frozen} if frozen and is_spread else {}
    arriving = trained if is_spread else 0.0
    return Sampling(processes, local, config, shape, memory, kept, arriving)


def resident_bytes(
    job: Job,
    mesh: Mesh | None,
    own: Sequence[Any],
    *,
    memory_bytes: float,
    has_sampler: bool = True,
    has_activations: bool = True,
) -> dict[str, float]:
    """Count what a run holds on each device, by kind; all but the activations for certain.

    Args:
        job: What is run.
        mesh: Of all devices; None for a single one.
        own: The devices of this process.
        memory_bytes: Of one device.
        has_sampler: Whether this process samples, and no servers do.
        has_activations: Whether those are counted, which are an estimate.

    Returns:
        What is there all the time, and beside it what the update needs or what the sampler does,
        whichever is more.
    """
    training = training_of(job, mesh)
    gradient = device_bytes(training.state.params)
    # Of several micro-batches the sum lies beside the gradient of the one at work.
    update = {
        "gradients": gradient * min(_micro_batches(job, mesh), 2),
        "activations": _activations(job, mesh) if has_activations else 0.0,
    }
    if not has_sampler:
        return training.memory | update
    sampling = sampling_of(job, mesh, own, memory_bytes=memory_bytes)
    turn = max(update, sampling.memory, key=lambda kinds: sum(kinds.values()))
    return training.memory | sampling.kept | turn


def _micro_batches(job: Job, mesh: Mesh | None) -> int:
    """Count the micro-batches of an update."""
    train = job.train
    groups = -(-train.prompts_per_step // (train.mini_batches * row_parts(mesh)))
    answers = train.batching.answers_per_batch or train.group_size
    return -(-groups * (train.group_size // answers) // train.batching.groups_per_batch)


def _activations(job: Job, mesh: Mesh | None) -> float:
    """Estimate the bytes of a micro-batch of the longest prompts and answers."""
    train, sampler, sizes = job.train, job.sampler, job.train.batching
    tensor = 1 if mesh is None else mesh.shape["tensor"]
    tokens = Tokens(
        prompts=sizes.groups_per_batch,
        prompt=round_up(sampler.max_prompt_tokens, multiple=sizes.prompt_multiple),
        answers=sizes.groups_per_batch * (sizes.answers_per_batch or train.group_size),
        answer=round_up(sampler.max_response_tokens, multiple=sizes.answer_multiple),
    )
    return activation_bytes(
        job.model,
        tokens,
        remat=job.source.remat,
        itemsize=job.dtype.itemsize,
        tensor=tensor,
        logits=min(
            LOGITS_BYTES, 4.0 * tokens.answers * tokens.answer * job.model.vocab_size / tensor
        ),
    )
