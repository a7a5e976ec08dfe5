"""Hugging Face's names and layout of every parameter."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from minirl.model.sharding import INPUT_AXES, PARAM_AXES

# Last part of a parameter's path -> its name in the file (within a layer for layers), and its
# axes there, outermost first; axes in one tuple are flattened into one dimension of the file.
_IN_FILE: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "embed": ("model.embed_tokens.weight", (("vocab",), ("width",))),
    "unembed": ("lm_head.weight", (("vocab",), ("width",))),
    "final_norm": ("model.norm.weight", (("norm",),)),
    "attn_norm": ("input_layernorm.weight", (("norm",),)),
    "q": ("self_attn.q_proj.weight", (("heads", "head_size"), ("width",))),
    "k": ("self_attn.k_proj.weight", (("kv_heads", "head_size"), ("width",))),
    "v": ("self_attn.v_proj.weight", (("kv_heads", "head_size"), ("width",))),
    "o": ("self_attn.o_proj.weight", (("width",), ("heads", "head_size"))),
    "q_bias": ("self_attn.q_proj.bias", (("heads", "head_size"),)),
    "k_bias": ("self_attn.k_proj.bias", (("kv_heads", "head_size"),)),
    "v_bias": ("self_attn.v_proj.bias", (("kv_heads", "head_size"),)),
    "q_norm": ("self_attn.q_norm.weight", (("norm",),)),
    "k_norm": ("self_attn.k_norm.weight", (("norm",),)),
    "mlp_norm": ("post_attention_layernorm.weight", (("norm",),)),
    "gate": ("mlp.gate_proj.weight", (("ff",), ("width",))),
    "up": ("mlp.up_proj.weight", (("ff",), ("width",))),
    "down": ("mlp.down_proj.weight", (("width",), ("ff",))),
}

# Adapters are named after their matrices, in PEFT's way.
for _name in INPUT_AXES:
    _file, (_outputs, _inputs) = _IN_FILE[_name]
    _start = _file.removesuffix("weight")
    _IN_FILE[f"{_name}_a"] = (f"{_start}lora_A.weight", (("rank",), _inputs))
    _IN_FILE[f"{_name}_b"] = (f"{_start}lora_B.weight", (_outputs, ("rank",)))


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter of ours and its place in Hugging Face's files.

    Attributes:
        name: The name in the file.
        shape: Our shape.
        axes: Our logical axes.
        file_axes: The axes in the file, grouped as they are flattened there.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    file_axes: tuple[tuple[str, ...], ...]

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Return the shape in the file."""
        size = dict(zip(self.axes, self.shape, strict=True))
        return tuple(math.prod(size[axis] for axis in group) for group in self.file_axes)

    def file_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Turn a part of our array into the part of the file's that holds it.

        Only the first axis of a flattened group may be cut: `head_size` is never split.
        """
        size = dict(zip(self.axes, self.shape, strict=True))
        cut = dict(zip(self.axes, index, strict=True))
        cuts = []
        for first, *rest in self.file_axes:
            start, stop, _ = cut[first].indices(size[first])
            assert all(cut[axis].indices(size[axis]) == (0, size[axis], 1) for axis in rest)
            inner = math.prod(size[axis] for axis in rest)
            cuts.append(slice(start * inner, stop * inner))
        return tuple(cuts)

    def from_file(self, block: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Turn a part read from the file into our part of the given shape."""
        size = dict(zip(self.axes, shape, strict=True))
        order = [axis for group in self.file_axes for axis in group]
        block = block.reshape([size[axis] for axis in order])
        return block.transpose([order.index(axis) for axis in self.axes])

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """Turn our array, or a part of it as `file_index` takes them, into the file's."""
        return np.ascontiguousarray(self.ordered(array))

    def ordered(self, array: Any) -> Any:
        """Do the same with an array of NumPy's or JAX's, wherever its elements come to lie."""
        order = [self.axes.index(axis) for group in self.file_axes for axis in group]
        size = dict(zip(self.axes, array.shape, strict=True))
        shape = tuple(math.prod(size[axis] for axis in group) for group in self.file_axes)
        return array.transpose(order).reshape(shape)


def file_tensors(path: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Return what a parameter is in the file: one tensor, or one a layer where it is stacked."""
    owner, _, last = path.rpartition(".")
    name, file_axes = _IN_FILE[last]
    axes = PARAM_AXES[last]
    if len(shape) == len(axes):
        prefix = f"model.{owner}." if owner else ""
        return [Tensor(prefix + name, shape, axes, file_axes)]
    depth, *rest = shape
    return [Tensor(f"model.{owner}.{i}.{name}", tuple(rest), axes, file_axes) for i in range(depth)]


def module_name(last: str) -> str:
    """Return the name of the module that a layer's matrix is in, for example `q_proj`."""
    return _IN_FILE[last][0].split(".")[1]
