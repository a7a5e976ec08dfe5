"""What a run measures at its places: greedy answers, samples beside them, and gains between."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import job
from launch.build import SqlSide
from launch.config import JobConfig, load_config
from launch.evaluation.answers import GREEDY, AnswerFile, Decode, Sampled
from launch.evaluation.results import Report, read_place, with_samples
from launch.evaluation.sampling import FIRST_EPISODE
from launch.reporting.runs import gain, gains, shared_rules
from sqlenv.types import Answer, Example

from .report_cases import summary, verdict

PLACES = ("before", "between", "after")
RIGHT = {"before": 1, "between": 2, "after": 4}
"""How many of six questions the greedy answer is right on; as many of four samples are of all."""


class Answers:
    """Answers in place of a policy: gold queries, and such as fail."""

    def __init__(self) -> None:
        self.asked: list[tuple[Decode, int]] = []
        self.right = 0

    def answers(
        self, examples: Sequence[Example], decode: Decode, cache: AnswerFile, show: Any, *,
        stops: bool, first: int,
    ) -> list[Sampled]:  # fmt: skip
        self.asked.append((decode, first))
        show(len(examples), len(examples), "")
        return [
            Sampled.of([
                Answer("", one.gold_sql if at < self.right else "SELECT x FROM nowhere")
                for at in (range(decode.samples) if decode.temperature else [number])
            ])
            for number, one in enumerate(examples)
        ]  # fmt: skip

    def free_memory(self) -> None: ...


@pytest.fixture(scope="module")
def measured(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[JobConfig, Answers, dict[str, Report]]:
    """Who answered in a job, and the reports by place."""
    folder = tmp_path_factory.mktemp("places") / "run"
    settings = ["evaluation.samples=4", "sampler.temperature=0.7", "sampler.top_p=0.9"]
    settings += ["data.demo.test_databases=3", "evaluation.questions=null"]
    config = load_config(str(tiny), [f"run.dir={folder}", *settings])
    asked: Any = Answers()
    reports: dict[str, Report] = {}
    with SqlSide(config, folder) as sql:
        test = [one for n, one in enumerate(sql.examples("test")) if n % 6 == 0][:6]
        assert len({one.db_id for one in test}) == 3
        for place in PLACES:
            asked.right = RIGHT[place]
            found = job._measure(asked, sql, test, folder / place)
            assert found == job._measure(asked, sql, test, folder / place)
            reports |= found
    return config, asked, reports


def test_a_place_has_greedy_answers_and_samples(measured):
    config, asked, reports = measured
    decode = Decode(4, 0.7, "pass", 0.9)
    (greedy, first), (sampled, other), *_ = asked.asked
    assert (greedy, sampled) == (GREEDY, decode)
    # Streams of their own: more than a test set has questions lie between, and numbers end.
    assert (first, other > 10_000) == (0, True)
    assert FIRST_EPISODE + (other + 10_000) * decode.samples < 2**31
    for place, report in reports.items():
        count = RIGHT[place]
        means = {name: one["mean"] for name, one in report.measures.items()}
        assert means == pytest.approx(
            {"set": count / 6, "mean@4": count / 4, "pass@4": 1}, abs=1e-6
        )
        assert report.failing == 6 - count
        assert read_place(config.folder / place) == report


def test_a_base_that_was_measured_is_not_read_again(measured, monkeypatch):
    config, _, reports = measured
    trained = config.model.model_copy(update={"path": config.folder / "model"})
    sql: Any = None
    monkeypatch.setattr(job, "load_model", None)
    found = job._measure_base(config.model_copy(update={"model": trained}), (), sql, trained.path)
    assert found == {"before": reports["before"]}


def test_a_result_has_every_place_and_the_gain_of_every_stage(measured):
    reports = measured[-1]
    found = job._gain(reports)
    assert (found["questions"], found["databases"], found["rule"]) == (6, 3, "set")
    assert found["failing"] == {"before": 5, "between": 4, "after": 2}
    assert {name: one["replies"] for name, one in found["outcomes"].items()} == dict.fromkeys(
        PLACES, 0
    )
    for stage, count in {"run": 3, "warm start": 1, "reinforcement": 2}.items():
        told = {
            rule: (one["difference"], one["only_second"])
            for rule, one in found["gains"].pop(stage).items()
        }
        greedy = (pytest.approx(count / 6), count)
        assert told == {"set": greedy, "mean@4": (count / 4, None), "pass@4": (0, 0)}
    assert not found["gains"]
    # A tiny model has no place between.
    ends = {place: reports[place] for place in ("before", "after")}
    assert job._gain(ends)["gains"].keys() == {"run"}


def judged(right: int, *, temperature: float) -> Report:
    greedy = verdict(scores={"set": 1.0})
    sampled = replace(greedy, samples=("SELECT 1",) * 8, right=right)
    return with_samples(summary(greedy), summary(sampled, notes={"temperature": temperature}))


def test_what_one_place_alone_has_is_not_compared():
    """Samples of a temperature, measures, questions."""
    one, other = judged(2, temperature=0.7), judged(6, temperature=0.7)
    assert shared_rules([one, other]) == ["set", "mean@8", "pass@8"]
    assert shared_rules([one, judged(4, temperature=1.0)]) == ["set"]
    found = gain(one, other, "mean@8")
    assert found
    assert found.difference == 0.5
    assert gain(one, other, "witness") is None
    assert gains({"before": one, "after": replace(other, questions=[])})["run"] == {}
