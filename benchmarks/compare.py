"""Compare ways to learn: arms of any configs, several seeds, paired intervals.

    python benchmarks/compare.py                          # the papers' four demos: do they learn?
    python benchmarks/compare.py --arm binary progress-demo.yaml 'reward={kind: execution}' \
        --arm progress progress-demo.yaml --seeds 0 1 2 --folder runs/rewards -- train.steps=40

An arm is a name, a config and settings; settings after `--` are of all arms. Runs go to
FOLDER/NAME-seedN. Repeat the command to resume; finished runs are only read. Prints accuracy before
and after by each arm's own rule, the difference of each arm from the first on the same questions by
a rule that both are judged by, and one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import markdown
from launch.evaluation.results import Report, read_report
from launch.reporting.runs import scores_of, shared_rules

RESAMPLES = 10_000
DEMOS = ("progress", "expo", "paverl", "astra")
_ACCURACY = ("arm", "seed", "by", "before %", "after %", "gain, points", "95 % interval", "seconds")
_DIFFERENCES = ("arm", "less", "seeds", "by", "points", "95 % interval", "p")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to learn: a config and settings in place of its own."""

    name: str
    config: str
    settings: Sequence[str]


@dataclass(frozen=True, slots=True)
class ArmDifference:
    """Mean difference of two arms' accuracies by a rule, its 95 % interval, and the two-sided
    p-value.
    """

    arm: str
    less: str
    seeds: int
    rule: str
    points: float
    low: float
    high: float
    p: float


def main() -> None:
    """Run what is not finished yet, and print what came out."""
    options = _options()
    arms = options.arm or [Arm(name, f"{name}-demo.yaml", ()) for name in DEMOS]
    results, after = [], {arm.name: dict[int, Report]() for arm in arms}
    for seed in options.seeds:
        for arm in arms:
            folder = options.folder / f"{arm.name}-seed{seed}"
            if not (folder / "result.json").exists():
                _train(arm, seed, folder, options.settings)
            found = json.loads((folder / "result.json").read_text())
            results.append({"arm": arm.name, "seed": seed} | found)
            after[arm.name][seed] = read_report(folder / "after")
    print(markdown(_ACCURACY, map(_accuracy, results)))
    differences = compare(after)
    if differences:
        print(f"\n{markdown(_DIFFERENCES, map(_difference, differences))}")
    shown = {"runs": results, "differences": list(map(asdict, differences))}
    print(json.dumps({"cpu_count": os.cpu_count(), **shown}))


def compare(after: Mapping[str, Mapping[int, Report]]) -> list[ArmDifference]:
    """Compare each arm with the first on the seeds that both have, by the first rule that both are
    judged by; none of other questions.
    """
    (base, first), *others = after.items()
    found = []
    for name, second in others:
        seeds = sorted(first.keys() & second.keys())
        pairs = [(first[seed], second[seed]) for seed in seeds]
        rule, *_ = shared_rules([one for pair in pairs for one in pair]) or [""]
        scores = [[scores_of(one, rule) for one in pair] for pair in pairs]
        if not rule or any(one.keys() != other.keys() for one, other in scores):
            continue
        rows = [[other[name] - right for name, right in one.items()] for one, other in scores]
        *shares, p = crossed_bootstrap(np.array(rows))
        found.append(ArmDifference(name, base, len(seeds), rule, *(100 * one for one in shares), p))
    return found


def crossed_bootstrap(
    differences: np.ndarray, *, seed: int = 0
) -> tuple[float, float, float, float]:
    """Resample seeds and questions of differences [seeds, questions], both with replacement.

    A resample has the same questions for each of its seeds, as the runs have. The p-value is twice
    the share of resampled means on the side of zero that has fewer, a zero included.

    Returns:
        The mean, the two ends of its 95 % interval, and the p-value.

    Note:
        Few seeds say little of how seeds differ: intervals of three to five are too narrow.
    """
    rng = np.random.default_rng(seed)
    seeds, questions = differences.shape
    by_seed = rng.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES) / seeds
    by_question = rng.multinomial(questions, np.full(questions, 1 / questions), RESAMPLES)
    means = ((by_seed @ differences) * (by_question / questions)).sum(axis=1)
    fewest = min(int((means <= 0).sum()), int((means >= 0).sum()))
    low, high = np.percentile(means, [2.5, 97.5])
    p = min(1.0, 2 * (fewest + 1) / (RESAMPLES + 1))
    return float(differences.mean()), float(low), float(high), p


def _train(arm: Arm, seed: int, folder: Path, settings: Sequence[str]) -> None:
    """Run an arm to its end; its messages go to standard error."""
    words = ["-m", "launch.train", "--cfg", arm.config, *settings, *arm.settings]
    command = [sys.executable, *words, f"seed={seed}", f"run.dir={folder}"]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        raise SystemExit(f"{arm.name}, seed {seed}: not finished; repeat the command to resume")


def _accuracy(result: Mapping) -> Sequence[str]:
    low, high = (100 * end for end in result["gain_ci95"])
    shares = (f"{100 * result[name]:.1f}" for name in ("ex_before", "ex_after", "gain"))
    interval, seconds = f"[{low:.1f}, {high:.1f}]", f"{result['seconds']:.0f}"
    return (result["arm"], str(result["seed"]), result["rule"], *shares, interval, seconds)


def _difference(one: ArmDifference) -> Sequence[str]:
    numbers = (f"{one.points:+.1f}", f"[{one.low:+.1f}, {one.high:+.1f}]", f"{one.p:.4f}")
    return (one.arm, one.less, str(one.seeds), one.rule, *numbers)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arm", nargs="+", action="append", metavar="WORD",
        help="NAME CONFIG [key.sub=value …]; the first is what the others are compared with",
    )  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2), metavar="SEED")
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"))
    parser.add_argument("settings", nargs="*", metavar="key.sub=value", help="of all arms")
    options = parser.parse_args()
    if short := next((words for words in options.arm or () if len(words) < 2), None):
        parser.error(f"--arm {short[0]}: give a name and a config")
    options.arm = options.arm and [Arm(name, config, rest) for name, config, *rest in options.arm]
    names = [arm.name for arm in options.arm or ()]
    if len({*names}) < len(names):
        parser.error("--arm: two arms have one name")
    return options


if __name__ == "__main__":
    main()
