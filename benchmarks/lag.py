"""Does a step with rounds ahead take as long as the longer of rollout and update?

    python benchmarks/lag.py
    python benchmarks/lag.py --answers 0.3 0.9 --steps 8

Prints one JSON object. The demo's job trains on the CPU with the episodes of a server that sends
canned bytes after a while (`_scripted_server.py`) and needs no processor, as one on its own devices
would: two real servers on the learner's own cores cannot show it. Of each time an answer takes,
`rollout_s` and `update_s` are those of the run with lag 0, medians over the steps after the first
two (which compile); `ratio` is a step's time over the longer of the two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._scripted_server import scripted
from minirl.run.metrics import read_metrics

# Steps that compile.
FIRST = 2
SETTINGS = (
    "warm_start=null", "rollout.backend=sglang", "rollout.sglang.tolerance=1000000",
    "train.prompts_per_step=32", "train.eval_every=1000", "train.checkpoint_every=1000",
    "train.kl_every=1000", "train.algorithm.equal_groups=keep",
    "train.algorithm.correctness_filter=none",
    "evaluation.questions=2", "evaluation.validation_questions=2",
)  # fmt: skip
# Of the tiny model, whose tokenizer ends replies with 2.
REPLY = (*range(200, 248), 2)


def train(answer_s: float, lag: int, steps: int, folder: Path) -> dict[str, float]:
    """Return the median seconds of what a step does."""
    with scripted(answer_s, REPLY) as url:
        line = [sys.executable, "-m", "launch.train", "--accel", "cpu", "--cfg"]
        line += ["progress-demo.yaml", *SETTINGS, f"rollout.lag={lag}", f"train.steps={steps}"]
        line += [f'rollout.sglang.urls=["{url}"]', f"run.dir={folder}"]
        subprocess.run(line, check=True, stdout=sys.stderr)
    lines = read_metrics(folder)[FIRST:]
    if not all(one["groups/trained"] for one in lines):
        raise SystemExit("some updates had no group to learn from, and took no time")
    return {
        name: round(statistics.median(one[f"time/{name}"] for one in lines), 3)
        for name in ("step_s", "weights_s", "rollout_s", "update_s")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as place:
        for answer_s in options.answers:
            alone = train(answer_s, 0, options.steps, Path(place) / f"{answer_s}-0")
            longer = max(alone["rollout_s"], alone["update_s"])
            case = {"answer_s": answer_s, "lag 0": alone}
            for lag in options.lags:
                found = train(answer_s, lag, options.steps, Path(place) / f"{answer_s}-{lag}")
                case[f"lag {lag}"] = found | {"ratio": round(found["step_s"] / longer, 3)}
            cases.append(case | {"lag 0 ratio": round(alone["step_s"] / longer, 3)})
    print(json.dumps({"steps": options.steps, "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
