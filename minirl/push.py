"""Weights for servers, by way of the disk: folders of safetensors under Hugging Face names.

Every process writes the parts that its devices hold, at their places in one file; nothing is
gathered. The folder has its name only when all is on the disk.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from minirl import hosts
from minirl.files import SINGLE
from minirl.layout import Tensor, file_tensors
from minirl.sharding import param_path
from minirl.shards import header, total_bytes
from minirl.weights import file_shapes
from minirl.writing import writing

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
    leaves = {param_path(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    tensors = {path: file_tensors(path, leaf.shape) for path, leaf in leaves.items()}
    shapes = file_shapes(tensors)
    head, starts = header(shapes, dtype)
    size = len(head) + total_bytes(shapes, dtype)
    folder = version_folder(place, name)
    new = folder.with_name(folder.name + _NEW)
    path = new / SINGLE

    def begin() -> None:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        with writing(path), path.open("wb") as file:
            file.write(head)
            file.truncate(size)

    def write_own() -> None:
        with writing(path), path.open("r+b") as file:
            for where, leaf in leaves.items():
                for index, data in _own_parts(leaf):
                    group = tensors[where]
                    parts = in_file(data, group, dtype=dtype)
                    inner = index[1:] if len(index) > len(group[0].shape) else index
                    for tensor, part in zip(group, parts, strict=True):
                        block = np.asarray(part)
                        _write(file.fileno(), starts[tensor.name], tensor, inner, block)
            os.fsync(file.fileno())

    def end() -> None:
        _sync_folder(new)
        new.rename(folder)
        _sync_folder(place)

    hosts.from_first(begin)
    hosts.gather(write_own)
    hosts.from_first(end)
    return folder, size


def version_folder(place: Path, name: str) -> Path:
    """Return where a version is."""
    return place / f"{_FOLDER}{name}"


def remove_versions(place: Path, *, but: Path | None = None) -> None:
    """Remove the folders of all versions but one; of several processes the first does."""
    for folder in place.glob(f"{_FOLDER}*") if hosts.is_first() else ():
        if folder != but:
            shutil.rmtree(folder, ignore_errors=True)


def in_file(
    array: jax.Array, tensors: Sequence[Tensor], *, dtype: Any, place: Sharding | None = None
) -> Iterator[jax.Array]:
    """Yield a parameter, or a part of one, as it is in the file, each tensor when it is computed.

    Args:
        array: On one device, or as `place` says.
        tensors: From `file_tensors`: one, or one a layer.
        dtype: What it is converted to.
        place: Where it is to lie.
    """
    is_stacked = array.ndim > len(tensors[0].shape)
    for layer, tensor in enumerate(tensors):
        # All layers share a program.
        make = _program(dataclasses.replace(tensor, name=""), jnp.dtype(dtype), place)
        # What is not yet computed has memory of its own.
        yield (make(array, layer) if is_stacked else make(array)).block_until_ready()


@functools.lru_cache
def _program(tensor: Tensor, dtype: Any, place: Sharding | None) -> Callable[..., jax.Array]:
    def in_file(array: jax.Array, layer: Any = None) -> jax.Array:
        if layer is not None:
            array = jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
        return tensor.ordered(array.astype(dtype))

    return jax.jit(in_file, out_shardings=place)


def _own_parts(leaf: jax.Array) -> Iterator[tuple[tuple[slice, ...], jax.Array]]:
    """Yield the parts of a parameter that this process writes, and where they are in it."""
    if _is_whole(leaf):
        if hosts.is_first():
            yield (slice(None),) * leaf.ndim, leaf
        return
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            yield shard.index, shard.data


def _is_whole(leaf: jax.Array) -> bool:
    return leaf.is_fully_addressable


def _write(
    file: int, start: int, tensor: Tensor, index: tuple[slice, ...], block: np.ndarray
) -> None:
    """Write a part of a tensor to its place: in one piece where whole rows are, else by rows."""
    shape = tensor.file_shape
    cuts = [cut.indices(size) for cut, size in zip(tensor.file_index(index), shape, strict=True)]
    row = int(np.prod(shape[1:], dtype=np.int64)) * block.itemsize
    start += cuts[0][0] * row
    data = block.reshape(block.shape[0], -1).view(np.uint8)
    if block.shape[1:] == shape[1:]:
        _write_all(file, data.reshape(-1).data, start)
        return
    start += cuts[1][0] * block.itemsize
    for number, piece in enumerate(data):
        _write_all(file, piece.data, start + number * row)


def _write_all(file: int, data: memoryview, start: int) -> None:
    """Write bytes, as many at a time as the system takes."""
    while len(data):
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
