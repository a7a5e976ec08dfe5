"""Do the demos of the four papers learn? Accuracy before and after, for several seeds.

    python benchmarks/learn.py
    python benchmarks/learn.py --configs progress-demo.yaml --seeds 0 --folder runs/learn

Prints a table as Markdown, then one JSON object. Each run takes some ten minutes on two cores;
what was interrupted goes on, and what is finished is only read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import markdown

CONFIGS = ("progress-demo.yaml", "expo-demo.yaml", "paverl-demo.yaml", "astra-demo.yaml")
_HEAD = ("config", "seed", "before %", "after %", "gain, points", "95 % interval", "seconds")


def main() -> None:
    """Run what is not finished yet, and print what came out."""
    options = _options()
    results = [
        {"config": config, "seed": seed} | learn(config, seed, options.folder)
        for config in options.configs
        for seed in options.seeds
    ]
    print(markdown(_HEAD, map(_row, results)))
    print(json.dumps({"cpu_count": os.cpu_count(), "runs": results}))


def learn(config: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run a demo to its end and return the numbers of its `result.json`."""
    run = folder / f"{Path(config).stem}-seed{seed}"
    if not (run / "result.json").exists():
        command = ["-m", "launch.train", "--accel", "cpu", "--cfg", config]
        overrides = [f"seed={seed}", f"run.dir={run}"]
        subprocess.run([sys.executable, *command, *overrides], check=True, stdout=sys.stderr)
    result = json.loads((run / "result.json").read_text())
    return {key: result[key] for key in ("ex_before", "ex_after", "gain", "gain_ci95", "seconds")}


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    low, high = result["gain_ci95"]
    return (
        result["config"],
        str(result["seed"]),
        f"{100 * result['ex_before']:.1f}",
        f"{100 * result['ex_after']:.1f}",
        f"{100 * result['gain']:.1f}",
        f"[{100 * low:.1f}, {100 * high:.1f}]",
        f"{result['seconds']:.0f}",
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", default=CONFIGS, metavar="CONFIG")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2), metavar="SEED")
    parser.add_argument("--folder", type=Path, default=Path("runs/learn"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
