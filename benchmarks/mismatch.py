"""What do corrections do where the sampler is worse than the learner? The demo, for several seeds.

    python benchmarks/mismatch.py
    python benchmarks/mismatch.py --arms none truncated --seeds 0 --lag 2 --dtype bfloat16
    python benchmarks/mismatch.py --arms exact none --seeds 0 train.steps=4   # to try it

The sampler has weights of `--lag` updates before, rounded to `--dtype`; in the arm `exact` it has
those of the learner. All arms of a seed start from the same weights. Prints a table as Markdown,
then one JSON object; what was interrupted goes on, and what is finished is only read.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import markdown

CONFIG = "progress-demo.yaml"
ARMS = {
    "exact": (),
    "none": ("correction=none",),
    "truncated": (),
    "masked": ("correction=masked",),
    "masked-negatives": ("correction=masked_negatives", "correction_level=sequence"),
    "whole-rows": ("correction_level=product",),
    "gspo": ("kind=gspo",),
    "cispo": ("kind=cispo",),
    "no-cut-offs": ("mask_cut_off=true",),
}
"""Settings of `train.algorithm`."""
_MEANS = ("mismatch/gap_mean", "mismatch/kl", "mismatch/far_share", "update/correction_mean")
_HEAD = ("arm", "seed", "before %", "after %", *_MEANS, "skipped")


def main() -> None:
    """Run what is not finished yet, and print what came out."""
    options = _options()
    results = [
        {"arm": arm, "seed": seed} | learn(arm, seed, options)
        for seed in options.seeds
        for arm in options.arms
    ]
    print(markdown(_HEAD, map(_row, results)))
    print(json.dumps({"lag": options.lag, "dtype": options.dtype, "runs": results}))


def learn(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run an arm to its end; return accuracies, and means of its metrics over the steps."""
    start, run = options.folder / f"start-seed{seed}", options.folder / f"{arm}-seed{seed}"
    if not (start / "warm" / "model").exists():
        words = ["launch.train", "--accel", "cpu", "--cfg", CONFIG, "--only", "warm-start"]
        _run(*words, f"seed={seed}", f"run.dir={start}", *options.settings)
    if not (run / "result.json").exists():
        model = (f"model.path={start / 'warm' / 'model'}", "model.tiny=null", "warm_start=null")
        algorithm = [f"train.algorithm.{setting}" for setting in ARMS[arm]]
        worse = ["0", "float32"] if arm == "exact" else [str(options.lag), options.dtype]
        words = ["benchmarks._worse_sampler", *worse, "--accel", "cpu", "--cfg", CONFIG]
        _run(*words, f"seed={seed}", f"run.dir={run}", *options.settings, *model, *algorithm)
    result = json.loads((run / "result.json").read_text())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    means = {name: float(np.mean([s[name] for s in steps if name in s])) for name in _MEANS}
    skipped = sum(step.get("update/skipped", 0.0) for step in steps)
    accuracy, rule = result["accuracy"], result["rule"]
    ends = {f"ex_{place}": accuracy[place][rule]["mean"] for place in ("before", "after")}
    return ends | means | {"skipped": skipped}


def _run(*words: str) -> None:
    subprocess.run([sys.executable, "-m", *words], check=True, stdout=sys.stderr)


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    shares = (f"{100 * result[key]:.1f}" for key in ("ex_before", "ex_after"))
    means = (f"{result[name]:.3g}" for name in _MEANS)
    return result["arm"], str(result["seed"]), *shares, *means, f"{result['skipped']:.0f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2), metavar="SEED")
    parser.add_argument("--lag", type=int, default=2, help="updates that its weights are old")
    parser.add_argument("--dtype", default="bfloat16", help="what its weights are rounded to")
    parser.add_argument("--folder", type=Path, default=Path("runs/mismatch"))
    parser.add_argument("settings", nargs="*", default=[], metavar="KEY=VALUE", help="of all runs")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
