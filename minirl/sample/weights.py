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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from minirl.model.decoder import Decoder
from minirl.model.lora import split
from minirl.model.sharding import (
    MESH_AXES,
    PARAM_AXES,
    device_bytes,
    param_path,
    param_shardings,
    with_shardings,
)
from minirl.run import distributed
from minirl.sample.cache import device_memory

# A copy takes at most this part of a device's memory, if there are devices enough to share it.
COPY_SHARE = 0.25

_frozen_copies: WeakKeyDictionary[Decoder, nnx.State] = WeakKeyDictionary()


def local_mesh(
    params: Any, devices: Sequence[Any], *, dtype: Any, memory_bytes: float
) -> Mesh | None:
    """Arrange the devices of a process for sampling; None for a single one.

    The fewest that hold a copy of `params` (all weights, or their shapes) in `dtype` are on
    `tensor`, the rest on `data`; `memory_bytes` is that of one device.
    """
    count, mesh = len(devices), None
    if count == 1:
        return None
    for tensor in (size for size in range(1, count + 1) if count % size == 0):
        grid = np.array(devices).reshape(count // tensor, 1, tensor)
        mesh = Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
        if device_bytes(copy_shapes(params, mesh, dtype)) <= COPY_SHARE * memory_bytes:
            break
    return mesh


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
        mesh of this process's devices.
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
    leaves = jax.tree.leaves(params)
    mesh = getattr(leaves[0].sharding, "mesh", None) if leaves else None
    if mesh is None:
        return params
    shape = (1, 1, 1) if target is None else target.devices.shape
    # One row a process: what is split along a row is there once for each of them.
    everyone = Mesh(np.array(_ordered(mesh)).reshape(-1, *shape), ("process", *MESH_AXES))
    single = SingleDeviceSharding(mesh.local_devices[0])
    shardings = () if target is None else (param_shardings(params, target),)

    def copy(path: Any, leaf: jax.Array, sharding: NamedSharding | None = None) -> jax.Array:
        leaf = leaf.astype(_copy_type(path, leaf, dtype))
        spec = PartitionSpec() if sharding is None else sharding.spec
        spread = jax.device_put(leaf, NamedSharding(everyone, spec))
        parts = [shard.data for shard in spread.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding or single, parts)

    return jax.tree.map_with_path(copy, params, *shardings)


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
