"""Stream a policy out of its checkpoint into a Hugging Face folder."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from launch import cli
from launch.policy import PolicySource
from minirl.errors import UserError
from minirl.model import huggingface
from minirl.model.config import read_config
from minirl.model.lora import adapter_shapes, merged_tensors
from minirl.model.tokenizer import ChatTokenizer
from minirl.run.checkpoint import stored_params
from minirl.run.files import read_json


def export(source: PolicySource, out: Path, *, dtype: str | None, shard_bytes: int) -> None:
    """Write a model; adapters are merged.

    Args:
        source: The policy.
        out: Not there, or empty.
        dtype: Type of the weights; None for that of the run, or of the folder.
        shard_bytes: Largest file of weights.

    Raises:
        UserError: The policy cannot be read, or the folder cannot be written.
    """
    tokenizer = ChatTokenizer(source.model)
    shapes = huggingface.tensor_shapes(huggingface.shapes_of(source.model))
    kind = dtype or _own_dtype(source)
    size = huggingface.total_bytes(shapes, kind)
    with _writing(out, size), _tensors(source) as tensors, cli.progress_bar("export") as progress:

        def counted() -> Iterator[tuple[str, np.ndarray]]:
            for number, (name, array) in enumerate(tensors):
                progress(number, len(shapes), name)
                yield name, array

        huggingface.write(
            out,
            shapes,
            counted(),
            source=source.model,
            dtype=kind,
            max_shard_bytes=shard_bytes,
            generation=_generation(source, tokenizer),
        )
        progress(len(shapes), len(shapes), "")
    cli.output.print(f"Model: {out} ({size / 1e6:,.1f} MB, {kind})", soft_wrap=True)


def export_adapter(source: PolicySource, out: Path, *, dtype: str | None) -> None:
    """Write a policy's adapters alone, in PEFT's form; see `export`."""
    if source.lora is None:
        raise UserError(
            f"--adapter: {source.name} has no adapters, since train.lora was not set; "
            "leave --adapter out"
        )
    assert source.checkpoint is not None
    like = adapter_shapes(read_config(source.model), source.lora)
    shapes = huggingface.tensor_shapes(like)
    size = huggingface.total_bytes(shapes, dtype or "float32")
    with _writing(out, size), stored_params(source.checkpoint, like) as read:
        huggingface.write_adapter(
            out,
            shapes,
            huggingface.tensors(like, read),
            source.lora,
            base=str(source.model.resolve()),
            dtype=dtype or "float32",
        )
    cli.output.print(f"Adapters of {source.model}: {out}", soft_wrap=True)


@contextmanager
def _tensors(source: PolicySource) -> Generator[Iterator[tuple[str, np.ndarray]]]:
    """Open a policy's weights, to be read one by one."""
    if source.checkpoint is None:
        yield huggingface.read_tensors(source.model)
        return
    if source.lora is None:
        like = huggingface.shapes_of(source.model)
    else:
        like = adapter_shapes(read_config(source.model), source.lora)
    with stored_params(source.checkpoint, like) as read:
        stored = huggingface.tensors(like, read)
        if source.lora is not None:
            weights = huggingface.read_tensors(source.model)
            stored = merged_tensors(weights, dict(stored), source.lora)
        yield stored


@contextmanager
def _writing(out: Path, size_bytes: int) -> Generator[None]:
    """Refuse what the disk has no room for; say in a line if it has none in the middle either."""
    place = next(path for path in out.absolute().parents if path.exists())
    free = shutil.disk_usage(place).free
    advice = "make room, or set --out to another folder"
    if size_bytes > free:
        raise UserError(
            f"--out {out}: it takes {size_bytes / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free; "
            f"{advice}"
        )
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"--out {out}: {error.strerror}; {advice}") from None


def _own_dtype(source: PolicySource) -> str:
    """Return what a run computed in, and so sampled with; or the type of a folder's weights."""
    if source.run is not None:
        return source.run.model.dtype
    config = read_json(source.model / "config.json", dict[str, Any], advice="copy it again")
    found = config.get("dtype") or config.get("torch_dtype")
    return found if found in ("bfloat16", "float16") else "float32"


def _generation(source: PolicySource, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Say how to sample, where the base model does not: as the run did."""
    content = {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}
    if source.run is None:
        return content
    sampler = source.run.sampler
    return content | {
        "do_sample": True,
        "temperature": sampler.temperature,
        "top_p": sampler.top_p,
    }
