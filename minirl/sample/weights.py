"""The sampler's copy of the weights: each process samples alone, on its own devices.

A gather of every layer pays for a batch of many tokens, and not for one token of each slot: the
copy is whole on every device, or split over as few as have the memory for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from minirl.model.decoder import Decoder
from minirl.model.lora import split
from minirl.model.sharding import (
    MESH_AXES,
    PARAM_AXES,
    device_bytes,
    divisors,
    param_path,
    param_shardings,
    with_shardings,
)
from minirl.run import distributed
from minirl.sample.cache import device_memory

# A copy takes at most this part of a device's memory, if there are devices enough to share it.
COPY_SHARE = 0.25

_frozen_copies: WeakKeyDictionary[Decoder, nnx.State] = WeakKeyDictionary()


def local_mesh(params: Any, devices: Sequence[Any], *, dtype: Any, memory_bytes: float) -> Mesh:
    """Arrange the devices of a process for sampling.

    The fewest that hold a copy of `params` (all weights, or their shapes) in `dtype` are on
    `tensor`, the rest on `data`; `memory_bytes` is that of one device.
    """
    count = len(devices)

    def arranged(tensor: int) -> Mesh:
        grid = np.array(devices).reshape(count // tensor, 1, tensor)
        return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))

    def holds(tensor: int) -> bool:
        share = device_bytes(copy_shapes(params, arranged(tensor), dtype))
        return share <= COPY_SHARE * memory_bytes

    return arranged(next(filter(holds, divisors(count)), count))


def copy_shapes(params: Any, target: Mesh | None, dtype: Any) -> Any:
    """Return the shapes and places of what `local_params` makes of weights."""
    return with_shardings(
        jax.tree.map_with_path(
            lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, _copy_type(path, leaf, dtype)),
            params,
        ),
        target,
    )


def local_model(model: Decoder) -> tuple[nnx.GraphDef, nnx.State, Mesh | None]:
    """Prepare a model for sampling on this process's devices; all processes have to call it.

    Returns:
        Its structure there; a copy of what is not trained, one for all samplers of a model; and the
        mesh of this process's devices, None for a model on none.
    """
    graph, _, frozen = split(model)
    if model.mesh is None:
        return graph, frozen, None
    local = local_mesh(
        nnx.state(model),
        [device for device in _ordered(model.mesh) if device.process_index == jax.process_index()],
        dtype=model.dtype,
        # All have to arrange their devices alike, and the memories of two hosts may differ.
        memory_bytes=min(distributed.gather(lambda: device_memory(model.mesh))),
    )
    if model not in _frozen_copies:
        _frozen_copies[model] = local_params(frozen, local, model.dtype)
    moved = nnx.clone(model)
    moved.mesh = local
    return nnx.graphdef(moved), _frozen_copies[model], local


def local_params(params: nnx.State, target: Mesh | None, dtype: Any) -> nnx.State:
    """Copy weights that are split over a mesh to this process's devices, one after the other.

    All processes have to call it. Weights on no mesh stay where they are; what lies whole on every
    device may share the learner's memory, so the copy has to go before an update.
    """
    leaves: list[Any] = jax.tree.leaves(params)
    if target is None or not leaves:
        return params
    # One row a process: what is split along a row is there once for each of them.
    rows = np.array(_ordered(leaves[0].sharding.mesh)).reshape(-1, *target.devices.shape)
    everyone = Mesh(rows, ("process", *MESH_AXES))

    def copy(path: Any, leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        leaf = leaf.astype(_copy_type(path, leaf, dtype))
        spread = jax.device_put(leaf, NamedSharding(everyone, sharding.spec))
        parts = [shard.data for shard in spread.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)

    return jax.tree.map_with_path(copy, params, param_shardings(params, target))


def in_compute_type(params: nnx.State, dtype: Any) -> nnx.State:
    """Copy weights where they lie, in the type of the computation."""
    return jax.tree.map_with_path(
        lambda path, leaf: jnp.array(leaf, dtype=_copy_type(path, leaf, dtype), copy=True), params
    )


def _copy_type(path: Any, leaf: Any, dtype: Any) -> Any:
    """Return the type of a weight's copy; norms enter in full precision."""
    axes = PARAM_AXES.get(param_path(path).rpartition(".")[2], ())
    return dtype if len(axes) > 1 else leaf.dtype


def _ordered(mesh: Mesh) -> list[Any]:
    """List the devices of a mesh, those of a process side by side, alike on every process."""
    return sorted(mesh.devices.flat, key=lambda device: (device.process_index, device.id))
