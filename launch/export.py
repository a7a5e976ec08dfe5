"""Write a policy as a Hugging Face folder, for transformers and SGLang.

    python -m launch.export --checkpoint runs/progress-seed0 --out progress-7b

Weights are read and written one by one, so that a model is exported on any machine. A policy that
was trained with adapters (train.lora) is merged; --adapter writes the adapters alone, for PEFT.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from launch import cli
from minirl.errors import UserError


def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _arguments(arguments)
    out: Path = options.out
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"--out {out}: is there already, and is not written over; name another")
    cli.use_accelerator("cpu")
    # JAX takes seconds to import, and nothing above needs it.
    from launch.policy import export, export_adapter, policy_in

    write = export_adapter if options.adapter else export
    write(policy_in(options.checkpoint), out, dtype=options.dtype)


def _arguments(arguments: list[str]) -> Namespace:
    parser = cli.Parser("launch.export", __doc__)
    folder: dict[str, Any] = {"type": Path, "required": True, "metavar": "DIR"}
    where = "a run folder (its best checkpoint), one of its checkpoints/N, or a model folder"
    parser.add_argument("--checkpoint", **folder, help=where)
    parser.add_argument("--out", **folder, help="the folder to make")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float16"),
        help="type of the weights (default: what the run computed in, model.dtype; of a Hugging "
        "Face folder its own; of adapters float32)",
    )
    parser.add_argument(
        "--adapter", action="store_true", help="the adapters alone, as PEFT's files"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    cli.run(main)
