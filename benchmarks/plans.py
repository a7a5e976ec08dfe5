"""What fits where? `launch.plan` for models and devices, as tables.

    python benchmarks/plans.py                        # 1.5B to 32B on four topologies
    python benchmarks/plans.py --scale                # the 7B model from 16 to 256 chips
    python benchmarks/plans.py --models qwen2.5-coder-7b --topologies v5p:4x4x4 h100x8

Progress-SQL's job: prompts of 6,000 and responses of 8,192 tokens, 8 answers to each of 64 prompts,
all of them decoded side by side; further arguments `key.sub=value` change it. Needs the compilers,
extras `tpu` and `plan-gpu`. Prints a table as Markdown, then one JSON object. A plan takes minutes;
each is kept in the folder, so the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import markdown

MODELS = tuple(f"qwen2.5-coder-{size}" for size in ("1.5b", "7b", "14b", "32b"))
TOPOLOGIES = ("v5e:4x4", "v5p:4x4x4", "v6e:8x8", "h100x8")
SCALE = ("v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16")
SCALE += ("v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x8", "v5p:4x8x8")
_JOB = ("--cfg", "progress.yaml", "sampler.slots=512")
_HEAD = ("model", "chips", "mesh", "samplers", "fits", "tokens of a micro-batch")
_HEAD += ("GiB update / generation", "of", "plan s")


def main() -> None:
    """Make what is not made yet, and print all."""
    options = _options()
    models = options.models or (MODELS if not options.scale else ("qwen2.5-coder-7b",))
    topologies = options.topologies or (SCALE if options.scale else TOPOLOGIES)
    options.folder.mkdir(parents=True, exist_ok=True)
    plans = [
        plan(model, topology, options.folder, options.overrides)
        for model in models
        for topology in topologies
    ]
    print(markdown(_HEAD, map(_row, plans)))
    for one in plans:
        if "refused" in one:
            print(f"\n{one['model']} on {one['topology']}: {one['refused']}")
    print(json.dumps({"cpu_count": os.cpu_count(), "plans": plans}))


def plan(model: str, topology: str, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Plan a model for a topology, or read the plan; a refusal is a result too."""
    words = "-".join([model, topology.replace(":", "-"), *overrides]).replace("/", "_")
    kept, made = folder / f"{words}.json", folder / f"{words}.partial"
    if kept.exists():
        return json.loads(kept.read_text())
    print(f"{model} on {topology}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "launch.plan", *_JOB, *overrides]
    command += ["--model", model, "--topology", topology, "--json", str(made)]
    started = perf_counter()
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ended.returncode == 2:
        refused = {"model": model, "topology": topology}
        refused["refused"] = ended.stderr.strip().splitlines()[-1].removeprefix("error: ")
        seconds = round(perf_counter() - started, 1)
        made.write_text(json.dumps({**refused, "plan_s": seconds}))
    elif ended.returncode:
        raise SystemExit(f"{model} on {topology}: status {ended.returncode}: {ended.stderr}")
    made.rename(kept)
    return json.loads(kept.read_text())


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    if "refused" in one:
        dashes = ("-",) * (len(_HEAD) - 6)
        return (one["model"], one["topology"], "-", "-", "no", *dashes, f"{one['plan_s']:.0f}")
    mesh = " x ".join(f"{axis} {size}" for axis, size in one["mesh"].items() if size > 1)
    axes = (one["sampler_mesh"] or {}).items()
    sampler = " x ".join(f"{axis} {size}" for axis, size in axes if size > 1)
    return (
        one["model"],
        one["topology"],
        mesh,
        f"{one['processes']}: {sampler or 'one device'}",
        "yes",
        f"{one['micro_batch_tokens']:,}",
        f"{one['update_bytes'] / 2**30:.1f} / {one['generation_bytes'] / 2**30:.1f}",
        f"{one['room_bytes'] / 2**30:.1f}",
        f"{one['plan_s']:.0f}",
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME")
    parser.add_argument("--topologies", nargs="+", metavar="CHIPS")
    parser.add_argument("--scale", action="store_true", help="one model from 16 to 256 chips")
    parser.add_argument("--folder", type=Path, default=Path("runs/plans"))
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
