"""Compare ways to learn over seeds: each seed's gain, and the mean over seeds with its intervals.

    python benchmarks/compare.py                          # the papers' four demos: do they learn?
    python benchmarks/compare.py --arm binary progress-demo.yaml 'reward={kind: execution}' \
        --arm progress progress-demo.yaml --seeds 0 1 2 --folder runs/rewards -- train.steps=40
    python benchmarks/compare.py --runs evals/base evals/own-seed* evals/gold-seed*

An arm is a name, a config and settings; settings after `--` are of all arms. Runs go to
FOLDER/NAME-seedN. Repeat the command to resume; finished runs are only read. With --runs arms are
finished runs and results of launch.eval whose names differ by their seeds alone.

Prints accuracy, what each arm gained by stage, and what sets its end apart from that of the first
arm with the same seed (of an arm of one run with every seed), and one JSON object of all measures.
docs/evaluation.md says what the intervals mean.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from benchmarks import markdown
from launch.evaluation.results import PLACES, STAGES, Paired, Report, paired_difference
from launch.reporting.runs import Run, gain, read_runs, scores_of, shared_rules, without_seed
from launch.tables import interval
from minirl.exchange import UserError

_log = logging.getLogger(__name__)
DEMOS = ("progress", "expo", "paverl", "astra")
Seeds = Mapping[int, Run]
"""The runs of an arm."""
_ACCURACY = ("arm", "seed", "by", *(f"{place} %" for place in PLACES), "queries that fail")
_INTERVALS = ("over questions", "over databases", "over seeds")
_POOLED = ("arm", "what", "by", "points by seed", "mean", *_INTERVALS)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to learn: a config and settings in place of its own."""

    name: str
    config: str
    settings: Sequence[str]


@dataclass(frozen=True, slots=True)
class Pooled:
    """What an arm gained by a stage, or has more than another one, by a measure.

    Attributes:
        seeds: The comparison of each seed.
        mean: That of the means over seeds, question by question.
        ci95_seeds: The difference's 95 % interval over seeds (Student's t); None for one seed.
    """

    arm: str
    what: str
    rule: str
    seeds: Mapping[int, Paired]
    mean: Paired
    ci95_seeds: tuple[float, float] | None


def main() -> None:
    """Run what is not finished yet, and print what came out."""
    options = _options()
    try:
        arms = _read(options.runs) if options.runs else _learn(options)
        found = list(compare(arms))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    runs = [(name, seed, run) for name, seeds in arms.items() for seed, run in seeds.items()]
    print(markdown(_ACCURACY, (_accuracy(*each) for each in runs)))
    if found:
        print(f"\n{markdown(_POOLED, map(_row, found))}")
    told = [{"arm": name, "seed": seed, **_record(run)} for name, seed, run in runs]
    shown = {"runs": told, "comparisons": list(map(asdict, found))}
    print(json.dumps({"cpu_count": os.cpu_count(), **shown}))


def compare(arms: Mapping[str, Seeds]) -> Iterator[Pooled]:
    """Compare the places of each arm's runs, then their ends with those of the first arm."""
    for name, seeds in arms.items():
        for stage, (start, end) in STAGES.items():
            ends = {seed: run.reports for seed, run in seeds.items()}
            pairs = {
                seed: (places[start], places[end])
                for seed, places in ends.items()
                if places.keys() >= {start, end}
            }
            if pairs:
                yield from pool(name, stage, pairs)
    (base, first), *others = arms.items()
    for name, seeds in others:
        lone = next(iter(first.values())) if len(first) == 1 else None
        pairs = {
            seed: (other.final(), run.final())
            for seed, run in seeds.items()
            if (other := first.get(seed, lone))
        }
        yield from pool(name, f"less {base}", pairs)


def pool(arm: str, what: str, pairs: Mapping[int, tuple[Report, Report]]) -> Iterator[Pooled]:
    """Compare pairs of reports, one a seed, by each measure that all are judged by alike, and that
    both of a pair have of the same questions and gold queries; where there is none, say why.

    Seeds may be of other questions: a question's mean is over those that asked it.
    """
    alike = {
        rule: scores
        for rule in shared_rules([one for pair in pairs.values() for one in pair])
        if (scores := [[scores_of(one, rule) for one in pair] for pair in pairs.values()])
        and all(first.keys() == second.keys() for first, second in scores)
    }
    problems = {
        "no seed is in both": not pairs,
        "other gold queries": any(a.settings.golds != b.settings.golds for a, b in pairs.values()),
        "other questions or measures": not alike,
    }
    if told := next((problem for problem, is_there in problems.items() if is_there), None):
        _log.warning("%s, %s: not compared (%s)", arm, what, told)
        return
    for rule, scores in alike.items():
        asked = dict.fromkeys(one for first, _ in scores for one in first)
        means = (
            [fmean(pair[end][one] for pair in scores if one in pair[end]) for one in asked]
            for end in (0, 1)
        )
        mean = paired_difference(*means, [db_id for _, db_id, _ in asked])
        seeds = {seed: found for seed, pair in pairs.items() if (found := gain(*pair, rule))}
        yield Pooled(arm, what, rule, seeds, mean, seeds_interval(list(seeds.values())))


def seeds_interval(found: Sequence[Paired]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean over seeds whose differences are normal; None for one."""
    from scipy.stats import t

    if len(found) < 2:
        return None
    points = [one.difference for one in found]
    half = t.ppf(0.975, len(points) - 1) * stdev(points) / len(points) ** 0.5
    return fmean(points) - half, fmean(points) + half


def _read(paths: Sequence[Path]) -> dict[str, dict[int, Run]]:
    """Read finished runs and results, by what their names share and by seed."""
    arms: dict[str, dict[int, Run]] = {}
    for run in read_runs([("", path) for path in paths]):
        seeds = arms.setdefault(without_seed(run.name), {})
        if run.seed in seeds:
            raise UserError(f"{run.name}: has the seed {run.seed} as {seeds[run.seed].name} does")
        run.final()
        seeds[run.seed] = run
    return arms


def _learn(options: argparse.Namespace) -> dict[str, dict[int, Run]]:
    """Run the arms that are not finished yet, seed by seed, and read them."""
    arms = options.arm or [Arm(name, f"{name}-demo.yaml", ()) for name in DEMOS]
    found: dict[str, dict[int, Run]] = {arm.name: {} for arm in arms}
    for seed in options.seeds:
        for arm in arms:
            folder = options.folder / f"{arm.name}-seed{seed}"
            if not (folder / "result.json").exists():
                _train(arm, seed, folder, options.settings)
            (found[arm.name][seed],) = read_runs([("", folder)])
    return found


def _train(arm: Arm, seed: int, folder: Path, settings: Sequence[str]) -> None:
    """Run an arm to its end; its messages go to standard error."""
    words = ["-m", "launch.train", "--cfg", arm.config, *settings, *arm.settings]
    command = [sys.executable, *words, f"seed={seed}", f"run.dir={folder}"]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        raise SystemExit(f"{arm.name}, seed {seed}: not finished; repeat the command to resume")


def _record(run: Run) -> dict[str, object]:
    places = run.reports.items()
    return {
        "rule": run.final().first,
        "accuracy": {place: report.measures for place, report in places},
        "failing": {place: report.failing for place, report in places},
        "seconds": run.result.get("seconds"),
    }


def _accuracy(arm: str, seed: int, run: Run) -> Sequence[str]:
    rule = run.final().first
    reports = {place: run.reports.get(place) for place in PLACES}
    reports["after"] = run.final()
    shares = (f"{100 * one.measures[rule]['mean']:.1f}" if one else "" for one in reports.values())
    failing = (f"{one.failing:,}" for one in reports.values() if one)
    return (arm, str(seed), rule, *shares, ", ".join(failing))


def _row(one: Pooled) -> Sequence[str]:
    points = ", ".join(f"{100 * each.difference:+.1f}" for each in one.seeds.values())
    intervals = (one.mean.ci95, one.mean.ci95_databases, one.ci95_seeds)
    told = (interval(each, sign="+") for each in intervals)
    return (one.arm, one.what, one.rule, points, f"{100 * one.mean.difference:+.1f}", *told)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arm", nargs="+", action="append", metavar="WORD",
        help="NAME CONFIG [key.sub=value …]; the first is what the others are compared with",
    )  # fmt: skip
    parser.add_argument("--runs", nargs="+", type=Path, metavar="RUN", help="finished runs")
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
