"""The sheet of verdicts: every question under every measure, and what the numbers are of.

A sheet is written when all questions are judged, never before. Until then what was found lies in a
journal beside it, whose first line tells what is judged and how.
"""

from __future__ import annotations

import fcntl
import json
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from launch.statistics import mean_interval, pass_at_k
from launch.texts import write_text
from launch.verdicts import rank
from minirl.run.files import PART, keep_lines, naming, read_json
from rewards.progress.diagnosis import UNPARSED, mismatch_rates
from sqlenv.errors import UserError

NO_GOLD = "none"
"""Status of the gold query where there is none, as in most questions of Spider 2."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One question under every measure.

    Attributes:
        sql: The answer that was judged.
        scores: By measure; 1 is right.
        predicted: How the answer ended on the question's own database.
        gold: How the gold query ended there, `none` where there is none.
        is_late: Whether a limit of time decided a score.
        samples: Queries that were sampled; 0 where the answer is the only one.
        right: Samples that are right by the first measure.
        turns: Replies of the answer's episode; 0 where the model has no tool.
        clauses: What the gold query has (`sqlenv.evaluators.features.clauses_of`), if there is one.
        tags: In what the answer differs from the gold query in structure (Progress-SQL's diagnostic
            tree), `none` where in nothing, `unparsed` where it is no query; none without a gold
            query, or where the tree cannot read it.
    """

    id: str
    db_id: str
    difficulty: str
    question: str
    sql: str
    scores: Mapping[str, float]
    predicted: str
    gold: str
    is_late: bool = False
    samples: int = 0
    right: int = 0
    turns: int = 0
    clauses: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


class Sheet(BaseModel):
    """What a file of verdicts holds.

    Attributes:
        settings: What was judged, and how: data, model, seed, prompt, decoding, comparators,
            versions, limits. Two sheets with equal settings have equal verdicts.
        measures: Mean and 95 % interval by measure.
        pass_at: Chance that one of k samples is right by the first measure, by k.
        parts: Shares of the questions, means and 95 % intervals by difficulty, by database, by
            clause of the gold query and by tag, of both of which a question may have several, and
            by turns where the model may call a tool (paper 004, table 3 and figure 5).
        mismatch: Share of answers that differ from the gold query in SELECT, JOIN, WHERE and GROUP,
            the mean of the four (Progress-SQL's table 8), and the share that is no query, which
            differs in all of them; empty without gold queries.
        failing_golds: Questions whose gold query does not run.
        late: Questions on which a limit of time decided a score.
        questions: All of them.
    """

    model_config = ConfigDict(frozen=True)

    settings: dict[str, Any]
    measures: dict[str, dict[str, Any]]
    pass_at: dict[str, float] = {}
    parts: dict[str, dict[str, dict[str, Any]]]
    mismatch: dict[str, float] = {}
    failing_golds: list[str]
    late: list[str] = []
    questions: list[Judged]

    @field_validator("settings")
    @classmethod
    def _name_what_is_judged(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(settings.get("model"), dict) or not {"data", "decode"} <= settings.keys():
            raise ValueError("should have data, decode and a model")
        return settings

    @field_validator("questions")
    @classmethod
    def _have_every_score(cls, questions: list[Judged], info: ValidationInfo) -> list[Judged]:
        measures = info.data.get("measures", {}).keys()
        if not questions or any(one.scores.keys() != measures for one in questions):
            raise ValueError(f"should each have the scores {', '.join(measures)}")
        return questions

    @property
    def first(self) -> str:
        """Name the measure that counts."""
        return next(iter(self.measures))


def fill(settings: Mapping[str, Any], judged: Sequence[Judged], *, seed: int) -> Sheet:
    """Summarise verdicts.

    Args:
        settings: What was judged, and how.
        judged: All questions, in the order of the data.
        seed: Of the bootstrap.
    """
    names = list(judged[0].scores)
    return Sheet(
        settings=dict(settings),
        measures={name: _summary([one.scores[name] for one in judged], seed) for name in names},
        pass_at=_pass_at(judged),
        parts={
            "difficulty": _parts(judged, lambda one: (one.difficulty or "unknown",), seed),
            "database": _parts(judged, lambda one: (one.db_id,), seed),
            "clause": _parts(judged, lambda one: one.clauses, seed),
            "tag": _parts(judged, lambda one: one.tags, seed),
            **(
                {"turns": _parts(judged, lambda one: (str(one.turns),), seed)}
                if any(one.turns for one in judged)
                else {}
            ),
        },
        mismatch=_mismatch([one.tags for one in judged if one.tags]),
        failing_golds=[one.id for one in judged if one.gold not in ("ok", NO_GOLD)],
        late=[one.id for one in judged if one.is_late],
        questions=list(judged),
    )


def _summary(scores: Sequence[float], seed: int) -> dict[str, Any]:
    low, high = mean_interval(scores, seed=seed)
    return {
        "mean": round(sum(scores) / len(scores), 6),
        "ci95": [round(low, 6), round(high, 6)],
        "questions": len(scores),
    }


def _mismatch(tags: Sequence[Sequence[str]]) -> dict[str, float]:
    if not tags:
        return {}
    unparsed = sum(UNPARSED in each for each in tags) / len(tags)
    rates = {**mismatch_rates(tags), UNPARSED: unparsed}
    return {category: round(rate, 6) for category, rate in rates.items()}


def _pass_at(judged: Sequence[Judged]) -> dict[str, float]:
    """Average pass@k over questions for k of 1, 2, 4 and so on, and for all samples."""
    samples = judged[0].samples
    if not samples:
        return {}
    sizes = [1 << power for power in range(samples.bit_length()) if 1 << power < samples]
    return {
        str(k): round(sum(pass_at_k(one.right, one.samples, k) for one in judged) / len(judged), 6)
        for k in (*sizes, samples)
    }


def _parts(
    judged: Sequence[Judged], keys: Callable[[Judged], Sequence[str]], seed: int
) -> dict[str, dict[str, Any]]:
    parts: defaultdict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        for key in keys(one):
            parts[key].append(one)
    found = {}
    for name, part in sorted(parts.items(), key=rank):
        summaries = {
            measure: _summary([one.scores[measure] for one in part], seed)
            for measure in part[0].scores
        }
        found[name] = {
            "questions": len(part),
            "share": round(len(part) / len(judged), 6),
            **{measure: one["mean"] for measure, one in summaries.items()},
            "ci95": {measure: one["ci95"] for measure, one in summaries.items()},
        }
    return found


def write_sheet(path: Path, sheet: Sheet) -> None:
    """Write a sheet whole or not at all, a question a line."""
    head = sheet.model_dump(mode="json", exclude={"questions"})
    lines = ",\n  ".join(json.dumps(asdict(one)) for one in sheet.questions)
    text = json.dumps(head, indent=1).removesuffix("\n}")
    write_text(path, f'{text},\n "questions": [\n  {lines}\n ]\n}}\n')


def read_sheet(path: Path) -> Sheet:
    """Read a sheet.

    Raises:
        UserError: It is none.
    """
    return read_json(path, Sheet, advice="give a result of launch.eval, or make it again")


def is_done(path: Path, settings: Mapping[str, Any]) -> bool:
    """Tell whether a sheet is there with these settings.

    Raises:
        UserError: What is there is no sheet, or one of other settings.
    """
    if not path.exists():
        return False
    found = read_sheet(path).settings
    if other := _difference(found, settings):
        raise UserError(f"{path}: holds verdicts of other settings ({other}); name another file")
    return True


class Journal:
    """What was found so far, by phase: one list of values a phase, in the order of the questions.

    Args:
        file: Open at its end.
        found: What it holds.
    """

    def __init__(self, file: IO[str], found: Mapping[str, list[Any]]) -> None:
        self._file = file
        self._found = defaultdict(list, found)

    def of(self, phase: str) -> list[Any]:
        """Give what a phase has found; it grows with `add`."""
        return self._found[phase]

    def add(self, phase: str, values: Sequence[Any]) -> None:
        """Write down what was found for the next questions of a phase."""
        self._file.writelines(json.dumps([phase, value]) + "\n" for value in values)
        self._file.flush()
        self._found[phase] += values


@contextmanager
def journal(sheet: Path, settings: Mapping[str, Any]) -> Generator[Journal]:
    """Open the journal of a sheet; it goes when the block ends well.

    Raises:
        UserError: It is of other settings, is damaged, cannot be written, or another process has
            it.
    """
    path = sheet.with_name(sheet.name + PART)
    advice = "delete it to begin anew"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{sheet}: cannot be written ({error.strerror}); name another") from None
    with naming(path), lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path}: another process writes here; wait for it") from None
        lines = keep_lines(path, list, advice=advice)
        if lines and (other := _difference(_settings(lines[0], path), settings)):
            raise UserError(f"{path}: was begun with other settings ({other}); {advice}")
        found: defaultdict[str, list[Any]] = defaultdict(list)
        for number, line in enumerate(lines[1:], 2):
            if len(line) != 2 or not isinstance(line[0], str):
                raise UserError(f"{path}:{number}: not a line of a journal; {advice}")
            found[line[0]].append(line[1])
        try:
            if not lines:
                lock.write(json.dumps(["settings", dict(settings)]) + "\n")
                lock.flush()
            yield Journal(lock, found)
        except BaseException:
            if not found and path.read_bytes().count(b"\n") < 2:
                path.unlink()  # no work came to it
            raise
    path.unlink()


def _settings(line: list[Any], path: Path) -> Mapping[str, Any]:
    match line:
        case ["settings", dict() as settings]:
            return settings
    raise UserError(f"{path}: not a journal of launch.eval; move it away")


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Name the first setting that differs, with both values."""
    here, there = (_by_contents(json.loads(json.dumps(dict(one)))) for one in (here, there))
    for key in [*here, *there]:
        if there.get(key) != here.get(key):
            return f"{key} is {there.get(key)!r:.120} there and {here.get(key)!r:.120} here"
    return ""


def _by_contents(settings: dict[str, Any]) -> dict[str, Any]:
    """Leave out where weights lie that are known by their digest."""
    model = settings.get("model")
    if isinstance(model, dict) and "weights" in model:
        settings["model"] = {k: v for k, v in model.items() if k not in ("model", "checkpoint")}
    return settings
