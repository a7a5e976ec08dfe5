"""Hugging Face folders of models: safetensors files and their index, PEFT adapters.

Parameters have the shapes of the files, so that reading, writing and pushing weights to servers is
a matter of names: `_NAMES` is the only table. A parameter that stacks all layers is one tensor a
layer in the files.

Tensors come one by one, and those of one file are in memory at a time.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from exchange import UserError
from minirl.config import LoraConfig
from minirl.model.config import INDEX, SINGLE, ModelConfig, read_config, weight_files
from minirl.model.decoder import Decoder
from minirl.model.lora import described, merged_tensors, split
from minirl.model.sharding import (
    MATRICES,
    constrain_params,
    is_stacked,
    param_path,
    param_shardings,
)
from minirl.run.files import appearing, naming

# Last part of a parameter's path -> its name in the files, for layers within `model.layers.N.`.
_NAMES = {
    "embed": "model.embed_tokens.weight",
    "unembed": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
# Adapters have PEFT's names.
for _name in MATRICES:
    for _end in "ab":
        _suffix = f"lora_{_end.upper()}.weight"
        _NAMES[f"{_name}_{_end}"] = _NAMES[_name].removesuffix("weight") + _suffix

# Before them, in files of adapters.
_PEFT = "base_model.model."

MAX_SHARD_BYTES = 2_000_000_000
_KINDS = ("F32", "BF16", "F16")
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
# What transformers passes over too: an output projection beside a tied embedding, and in each layer
# the buffer of the rotary embedding that older files have.
_IGNORED = re.compile(r"lm_head\.weight|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_WEIGHT_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")

# Names and shapes of tensors, in the order in which they are written.
Shapes = Mapping[str, tuple[int, ...]]
Tensors = Iterable[tuple[str, np.ndarray]]


def tensor_names(path: str, shape: tuple[int, ...]) -> list[str]:
    """Return the names in the files of a parameter: one, or one a layer where it is stacked."""
    owner, _, last = path.rpartition(".")
    if not is_stacked(path, len(shape)):
        return [f"model.{owner}.{_NAMES[last]}" if owner else _NAMES[last]]
    return [f"model.{owner}.{layer}.{_NAMES[last]}" for layer in range(shape[0])]


def tensor_shapes(params: nnx.State) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes in the files of all parameters of a tree."""
    shapes = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        name = param_path(path)
        shape = leaf.shape[1:] if is_stacked(name, leaf.ndim) else leaf.shape
        shapes |= dict.fromkeys(tensor_names(name, leaf.shape), tuple(shape))
    return shapes


def tensors(
    params: nnx.State, read: Callable[[str], Any] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights of a model under their names in the files, one by one.

    Args:
        params: All addressable from this process; or shapes.
        read: Gives a parameter by its path, where `params` are shapes.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        name = param_path(path)
        array = leaf if read is None else read(name)
        names = tensor_names(name, leaf.shape)
        # Not by iteration: JAX would copy a hundred layers at a time.
        indices = range(len(names)) if is_stacked(name, leaf.ndim) else [...]
        for tensor_name, index in zip(names, indices, strict=True):
            yield tensor_name, np.asarray(array[index])


def shapes_of(folder: Path) -> nnx.State:
    """Return the shapes of the model in a Hugging Face folder, all in float32."""
    return nnx.state(described(read_config(folder)))


def init(
    config: ModelConfig,
    seed: int,
    *,
    mesh: Mesh | None = None,
    param_dtype: Any = jnp.float32,
    dtype: Any = jnp.float32,
) -> Decoder:
    """Make a model with fresh weights, each part on the device where it stays.

    The weights depend on the seed and not on the mesh; None is the default device. `dtype` is the
    type of the computation.
    """

    # Compiled, so that no device holds a model that fits only the mesh.
    @jax.jit
    def make(key: jax.Array) -> Decoder:
        model = Decoder(config, key=key, param_dtype=param_dtype, dtype=dtype, mesh=mesh)
        nnx.update(model, constrain_params(nnx.state(model), mesh))
        return model

    return make(jax.random.key(seed))


def load(
    folder: Path,
    *,
    mesh: Mesh | None = None,
    param_dtype: Any = jnp.float32,
    dtype: Any = jnp.float32,
) -> Decoder:
    """Read a model from a Hugging Face folder of safetensors files in bf16, fp16 or fp32.

    Weights are read one at a time, and of each only the parts that this process's devices hold.

    Raises:
        UserError: A file is missing or cut short, or does not hold the model of `config.json`.

    Note:
        Tensors of `_IGNORED` that the model has not are passed over.
    """
    config = read_config(folder)
    model = described(config, param_dtype=param_dtype, dtype=dtype, mesh=mesh)
    shapes = nnx.state(model)
    files = _checked_files(folder, shapes)

    def read(path: Any, leaf: Any, sharding: NamedSharding | None = None) -> jax.Array:
        names = tensor_names(param_path(path), leaf.shape)
        stacked = is_stacked(param_path(path), leaf.ndim)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            index = index or (slice(None),) * leaf.ndim
            cuts = [slice(*cut.indices(size)) for cut, size in zip(index, leaf.shape, strict=True)]
            array = np.empty([cut.stop - cut.start for cut in cuts], param_dtype)
            layers = zip(names[cuts[0]], array, strict=True) if stacked else [(names[0], array)]
            for name, layer in layers:
                layer[...] = _read_tensor(files, name, cuts[1:] if stacked else cuts)
            return array

        # Not jnp.asarray, which copies twice. Each is waited for: copies run behind, and those of a
        # whole model could be under way at once.
        if sharding is None:
            return jax.device_put(part(None)).block_until_ready()
        return jax.make_array_from_callback(leaf.shape, sharding, part).block_until_ready()

    rest = () if mesh is None else (param_shardings(shapes, mesh),)
    nnx.update(model, jax.tree.map_with_path(read, shapes, *rest))
    return model


def check_files(folder: Path) -> None:
    """Check that a folder's files hold the model of its `config.json`; no tensor is read.

    Raises:
        UserError: As `load`.
    """
    _checked_files(folder, shapes_of(folder))


def read_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights of a Hugging Face folder by name, one after the other, in float32.

    Raises:
        UserError: As `load`.
    """
    shapes = shapes_of(folder)
    files = _checked_files(folder, shapes)
    for name, shape in tensor_shapes(shapes).items():
        yield name, _read_tensor(files, name, [slice(size) for size in shape]).astype(np.float32)


def _read_tensor(files: Mapping[str, Path], name: str, index: list[slice]) -> np.ndarray:
    # Opened anew for each, or the pages of all that was read would stay mapped.
    with safe_open(files[name], "numpy") as file:
        return file.get_slice(name)[tuple(index)]


def _checked_files(folder: Path, shapes: nnx.State) -> dict[str, Path]:
    """Return the file of every tensor.

    Raises:
        UserError: A file is not whole, or they do not hold the model of these shapes and no other.
    """
    files: dict[str, Path] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "numpy") as file:
                files |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path}: cut short or not safetensors ({error}); copy it again"
            ) from None
    expected = tensor_shapes(shapes)
    missing = [name for name in expected if name not in files]
    extra = sorted(name for name in files.keys() - expected if not _IGNORED.fullmatch(name))
    for wrong, what in ((missing, "missing"), (extra, "not of the model in config.json")):
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise UserError(
                f"{folder}: tensor {wrong[0]}{more} {what}; "
                "config.json and the safetensors files must be of the same model"
            )
    for name, shape in expected.items():
        with safe_open(files[name], "numpy") as file:
            header = file.get_slice(name)
            stored, kind = tuple(header.get_shape()), header.get_dtype()
        if stored != shape:
            raise UserError(
                f"{files[name]}: tensor {name} has shape {stored}, config.json says {shape}; "
                "they must be of the same model"
            )
        if kind not in _KINDS:
            raise UserError(
                f"{files[name]}: tensor {name} is {kind}; use a model in bf16, fp16 or fp32"
            )
    return files


def save(model: Decoder, folder: Path, *, source: Path, dtype: Any = None) -> None:
    """Write a model, all of it addressable from this process; see `write`.

    Adapters are merged, then in float32 by default; else in the type of the weights.
    """
    _, params, rest = split(model)
    arrays, lora = tensors(params), model.layers.lora
    if lora is not None:
        params, arrays = rest, merged_tensors(tensors(rest), dict(arrays), lora)
    write(
        folder,
        tensor_shapes(params),
        arrays,
        source=source,
        dtype=dtype or (jnp.float32 if lora else model.embed[...].dtype),
    )


def write(
    folder: Path,
    shapes: Shapes,
    arrays: Tensors,
    *,
    source: Path,
    dtype: Any,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that `load` and transformers read; it appears whole or not at all.

    Args:
        folder: Made, or replaced if it holds nothing but a model.
        shapes: Names and shapes of its tensors.
        arrays: The tensors, in the same order; those of a file are asked for when the one before is
            written.
        source: Folder that `config.json` and the tokenizer are copied from.
        dtype: bfloat16, float16 or float32.
        generation: Content of `generation_config.json` if `source` has none.

    Raises:
        UserError: `folder` holds other files, which replacing it would lose.
    """
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        if path.name not in _COPIED and not _WEIGHT_FILE.fullmatch(path.name):
            raise UserError(f"{path}: would be lost; write the model to a folder of its own")
    with appearing(folder) as new:
        if generation is not None:
            _write_json(new / "generation_config.json", generation)
        for name in _COPIED:
            if (source / name).exists():
                shutil.copyfile(source / name, new / name)
        _describe(new / "config.json", dtype)
        files = write_files(new, shapes, iter(arrays), dtype=dtype, max_bytes=MAX_SHARD_BYTES)
        if {*files.values()} != {SINGLE}:
            metadata = {"total_size": total_bytes(shapes, dtype)}
            _write_json(new / INDEX, {"metadata": metadata, "weight_map": files})


def write_adapter(
    folder: Path,
    shapes: Shapes,
    arrays: Tensors,
    lora: LoraConfig,
    *,
    base: str,
    dtype: Any = jnp.float32,
) -> None:
    """Write a folder of adapters that PEFT and SGLang read; it appears whole or not at all.

    `base` is the name or path of the model that they belong to; see `write` for the others.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": target_modules(lora),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    prefixed = {f"{_PEFT}{name}": shape for name, shape in shapes.items()}
    named = ((f"{_PEFT}{name}", array) for name, array in arrays)
    with appearing(folder) as new:
        _write_json(new / "adapter_config.json", config)
        write_files(
            new, prefixed, named, dtype=dtype, max_bytes=MAX_SHARD_BYTES, name="adapter_model"
        )


def target_modules(lora: LoraConfig) -> list[str]:
    """Return the names in PEFT and SGLang of the matrices that have adapters."""
    return [_NAMES[name].split(".")[1] for name in dict.fromkeys(lora.targets)]


def total_bytes(shapes: Shapes, dtype: Any) -> int:
    """Return the size of all tensors."""
    return sum(map(math.prod, shapes.values())) * jnp.dtype(dtype).itemsize


def write_files(
    folder: Path,
    shapes: Shapes,
    arrays: Iterator[tuple[str, Any]],
    *,
    dtype: Any,
    max_bytes: int,
    name: str = "model",
) -> dict[str, str]:
    """Write safetensors files of at most so many bytes, if a tensor has no more; see `write`.

    Returns:
        The file of each tensor.
    """
    files, size = [list[str]()], 0
    for tensor, shape in shapes.items():
        size += (more := total_bytes({tensor: shape}, dtype))
        if files[-1] and size > max_bytes:
            files, size = [*files, []], more
        files[-1].append(tensor)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        part = f"-{number:05}-of-{len(files):05}" if len(files) > 1 else ""
        path = folder / f"{name}{part}.safetensors"
        # transformers reads only files which say that their layout is PyTorch's.
        with naming(path):
            save_file(
                {
                    tensor: np.ascontiguousarray(array, jnp.dtype(dtype))
                    for tensor, array in islice(arrays, len(tensors))
                },
                path,
                {"format": "pt"},
            )
        weight_map |= dict.fromkeys(tensors, path.name)
    return weight_map


def _describe(path: Path, dtype: Any) -> None:
    """Make a `config.json` tell the type of the weights beside it, and SGLang the architecture."""
    config = json.loads(path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = jnp.dtype(dtype).name
    config.setdefault("architectures", [f"{config['model_type'].capitalize()}ForCausalLM"])
    _write_json(path, config)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
