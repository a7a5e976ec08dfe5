"""Weights for servers, by way of the disk: folders of safetensors under Hugging Face names.

The devices bring one tensor at a time together, and every process writes its share of them whole,
at their places in one file. The folder has its name only when all is on the disk.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from minirl.model.huggingface import file_header, tensor_names, tensor_shapes, total_bytes
from minirl.model.sharding import is_stacked, param_path
from minirl.run import distributed
from minirl.run.files import SINGLE, naming

_FOLDER = "version-"
_NEW = ".new"


def write_version(place: Path, name: str, params: nnx.State, *, dtype: Any) -> tuple[Path, int]:
    """Write all weights of a model; all processes have to ask.

    Args:
        place: Folder of all versions, seen by all processes.
        name: Of this version.
        params: Where they lie.
        dtype: What they are converted to.

    Returns:
        The folder, and the bytes in it.

    Raises:
        OSError: It cannot be written.
    """
    shapes = tensor_shapes(params)
    head, starts = file_header(shapes, dtype)
    size = len(head) + total_bytes(shapes, dtype)
    folder = version_folder(place, name)
    new = folder.with_name(folder.name + _NEW)
    path = new / SINGLE

    def begin() -> None:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        with naming(path), path.open("wb") as file:
            file.write(head)
            file.truncate(size)

    def write_own() -> None:
        wholes = whole_tensors(params, dtype)
        try:
            with naming(path), path.open("r+b") as file:
                for number, (tensor, whole) in enumerate(wholes):
                    if number % distributed.count() == jax.process_index():
                        _write_all(file.fileno(), np.asarray(whole), starts[tensor])
                os.fsync(file.fileno())
        finally:
            # All processes bring a tensor together: after an error here the others go on.
            for _ in wholes:
                pass

    def end() -> None:
        _sync_folder(new)
        new.rename(folder)
        _sync_folder(place)

    distributed.from_first(begin)
    distributed.gather(write_own)
    distributed.from_first(end)
    return folder, size


def version_folder(place: Path, name: str) -> Path:
    """Return where a version is."""
    return place / f"{_FOLDER}{name}"


def remove_versions(place: Path, *, but: Path | None = None) -> None:
    """Remove the folders of all versions but one; of several processes the first does."""
    for folder in place.glob(f"{_FOLDER}*") if distributed.is_first() else ():
        if folder != but:
            shutil.rmtree(folder, ignore_errors=True)


def whole_tensors(params: nnx.State, dtype: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yield each tensor as Hugging Face has it, whole on the first device of this process.

    Of a parameter that holds all layers one layer at a time is brought together, by the devices.
    All processes have to ask.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        names = tensor_names(param_path(path), leaf.shape)
        layers = len(names) if is_stacked(param_path(path), leaf.ndim) else None
        wholes = by_layer(leaf, layers, dtype=dtype, place=_everywhere(leaf))
        for name, whole in zip(names, wholes, strict=True):
            yield name, whole.addressable_data(0)


def by_layer(
    array: jax.Array, layers: int | None, *, dtype: Any, place: Sharding | None = None
) -> Iterator[jax.Array]:
    """Yield a parameter, or a part of one, layer by layer, each when it is computed.

    Args:
        array: On one device, or as `place` says.
        layers: How many are stacked; None for a parameter that is of no layer.
        dtype: What it is converted to.
        place: Where it is to lie.
    """
    make = _program(jnp.dtype(dtype), place)
    for layer in [None] if layers is None else range(layers):
        # What is not yet computed has memory of its own.
        yield make(array, layer).block_until_ready()


@functools.lru_cache
def _program(dtype: Any, place: Sharding | None) -> Callable[..., jax.Array]:
    def pick(array: jax.Array, layer: Any) -> jax.Array:
        if layer is not None:
            array = jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
        return array.astype(dtype)

    return jax.jit(pick, out_shardings=place)


def _everywhere(leaf: jax.Array) -> Sharding | None:
    place = leaf.sharding
    return NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else None


def _write_all(file: int, array: np.ndarray, start: int) -> None:
    """Write an array, as many bytes at a time as the system takes."""
    # As bytes: bfloat16 is no type of Python's buffers.
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while len(data):
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
