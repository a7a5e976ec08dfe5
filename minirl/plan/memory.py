"""What a job holds on each device between its programs, counted from shapes.

An update and a rollout take turns, and so does what they need: the gradient for the one, the
sampler's copy of the weights and its cache for the other. What programs need besides their
arguments their compiler says (`minirl.plan.fit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from flax import nnx
from jax.sharding import Mesh

from minirl.config import LoraConfig, ModelSource, SamplerConfig, TrainConfig
from minirl.errors import UserError
from minirl.model.config import ModelConfig, parse_config
from minirl.model.decoder import Decoder
from minirl.model.lora import add_adapters, split
from minirl.model.sharding import MESH_AXES, device_bytes, placed
from minirl.sample.cache import MEMORY_SHARE, CacheShape, cache_shapes, plan_cache
from minirl.sample.weights import copy_shapes, local_mesh
from minirl.train.layout import Extent, Shape
from minirl.train.optimizer import make_optimizer
from minirl.train.rollouts import own_slots
from minirl.train.update import Learner, TrainState, policy_objective


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


@dataclass(frozen=True, slots=True)
class Training:
    """The learner's side of a workload: shapes and shardings of the trained weights and of the
    optimizer's state, bytes of a device by kind that it holds all the time, numbers of the model.
    """

    learner: Learner
    state: TrainState
    memory: dict[str, float]
    parameters: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """The native sampler's side of a workload, on the devices of one of the processes that sample.

    Bytes are those of a device: by kind, while it samples (`memory`) and all the time (`kept`), and
    those that come from the learner before every rollout (`transfer`).
    """

    processes: int
    mesh: Mesh
    cache: CacheShape
    memory: dict[str, float]
    kept: dict[str, float]
    transfer: float


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
) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Return a model's structure, and shapes and shardings of its trained and frozen weights."""
    dtype = jnp.dtype(source.dtype)

    def make(key: jax.Array) -> Decoder:
        # As they are read: frozen weights need no more precision than the computation has.
        kept = jnp.float32 if lora is None else dtype
        kinds = {"dtype": dtype, "param_dtype": kept, "remat": source.remat}
        model = Decoder(config, key=key, mesh=mesh, **kinds)
        if lora is not None:
            add_adapters(model, lora, seed=0)
        return model

    graph, trained, frozen = split(nnx.eval_shape(make, jax.random.key(0)))
    return graph, placed(trained, mesh), placed(frozen, mesh)


def training_of(work: Workload, mesh: Mesh | None) -> Training:
    """Describe the learner's side of a workload on a mesh of all devices."""
    train = work.train
    graph, params, frozen = abstract_model(work.model, work.source, mesh, lora=train.lora)
    optimizer = make_optimizer(train.optimizer)
    objective = policy_objective(train.algorithm, temperature=work.sampler.temperature)
    state = TrainState(params, placed(jax.eval_shape(optimizer.init, params), mesh))
    memory = {
        "weights": device_bytes(params) + device_bytes(frozen),
        "optimizer": device_bytes(state.opt_state),
    }
    if train.has_reference:
        memory["start weights"] = device_bytes(copy_shapes(params, mesh, work.dtype))
    learner = Learner(graph, objective, optimizer, frozen=frozen, mesh=mesh)
    parameters = sum(leaf.size for leaf in jax.tree.leaves((params, frozen)))
    return Training(learner, state, memory, parameters)


def sampling_of(
    work: Workload, mesh: Mesh | None, own: Sequence[Any], *, memory_bytes: float
) -> Sampling:
    """Describe the native sampler's side of a workload; `own` are the devices of one process, of
    so much memory each.
    """
    _, *weights = abstract_model(work.model, work.source, mesh, lora=work.train.lora)
    local = local_mesh(nnx.merge_state(*weights), own, dtype=work.dtype, memory_bytes=memory_bytes)
    if local is None:
        local = Mesh(np.array(own).reshape(1, 1, 1), MESH_AXES)
    processes = 1 if mesh is None else mesh.size // len(own)

    def cache(config: SamplerConfig, group_size: int) -> tuple[float, CacheShape]:
        if config.cache_gb is None:
            # The most that the sampler would take.
            most = min(MEMORY_SHARE * memory_bytes / 1e9, 1e9)
            config = config.model_copy(update={"cache_gb": most})
        kinds = {"itemsize": work.dtype.itemsize, "mesh": local}
        shape = plan_cache(work.model, config, group_size=group_size, **kinds)
        arrays = cache_shapes(shape, work.model, dtype=work.dtype, mesh=local)
        return device_bytes(arrays), shape

    slots = own_slots(work.sampler, work.train, processes=processes)
    caches = [cache(slots, work.train.group_size)]
    if work.evaluation is not None:
        caches.append(cache(work.evaluation, 1))
    size, shape = max(caches, key=lambda one: one[0])
    trained, frozen = (device_bytes(copy_shapes(part, local, work.dtype)) for part in weights)
    # Frozen weights are copied once for all rollouts.
    memory = {"sampler's weights": frozen + trained, "cache": size}
    is_spread = mesh is not None and mesh.size > 1
    kept = {"sampler's frozen weights": frozen} if frozen and is_spread else {}
    return Sampling(processes, local, shape, memory, kept, trained if is_spread else 0.0)


def longest_group(work: Workload) -> Extent:
    """Return the lengths of a group of the longest prompt and answers."""
    sampler = work.sampler
    # The last token of a prompt is the first input of every answer.
    answers = (sampler.max_response_tokens,) * work.train.group_size
    return Extent(sampler.max_prompt_tokens - 1, answers)


def cudnn_workspace(config: ModelConfig, shape: Shape, *, tensor: int) -> float:
    """Return the largest workspace of cuDNN's flash attention in a device's micro-batch, in bytes.

    XLA does not know it without a GPU. The backward kernel takes the gradient of the queries in
    fp32 and a number for each of their rows, and the gradients of keys and values in 16 bits for
    each query head; the forward kernel takes nothing. That is what cuDNN 9 plans for sm_90 (169,
    987 and 1,799 MiB for a 7B model's prompt, its prefix and eight answers of 8,192 tokens).
    """
    heads, size = config.num_attention_heads / tensor, config.head_dim
    prompts = shape.prompts * shape.prompt_columns
    answers = shape.prompts * shape.answers * shape.answer_columns
    # (queries, keys) of the prompt's own attention, of answers to prompts, of answers' own.
    pairs = ((prompts, prompts), (answers, prompts), (answers, answers))
    return max(4 * heads * (queries * (size + 1) + keys * size) for queries, keys in pairs)
