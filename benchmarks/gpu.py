"""On one GPU: the H100 recipe first, then the speed of real shapes.

    python benchmarks/gpu.py --model FOLDER --data FOLDER --out OUT
    python benchmarks/gpu.py --accel cpu --shapes tiny --out OUT    # to try it

Trains `h100.yaml` with each seed, and goes on where it was stopped; without --model and --data it
is left out. Then a GRPO step of each shape with random weights (`grpo_step.py`): 8 prompts of 2,048
tokens x 8 replies of 512. Every command is a process of its own, and one that fails is a result
too. OUT/gpu.json is written after each: accuracy before, between and after, hours, memory planned
and measured of each seed, and the figures of each step. Prints it at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SHAPES = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "qwen2.5-coder-7b", "qwen3.5-0.8b")
STEP = ("--dtype", "bfloat16", "--moments", "bfloat16", "--remat", "full", "--runs", "2")
STEP += ("--max-prompt-tokens", "2048", "--max-tokens", "512")
STEP += ("--batching", "{micro_batch_tokens: 16384}")


def main() -> None:
    """Run what is asked for, and note what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="what the recipe teaches")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="the recipe's data.root")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2), metavar="SEED")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NAME")
    parser.add_argument("--accel", default="gpu", help="gpu (the default) or cpu")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value", help="of the recipe")
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    if options.model and options.data:
        for seed in options.seeds:
            note(options.out, found, f"recipe, seed {seed}", recipe(options, seed))
    for shape in options.shapes:
        sizes = ("--runs", "1") if shape == "tiny" else ("--model", shape, *STEP)
        words = ["benchmarks.grpo_step", "--accel", options.accel, *sizes]
        note(options.out, found, shape, ran(words))
    print(json.dumps(found))


def note(out: Path, found: dict[str, Any], name: str, figures: Any) -> None:
    found[name] = figures
    (out / "gpu.json").write_text(json.dumps(found, indent=2) + "\n")


def recipe(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train one seed to its end; return accuracies and memory."""
    run = (options.out / f"recipe-seed{seed}").resolve()
    words = ["launch.train", "--accel", options.accel, "--cfg", "h100.yaml", f"run.dir={run}"]
    words += [f"model.path={options.model.resolve()}", f"data.root={options.data.resolve()}"]
    ended = ran([*words, f"seed={seed}", *options.settings])
    if not (run / "result.json").exists():
        return {"ended": ended}
    result = json.loads((run / "result.json").read_text())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    plan = json.loads((run / "plan.json").read_text())
    peak = max(step.get("time/peak_memory_gib", 0.0) for step in steps)
    memory = {"planned": plan, "measured_gib": peak}
    return {name: result.get(name) for name in ("accuracy", "rule", "seconds")} | memory


def ran(words: list[str]) -> list[Any]:
    """Run a module, whose messages are shown; return its lines of JSON, or the last one it said."""
    print(" ".join(words), file=sys.stderr, flush=True)
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [{"status": done.returncode}] * bool(done.returncode) + list(map(json.loads, said))


if __name__ == "__main__":
    main()
