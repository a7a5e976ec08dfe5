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
from minirl.model.decoder import read_config
from minirl.model.lora import adapter_shapes, merged_parts
from minirl.model.shards import total_bytes
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
    shapes = huggingface.paths_of(huggingface.shapes_of(source.model))
    kind = dtype or _own_dtype(source)
    size = total_bytes(shapes, kind)
    with _writing(out, size), _parts(source) as parts, cli.progress_bar("export") as progress:
        number = {path: n for n, path in enumerate(shapes)}

        def counted(path: str) -> Iterator[np.ndarray]:
            progress(number[path], len(shapes), path)
            return parts(path)

        huggingface.write(
            out,
            shapes,
            counted,
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
    size = total_bytes(huggingface.paths_of(like), dtype or "float32")
    with _writing(out, size), stored_params(source.checkpoint, like) as read:
        huggingface.write_adapter(
            out,
            huggingface.paths_of(like),
            lambda path: huggingface.parts_of(path, read(path)),
            source.lora,
            base=str(source.model.resolve()),
            dtype=dtype or "float32",
        )
    cli.output.print(f"Adapters of {source.model}: {out}", soft_wrap=True)


@contextmanager
def _parts(source: PolicySource) -> Generator[huggingface.Parts]:
    """Open a policy's weights, to be read one by one."""
    if source.checkpoint is None:
        yield huggingface.parts_in_folder(source.model)
        return
    shapes = huggingface.shapes_of(source.model)
    like = shapes
    if source.lora is not None:
        like = adapter_shapes(read_config(source.model), source.lora)
    with stored_params(source.checkpoint, like) as read:
        if source.lora is None:
            yield lambda path: huggingface.parts_of(path, read(path))
        else:
            yield merged_parts(huggingface.parts_in_folder(source.model), read, source.lora)


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
