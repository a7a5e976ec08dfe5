"""How much quicker than Spider's official program are our verdicts?

    python benchmarks/evaluators.py --data ../shared/data --python official/bin/python \
        --spider test-suite-sql-eval

Measures whole processes, start-up included, by turns: execution accuracy and test suite of 412
questions, with the levels of difficulty. The official program runs once for each of the two
measures. Ours is measured twice: the comparators in a program of few lines (`ours`), and
`python -m launch.eval` (`command`), which also fingerprints the databases and writes intervals and
breakdowns. Prints one JSON object with medians of wall and CPU time; exit status 1 when verdicts
differ.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._comparison import (
    SPIDER,
    SUITE,
    Predictions,
    ask_spider,
    read_lines,
    spider_gold,
)
from sqlenv.config import OFFICIAL
from sqlenv.evaluators.comparators import judge_cases
from sqlenv.evaluators.hardness import grade
from sqlenv.executor import Executor

DATABASES = {"spider_ex": SPIDER, "spider_ts": SUITE}


def main() -> None:
    options = parse_arguments()
    if options.ours:
        json.dump(judge(read(options)), sys.stdout)
        return
    programs = {"official": run_official, "ours": run_ours, "command": run_command}
    seconds: dict[str, list[tuple[float, float]]] = {who: [] for who in programs}
    answers: dict[str, Any] = {}
    for _ in range(options.repeats):
        for who, run in programs.items():
            answers[who], times = timed(run, options)
            seconds[who].append(times)
    report: dict[str, Any] = {"predictions": options.predictions.name}
    for at, name in enumerate(("wall", "cpu")):
        taken = {who: statistics.median(each[at] for each in seconds[who]) for who in programs}
        report[f"{name}_s"] = {who: round(value, 3) for who, value in taken.items()}
        ratios = {who: round(taken["official"] / taken[who], 1) for who in ("ours", "command")}
        report[f"times_less_{name}"] = ratios
    is_equal = answers["official"] == answers["ours"] == answers["command"]
    right = {name: sum(answers["ours"][name]) for name in DATABASES}
    print(json.dumps(report | {"verdicts_equal": is_equal, "right": right}))
    sys.exit(not is_equal)


def timed(
    run: Callable[[argparse.Namespace], Any], options: argparse.Namespace
) -> tuple[Any, tuple[float, float]]:
    """Measure a call that starts processes: its answer, then wall and CPU time in seconds."""
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    answer = run(options)
    wall_s = time.perf_counter() - start_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return answer, (wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def run_official(options: argparse.Namespace) -> dict[str, Any]:
    found = {name: ask_spider(options, read(options), folder) for name, folder in DATABASES.items()}
    verdicts = {name: [float(one) for one in found[name]["verdicts"]] for name in DATABASES}
    return {**verdicts, "levels": found["spider_ex"]["levels"]}


def run_ours(options: argparse.Namespace) -> dict[str, Any]:
    place = [f"--data={options.data}", f"--predictions={options.predictions}"]
    command = [sys.executable, __file__, "--ours", *place]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def run_command(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "verdicts.json"
        command = [sys.executable, "-m", "launch.eval", "--data=spider-dev", f"--json={out}"]
        command += [f"--data-root={options.data}", "--file=dev_visible.json"]
        command += [f"--predictions={predictions(options)}"]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        questions = json.loads(out.read_text())["questions"]
    verdicts = {name: [one["scores"][name] for one in questions] for name in DATABASES}
    return {**verdicts, "levels": [one["difficulty"] for one in questions]}


def judge(file: Predictions) -> dict[str, Any]:
    """Judge every question under both comparators, and grade it."""
    with Executor(OFFICIAL) as executor:
        levels = [grade(gold) for gold, _ in file.gold]
        judged = judge_cases(executor, file.cases(), tuple(DATABASES))
    return {name: [one.scores[name] for one in judged] for name in DATABASES} | {"levels": levels}


def predictions(options: argparse.Namespace) -> Path:
    return options.data / "predictions/spider_dev" / options.predictions


def read(options: argparse.Namespace) -> Predictions:
    data, lines = options.data, read_lines(predictions(options))
    predicted = [line.split("\t")[0] for line in lines]
    return Predictions("", predicted, spider_gold(data), data / SPIDER, data / SUITE)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--python", type=Path, help="interpreter of the official program")
    parser.add_argument("--spider", type=Path, help="folder of the official program")
    parser.add_argument("--predictions", type=Path, default=Path("gpt4_zero_shot.sql"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ours", action="store_true", help="only judge, and print the verdicts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
