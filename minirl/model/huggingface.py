"""Model weights: fresh, from Hugging Face's safetensors files, and back into them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open

from minirl.config import LoraConfig
from minirl.errors import UserError
from minirl.model.decoder import Decoder, ModelConfig, read_config
from minirl.model.layout import Tensor, file_tensors, module_name
from minirl.model.sharding import PARAM_AXES, param_path, param_shardings
from minirl.model.shards import write_file, write_shards
from minirl.run.files import appearing, weight_files

# Gives the arrays of the parameter at a path: one, or one a layer where it is stacked.
Parts = Callable[[str], Iterator[np.ndarray]]

MAX_SHARD_BYTES = 5_000_000_000

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

    def make(key: jax.Array) -> Decoder:
        return Decoder(config, key=key, param_dtype=param_dtype, dtype=dtype, mesh=mesh)

    key = jax.random.key(seed)
    graph, shapes = nnx.split(nnx.eval_shape(make, key))
    places = None if mesh is None else param_shardings(shapes, mesh)
    # Compiled, so that no device holds a model that fits only the mesh.
    return nnx.merge(graph, jax.jit(lambda key: nnx.state(make(key)), out_shardings=places)(key))


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

    def make(key: jax.Array) -> Decoder:
        return Decoder(config, key=key, param_dtype=param_dtype, dtype=dtype, mesh=mesh)

    graph, shapes = nnx.split(nnx.eval_shape(make, jax.random.key(0)))
    files = _files_of_tensors(folder)
    _check(folder, files, shapes)

    def read(path: Any, leaf: Any, sharding: NamedSharding | None = None) -> jax.Array:
        tensors = file_tensors(param_path(path), leaf.shape)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            return _read(files, tensors, leaf.shape, index, dtype=param_dtype)

        if sharding is None:
            # Not jnp.asarray, which copies twice.
            return jax.device_put(part(None))
        return jax.make_array_from_callback(leaf.shape, sharding, part)

    rest = () if mesh is None else (param_shardings(shapes, mesh),)
    return nnx.merge(graph, jax.tree.map_with_path(read, shapes, *rest))


def _read(
    files: Mapping[str, Path],
    tensors: Sequence[Tensor],
    shape: tuple[int, ...],
    index: tuple[slice, ...] | None,
    *,
    dtype: Any,
) -> np.ndarray:
    """Read a part of a parameter; of a stacked one layer by layer."""
    index = index or (slice(None),) * len(shape)
    lengths = [len(range(*cut.indices(size))) for cut, size in zip(index, shape, strict=True)]
    is_stacked = len(shape) > len(tensors[0].shape)
    chosen = tensors[index[0]] if is_stacked else tensors
    inner = index[1:] if is_stacked else index
    found = np.empty(lengths, dtype)
    for tensor, place in zip(chosen, found if is_stacked else [found], strict=True):
        # Opened anew for each, or the pages of all that was read would stay mapped.
        with safe_open(files[tensor.name], "numpy") as file:
            block = file.get_slice(tensor.name)[tensor.file_index(inner)]
        place[...] = tensor.from_file(block, place.shape)
    return found


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
    wanted = [one for path, leaf in leaves for one in file_tensors(param_path(path), leaf.shape)]
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


def _check_header(path: Path, tensor: Tensor) -> None:
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


def paths_of(shapes: nnx.State) -> dict[str, tuple[int, ...]]:
    """Return the path and shape of every parameter of a tree."""
    return {param_path(path): tuple(leaf.shape) for path, leaf in jax.tree.leaves_with_path(shapes)}


def shapes_of(folder: Path) -> nnx.State:
    """Return the shapes of the model in a Hugging Face folder, all in float32."""
    config = read_config(folder)
    return nnx.state(nnx.eval_shape(lambda: Decoder(config, key=jax.random.key(0))))


def parts_in_tree(params: nnx.State) -> Parts:
    """Give the parts of weights that are in memory, all of them addressable from this process."""
    leaves = {param_path(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}

    return lambda path: parts_of(path, leaves[path])


def parts_of(path: str, array: Any) -> Iterator[np.ndarray]:
    """Take a parameter apart: by layers, where it is stacked."""
    is_stacked = array.ndim > len(PARAM_AXES[path.rpartition(".")[2]])
    # Not by iteration: JAX would copy a hundred layers at a time.
    for number in range(len(array)) if is_stacked else (...,):
        yield np.asarray(array[number])


def parts_in_folder(folder: Path) -> Parts:
    """Give the parts of the weights in a Hugging Face folder, in float32.

    Raises:
        UserError: As `load`.
    """
    shapes = shapes_of(folder)
    files = _files_of_tensors(folder)
    _check(folder, files, shapes)
    known = paths_of(shapes)

    def parts(path: str) -> Iterator[np.ndarray]:
        for tensor in file_tensors(path, known[path]):
            yield _read(files, [tensor], tensor.shape, None, dtype=np.float32)

    return parts


def save(
    model: Decoder,
    folder: Path,
    *,
    source: Path,
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
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
    params = nnx.state(model)
    write(
        folder,
        paths_of(params),
        parts_in_tree(params),
        source=source,
        dtype=dtype or model.embed[...].dtype,
        max_shard_bytes=max_shard_bytes,
    )


def write(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Parts,
    *,
    source: Path,
    dtype: Any,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write a model of which no more than one parameter is in memory at a time; see `save`.

    Args:
        folder: Made, or replaced if it holds nothing but a model.
        shapes: Paths and shapes of its parameters.
        parts: Gives them.
        source: Folder that `config.json` and the tokenizer are copied from.
        dtype: Type to convert to.
        max_shard_bytes: Size above which a file of weights is not grown.
        generation: Content of `generation_config.json` if `source` has none.

    Raises:
        UserError: `folder` holds other files, which replacing it would lose.
    """
    _refuse_foreign_files(folder)
    with appearing(folder) as new:
        if generation is not None:
            _write_json(new / "generation_config.json", generation)
        for name in _COPIED:
            if (source / name).exists():
                shutil.copyfile(source / name, new / name)
        _describe(new / "config.json", dtype)
        tensors = {path: file_tensors(path, shape) for path, shape in shapes.items()}
        write_shards(
            new, file_shapes(tensors), _arrays(tensors, parts),
            dtype=dtype, max_bytes=max_shard_bytes,
        )  # fmt: skip


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Parts,
    lora: LoraConfig,
    *,
    base: str,
    dtype: Any = jnp.float32,
) -> None:
    """Write a folder of adapters that PEFT and SGLang read; it appears whole or not at all.

    Args:
        folder: Not there, or empty.
        shapes: Paths and shapes of the adapters.
        parts: Gives them.
        lora: Rank, scale and targets.
        base: Name or path of the model that they belong to.
        dtype: Type to convert to.
    """
    tensors = {path: file_tensors(path, shape) for path, shape in shapes.items()}
    sizes = {f"base_model.model.{name}": size for name, size in file_shapes(tensors).items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [module_name(name) for name in dict.fromkeys(lora.targets)],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with appearing(folder) as new:
        _write_json(new / "adapter_config.json", config)
        path = new / "adapter_model.safetensors"
        write_file(path, sizes, _arrays(tensors, parts), dtype=dtype)


def file_shapes(tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes in the file of parameters by path, in their order."""
    return {tensor.name: tensor.file_shape for group in tensors.values() for tensor in group}


def _arrays(tensors: Mapping[str, Sequence[Tensor]], parts: Parts) -> Iterator[np.ndarray]:
    for path, group in tensors.items():
        for tensor, part in zip(group, parts(path), strict=True):
            yield tensor.to_file(part)


def _describe(path: Path, dtype: Any) -> None:
    """Make a `config.json` tell the type of the weights beside it, and SGLang the architecture."""
    config = json.loads(path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = jnp.dtype(dtype).name
    config.setdefault("architectures", [f"{config['model_type'].capitalize()}ForCausalLM"])
    _write_json(path, config)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _refuse_foreign_files(folder: Path) -> None:
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        if path.name not in _COPIED and not _WEIGHT_FILE.fullmatch(path.name):
            raise UserError(f"{path}: would be lost; write the model to a folder of its own")
