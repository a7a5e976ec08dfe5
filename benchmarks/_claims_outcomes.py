"""Outcomes of the runs of `claims.py`: read from their folders, kept in the data of the page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks._claims_data import QUESTIONS, VARIANTS
from rewards.verbal import normalise_sql
from sqlenv.config import AnswerConfig, ExecutorConfig
from sqlenv.envs.single_turn import judge_answer
from sqlenv.executor import Executor
from sqlenv.types import Answer, Example, Table

_BITS = (*VARIANTS, "right")
"""Names of the lists of verdicts in the data."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        before, after: Whether each question was right, by variant of the questions.
        turns: Mean replies of a training episode over the last ten steps.
        pushed_up: Share of the recorded wrong episodes whose tokens have an advantage above 0.
        seconds: Of all stages.
    """

    before: Mapping[str, Sequence[bool]]
    after: Mapping[str, Sequence[bool]]
    turns: float
    pushed_up: float
    seconds: float


@dataclass(frozen=True, slots=True)
class SampledAnswers:
    """Verdicts of vote@8 or judge@8.

    Attributes:
        right: Whether each question was answered right.
        any_right: Share of the questions with a right query among the samples.
        contested: Questions with right and wrong ones among the distinct queries that ran.
        chosen: Share of these that were answered right.
        chance: Share of these that a random choice would answer right.
        asked, read: Judgements that were asked for, and those that could be parsed.
    """

    right: Sequence[bool]
    any_right: float
    contested: int
    chosen: float
    chance: float
    asked: int
    read: int


Runs = dict[str, dict[int, Outcome]]
"""By arm and seed."""
Answers = dict[str, dict[int, SampledAnswers]]
"""By decoding and seed."""


def read_outcome(stages: Sequence[Path]) -> Outcome:
    """Read the run folders of an arm's stages."""
    lines = [json.loads(line) for line in (stages[-1] / "metrics.jsonl").open()]
    results = [json.loads((stage / "result.json").read_text()) for stage in stages]
    return Outcome(
        before=_verdicts(stages[0] / "before"),
        after=_verdicts(stages[-1] / "after"),
        turns=mean(line["rollout/turns"] for line in lines[-10:]),
        pushed_up=_pushed_up(stages),
        seconds=sum(result["seconds"] for result in results),
    )


def _verdicts(folder: Path) -> dict[str, list[bool]]:
    """Read whether each question was right; the variants follow one another."""
    correct = [one["correct"] for one in _lines(folder / "predictions.jsonl")]
    if len(correct) != QUESTIONS * len(VARIANTS):
        raise SystemExit(f"{folder}: {len(correct)} questions, not {QUESTIONS * len(VARIANTS)}")
    return {
        variant: correct[number * QUESTIONS : (number + 1) * QUESTIONS]
        for number, variant in enumerate(VARIANTS)
    }


def _pushed_up(stages: Sequence[Path]) -> float:
    advantages = [
        trajectory["advantage"]
        for stage in stages
        for line in _lines(stage / "trajectories.jsonl")
        for trajectory in line.get("trajectories", ())
        if not trajectory["correct"] and trajectory["advantage"] is not None
    ]
    return mean(advantage > 0 for advantage in advantages) if advantages else 0.0


def read_answers(folder: Path, data: Path) -> SampledAnswers:
    """Read a folder of `launch.eval` with vote@8 or judge@8, on the questions of a data set."""
    notes = json.loads((folder / "verdicts.json").read_text())["notes"]
    choices = folder / "choices.jsonl"
    kept = {one["id"]: one["candidates"] for one in _lines(choices)} if choices.exists() else {}
    right, any_right, chosen, chance = [], [], [], []
    with Executor(ExecutorConfig()) as executor:
        for one in _lines(folder / "predictions.jsonl"):
            database = data / "database" / one["db_id"] / f"{one['db_id']}.sqlite"
            example = Example(one["id"], one["question"], one["db_id"], database, one["gold"])
            queries = kept.get(one["id"]) or one.get("samples") or ()
            found = candidates(example, queries, executor)
            right.append(one["correct"])
            any_right.append(any(found.values()))
            if any(found.values()) and not all(found.values()):
                chosen.append(one["correct"])
                chance.append(mean(found.values()))
    read = notes.get("judged", 0)
    return SampledAnswers(
        right, mean(any_right), len(chosen), mean(chosen or [0]), mean(chance or [0]),
        asked=read + notes.get("left_out", 0), read=read,
    )  # fmt: skip


def candidates(example: Example, queries: Sequence[str], executor: Executor) -> dict[str, bool]:
    """Run queries, and tell of each distinct one that runs whether it is right."""
    distinct: dict[str, str] = {}
    for query in filter(None, queries):
        distinct.setdefault(normalise_sql(query), query)
    found = {}
    for query in distinct.values():
        attempt = judge_answer(example, Answer(query, query), executor, AnswerConfig(match="set"))
        if isinstance(attempt.result, Table):
            found[query] = attempt.correct
    return found


def load(path: Path) -> tuple[Runs, Answers]:
    """Read the data that `save` wrote; none where there is no file."""
    runs: Runs = {}
    answers: Answers = {}
    for one in map(_from_bits, json.loads(path.read_text()) if path.exists() else ()):
        arm, decoding, seed = one.pop("arm", None), one.pop("answers", None), one.pop("seed")
        if arm is not None:
            runs.setdefault(arm, {})[seed] = Outcome(**one)
        else:
            answers.setdefault(decoding, {})[seed] = SampledAnswers(**one)
    return runs, answers


def save(path: Path, runs: Runs, answers: Answers) -> None:
    """Write all outcomes, one a line."""
    data = [
        {kind: name, "seed": seed, **_to_bits(asdict(one))}
        for kind, found in (("arm", runs), ("answers", answers))
        for name, by_seed in found.items()
        for seed, one in by_seed.items()
    ]
    path.write_text("[\n" + ",\n".join(map(json.dumps, data)) + "\n]\n", encoding="utf-8")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _to_bits(value: Any) -> Any:
    """Write lists of verdicts as texts of 0 and 1."""
    if isinstance(value, dict):
        return {name: _to_bits(one) for name, one in value.items()}
    return "".join("01"[one] for one in value) if isinstance(value, list) else value


def _from_bits(value: Any, name: str = "") -> Any:
    """Read what `_to_bits` wrote."""
    if isinstance(value, dict):
        return {key: _from_bits(one, key) for key, one in value.items()}
    return [digit == "1" for digit in value] if name in _BITS else value
