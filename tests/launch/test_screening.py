"""The screening: which questions are kept, what is learned of own answers, kills in each phase."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch import job as course
from launch import screening
from launch.config import JobConfig, load_config
from launch.evaluation.answers import Sampled
from launch.screening import OwnAnswer, Screened, by_part, kept, screen, shares
from launch.warm_start import choose_answers
from minirl.exchange import UserError
from sqlenv.cache import DiskCache
from sqlenv.types import Example
from tests.minirl.toy import metrics_of

from .conftest import json_lines
from .test_train import STOPPED

TRAIN = [Example(f"q{n}", f"Question {n}?", f"db{n % 3}", Path("db"), "SELECT 1") for n in range(9)]


def one(number: int, right: int, *queries: str) -> Screened:
    answers = tuple(OwnAnswer(sql, f"```sql\n{sql}\n```", 1) for sql in queries)
    return Screened(number, f"q{number}", f"db{number % 3}", "", 4, right, answers)


def job(*settings: str) -> JobConfig:
    lines = ["model.path=x", "data.root=y", "warm_start={answers: own}", "train.group_size=4"]
    few = ["screen.questions=6", "train.prompts_per_step=3"]
    return load_config("plain.yaml", [*lines, *few, *settings])


def screened(folder: Path, *settings: str) -> list[Screened]:
    nothing: Any = None
    return screen(job(f"run.dir={folder}", *settings), nothing, TRAIN, Path("model"))


def said(right: str, *queries: str, **more: Any) -> Sampled:
    """Samples, given whether each is right, as `+` or `-`."""
    ends = more.pop("ends", ("stop",) * len(right))
    marks = tuple(mark == "+" for mark in right)
    return Sampled(queries, tuple(f"so: {sql}" for sql in queries), ends=ends, right=marks, **more)


def test_a_screening_is_made_once_and_keeps_two_different_right_queries(tmp_path, monkeypatch):
    asked: list[list[str]] = []
    answers = said("+-++", "SELECT 1", "SELECT 2", "select  1;", "SELECT 3", turns=(1, 1, 2, 3))

    def sample(_config, _sql, questions, _model):
        asked.append([example.id for example in questions])
        return [answers] * len(questions)

    monkeypatch.setattr(screening, "_sample", sample)
    monkeypatch.setattr(screening, "_digest", lambda _config, _sql, order, *_: f"of {len(order)}")
    found = screened(tmp_path)
    assert len(asked[0]) == len(found) == 6
    # Spread over the databases.
    assert sorted(example.db_id for example in found) == ["db0", "db0", "db1", "db1", "db2", "db2"]
    assert [TRAIN[example.number].id for example in found] == asked[0]
    (first, *_) = found
    assert (first.right, first.samples, first.rate) == (3, 4, 0.75)
    # The commonest first, of which one is a reply after another.
    right = (OwnAnswer("SELECT 1", "so: SELECT 1", 1), OwnAnswer("SELECT 3", "so: SELECT 3", 3))
    assert first.answers == right
    # Neither a resumed run nor another one of these settings samples again.
    for folder in (tmp_path, tmp_path / "other"):
        assert screened(folder) == found
    assert len(asked) == 1
    # A copy that was cut off, at the end of a line or within one.
    text = (tmp_path / "other" / "screening.jsonl").read_text()
    for part in (text[: text[:-1].rindex("\n") + 1], text[:-9]):
        (tmp_path / "other" / "screening.jsonl").write_text(part)
        with pytest.raises(UserError, match=r"jsonl: cut off, holds 5 of 6 questions.*delete it"):
            screened(tmp_path / "other")
    (tmp_path / "other" / "screening.jsonl").write_text(text)
    for name in ("screening.jsonl", "screening.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    # A reply that a limit ended is not learned.
    cut = said("++", "SELECT 1", "SELECT 2", ends=("length", "stop"))
    found = screening._screened(0, TRAIN[0], cut)
    assert ([answer.sql for answer in found.answers], found.right) == (["SELECT 2"], 2)
    screened(tmp_path / "smaller", "screen.questions=4")
    assert asked[1] == asked[0][:4]
    assert json.loads((tmp_path / "screening.json").read_text())["all"]["sometimes"] == 1


def test_a_screening_of_other_settings_or_questions_is_another(monkeypatch):
    monkeypatch.setattr(screening, "read_tokenizer", lambda *_: None)
    monkeypatch.setattr(screening, "model_digest", lambda _model: "of the model")
    sql: Any = SimpleNamespace(training_prompt=lambda *_: ())

    def digest(asked: list[Example], *settings: str) -> str:
        return screening._digest(job(*settings), sql, [0], asked, Path("model"))

    alike = [digest(TRAIN[:1]) for _ in range(2)]
    others = [digest(TRAIN[:1], "seed=1"), digest(TRAIN[1:2])]
    assert len({*alike, *others}) == 3


def test_shares_are_told_by_level_and_database():
    found = [one(0, 0), one(1, 2), replace(one(2, 4), difficulty="hard"), one(3, 1)]
    assert shares(found) == {
        "questions": 4, "never": 0.25, "sometimes": 0.5, "always": 0.25, "right": 7 / 16
    }  # fmt: skip
    parts = by_part(found)
    assert {name: each["questions"] for name, each in parts["database"].items()} == {
        "db0": 2, "db1": 1, "db2": 1
    }  # fmt: skip
    assert parts["difficulty"]["hard"]["always"] == 1
    assert parts["difficulty"]["unknown"]["questions"] == 3


def test_questions_are_kept_by_the_share_of_right_answers():
    config = job("data.train.pass_rate=[0.25, 0.75]")
    found = [one(n, right) for n, right in enumerate((4, 0, 1, 3, 4, 2))]
    assert [example.id for example in kept(config, TRAIN, found)] == ["q2", "q3", "q5"]
    with pytest.raises(UserError, match=r"keeps 2 questions, fewer than train.prompts_per_step=3"):
        kept(config, TRAIN, found[:4])


def test_too_few_that_own_answers_keep_are_refused_before_the_warm_start(monkeypatch):
    config = job("data.train.pass_rate=[0.25, 0.75]")
    warmed: list[Any] = []
    monkeypatch.setattr(course, "screen", lambda *_: [one(n, 4) for n in range(6)])
    monkeypatch.setattr(course, "start_model", lambda *given: warmed.append(given) or Path("warm"))
    given = (config, cast(Any, None), TRAIN, Path("model"))
    with pytest.raises(UserError, match="keeps 0 questions"):
        course._start(*given, only=None)
    assert not warmed
    # A warm start alone keeps none.
    assert course._start(*given, only="warm-start") == (Path("warm"), TRAIN)


def test_a_warm_start_learns_own_answers_and_gold_queries_where_there_are_none():
    own = [one(0, 2, "SELECT 5", "SELECT 6"), one(4, 0)]

    def learned(answers: str, found=own) -> list[tuple[str, str]]:
        config = job(f"warm_start.answers={answers}")
        lessons = choose_answers(cast(Any, SimpleNamespace(config=config)), GOLDS, found)
        assert all(lesson.reply == "" for lesson in lessons)  # the prompt asks for no reasoning
        return [(lesson.example.id, lesson.sql) for lesson in lessons]

    assert learned("own") == [("q0", "SELECT 5"), ("q0", "SELECT 6")]
    assert learned("own_or_gold") == [*learned("own"), ("q4", "SELECT 1")]
    assert learned("gold") == [(example.id, "SELECT 1") for example in TRAIN]
    with pytest.raises(UserError, match="no answer of the screening is right"):
        learned("own", own[1:])


# Another dialect's gold queries are not spelled anew, so that none of these needs a database.
GOLDS = [replace(example, dialect="postgres") for example in TRAIN]

# While the second part of the screening is written.
KILLED = """
from launch.evaluation.answers import AnswerFile
before(AnswerFile, "write", lambda self, *_: self._path.exists() and os.kill(os.getpid(), 9))
"""


@pytest.mark.timeout(600)
def test_a_run_that_screens_resumes(command, place, tiny, tmp_path):
    """The kills in the warm start and while learning are those of test_train and test_trainer."""
    line = [
        "--cfg", tiny, f"model={{path: {place / 'finished' / 'warm' / 'model'}, dtype: float32}}",
        "warm_start={answers: own_or_gold, lora: {rank: 2}, groups_per_step: 8}",
        "data.train.pass_rate=[0, 1]", "screen.questions=16", "train.lora={rank: 2}",
        "train.steps=1",
    ]  # fmt: skip

    def run(name: str, code: str, *more: str) -> subprocess.CompletedProcess[str]:
        cache = f"import os\nos.environ['MINIRL_CACHE'] = {str(tmp_path / 'cache' / name)!r}\n"
        code = f"{cache}{STOPPED}{code}cli.run(main)"
        return command(*line, f"run.dir={name}", *more, cwd=tmp_path, code=code)

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    done = run("whole", "", "--only", "warm-start")
    assert done.returncode == 0, done.stderr
    assert json.loads((whole / "screening.json").read_text())["all"]["questions"] == 16
    # One pass: no answer of this model is right, so that there is a gold query to each question.
    assert len(json_lines(whole / "warm" / "metrics.jsonl")) == 2
    done = run("stopped", KILLED)
    assert done.returncode == -9, done.stderr
    assert not (stopped / "screening.jsonl").exists()
    done = run("stopped", "")
    assert done.returncode == 0, done.stderr
    assert (stopped / "between" / "verdicts.json").is_file()
    for name in ("screening.jsonl", "screening.json"):
        assert (whole / name).read_bytes() == (stopped / name).read_bytes()
    assert metrics_of(whole / "warm") == metrics_of(stopped / "warm")
    # By this name other runs find it.
    caches = [DiskCache(path) for path in (tmp_path / "cache").glob("*/minirl/sql")]
    keys = [key for one in caches for key in one._cache if key.startswith("screening ")]
    assert (len(keys), len({*keys})) == (2, 1)
    for one in caches:
        one.close()
