"""Files of safetensors, written tensor by tensor: no more than one is in memory at a time.

The library's own writer takes all tensors of a file at once. The format
(https://github.com/huggingface/safetensors#format) is a length, a header in JSON, the bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from minirl.run.files import INDEX, SINGLE, naming

# Names and shapes, in the order in which the tensors are written.
Shapes = Mapping[str, tuple[int, ...]]

_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_shards(
    folder: Path, shapes: Shapes, arrays: Iterator[np.ndarray], *, dtype: Any, max_bytes: int
) -> None:
    """Write a model's tensors to one file, or to several and their index.

    Args:
        folder: Where to.
        shapes: What is written.
        arrays: The tensors, in the same order; each is asked for when the one before is written.
        dtype: bfloat16, float16 or float32; what they are converted to.
        max_bytes: Size above which a file is not grown; one tensor may be larger.
    """
    files = _plan(shapes, jnp.dtype(dtype).itemsize, max_bytes=max_bytes)
    if len(files) == 1:
        write_file(folder / SINGLE, shapes, arrays, dtype=dtype)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(files):
        file = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        write_file(folder / file, {name: shapes[name] for name in names}, arrays, dtype=dtype)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes(shapes, dtype)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(path: Path, shapes: Shapes, arrays: Iterator[np.ndarray], *, dtype: Any) -> None:
    """Write one file; see `write_shards`."""
    kind = jnp.dtype(dtype)
    head, _ = header(shapes, dtype)
    with naming(path), path.open("wb") as file:
        file.write(head)
        for name, shape in shapes.items():
            array = next(arrays)
            assert array.shape == shape, f"{name}: {array.shape} is not {shape}"
            # As bytes: bfloat16 is no type of Python's buffers.
            file.write(np.ascontiguousarray(array, kind).reshape(-1).view(np.uint8).data)


def header(shapes: Shapes, dtype: Any) -> tuple[bytes, dict[str, int]]:
    """Return what a file begins with, and where in it each tensor begins; see `write_shards`."""
    kind = jnp.dtype(dtype)
    # transformers reads only files which say that their layout is PyTorch's.
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, shape in shapes.items():
        starts[name], end = end, end + _elements(shape) * kind.itemsize
        offsets = (starts[name], end)
        content[name] = {"dtype": _CODES[kind.name], "shape": shape, "data_offsets": offsets}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {name: len(head) + start for name, start in starts.items()}


def total_bytes(shapes: Shapes, dtype: Any) -> int:
    """Return the size of all tensors."""
    return sum(map(_elements, shapes.values())) * jnp.dtype(dtype).itemsize


def _elements(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _plan(shapes: Shapes, item_bytes: int, *, max_bytes: int) -> list[list[str]]:
    """Share tensors out to files, in order."""
    files: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        size = _elements(shape) * item_bytes
        if files[-1] and held + size > max_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files
