"""Hugging Face folders of models: safetensors files and their index, PEFT adapters.

Parameters have the shapes of the files, so that reading, writing and pushing weights to servers is
a matter of names (`minirl.model.sharding.FILE_NAMES`). A parameter that stacks layers is one tensor
a layer in the files.

Of Qwen3.5 the decoder is read and written: its vision tower and its prediction of several tokens
are passed over, and what is written is the decoder alone, as transformers writes it.

Tensors come one by one, and those of one file are in memory at a time.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from minirl.config import LoraConfig
from minirl.exchange import UserError
from minirl.model.config import (
    INDEX,
    PERIOD,
    SINGLE,
    ModelConfig,
    architecture,
    read_config,
    text_keys,
    weight_files,
)
from minirl.model.decoder import Decoder
from minirl.model.lora import described, merged_tensors, split
from minirl.model.sharding import (
    FILE_NAMES,
    MATRICES,
    param_path,
    stack_axes,
    with_shardings,
)
from minirl.run.files import appearing, naming

_log = logging.getLogger(__name__)

# What files in 16 bits have in 32.
_FULL = tuple(FILE_NAMES[name] for name in ("a_log", "out_norm"))
# Before the names of a decoder that has a vision tower beside it, and without one.
_INNER, _OUTER = "model.language_model.", "model."
# Before those of adapters.
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
# the buffer of the rotary embedding that older files have. And what is no part of a decoder.
_IGNORED = re.compile(r"lm_head\.weight|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_BESIDE = re.compile(r"(model\.visual|mtp)\..*")
_WEIGHT_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")

# Names and shapes of tensors, in the order in which they are written.
Shapes = Mapping[str, tuple[int, ...]]
Tensors = Iterable[tuple[str, np.ndarray]]


def tensor_names(path: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the names in the files of a parameter, each with where that tensor lies in it: one, or
    one a layer where it is stacked.
    """
    owner, _, last = path.rpartition(".")
    stack = shape[: stack_axes(path, len(shape))]
    if not stack:
        return {f"model.{owner}.{FILE_NAMES[last]}" if owner else FILE_NAMES[last]: ()}
    # Of a hybrid: whole periods, with several linear layers before one of full attention.
    layers = range(math.prod(stack))
    if owner == "layers.full":
        layers = [PERIOD * period + PERIOD - 1 for period in layers]
    elif owner == "layers.linear":
        layers = [PERIOD * period + n for period in range(stack[0]) for n in range(stack[1])]
    names = (f"model.layers.{layer}.{FILE_NAMES[last]}" for layer in layers)
    return dict(zip(names, np.ndindex(stack), strict=True))


def tensor_shapes(params: nnx.State) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes in the files of all parameters of a tree."""
    shapes = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        name = param_path(path)
        shape = leaf.shape[stack_axes(name, leaf.ndim) :]
        shapes |= dict.fromkeys(tensor_names(name, leaf.shape), tuple(shape))
    return shapes


def shapes_of(folder: Path) -> Shapes:
    """Return the same of the model that the `config.json` of a folder describes."""
    return tensor_shapes(nnx.state(described(read_config(folder))))


def tensors(params: nnx.State) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights of a model, all addressable from this process, under their names in the
    files, one by one.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        # Not by iteration: JAX would copy a hundred layers at a time.
        for name, index in tensor_names(param_path(path), leaf.shape).items():
            yield name, np.asarray(leaf[(*index, ...)])


def init(
    config: ModelConfig, seed: int, *, param_dtype: Any = jnp.float32, dtype: Any = jnp.float32
) -> Decoder:
    """Make a model with fresh weights on the default device; `dtype` is that of the computation."""
    make = jax.jit(partial(Decoder, config, param_dtype=param_dtype, dtype=dtype))
    return make(key=jax.random.key(seed))


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
    shapes = with_shardings(nnx.state(model), mesh)
    files = check_files(folder, tensor_shapes(shapes))

    def read(path: Any, leaf: Any) -> jax.Array:
        name = param_path(path)
        # No mesh splits what stacks layers.
        names, depth = tensor_names(name, leaf.shape), stack_axes(name, leaf.ndim)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            index = index or (slice(None),) * leaf.ndim
            cuts = [slice(*cut.indices(size)) for cut, size in zip(index, leaf.shape, strict=True)]
            array = np.empty([cut.stop - cut.start for cut in cuts], leaf.dtype)
            for tensor, layer in names.items():
                array[(*layer, ...)] = _read_tensor(files, tensor, cuts[depth:])
            return array

        # Not jnp.asarray, which copies twice. Each is waited for: copies run behind, and those of a
        # whole model could be under way at once.
        if leaf.sharding is None:
            return jax.device_put(part(None)).block_until_ready()
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part).block_until_ready()

    nnx.update(model, jax.tree.map_with_path(read, shapes))
    return model


def read_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights of a Hugging Face folder by name, one after the other, in float32.

    Raises:
        UserError: As `load`.
    """
    shapes = shapes_of(folder)
    files = check_files(folder, shapes)
    for name, shape in shapes.items():
        yield name, _read_tensor(files, name, [slice(size) for size in shape]).astype(np.float32)


# The file of a tensor, and its name there.
_Files = Mapping[str, tuple[Path, str]]


def _read_tensor(files: _Files, name: str, index: list[slice]) -> np.ndarray:
    path, own_name = files[name]
    # Opened anew for each, or the pages of all that was read would stay mapped.
    with safe_open(path, "numpy") as file:
        return file.get_slice(own_name)[tuple(index)]


def check_files(folder: Path, shapes: Shapes) -> _Files:
    """Return the file of every tensor, of which none is read.

    Raises:
        UserError: A file is not whole, or they do not hold the model of these shapes and no other.
    """
    files, beside = dict[str, tuple[Path, str]](), 0
    headers: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "numpy") as file:
                names = [name for name in file.keys() if not _BESIDE.fullmatch(name)]  # noqa: SIM118
                beside += len(file.keys()) - len(names)
                for own_name in names:
                    name, header = own_name.replace(_INNER, _OUTER), file.get_slice(own_name)
                    files[name] = path, own_name
                    headers[name] = tuple(header.get_shape()), header.get_dtype()
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path}: cut short or not safetensors ({error}); copy it again"
            ) from None
    if beside:
        _log.info(
            "%s: %d tensors of the vision tower and of the prediction of several tokens are left "
            "out, here and in exports", folder, beside,
        )  # fmt: skip
    for name in {**shapes, **headers}:
        if name not in shapes and _IGNORED.fullmatch(name):
            continue
        said, (shape, kind) = shapes.get(name, "none"), headers.get(name, ((), ""))
        if shape != said or kind not in _KINDS:
            there = f"{kind} of shape {shape}" if kind else "missing"
            raise UserError(
                f"{folder}: tensor {name} is {there}, config.json says {said}; "
                "both must be of the same model, in bf16, fp16 or fp32"
            )
    return files


def save(model: Decoder, folder: Path, *, source: Path) -> None:
    """Write a model, all of it addressable from this process; see `write`.

    Weights keep their type; where adapters are merged into them it is float32.
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
        dtype=jnp.float32 if lora else model.embed[...].dtype,
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
    modules: Sequence[str] | None = None,
) -> None:
    """Write a folder of adapters that PEFT and SGLang read; it appears whole or not at all.

    `base` is the name or path of the model that they belong to, `modules` the names of its matrices
    with adapters where they are not PEFT's; see `write` for the others.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": modules or target_modules(lora, shapes),
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


def full_matrices() -> list[str]:
    """Return the names in the files of the matrices of layers with full attention."""
    names = (FILE_NAMES[name] for name in MATRICES)
    return [name for name in names if not name.startswith("linear_attn.")]


def target_modules(lora: LoraConfig, names: Iterable[str]) -> list[str]:
    """Return the names in PEFT of the matrices with adapters of a model, or of its adapters, that
    has tensors of these names.
    """
    there = {part for name in names for part in name.split(".")}
    modules = (FILE_NAMES[name].split(".")[1] for name in dict.fromkeys(lora.targets))
    return [module for module in modules if module in there]


def file_type(name: str, dtype: Any) -> Any:
    """Return the type in which a tensor is written to files of a type."""
    return jnp.dtype("float32" if name.endswith(_FULL) else dtype)


def total_bytes(shapes: Shapes, dtype: Any) -> int:
    """Return the size of all tensors in files of a type."""
    return sum(math.prod(shape) * file_type(name, dtype).itemsize for name, shape in shapes.items())


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
        with naming(path):
            # safetensors lets nobody else read its files: servers may be another user's.
            path.touch()
            mode = path.stat().st_mode
            # transformers reads only files which say that their layout is PyTorch's.
            save_file(
                {
                    tensor: np.ascontiguousarray(array, file_type(tensor, dtype))
                    for tensor, array in islice(arrays, len(tensors))
                },
                path,
                {"format": "pt"},
            )
            path.chmod(mode)
        weight_map |= dict.fromkeys(tensors, path.name)
    return weight_map


def _describe(path: Path, dtype: Any) -> None:
    """Make a `config.json` tell the type of the weights beside it, and SGLang what these are."""
    raw = json.loads(path.read_bytes())
    config = text_keys(raw)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = jnp.dtype(dtype).name
    config.setdefault("architectures", [architecture(config["model_type"])])
    if "linear_attention" in config.get("layer_types", ()):
        # transformers writes this list alone, and SGLang reads the interval alone.
        config.setdefault("full_attention_interval", PERIOD)
    _write_json(path, config)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
