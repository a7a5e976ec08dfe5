"""Where arrays live: parameters name their axes, and one table maps those to axes of the mesh."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from minirl.errors import UserError

_log = logging.getLogger(__name__)

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis -> the mesh axes that split it; None is never split.
_SPLIT_BY: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "vocab": "tensor",
    "width": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_size": None,
    "position": None,
    "ff": "tensor",
    "norm": None,
}

# Last part of a parameter's path -> its logical axes, in the order of its shape.
PARAM_AXES: dict[str, tuple[str, ...]] = {
    "embed": ("vocab", "width"),
    "unembed": ("vocab", "width"),
    "final_norm": ("norm",),
    "attn_norm": ("norm",),
    "q": ("width", "heads", "head_size"),
    "k": ("width", "kv_heads", "head_size"),
    "v": ("width", "kv_heads", "head_size"),
    "o": ("heads", "head_size", "width"),
    "q_bias": ("heads", "head_size"),
    "k_bias": ("kv_heads", "head_size"),
    "v_bias": ("kv_heads", "head_size"),
    "q_norm": ("norm",),
    "k_norm": ("norm",),
    "mlp_norm": ("norm",),
    "gate": ("width", "ff"),
    "up": ("width", "ff"),
    "down": ("ff", "width"),
}


def make_mesh(
    shape: Mapping[str, int] | Literal["auto"] = "auto", devices: Sequence[Any] | None = None
) -> Mesh:
    """Arrange devices along the axes `data`, `fsdp` and `tensor`.

    Args:
        shape: Devices along each axis, 1 where not named; "auto" puts all of them on `fsdp`.
        devices: All devices of all processes when None.

    Raises:
        UserError: An unknown axis, or sizes that do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes: Mapping[str, int] = {"fsdp": len(devices)} if shape == "auto" else shape
    unknown = sorted(set(sizes) - set(MESH_AXES))
    if unknown:
        raise UserError(f"mesh.{unknown[0]}: no such axis; use {', '.join(MESH_AXES)}")
    full = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    if min(full) < 1 or math.prod(full) != len(devices):
        product = " x ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, full, strict=True))
        raise UserError(
            f"mesh: {product} is not the {len(devices)} devices there are; "
            "change it, or write mesh: auto"
        )
    auto = (AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh(full, MESH_AXES, axis_types=auto, devices=devices)


def axes_sharding(
    axes: Sequence[str], shape: Sequence[int], mesh: Mesh, *, name: str
) -> NamedSharding:
    """Place an array by its logical axes.

    An axis whose size the mesh does not divide is kept whole on every device, with a note in the
    log: two key/value heads, for example, on four tensor-parallel devices.

    Args:
        axes: Logical axis of each dimension.
        shape: Sizes of the dimensions.
        mesh: From `make_mesh`.
        name: What the note calls the array.
    """
    spec: list[str | tuple[str, ...] | None] = []
    for axis, size in zip(axes, shape, strict=True):
        split = _SPLIT_BY[axis]
        parts = math.prod(mesh.shape[part] for part in _as_tuple(split))
        if size % parts:
            _log.info("%s: %s = %d is not split over %s = %d", name, axis, size, split, parts)
            split = None
        spec.append(split)
    return NamedSharding(mesh, PartitionSpec(*spec))


def param_shardings(params: nnx.State, mesh: Mesh) -> nnx.State:
    """Give every parameter its place.

    Args:
        params: Parameters of a `Decoder`, or their shapes (`nnx.eval_shape`).
        mesh: From `make_mesh`.

    Returns:
        The same tree with a `NamedSharding` as every leaf.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = param_path(path)
        axes = PARAM_AXES[name.rpartition(".")[2]]
        return axes_sharding(axes, leaf.shape, mesh, name=name)

    return jax.tree.map_with_path(place, params)


def param_path(path: tuple[Any, ...]) -> str:
    """Write a key path of a parameter tree as, for example, `layers.0.q`."""
    keys = [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return ".".join(keys)


def _as_tuple(split: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if split is None:
        return ()
    return (split,) if isinstance(split, str) else split
