"""What fits where? `launch.plan` for models and devices.

    python benchmarks/plans.py                        # 1.5B to 32B on four topologies
    python benchmarks/plans.py --models qwen2.5-coder-7b --topologies v5p:4x4x4,h100x8

Progress-SQL's job: prompts of 6,000 and responses of 8,192 tokens, 8 answers to each of 64 prompts,
all of them decoded side by side; further arguments `key.sub=value` change it. Needs the compilers,
extras `tpu` and `plan-gpu`. A plan takes minutes; each is kept in the folder, so the same command
resumes. Prints a line of JSON a plan, of `launch.plan` or with why it is refused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MODELS = tuple(f"qwen2.5-coder-{size}" for size in ("1.5b", "7b", "14b", "32b"))
TOPOLOGIES = ("v5e:4x4", "v5p:4x4x4", "v6e:8x8", "h100x8")
_JOB = ("--cfg", "progress.yaml", "sampler.slots=512")


def main() -> None:
    """Make what is not made yet, and print all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("--models", MODELS), ("--topologies", TOPOLOGIES)):
        parser.add_argument(name, default=default, type=lambda text: text.split(","))
    parser.add_argument("--folder", type=Path, default=Path("runs/plans"))
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_intermixed_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        for topology in options.topologies:
            made = plan(model, topology, options.folder, options.overrides)
            print(json.dumps({"model": model, "topology": topology, **made}), flush=True)


def plan(model: str, topology: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Plan a model for a topology, or read the plan; a refusal is a result too."""
    words = "-".join([model, topology, *overrides]).translate(str.maketrans("/:=", "_--"))
    kept, made = folder / f"{words}.json", folder / f"{words}.partial"
    if not kept.exists():
        command = [sys.executable, "-m", "launch.plan", *_JOB, *overrides]
        command += ["--model", model, "--topology", topology, "--json", str(made)]
        made.unlink(missing_ok=True)  # what a kill left is not written over
        ended = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        if ended.returncode == 2:
            refused = ended.stderr.strip().splitlines()[-1].removeprefix("error: ")
            made.write_text(json.dumps({"refused": refused}))
        elif ended.returncode:
            raise SystemExit(f"{model} on {topology}: status {ended.returncode}: {ended.stderr}")
        made.rename(kept)
    return json.loads(kept.read_text())


if __name__ == "__main__":
    main()
