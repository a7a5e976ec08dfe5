"""Sharding: one table has the logical axes of each parameter, beside its name in files, and another
one maps those to axes of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from minirl.config import Matrix
from minirl.exchange import UserError

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis -> the mesh axes that split it; None is never split.
_SPLIT_BY: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "width": "fsdp",
    **dict.fromkeys(("vocab", "heads", "kv_heads", "ff"), "tensor"),
    # `model` is the model's width in activations; that of weights is split.
    **dict.fromkeys(("layer", "model", "head_size", "position", "norm", "rank", "tap")),
}

# Last part of a parameter's path -> its name in Hugging Face's files, for layers within
# `model.layers.N.`, and its logical axes, in the order of its shape; those of stacked layers have
# "layer" before them. `heads` and `kv_heads` count heads times their size here.
_PARAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "embed": ("model.embed_tokens.weight", ("vocab", "width")),
    "unembed": ("lm_head.weight", ("vocab", "width")),
    "final_norm": ("model.norm.weight", ("norm",)),
    "attn_norm": ("input_layernorm.weight", ("norm",)),
    "q": ("self_attn.q_proj.weight", ("heads", "width")),
    "k": ("self_attn.k_proj.weight", ("kv_heads", "width")),
    "v": ("self_attn.v_proj.weight", ("kv_heads", "width")),
    "o": ("self_attn.o_proj.weight", ("width", "heads")),
    "q_bias": ("self_attn.q_proj.bias", ("heads",)),
    "k_bias": ("self_attn.k_proj.bias", ("kv_heads",)),
    "v_bias": ("self_attn.v_proj.bias", ("kv_heads",)),
    "q_norm": ("self_attn.q_norm.weight", ("norm",)),
    "k_norm": ("self_attn.k_norm.weight", ("norm",)),
    "mlp_norm": ("post_attention_layernorm.weight", ("norm",)),
    "gate": ("mlp.gate_proj.weight", ("ff", "width")),
    "up": ("mlp.up_proj.weight", ("ff", "width")),
    "down": ("mlp.down_proj.weight", ("width", "ff")),
    # Of linear attention.
    "in_qkv": ("linear_attn.in_proj_qkv.weight", ("heads", "width")),
    "in_z": ("linear_attn.in_proj_z.weight", ("heads", "width")),
    "in_b": ("linear_attn.in_proj_b.weight", ("heads", "width")),
    "in_a": ("linear_attn.in_proj_a.weight", ("heads", "width")),
    "conv": ("linear_attn.conv1d.weight", ("heads", "tap", "tap")),
    "a_log": ("linear_attn.A_log", ("heads",)),
    "dt_bias": ("linear_attn.dt_bias", ("heads",)),
    "out_norm": ("linear_attn.norm.weight", ("norm",)),
    "out": ("linear_attn.out_proj.weight", ("width", "heads")),
}
# The matrices of a layer, [out, in], that are trained as such; each may have an adapter B A, under
# PEFT's names.
MATRICES: tuple[str, ...] = get_args(Matrix)
for _name in MATRICES:
    _file, (_out, _in) = _PARAMS[_name]
    for _end, _axes in (("a", ("rank", _in)), ("b", (_out, "rank"))):
        _own = _file.removesuffix("weight") + f"lora_{_end.upper()}.weight"
        _PARAMS[f"{_name}_{_end}"] = (_own, _axes)
FILE_NAMES = {name: file for name, (file, _) in _PARAMS.items()}
PARAM_AXES = {name: axes for name, (_, axes) in _PARAMS.items()}


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange devices, all those of all processes by default, along the axes of the mesh.

    Args:
        sizes: Devices along each axis, 1 where not named.
        devices: Other devices.

    Raises:
        UserError: The sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    full = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    if math.prod(full) != len(devices):
        product = " x ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, full, strict=True))
        raise UserError(
            f"mesh: {product} is not the {len(devices)} devices there are; "
            "change it, or write mesh: auto"
        )
    # An axis of the mesh may be a part of one of the torus: 64 x 2 on 4 x 4 x 8 chips.
    grid = mesh_utils.create_device_mesh(full, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def choose_mesh(devices: int, *, prompts: int, heads: int, width: int) -> dict[str, int]:
    """Choose a mesh shape: all devices on `fsdp`, but where there are more than prompts.

    Each data x fsdp part computes whole prompts; with more parts than prompts of an update some
    would compute padding, so the rest of the devices goes to `tensor`, which should divide the
    query heads. `fsdp` divides the model's width, or nothing would be split; `data` has the rest.
    """
    enough = [size for size in divisors(devices) if devices // size <= prompts]
    # Where it does not divide the heads, `tensor` still splits the matrices.
    tensor = next((size for size in enough if heads % size == 0), enough[0])
    parts = devices // tensor
    fsdp = max(size for size in divisors(parts) if width % size == 0)
    return {"data": parts // fsdp, "fsdp": fsdp, "tensor": tensor}


def divisors(number: int) -> list[int]:
    """Return what divides a number, in order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def axes_sharding(
    axes: Sequence[str], shape: Sequence[int], mesh: Mesh | None
) -> NamedSharding | None:
    """Shard an array by its logical axes; nothing without mesh."""
    return None if mesh is None else NamedSharding(mesh, axes_spec(axes, shape, mesh))


def axes_spec(axes: Sequence[str], shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Return the mesh axes that split each dimension; None where they do not divide its size."""
    sizes = zip(axes, shape, strict=True)
    return PartitionSpec(
        *[None if size % _parts(axis, mesh) else _SPLIT_BY[axis] for axis, size in sizes]
    )


def _parts(axis: str, mesh: Mesh) -> int:
    """Return the number of parts of a logical axis."""
    split = _SPLIT_BY[axis]
    over = (split,) if isinstance(split, str) else split or ()
    return math.prod(mesh.shape[part] for part in over)


def param_shardings(params: Any, mesh: Mesh) -> Any:
    """Return the sharding of every parameter, or of an optimizer's state, as a tree.

    Instead of arrays, shapes will do. What is no parameter is replicated.
    """

    def sharding_of(path: tuple[Any, ...], leaf: Any) -> NamedSharding | None:
        name = param_path(path)
        axes = PARAM_AXES.get(name.rpartition(".")[2])
        if axes is None or leaf.ndim == 0:
            return NamedSharding(mesh, PartitionSpec())
        axes = ("layer",) * stack_axes(name, leaf.ndim) + axes
        return axes_sharding(axes, leaf.shape, mesh)

    return jax.tree.map_with_path(sharding_of, params)


def with_shardings(shapes: Any, mesh: Mesh | None) -> Any:
    """Add shardings to the shapes of weights, or of an optimizer's state."""
    if mesh is None:
        return shapes
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        param_shardings(shapes, mesh),
    )


def device_bytes(tree: Any) -> float:
    """Return the bytes of a tree of shapes with shardings, or of arrays, on each device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape)
        * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def constrain(array: jax.Array, axes: Sequence[str], mesh: Mesh | None) -> jax.Array:
    """Shard an activation by its logical axes, inside a compiled function; nothing without mesh."""
    sharding = axes_sharding(axes, array.shape, mesh)
    return array if sharding is None else jax.lax.with_sharding_constraint(array, sharding)


def on_parts(run: Callable[..., Any], mesh: Mesh | None, *, inputs: Any, outputs: Any) -> Any:
    """Run a function on every part of the mesh with what lies there; as it is without a mesh."""
    if mesh is None:
        return run
    return jax.shard_map(run, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def constrain_params(tree: Any, mesh: Mesh | None) -> Any:
    """Shard what is shaped like the weights as they are, inside a compiled function, whatever the
    compiler thinks; nothing without mesh.
    """
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, param_shardings(tree, mesh))


def split_rows(tree: Any, mesh: Mesh) -> Any:
    """Shard arrays that every process has whole by rows, a multiple of `row_parts`."""
    sharding = NamedSharding(mesh, PartitionSpec(_SPLIT_BY["batch"]))

    def split(array: Any) -> jax.Array:
        rows = np.asarray(array)
        return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])

    return jax.tree.map(split, tree)


def axis_parts(axis: str, size: int, mesh: Mesh | None) -> int:
    """Return the number of parts of a logical axis of this size; 1 where it is replicated."""
    parts = 1 if mesh is None else _parts(axis, mesh)
    return 1 if size % parts else parts


def row_parts(mesh: Mesh | None) -> int:
    """Return the number of parts of a batch's rows."""
    return 1 if mesh is None else _parts("batch", mesh)


def device_of(mesh: Mesh | None) -> Any:
    """Return one of the devices, which are of one kind and may be only described."""
    return jax.devices()[0] if mesh is None else mesh.devices.flat[0]


def platform_of(mesh: Mesh | None) -> str:
    """Return what the devices are: `cpu`, `gpu` or `tpu`."""
    return device_of(mesh).platform


def param_path(path: tuple[Any, ...]) -> str:
    """Write a key path of a parameter tree as, for example, `layers.q`."""
    keys = [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return ".".join(keys)


def stack_axes(path: str, ndim: int) -> int:
    """Return how many of a parameter's axes, the first of them, stack layers: none outside of
    layers, one, or two where each period of a hybrid has several of a kind.
    """
    return ndim - len(PARAM_AXES[path.rpartition(".")[2]])
