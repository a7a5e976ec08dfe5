"""Model weights: fresh, from Hugging Face's safetensors files, and back into them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from minirl.errors import UserError
from minirl.files import INDEX, SINGLE, weight_files
from minirl.model import Block, Decoder, ModelConfig, read_config
from minirl.sharding import PARAM_AXES, param_path, param_shardings

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

_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_WEIGHT_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
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
        """Turn our whole array into the file's."""
        order = [self.axes.index(axis) for group in self.file_axes for axis in group]
        return np.ascontiguousarray(array.transpose(order).reshape(self.file_shape))


def _tensor(path: str, shape: tuple[int, ...]) -> _Tensor:
    owner, _, last = path.rpartition(".")
    name, file_axes = _IN_FILE[last]
    prefix = f"model.{owner}." if owner else ""
    return _Tensor(prefix + name, shape, PARAM_AXES[last], file_axes)


def init(
    config: ModelConfig,
    seed: int,
    *,
    mesh: Mesh | None = None,
    param_dtype: Any = jnp.float32,
    dtype: Any = jnp.float32,
) -> Decoder:
    """Make a model with fresh weights, each part on the device where it stays.

    The weights depend on the seed and not on the mesh.

    Args:
        config: Its shape.
        seed: Seed of the weights.
        mesh: From `sharding.make_mesh`; None for the default device.
        param_dtype: Type of the weights.
        dtype: Type of the computation.
    """

    def place(fresh: nnx.Module) -> nnx.State:
        state = nnx.state(fresh)
        return state if mesh is None else jax.tree.map(_put, state, param_shardings(state, mesh))

    # Layer by layer, so that no device holds a model that fits only the mesh. Not compiled as a
    # whole: that takes longer than all the rest, and layers of one shape share what is compiled.
    key, *layer_keys = jax.random.split(jax.random.key(seed), 1 + config.num_hidden_layers)
    types = {"param_dtype": param_dtype, "dtype": dtype}
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **types))
    outer = dataclasses.replace(config, num_hidden_layers=0)
    nnx.update(model, place(Decoder(outer, rngs=nnx.Rngs(key), **types)))
    for layer, layer_key in zip(model.layers, layer_keys, strict=True):
        nnx.update(layer, place(Block(config, rngs=nnx.Rngs(layer_key), param_dtype=param_dtype)))
    return model


def _put(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    whole = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: whole[index])


def load(
    folder: Path,
    *,
    mesh: Mesh | None = None,
    param_dtype: Any = jnp.float32,
    dtype: Any = jnp.float32,
) -> Decoder:
    """Read a model from a Hugging Face folder of safetensors files in bf16, fp16 or fp32.

    Weights are read one at a time, and of each only the parts that this process's devices hold.

    Args:
        folder: With `config.json`, and `model.safetensors` or its shards and their index.
        mesh: From `sharding.make_mesh`; None for the default device.
        param_dtype: Type of the weights.
        dtype: Type of the computation.

    Raises:
        UserError: A file is missing or cut short, or does not hold the model of `config.json`.

    Note:
        `lm_head.weight` is ignored when the embedding is tied to it, as transformers does.
    """
    config = read_config(folder)

    def make() -> Decoder:
        return Decoder(config, rngs=nnx.Rngs(0), param_dtype=param_dtype, dtype=dtype)

    graph, shapes = nnx.split(nnx.eval_shape(make))
    files = _files_of_tensors(folder)
    _check(folder, files, shapes)

    def read(path: Any, leaf: Any, sharding: NamedSharding | None = None) -> jax.Array:
        tensor = _tensor(param_path(path), leaf.shape)
        # Opened anew for each, or the pages of all that was read would stay mapped.
        with safe_open(files[tensor.name], "numpy") as file:
            source = file.get_slice(tensor.name)
            return _read(source, tensor, dtype=param_dtype, sharding=sharding)

    rest = () if mesh is None else (param_shardings(shapes, mesh),)
    return nnx.merge(graph, jax.tree.map_with_path(read, shapes, *rest))


def _read(source: Any, tensor: _Tensor, *, dtype: Any, sharding: NamedSharding | None) -> jax.Array:
    whole = (slice(None),) * len(tensor.shape)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        index = whole if index is None else index
        lengths = [cut.indices(size) for cut, size in zip(index, tensor.shape, strict=True)]
        shape = tuple(stop - start for start, stop, _ in lengths)
        ours = tensor.from_file(source[tensor.file_index(index)], shape)
        return np.ascontiguousarray(ours, dtype)

    if sharding is None:
        return jnp.asarray(part(whole))
    return jax.make_array_from_callback(tensor.shape, sharding, part)


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Find the file of every tensor; a file must be whole to be taken."""
    files: dict[str, Path] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "numpy") as file:
                files |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path}: cut short or not safetensors ({error}); copy it again"
            ) from None
    return files


def _check(folder: Path, files: Mapping[str, Path], shapes: nnx.State) -> None:
    """Raise a `UserError` unless the files hold the model of these shapes and no other."""
    leaves = jax.tree.leaves_with_path(shapes)
    wanted = [_tensor(param_path(path), leaf.shape) for path, leaf in leaves]
    # An output projection beside a tied embedding is left out by transformers too.
    known = {tensor.name for tensor in wanted} | {"lm_head.weight"}
    missing = [tensor.name for tensor in wanted if tensor.name not in files]
    extra = sorted(set(files) - known)
    for found, what in ((missing, "missing"), (extra, "not of the model in config.json")):
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise UserError(
                f"{folder}: tensor {found[0]}{more} {what}; "
                "config.json and the safetensors files must be of the same model"
            )
    for tensor in wanted:
        _check_header(files[tensor.name], tensor)


def _check_header(path: Path, tensor: _Tensor) -> None:
    with safe_open(path, "numpy") as file:
        header = file.get_slice(tensor.name)
        shape, kind = tuple(header.get_shape()), header.get_dtype()
    if shape != tensor.file_shape:
        raise UserError(
            f"{path}: tensor {tensor.name} has shape {shape}, config.json says "
            f"{tensor.file_shape}; they must be of the same model"
        )
    if kind not in ("F32", "F16", "BF16"):
        raise UserError(
            f"{path}: tensor {tensor.name} is {kind}; use a model in bf16, fp16 or fp32"
        )


def file_tensors(model: Decoder, *, dtype: Any = None) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights one by one under Hugging Face's names, in its layout.

    Args:
        model: All its weights addressable from this process.
        dtype: Type to convert to; None keeps the model's.
    """
    for path, array in jax.tree.leaves_with_path(nnx.state(model)):
        tensor = _tensor(param_path(path), array.shape)
        yield tensor.name, tensor.to_file(np.asarray(array).astype(dtype or array.dtype))


def save(
    model: Decoder,
    folder: Path,
    *,
    source: Path,
    dtype: Any = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder that `load` and transformers read; it appears whole or not at all.

    Args:
        model: All its weights addressable from this process.
        folder: Made, or replaced if it holds nothing but a model.
        source: Folder that `config.json` and the tokenizer are copied from.
        dtype: Type to convert to; None keeps the model's.
        max_shard_bytes: Size above which a file of weights is not grown.

    Raises:
        UserError: `folder` holds other files, which replacing it would lose.
    """
    _refuse_foreign_files(folder)
    new = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    old = new.with_suffix(".old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        for name in _COPIED:
            if (source / name).exists():
                shutil.copyfile(source / name, new / name)
        _set_dtype(new / "config.json", dtype or model.embed[...].dtype)
        _write_shards(file_tensors(model, dtype=dtype), new, max_bytes=max_shard_bytes)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _set_dtype(path: Path, dtype: Any) -> None:
    """Make a `config.json` tell the type of the weights beside it."""
    config = json.loads(path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = np.dtype(dtype).name
    path.write_text(json.dumps(config, indent=2) + "\n")


def _refuse_foreign_files(folder: Path) -> None:
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        if path.name not in _COPIED and not _WEIGHT_FILE.fullmatch(path.name):
            raise UserError(f"{path}: would be lost; write the model to a folder of its own")


def _write_shards(
    tensors: Iterable[tuple[str, np.ndarray]], folder: Path, *, max_bytes: int
) -> None:
    """Write files of at most `max_bytes`, or of one tensor where that alone is larger."""
    names: list[list[str]] = []
    total_bytes = 0
    for shard in _shards(tensors, max_bytes=max_bytes):
        path = folder / f"part-{len(names)}"
        # transformers reads only files which say that their layout is PyTorch's.
        save_file(shard, path, metadata={"format": "pt"})
        # safetensors makes files that only their owner may read.
        shutil.copymode(folder / "config.json", path)
        names.append(list(shard))
        total_bytes += sum(array.nbytes for array in shard.values())
    if len(names) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return
    weight_map = {}
    for i, shard_names in enumerate(names):
        file = f"model-{i + 1:05}-of-{len(names):05}.safetensors"
        (folder / f"part-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(shard_names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(
    tensors: Iterable[tuple[str, np.ndarray]], *, max_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    for name, array in tensors:
        size = sum(held.nbytes for held in shard.values())
        if shard and size + array.nbytes > max_bytes:
            yield shard
            shard = {}
        shard[name] = array
    yield shard
