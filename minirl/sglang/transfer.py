"""New weights as files that SGLang servers read: a folder for each version, all of a model or its
adapters. All processes of the learner have to call what writes one.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from minirl.config import LoraConfig
from minirl.model.config import HybridConfig
from minirl.model.huggingface import (
    file_type,
    full_matrices,
    target_modules,
    tensor_names,
    tensor_shapes,
    write_adapter,
    write_files,
)
from minirl.model.sharding import param_path
from minirl.run import distributed
from minirl.run.files import appearing

_VERSION = "version-"
# SGLang has one matrix where the files have two.
_JOINED = dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz")
# Tensors of a file are in a process's memory together, beside the learner's.
_FILE_BYTES = 2**28


def write_version(root: Path, name: str, params: nnx.State, *, dtype: Any) -> Path:
    """Write all weights of a model, split over devices in any way.

    Each process writes its share of the tensors to a folder of `root`, which all see. It appears
    when all are whole.
    """
    shapes, folder = tensor_shapes(params), root / f"{_VERSION}{name}"
    process, processes = jax.process_index(), distributed.count()
    share = {tensor: shapes[tensor] for tensor in list(shapes)[process::processes]}

    def write_share() -> None:
        tensors = whole_tensors(params, dtype)
        mine = (pair for pair in tensors if pair[0] in share)
        try:
            file = "model" if processes == 1 else f"model-{process:05}"
            write_files(new, share, mine, dtype=dtype, name=file, max_bytes=_FILE_BYTES)
        finally:
            # All processes bring a tensor together: after an error here the others go on.
            for _ in tensors:
                pass

    with distributed.held_by_first(appearing(folder)) as new:
        distributed.gather(write_share)
    distributed.check()  # the folder has its name
    return folder


def write_adapters(
    root: Path,
    name: str,
    params: nnx.State,
    lora: LoraConfig,
    *,
    base: Path,
    hybrid: HybridConfig | None = None,
) -> Path:
    """Write adapters alone, as SGLang reads them.

    `base` is the model that they belong to, and `hybrid` its shape where it is one.
    """
    folder = root / f"{_VERSION}{name}"
    tensors = {tensor: np.asarray(array) for tensor, array in whole_tensors(params, "float32")}
    modules = served_modules(lora, tensors)
    if hybrid is not None:
        tensors = served_adapters(tensors, hybrid)
    shapes = {tensor: array.shape for tensor, array in tensors.items()}
    distributed.from_first(
        lambda: write_adapter(
            folder, shapes, tensors.items(), lora, base=str(base), modules=modules
        )
    )
    return folder


def served_adapters(
    adapters: Mapping[str, np.ndarray], shape: HybridConfig
) -> dict[str, np.ndarray]:
    """Take the adapters of linear attention's inputs apart: SGLang joins those of queries, keys,
    values and gates, and wants all four where it has one.
    """
    keys = shape.linear_num_key_heads * shape.linear_key_head_dim
    values = shape.linear_num_value_heads * shape.linear_value_head_dim
    outputs, found = {"q": keys, "k": keys, "v": values, "z": values}, dict[str, np.ndarray]()
    for name, array in adapters.items():
        start, is_input, end = name.partition(".linear_attn.in_proj_")
        if not is_input:
            found[name] = array
            continue
        mine, _, factor = end.partition(".")  # the letters of its outputs
        is_first = "lora_A" in factor
        cuts = np.cumsum([outputs[part] for part in mine])[:-1]
        parts = [array] * len(mine) if is_first else np.split(array, cuts)
        for part, own in zip(mine, parts, strict=True):
            found[f"{start}{is_input}{part}.{factor}"] = own
        for part in outputs.keys() - {*mine}:
            nothing = array.shape if is_first else (outputs[part], array.shape[1])
            found.setdefault(f"{start}{is_input}{part}.{factor}", np.zeros(nothing, array.dtype))
    return found


def served_modules(lora: LoraConfig, names: Iterable[str]) -> list[str]:
    """Return the names in SGLang of the matrices with adapters; see `target_modules`."""
    modules = target_modules(lora, names)
    return list(dict.fromkeys(_JOINED.get(module, module) for module in modules))


def lora_options(lora: LoraConfig, hybrid: HybridConfig | None = None) -> list[str]:
    """Return what a server is launched with: room for two versions, and for none in a batch."""
    sizes = ["--max-lora-rank", str(lora.rank), "--max-loras-per-batch", "3"]
    # SGLang's list of what may be named is without the modules of linear attention.
    modules = ["all"] if hybrid else served_modules(lora, full_matrices())
    return ["--enable-lora", *sizes, "--lora-target-modules", *modules]


def remove_versions(root: Path, *, but: Path | None = None) -> None:
    """Remove the folders of all versions but one, also those that a kill left half written."""
    for folder in root.glob(f"*{_VERSION}*") if distributed.is_first() else ():
        if folder != but:
            shutil.rmtree(folder, ignore_errors=True)


def whole_tensors(params: nnx.State, dtype: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yield each tensor by its Hugging Face name, whole on the first device of this process.

    Parameters that hold all layers are gathered one layer at a time.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        for tensor, index in tensor_names(param_path(path), leaf.shape).items():
            gather = _gather(file_type(tensor, dtype), sharding)
            whole = gather(leaf, index)
            # One that is not computed yet has memory of its own already.
            yield tensor, whole.block_until_ready().addressable_data(0)


@functools.lru_cache
def _gather(dtype: Any, whole: Sharding) -> Callable[..., jax.Array]:
    def gather(array: jax.Array, index: tuple[Any, ...]) -> jax.Array:
        for number in index:
            array = jax.lax.dynamic_index_in_dim(array, number, keepdims=False)
        return array.astype(dtype)

    return jax.jit(gather, out_shardings=whole)
