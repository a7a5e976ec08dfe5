"""Write a policy as a Hugging Face folder, for transformers and SGLang.

    python -m launch.export --checkpoint runs/progress-seed0 --out progress-7b
    python -m launch.export --gguf qwen2.5-coder-0.5b-q4_k_m.gguf --out qwen2.5-coder-0.5b

Weights are read and written one by one, so that a model is exported on any machine. A policy that
was trained with adapters (train.lora) is merged; --adapter writes the adapters alone, for PEFT.
Of a GGUF file, quantised or not, the folder has configuration and tokenizer too, and can be
trained, evaluated and served like any other.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from exchange import UserError
from launch import cli
from launch.policy import WHERE, policy_in


def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _arguments(arguments)
    out: Path = options.out
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"--out {out}: is there already, and is not written over; name another")
    if options.gguf and options.adapter:
        raise UserError("--adapter: a GGUF file holds a whole model; leave --adapter out")
    policy = policy_in(options.checkpoint) if options.checkpoint else None
    cli.use_accelerator("cpu")
    # JAX takes seconds to import, and nothing above needs it.
    from launch.weights import export, export_adapter, export_gguf

    if policy is None:
        export_gguf(options.gguf, out, dtype=options.dtype)
    elif options.adapter:
        export_adapter(policy, out, dtype=options.dtype)
    else:
        export(policy, out, dtype=options.dtype)


def _arguments(arguments: list[str]) -> Namespace:
    parser = cli.Parser("launch.export", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help=WHERE)
    what = "a GGUF file of a Qwen2, Qwen2.5, Qwen3, Llama or Mistral model"
    source.add_argument("--gguf", type=Path, metavar="FILE", help=what)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float16"),
        help="type of the weights (default: what the run computed in, model.dtype; of a Hugging "
        "Face folder its own; of adapters and GGUF files float32)",
    )
    parser.add_argument(
        "--adapter", action="store_true", help="the adapters alone, as PEFT's files"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    cli.run(main)
