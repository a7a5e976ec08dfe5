"""Weights of policies: loaded to be measured, and exported tensor by tensor."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from launch import cli
from launch.build import load_model
from launch.config import JobConfig
from launch.policy import PolicySource
from minirl.exchange import UserError
from minirl.model import huggingface
from minirl.model.config import read_config, text_keys
from minirl.model.decoder import Decoder
from minirl.model.lora import described, merged_tensors, trained
from minirl.model.tokenizer import ChatTokenizer
from minirl.run.checkpoint import read_params, stored_params
from minirl.run.files import read_json


def load_policy(source: PolicySource, config: JobConfig) -> tuple[Decoder, ChatTokenizer]:
    """Read a policy and its tokenizer, for the devices and the dtype of a job."""
    model, tokenizer = load_model(config, source.model, lora=source.lora)
    if source.checkpoint is not None:
        nnx.update(model, read_params(source.checkpoint, trained(model)))
    return model, tokenizer


def export(source: PolicySource, out: Path, *, dtype: str | None) -> None:
    """Write a policy as a Hugging Face folder, by default in its own dtype; adapters are merged."""
    shapes = huggingface.tensor_shapes(huggingface.shapes_of(source.model))
    kind, generation = dtype or _own_dtype(source), _generation(source)
    with _tensors(source) as tensors:
        _write(out, shapes, tensors, source=source.model, dtype=kind, generation=generation)


def export_adapter(source: PolicySource, out: Path, *, dtype: str | None) -> None:
    """Write a policy's adapters alone, in PEFT's form; see `export`."""
    if source.lora is None or source.checkpoint is None:
        raise UserError(
            f"--adapter: {source.name} has no adapters, since train.lora was not set; "
            "leave --adapter out"
        )
    like = trained(described(read_config(source.model), lora=source.lora))
    shapes = huggingface.tensor_shapes(like)
    with stored_params(source.checkpoint, like) as read:
        tensors, base = huggingface.tensors(like, read), str(source.model.resolve())
        kind = dtype or "float32"
        huggingface.write_adapter(out, shapes, tensors, source.lora, base=base, dtype=kind)
    cli.output.print(f"Adapters of {source.model}: {out}", soft_wrap=True)


def _write(
    out: Path, shapes: huggingface.Shapes, tensors: huggingface.Tensors, *, dtype: str, **more: Any
) -> None:
    """Write a Hugging Face folder (`huggingface.write`) with a bar, and name it."""
    with cli.progress_bar("export") as progress:

        def counted() -> Iterator[tuple[str, np.ndarray]]:
            for number, (name, array) in enumerate(tensors, 1):
                yield name, array
                progress(number, len(shapes), name)

        huggingface.write(out, shapes, counted(), dtype=dtype, **more)
    cli.output.print(f"Model: {out} ({dtype})", soft_wrap=True)


@contextmanager
def _tensors(source: PolicySource) -> Generator[Iterator[tuple[str, np.ndarray]]]:
    if source.checkpoint is None:
        yield huggingface.read_tensors(source.model)
        return
    lora = source.lora
    shape = read_config(source.model)
    like = trained(described(shape, lora=lora))
    with stored_params(source.checkpoint, like) as read:
        stored = huggingface.tensors(like, read)
        if lora is not None:
            # As the run has read them: in the type that it computes in.
            kept = jnp.dtype(_own_dtype(source))
            base = ((n, one.astype(kept)) for n, one in huggingface.read_tensors(source.model))
            stored = merged_tensors(base, dict(stored), lora)
        yield stored


def _own_dtype(source: PolicySource) -> str:
    """Return what a run computed in, and so sampled with; or the type of a folder's weights."""
    if source.run is not None:
        return source.run.model.dtype
    path = source.model / "config.json"
    config = text_keys(read_json(path, dict[str, Any], advice="copy it again"))
    found = config.get("dtype") or config.get("torch_dtype")
    return found if found in ("bfloat16", "float16") else "float32"


def _generation(source: PolicySource) -> dict[str, Any]:
    tokenizer = ChatTokenizer(source.model)
    content = {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}
    if source.run is None:
        return content
    sampler = source.run.sampler
    own = {"do_sample": True, "temperature": sampler.temperature, "top_p": sampler.top_p}
    return content | own
