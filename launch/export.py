"""Write a policy as a Hugging Face folder, for transformers and SGLang.

    python -m launch.export --checkpoint runs/progress-seed0 --out progress-7b

Weights are read and written one by one, so that a model is exported on any machine. A policy that
was trained with adapters (train.lora) is merged; --adapter writes the adapters alone, for PEFT.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from launch import cli, options
from launch.policy import WHERE, policy_in
from minirl.exchange import UserError


def export(
    *,
    checkpoint: Annotated[Path, Parameter(help=WHERE)],
    out: Annotated[Path, Parameter(help="the folder to make")],
    dtype: Annotated[
        Literal["bfloat16", "float32", "float16"] | None,
        Parameter(
            help="type of the weights (default: what the run computed in, model.dtype; of a "
            "Hugging Face folder its own; of adapters float32)"
        ),
    ] = None,
    adapter: Annotated[bool, Parameter(help="the adapters alone, as PEFT's files")] = False,
) -> None:
    """Write a policy as a Hugging Face folder."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"--out {out}: is there already, and is not written over; name another")
    policy = policy_in(checkpoint)
    cli.use_accelerator("cpu")
    # JAX takes seconds to import, and nothing above needs it.
    from launch import weights

    write = weights.export_adapter if adapter else weights.export
    write(policy, out, dtype=dtype)


main = options.command(export)


if __name__ == "__main__":
    cli.run(main)
