"""Write a policy as a Hugging Face folder, for transformers and SGLang.

    python -m launch.export --checkpoint runs/progress-seed0 --out progress-7b

The weights that were trained are in memory together, 4 bytes each; others are read and written one
by one. A policy with adapters (train.lora) is merged; --adapter writes these alone, for PEFT.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from cyclopts import Parameter

from launch import cli, options
from launch.files import check_place
from launch.policy import WHERE, PolicySource, policy_in
from minirl.exchange import UserError
from minirl.model.config import read_config, text_keys
from minirl.run.files import read_json


@options.command
def main(
    *,
    checkpoint: Annotated[Path, Parameter(help=WHERE)],
    out: Path,
    dtype: Literal["bfloat16", "float32", "float16"] | None = None,
    adapter: bool = False,
) -> None:
    """Write a policy as a Hugging Face folder.

    Args:
        out: the folder to make
        dtype: type of the weights (default: what the run computed in, model.dtype; of a Hugging
            Face folder its own; of adapters float32)
        adapter: the adapters alone, as PEFT's files
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"--out {out}: is there already, and is not written over; name another")
    check_place(out, key="--out")
    policy = policy_in(checkpoint)
    if adapter and policy.lora is None:
        raise UserError(
            f"--adapter: {policy.name} has no adapters, since train.lora was not set; leave "
            "--adapter out"
        )
    cli.use_accelerator("cpu")
    # JAX takes seconds to import, and nothing above needs it.
    from minirl.model import huggingface
    from minirl.model.lora import described, merged_tensors, trained
    from minirl.run.checkpoint import read_params

    kind = dtype or ("float32" if adapter else _own_dtype(policy))
    with cli.progress_bar("export") as progress:
        shapes = huggingface.shapes_of(policy.model)
        tensors = huggingface.read_tensors(policy.model)
        if policy.checkpoint is not None:
            like = trained(described(read_config(policy.model), lora=policy.lora))
            # As the run has read them: in the type that it computes in, but for some of Qwen3.5.
            own = partial(huggingface.file_type, dtype=_own_dtype(policy))
            base = ((name, one.astype(own(name))) for name, one in tensors)
            tensors = huggingface.tensors(read_params(policy.checkpoint, like))
            if adapter:
                shapes = huggingface.tensor_shapes(like)
            elif policy.lora is not None:
                tensors = merged_tensors(base, dict(tensors), policy.lora)

        def counted() -> Iterator[tuple[str, np.ndarray]]:
            for number, (name, array) in enumerate(tensors, 1):
                yield name, array
                progress(number, len(shapes), name)

        if adapter and policy.lora is not None:
            where = str(policy.model.resolve())
            huggingface.write_adapter(out, shapes, counted(), policy.lora, base=where, dtype=kind)
        else:
            huggingface.write(
                out, shapes, counted(), source=policy.model, dtype=kind,
                generation=_generation(policy),
            )  # fmt: skip
    told = f"Adapters of {policy.model}: {out}" if adapter else f"Model: {out} ({kind})"
    cli.output.print(told)


def _own_dtype(source: PolicySource) -> str:
    """Return what a run computed in, and so sampled with; or the type of a folder's weights."""
    if source.run is not None:
        return source.run.model.dtype
    path = source.model / "config.json"
    config = text_keys(read_json(path, dict[str, Any], advice="copy it again"))
    found = config.get("dtype") or config.get("torch_dtype")
    return found if found in ("bfloat16", "float16") else "float32"


def _generation(source: PolicySource) -> dict[str, Any]:
    from minirl.model.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(source.model)
    content = {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}
    if source.run is None:
        return content
    sampler = source.run.sampler
    own = {"do_sample": True, "temperature": sampler.temperature, "top_p": sampler.top_p}
    return content | own


if __name__ == "__main__":
    cli.run(main)
