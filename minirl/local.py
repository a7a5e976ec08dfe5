"""The weights on this process's own devices: each process samples alone, from a whole model."""

from __future__ import annotations

from math import gcd
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from minirl.model import Decoder
from minirl.sharding import PARAM_AXES, mesh_of, param_path, param_shardings


def local_mesh(mesh: Mesh) -> Mesh | None:
    """Arrange this process's devices as those of all: `tensor` as far as they go, else `fsdp`.

    Returns:
        None for a single device.
    """
    devices = jax.local_devices()
    if len(devices) == 1:
        return None
    tensor = gcd(mesh.shape["tensor"], len(devices))
    # In the order of their numbers on every process, as `local_params` counts on.
    grid = np.array(devices).reshape(1, len(devices) // tensor, tensor)
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def local_model(model: Decoder) -> Decoder:
    """Return the model on this process's devices; the same one where there are no others."""
    if jax.process_count() == 1:
        return model
    assert model.mesh is not None
    graph, params = nnx.split(model)
    copied = nnx.merge(graph, local_params(params, model.dtype))
    own = local_mesh(model.mesh)
    for _, node in nnx.iter_graph(copied):
        if isinstance(node, nnx.Module) and hasattr(node, "mesh"):
            node.mesh = own
    return copied


def local_params(params: nnx.State, dtype: Any) -> nnx.State:
    """Copy weights that are split over all processes to this process's devices.

    Matrices come in the type of the computation, half of the bytes where that is bf16: a process
    receives what it does not hold, 2 bytes a parameter at most, and keeps 2 bytes a parameter on
    its devices together. All processes have to ask. Where there is one, nothing is copied.
    """
    mesh = mesh_of(params)
    if jax.process_count() == 1 or mesh is None:
        return params
    own = local_mesh(mesh)
    shape = (1, 1, 1) if own is None else own.devices.shape
    order = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    # One row a process: what is split along a row is there once for each of them.
    everyone = Mesh(np.array(order).reshape(-1, *shape), ("process", *mesh.axis_names))
    single = SingleDeviceSharding(jax.local_devices()[0])
    targets = None if own is None else param_shardings(params, own)

    def copy(path: Any, leaf: jax.Array, target: NamedSharding | None = None) -> jax.Array:
        axes = PARAM_AXES.get(param_path(path).rpartition(".")[2], ())
        if len(axes) > 1 and "rank" not in axes:  # adapters are added in full precision
            leaf = leaf.astype(dtype)
        spec = PartitionSpec() if target is None else target.spec
        spread = jax.device_put(leaf, NamedSharding(everyone, spec))
        parts = [shard.data for shard in spread.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, target or single, parts)

    rest = () if targets is None else (targets,)
    return jax.tree.map_with_path(copy, params, *rest)
