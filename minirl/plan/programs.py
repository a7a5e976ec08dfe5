"""The programs of a job, and what they keep on each device, as shapes: nothing is allocated.

An update and a rollout take turns, and so does what they need: the gradient for the one, the
sampler's copy of the weights and its cache for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from flax import nnx
from jax.sharding import Mesh

from exchange import UserError
from minirl.config import LoraConfig, ModelSource, SamplerConfig, TrainConfig
from minirl.model.config import ModelConfig, parse_config
from minirl.model.decoder import Decoder
from minirl.model.lora import described, split, trained
from minirl.model.sharding import MESH_AXES, axes_sharding, device_bytes, row_parts, with_shardings
from minirl.sample.cache import CacheShape, cache_room, cache_shapes, plan_cache
from minirl.sample.weights import copy_shapes, local_mesh
from minirl.train.batching import Batch, Shape, empty_batch
from minirl.train.losses import policy_loss
from minirl.train.optimizer import make_optimizer
from minirl.train.rollouts import needed_slots
from minirl.train.update import Learner, TrainState


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
    memory = {
        "weights": device_bytes(weights),
        "optimizer": device_bytes(state.opt_state),
    }
    if train.has_reference:
        memory["start weights"] = device_bytes(copy_shapes(params, mesh, work.dtype))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(weights))
    return Training(learner, state, memory, parameters)


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
            work.model,
            config,
            group_size=size,
            itemsize=work.dtype.itemsize,
            mesh=local,
            room=room,
        )
        for config, size in uses
    ]
    return max(caches, key=lambda cache: cache.tokens)


def abstract_batch(shape: Shape, mesh: Mesh | None, *, top: int = 0) -> Batch:
    """Return the shapes and shardings of a micro-batch, on all devices (`empty_batch`)."""

    def abstract(array: Any) -> Any:
        axes = ("batch", "position")[: array.ndim]
        sharding = None if mesh is None else axes_sharding(axes, array.shape, mesh, name="batch")
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(abstract, empty_batch(shape, parts=row_parts(mesh), top=top))
