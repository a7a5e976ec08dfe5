"""The report of an evaluation: every question under every measure, and what the numbers are of."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from exchange import UserError
from launch.evaluation.outcomes import NO_REPLIES, Outcomes
from launch.evaluation.statistics import mean_interval, paired_difference, pass_at_k
from launch.texts import write_text
from minirl.run.files import read_json

VERDICTS = "verdicts.json"
"""The report's name in a folder of results."""
CORRECTED = "corrected"
"""The measure by corrected gold queries, beside the one that counts."""
NO_GOLD = "none"
"""Status of the gold query where there is none, as in most questions of Spider 2."""
# Spider's, BIRD's and SynSQL's words for difficulty.
_LEVELS = (
    *("easy", "medium", "hard", "extra"),
    *("simple", "moderate", "challenging", "complex", "highly complex"),
)


@dataclass(frozen=True, slots=True)
class QuestionVerdict:
    """One question under every measure.

    Attributes:
        sql: The answer that was judged.
        scores: By measure; 1 is right. Empty where there is nothing to judge by.
        predicted: How the answer ended on the question's own database.
        gold: How the gold query ended there, `none` where there is none.
        is_late: Whether a limit of time decided a score.
        samples: Queries that were sampled; 0 where the answer is the only one.
        right: Samples that are right by the first measure.
        turns: Of the answer's episode, its calls of the tool, or 1; 0 where the model has no tool.
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


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Whose answers were judged.

    Attributes:
        model: Folder of its weights, or the endpoint's name of it.
        weights: Digest of a policy's weights: then it is known by them, wherever they lie.
        base, reward: What learning started from, and what it learned from.
        sampler: Where it is not the native one.
    """

    name: str
    model: str | None = None
    checkpoint: str | None = None
    weights: str | None = None
    base: str | None = None
    reward: str | None = None
    sampler: str | None = None


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """What was judged, and how; two reports with equal settings have equal verdicts.

    Questions have a fingerprint, databases, suite, prompts, corrections and predictions a digest of
    their contents, and each measure has its program and commit.
    """

    data: str
    model: ModelFacts
    decode: str
    questions: int = 0
    fingerprint: str = ""
    databases: str = ""
    suite: str | None = None
    seed: int = 0
    prompt: str | None = None
    vote_by: str | None = None
    corrections: str | None = None
    predictions: str = ""
    comparators: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    def deciding(self) -> dict[str, Any]:
        """Return the settings as JSON has them; weights are known by their digest, not by names."""
        found = json.loads(json.dumps(asdict(self)))
        if self.model.weights:
            found["model"] = {key: found["model"][key] for key in ("weights", "sampler")}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the file holds.

    Attributes:
        measures: Mean and 95 % interval by measure.
        pass_at: Chance that one of k samples is right by the first measure, by k.
        parts: Shares of the questions, means and 95 % intervals by difficulty, by database, by
            clause of the gold query and by tag, of both of which a question may have several, and
            by turns where the model may call a tool (SQL-ASTRA, table 3 and figure 5).
        mismatch: Share of answers that differ from the gold query in SELECT, JOIN, WHERE and GROUP,
            the mean of the four (Progress-SQL's table 8), and the share that is no query, which
            differs in all of them; empty without gold queries.
        failing_golds: Questions whose gold query does not run.
        late: Questions on which a limit of time decided a score.
        corrected: The difference that corrected gold queries make, on questions judged by both:
            `difference` with its `ci95`, `questions`, and `gained` and `lost`, those on which the
            verdicts differ; `asked_anew` are not judged by them. Empty without corrections.
        outcomes: What became of the replies.
        notes: What the source says of its work: seconds, costs, a hint.
    """

    settings: ReportSettings
    measures: Mapping[str, Mapping[str, Any]]
    pass_at: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Mapping[str, Any]]]
    mismatch: Mapping[str, float] = field(default_factory=dict)
    failing_golds: Sequence[str]
    late: Sequence[str] = ()
    corrected: Mapping[str, Any] = field(default_factory=dict)
    outcomes: Outcomes = NO_REPLIES
    notes: Mapping[str, Any] = field(default_factory=dict)
    questions: Sequence[QuestionVerdict]

    @property
    def first(self) -> str:
        """Name the measure that counts; empty where nothing could be judged."""
        return next(iter(self.measures), "")

    def is_right(self, question: QuestionVerdict) -> bool:
        """Tell whether an answer is right by the measure that counts."""
        return question.scores.get(self.first) == 1


def summarise(
    settings: ReportSettings,
    questions: Sequence[QuestionVerdict],
    *,
    seed: int,
    outcomes: Outcomes = NO_REPLIES,
    notes: Mapping[str, Any] | None = None,
) -> Report:
    """Summarise verdicts, given in the order of the data; the seed is the bootstrap's."""
    judged = [one for one in questions if one.scores]
    keys: dict[str, Callable[[QuestionVerdict], Sequence[str]]] = {
        "difficulty": lambda one: (one.difficulty or "unknown",),
        "database": lambda one: (one.db_id,),
        "clause": lambda one: one.clauses,
        "tag": lambda one: one.tags,
    }
    if any(one.turns for one in judged):
        keys["turns"] = lambda one: (str(one.turns),)
    return Report(
        settings=settings,
        measures=_summaries(judged, seed),
        pass_at=_pass_at(judged),
        parts={name: _parts(judged, key, seed) for name, key in keys.items()},
        mismatch=_mismatch([one.tags for one in judged if one.tags]),
        failing_golds=[one.id for one in judged if one.gold not in ("ok", NO_GOLD)],
        late=[one.id for one in judged if one.is_late],
        corrected=_corrected(judged),
        outcomes=outcomes,
        notes=dict(notes or {}),
        questions=list(questions),
    )


def _summaries(judged: Sequence[QuestionVerdict], seed: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name in dict.fromkeys(name for one in judged for name in one.scores):
        scores = [one.scores[name] for one in judged if name in one.scores]
        interval = [round(bound, 6) for bound in mean_interval(scores, seed=seed)]
        mean = round(sum(scores) / len(scores), 6)
        found[name] = {"mean": mean, "ci95": interval, "questions": len(scores)}
    return found


def _corrected(judged: Sequence[QuestionVerdict]) -> dict[str, Any]:
    """Compare the verdicts by published and by corrected gold queries, question by question."""
    both = [one for one in judged if CORRECTED in one.scores]
    if not both:
        return {}
    first = next(iter(both[0].scores))
    pairs = [(one.id, one.scores[first], one.scores[CORRECTED]) for one in both]
    found = paired_difference([old for _, old, _ in pairs], [new for _, _, new in pairs])
    return {
        "difference": round(found.difference, 6),
        "ci95": [round(bound, 6) for bound in found.ci95],
        "questions": len(both),
        "gained": [name for name, old, new in pairs if new > old],
        "lost": [name for name, old, new in pairs if new < old],
        "asked_anew": [one.id for one in judged if CORRECTED not in one.scores],
    }


def _mismatch(tags: Sequence[Sequence[str]]) -> dict[str, float]:
    if not tags:
        return {}
    from rewards.progress.diagnosis import UNPARSED, mismatch_rates

    unparsed = sum(UNPARSED in each for each in tags) / len(tags)
    rates = {**mismatch_rates(tags), UNPARSED: unparsed}
    return {category: round(rate, 6) for category, rate in rates.items()}


def _pass_at(judged: Sequence[QuestionVerdict]) -> dict[str, float]:
    """Average pass@k over questions for k of 1, 2, 4 and so on, and for all samples."""
    samples = judged[0].samples if judged else 0
    sizes = [1 << power for power in range(samples.bit_length()) if 1 << power < samples]
    return {
        str(k): round(sum(pass_at_k(one.right, one.samples, k) for one in judged) / len(judged), 6)
        for k in (*sizes, samples)
        if k
    }


def _parts(
    judged: Sequence[QuestionVerdict], keys: Callable[[QuestionVerdict], Sequence[str]], seed: int
) -> dict[str, dict[str, Any]]:
    parts: defaultdict[str, list[QuestionVerdict]] = defaultdict(list)
    for one in judged:
        for key in keys(one):
            parts[key].append(one)
    # Levels of difficulty from easy to hard, all other names by the alphabet.
    ranks = {level: rank for rank, level in enumerate(_LEVELS)}
    found = {}
    for name in sorted(parts, key=lambda name: (ranks.get(name.lower(), len(ranks)), name)):
        summaries = _summaries(parts[name], seed)
        found[name] = {
            "questions": len(parts[name]),
            "share": round(len(parts[name]) / len(judged), 6),
            **{measure: one["mean"] for measure, one in summaries.items()},
            "ci95": {measure: one["ci95"] for measure, one in summaries.items()},
        }
    return found


def write_report(path: Path, report: Report) -> None:
    """Write a report whole or not at all, a question a line."""
    # Without copies of what each question has, which take longer than the rest.
    lines = ",\n  ".join(json.dumps(one, default=_fields) for one in report.questions)
    head = asdict(replace(report, questions=()))
    del head["questions"]
    text = json.dumps(head, indent=1).removesuffix("\n}")
    write_text(path, f'{text},\n "questions": [\n  {lines}\n ]\n}}\n')


def _fields(record: QuestionVerdict) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def read_report(path: Path) -> Report:
    """Read a report."""
    advice = "this is no result of launch.eval, or a damaged one; give another, or make it again"
    return read_json(path, Report, advice=advice)


def find_report(path: Path, settings: ReportSettings) -> Report | None:
    """Return the report of these settings that is there already; one of others is refused."""
    if not path.exists():
        return None
    from launch.config import flat  # much to import, and few files are there already

    report = read_report(path)
    there, here = (dict(flat(one.deciding())) for one in (report.settings, settings))
    names = {**here, **there}
    if differing := [name for name in names if there.get(name) != here.get(name)]:
        name = differing[0]
        raise UserError(
            f"{path}: holds verdicts of other settings ({name} is {there.get(name)!r:.120} there "
            f"and {here.get(name)!r:.120} here); name another file"
        )
    return report
