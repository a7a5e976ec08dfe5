"""How much quicker than Spider's official program are our verdicts?

    python benchmarks/evaluators.py --data ../shared/data --python official/bin/python \
        --spider test-suite-sql-eval

Measures whole processes, one program after the other, several times: execution accuracy and test
suite of 412 questions, with the levels of difficulty. Their start, what they import, reading and
opening the databases count. The official program runs once for each of the two measures. Ours is
measured twice: the comparators in a program of few lines (`ours`), and `python -m launch.eval`
(`command`), which also looks for damage in the databases, takes their fingerprints, and writes
intervals and breakdowns. Prints one JSON object with medians of wall and CPU time; exit status 1
when verdicts differ.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks._ask import ask
from sqlenv.config import OFFICIAL
from sqlenv.evaluators.comparators import Case
from sqlenv.evaluators.hardness import grade
from sqlenv.executor import Executor

NAMES = ("spider_ex", "spider_ts")
DATABASES = {"spider_ex": "spider_data/database", "spider_ts": "test_suite_database"}


def main() -> None:
    options = parse_arguments()
    if options.ours:
        json.dump(judge(options.data, options.predictions), sys.stdout)
        return
    programs = {"official": run_official, "ours": run_ours, "command": run_command}

    seconds: dict[str, list[tuple[float, float]]] = {who: [] for who in programs}
    answers: dict[str, Any] = {}
    for _ in range(options.repeats):
        for who, run in programs.items():
            answers[who], times = timed(run, options)
            seconds[who].append(times)
    wall, cpu = (
        {who: median(each[at] for each in times) for who, times in seconds.items()} for at in (0, 1)
    )
    is_equal = answers["official"] == answers["ours"] == answers["command"]
    report = {
        "predictions": options.predictions.name,
        "questions": len(answers["ours"]["levels"]),
        "wall_s": rounded(wall),
        "cpu_s": rounded(cpu),
        "times_as_fast": ratios(wall),
        "times_less_cpu": ratios(cpu),
        "verdicts_equal": is_equal,
        "right": {name: sum(answers["ours"][name]) for name in NAMES},
    }
    print(json.dumps(report))
    sys.exit(not is_equal)


def timed(run: Callable[[argparse.Namespace], Any], options: argparse.Namespace) -> Any:
    """Measure a call that starts processes: its answer, then wall and CPU time in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start_s = time.perf_counter()
    answer = run(options)
    wall_s = time.perf_counter() - start_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return answer, (wall_s, cpu_s)


def run_official(options: argparse.Namespace) -> dict[str, Any]:
    found = {
        name: ask(
            options.python,
            "spider",
            options.spider,
            {
                "gold": str(gold_file(options.data)),
                "predicted": str(predictions_file(options.data, options.predictions)),
                "databases": str(options.data.resolve() / DATABASES[name]),
                "keep_distinct": False,
            },
        )
        for name in NAMES
    }
    verdicts = {name: [float(one) for one in found[name]["verdicts"]] for name in NAMES}
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
        command += [f"--predictions={predictions_file(options.data, options.predictions)}"]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        questions = json.loads(out.read_text())["questions"]
    verdicts = {name: [one["scores"][name] for one in questions] for name in NAMES}
    return {**verdicts, "levels": [one["difficulty"] for one in questions]}


def judge(data: Path, predictions: Path) -> dict[str, Any]:
    """Judge every question under both comparators, and grade it."""
    with Executor(OFFICIAL) as executor:
        executor.start()
        cases = read_cases(data, predictions)
        levels = [grade(case.gold) for case in cases]
        judged = executor.judge(cases, NAMES)
    verdicts = {name: [one.scores[name] for one in judged] for name in NAMES}
    return {**verdicts, "levels": levels}


def read_cases(data: Path, predictions: Path) -> list[Case]:
    gold = [line.split("\t") for line in gold_file(data).read_text().splitlines()]
    predicted = predictions_file(data, predictions).read_text().splitlines()
    suites = {
        name: tuple(sorted((data / DATABASES["spider_ts"] / name).glob("*.sqlite")))
        for _, name in gold
    }
    databases = data / DATABASES["spider_ex"]
    return [
        Case(sql.strip(), wanted, databases / name / f"{name}.sqlite", suites[name])
        for sql, (wanted, name) in zip(predicted, gold, strict=True)
    ]


def gold_file(data: Path) -> Path:
    return data.resolve() / "spider_data/dev_visible_gold.sql"


def predictions_file(data: Path, name: Path) -> Path:
    return data.resolve() / "predictions/spider_dev" / name


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """Say how many times as long the official program takes as each of ours."""
    official = seconds["official"]
    return {who: round(official / value, 1) for who, value in seconds.items() if who != "official"}


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {who: round(value, 3) for who, value in seconds.items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the shared data")
    parser.add_argument("--python", type=Path, help="interpreter of the official program")
    parser.add_argument("--spider", type=Path, help="folder of the official program")
    parser.add_argument("--predictions", type=Path, default=Path("gpt4_zero_shot.sql"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ours", action="store_true", help="only judge, and print the verdicts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
