"""The record of an evaluation: a line for each question, and a summary of what the numbers are of
and how sure they are.

`predictions.jsonl` has the lines and `verdicts.json` the summary, in the folder of launch.eval and
in the places of a run of launch.train. docs/evaluation.md describes both.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from launch.evaluation.answers import NO_REPLIES, ModelFacts, Outcomes
from launch.files import write_json, write_text
from minirl.exchange import UserError
from minirl.run.files import read_json, read_lines
from rewards.progress.diagnosis import UNPARSED, mismatch_rates

PREDICTIONS = "predictions.jsonl"
"""The lines of the questions in a folder of results."""
VERDICTS = "verdicts.json"
"""The summary in a folder of results."""
PLACES = ("before", "between", "after")
"""Folders of a run's results, in order: of the model that it starts from (a tiny one learned its
form before), of what a warm start made of another model, and of what it learned."""
STAGES = {
    "run": ("before", "after"),
    "warm start": ("before", "between"),
    "reinforcement": ("between", "after"),
}
"""What a run gains by, and the places where it begins and ends."""
SAMPLES = "samples"
"""The folder of sampled answers in a place of a run."""
NO_GOLD = "none"
"""Status of the gold query where there is none, as in most questions of Spider 2."""
# Spider's, BIRD's and SynSQL's words for difficulty.
_LEVELS = (
    *("easy", "medium", "hard", "extra"),
    *("simple", "moderate", "challenging", "complex", "highly complex"),
)


@dataclass(frozen=True, slots=True)
class QuestionVerdict:
    """One question, its answer, and the verdict by every measure.

    Attributes:
        gold_sql: The gold query; empty where there is none, as in most questions of Spider 2.
        sql: The answer that was judged.
        scores: By measure; 1 is right. Empty where there is nothing to judge by.
        status: How the answer ended on the question's own database.
        gold_status: How the gold query ended there, `none` where there is none.
        reply: The text that the answer stands in; empty where it was not recorded.
        samples: All queries that were sampled; empty where the answer is the only one.
        right: Samples that are right by the first measure.
        turns: Of the answer's episode, its calls of the tool, or 1; 0 where the model has no tool.
        parts: What the run's reward pays for the episode, by name, where there is one.
        choice: How `judge@K` chose among the model's own queries.
        outcomes: What became of all replies to the question.
        clauses: What the gold query has (`sqlenv.evaluators.hardness.clauses_of`), if there is one.
        tags: In what the answer differs from the gold query in structure (Progress-SQL's diagnostic
            tree), `none` where in nothing, `unparsed` where it is no query; none without a gold
            query, or where the tree cannot read it.
    """

    id: str
    db_id: str
    difficulty: str
    question: str
    gold_sql: str
    sql: str
    scores: Mapping[str, float]
    status: str = ""
    gold_status: str = NO_GOLD
    reply: str = ""
    samples: tuple[str, ...] = ()
    right: int = 0
    turns: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    clauses: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    choice: Mapping[str, Any] | None = None
    outcomes: Outcomes = NO_REPLIES


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """What was judged, and how; two reports with equal settings have equal verdicts.

    Questions have a fingerprint, gold queries, databases and suite a digest of their contents, and
    each measure has its program and commit.
    """

    data: str
    model: ModelFacts
    decode: str
    questions: int = 0
    fingerprint: str = ""
    golds: str = ""
    databases: str = ""
    suite: str | None = None
    seed: int = 0
    vote_by: str | None = None
    comparators: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An evaluation: its summary, and the verdicts on all questions.

    Attributes:
        measures: By measure the mean and its 95 % intervals, over questions (`ci95`) and, where
            there are several, over databases (`ci95_databases`).
        pass_at: Chance that one of k samples is right by the first measure, by k.
        parts: Shares of the questions, means and 95 % intervals by difficulty, by database, by
            clause of the gold query and by tag, of both of which a question may have several, and
            by turns where the model may call a tool (SQL-ASTRA, table 3 and figure 5).
        mismatch: Share of answers that differ from the gold query in SELECT, JOIN, WHERE and GROUP,
            the mean of the four (Progress-SQL's table 8), and the share that is no query, which
            differs in all of them; empty without gold queries.
        failing_golds: Questions whose gold query does not run.
        late: Questions whose answer or gold query met a limit of time.
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
    outcomes: Outcomes = NO_REPLIES
    notes: Mapping[str, Any] = field(default_factory=dict)
    questions: Sequence[QuestionVerdict] = ()

    @property
    def first(self) -> str:
        """Name the measure that counts; empty where nothing could be judged."""
        return next(iter(self.measures), "")

    @property
    def failing(self) -> int:
        """Count the answers whose query has no result: it fails, is denied, or takes too long."""
        return sum(one.sql != "" and one.status not in ("ok", "") for one in self.questions)


def summarise(
    settings: ReportSettings,
    questions: Sequence[QuestionVerdict],
    notes: Mapping[str, Any] | None = None,
) -> Report:
    """Summarise verdicts, given in the order of the data."""
    seed = settings.seed
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
        failing_golds=[one.id for one in judged if one.gold_status not in ("ok", NO_GOLD)],
        late=[one.id for one in judged if "timeout" in (one.status, one.gold_status)],
        outcomes=Outcomes.total(one.outcomes for one in questions),
        notes=dict(notes or {}),
        questions=list(questions),
    )


def _summaries(judged: Sequence[QuestionVerdict], seed: int) -> dict[str, dict[str, Any]]:
    """Give by measure the mean, its 95 % intervals, and of how many questions it is."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for one in judged for name in one.scores):
        asked = [one for one in judged if name in one.scores]
        scores = [one.scores[name] for one in asked]
        found[name] = {
            "mean": round(sum(scores) / len(scores), 6),
            "ci95": [round(bound, 6) for bound in mean_interval(scores, seed=seed)],
            "questions": len(scores),
        }
        if over := database_interval(scores, [one.db_id for one in asked], seed=seed):
            found[name]["ci95_databases"] = [round(bound, 6) for bound in over]
    return found


def with_samples(report: Report, sampled: Report) -> Report:
    """Score the questions of greedy answers by n samples too: `mean@n` is the share of these that
    are right by the measure that counts, `pass@n` whether any is.
    """
    own = {
        one.id: {f"mean@{n}": pass_at_k(one.right, n, 1), f"pass@{n}": pass_at_k(one.right, n, n)}
        for one in sampled.questions
        if one.scores and (n := len(one.samples))
    }
    judged = [replace(one, scores=own[one.id]) for one in report.questions if one.id in own]
    measures, said = _summaries(judged, sampled.settings.seed), sampled.settings
    drawn = [sampled.notes.get(name) for name in ("temperature", "top_p")]
    how = f"{sampled.first}, {said.comparators.get(sampled.first)}, temperature and top-p {drawn}"
    comparators = {**report.settings.comparators, **dict.fromkeys(measures, how)}
    return replace(
        report,
        settings=replace(report.settings, comparators=comparators),
        measures={**report.measures, **measures},
        questions=[
            replace(one, scores={**one.scores, **own.get(one.id, {})}) for one in report.questions
        ],
    )


def _mismatch(tags: Sequence[Sequence[str]]) -> dict[str, float]:
    if not tags:
        return {}
    unparsed = sum(UNPARSED in each for each in tags) / len(tags)
    rates = {**mismatch_rates(tags), UNPARSED: unparsed}
    return {category: round(rate, 6) for category, rate in rates.items()}


def _pass_at(judged: Sequence[QuestionVerdict]) -> dict[str, float]:
    """Average pass@k over questions for k of 1, 2, 4 and so on, and for all samples."""
    samples = len(judged[0].samples) if judged else 0
    sizes = [1 << power for power in range(samples.bit_length()) if 1 << power < samples]
    return {
        str(k): round(
            sum(pass_at_k(one.right, len(one.samples), k) for one in judged) / len(judged), 6
        )
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


def as_json(report: Report) -> str:
    """Write a report as one JSON object, a question a line."""
    # Without copies of what each question has, which take longer than the rest.
    lines = ",\n  ".join(json.dumps(one, default=_fields) for one in report.questions)
    text = json.dumps(_head(report), indent=1).removesuffix("\n}")
    return f'{text},\n "questions": [\n  {lines}\n ]\n}}\n'


def write_result(folder: Path, report: Report) -> None:
    """Write a report into a folder: the questions, then the summary, which marks them complete."""
    lines = (json.dumps(one, default=_fields) + "\n" for one in report.questions)
    write_text(folder / PREDICTIONS, "".join(lines))
    write_json(folder / VERDICTS, _head(report))


def _head(report: Report) -> dict[str, Any]:
    head = asdict(replace(report, questions=()))
    del head["questions"]
    return head


def _fields(record: QuestionVerdict | Outcomes) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def read_report(path: Path) -> Report:
    """Read the report of a folder of results, or of the one file that `--json` names.

    Raises:
        UserError: It is damaged, or of an older version.
    """
    is_folder = path.is_dir()
    advice = "no result of launch.eval, or an older one; repeat the command that made it"
    report = read_json(path / VERDICTS if is_folder else path, Report, advice=advice)
    file = path / PREDICTIONS if is_folder else path
    if is_folder:
        lines = read_lines(file, QuestionVerdict, advice=advice)
        report = replace(report, questions=[verdict for _, verdict in lines])
    count, expected = len(report.questions), report.settings.questions
    if count < expected:
        raise UserError(
            f"{file}: cut off, holds {count:,} of {expected:,} questions; fetch it again, or "
            "repeat the command that made it, with another --out"
        )
    return report


def read_place(folder: Path) -> Report:
    """Read what was measured at a place of a run: greedy answers, and samples where there are."""
    report, samples = read_report(folder), folder / SAMPLES
    if not (samples / VERDICTS).exists():
        return report
    return with_samples(report, read_report(samples))


# How sure one can be of a number. What every evaluation needs stands here, for importing
# `scipy.stats` takes longer than judging a file of predictions.

RESAMPLES = 10_000
"""As in EXPO-SQL (section 6.7)."""
LEAST_DATABASES = 3
"""Of fewer there is no interval over databases."""
_Z = NormalDist().inv_cdf(0.975)

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Paired:
    """Two runs on the same questions, the second less the first.

    Attributes:
        difference: Of the means, with its 95 % interval over questions.
        p: Two-sided: McNemar's exact test of rates, the bootstrap's of other scores.
        only_first, only_second: Questions that one run alone has right; None unless all scores are
            0 or 1.
        ci95_databases: The difference's 95 % interval over databases; None where there is none.
        means: Of the first and of the second run.
        questions: How many both have.
    """

    difference: float
    ci95: Interval
    p: float
    only_first: int | None
    only_second: int | None
    ci95_databases: Interval | None
    means: tuple[float, float]
    questions: int


def _bootstrap(values: Sequence[float], seed: int) -> tuple[Interval, np.ndarray]:
    """Draw questions with replacement: return the 95 % percentile interval of their mean, and the
    means that were drawn.
    """
    from scipy.stats import bootstrap

    if len({*values}) == 1:  # nothing to draw from
        return (values[0], values[0]), np.full(RESAMPLES, values[0])
    rng = np.random.default_rng(seed)
    # Resamples are made so many at a time: they are large together.
    found = bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, batch=100, method="percentile", rng=rng
    )
    low, high = map(float, found.confidence_interval)
    return (low, high), found.bootstrap_distribution


def mean_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the 95 % interval of a mean over independent questions.

    Of a rate (all values are 0 or 1) it is Wilson's score interval: 3 of 3 right are [0.44, 1]. Of
    other values it is the percentile bootstrap's; where all of them are one value in [0, 1] there
    is nothing to draw from, and it is Wilson's with that value for the rate.
    """
    kinds = set(values)
    if kinds <= {0, 1} or (len(kinds) == 1 and 0 <= values[0] <= 1):
        return wilson(fmean(values), len(values))
    return _bootstrap(values, seed)[0]


def database_interval(
    values: Sequence[float], databases: Sequence[str], *, seed: int = 0
) -> Interval | None:
    """Return the 95 % interval of a mean over databases, given the database of each question.

    The percentile cluster bootstrap: databases are drawn with replacement, each with all of its
    questions, as many as there are (Field and Welsh, JRSS B 69, 2007). There is no interval of
    fewer than `LEAST_DATABASES`, nor where all have one mean, with nothing to draw from.

    Note:
        Of few databases it is too narrow: docs/evaluation.md.
    """
    parts = defaultdict[str, list[float]](list)
    for name, value in zip(databases, values, strict=True):
        parts[name].append(value)
    means = {*map(fmean, parts.values())}
    if len(parts) < LEAST_DATABASES or len(means) == 1:
        return None
    sums, sizes = np.array([[math.fsum(each), len(each)] for each in parts.values()]).T
    chances = [1 / len(parts)] * len(parts)
    drawn = np.random.default_rng(seed).multinomial(len(parts), chances, size=RESAMPLES)
    low, high = np.percentile((drawn @ sums) / (drawn @ sizes), [2.5, 97.5])
    return float(low), float(high)


def wilson(rate: float, count: int) -> Interval:
    """Return Wilson's 95 % score interval of a rate of so many questions (Wilson 1927)."""
    middle = rate + _Z**2 / (2 * count)
    half = _Z * math.sqrt(rate * (1 - rate) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    # At rates of 0 and 1 one side is exact.
    low = 0.0 if rate == 0 else (middle - half) / scale
    return low, 1.0 if rate == 1 else (middle + half) / scale


def paired_difference(
    first: Sequence[float], second: Sequence[float], databases: Sequence[str] = ()
) -> Paired:
    """Compare two runs on the same questions; given their databases, over these too.

    The interval is the percentile bootstrap's of the differences (where these are all alike,
    Wilson's carried over from [0, 1] to [-1, 1], and of runs that agree that of the share which
    differs). Rates (all scores are 0 or 1) have McNemar's exact p-value. Other scores have that of
    EXPO-SQL's paired bootstrap (section 6.7), which does not say how it counts: here twice the
    share of resampled differences on the side of zero that has fewer, a zero included, with
    `(count + 1) / (10,000 + 1)` for a share. It is never below 2^(1 - m), the least that m
    differing questions can show.

    Raises:
        ValueError: There is no question, or the runs have different numbers of them.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    mean, count, kinds = fmean(differences), len(differences), {*differences}
    ci95, drawn = _bootstrap(differences, 0)
    if kinds == {0}:
        _, most = wilson(0, count)  # of the questions differ
        ci95 = (-most, most)
    elif len(kinds) == 1 and abs(differences[0]) <= 1:
        low, high = wilson((1 + differences[0]) / 2, count)
        ci95 = (2 * low - 1, 2 * high - 1)
    lost: int | None = None
    won: int | None = None
    if {*first, *second} <= {0, 1}:
        from scipy.stats import binomtest

        lost, won = differences.count(-1), differences.count(1)
        p = float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0
    else:
        fewest = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
        differing = count - differences.count(0)
        p = min(1.0, max(2 * (fewest + 1) / (RESAMPLES + 1), 2.0 ** (1 - differing)))
    over = database_interval(differences, databases) if databases else None
    means = (fmean(first), fmean(second))
    return Paired(mean, ci95, p, lost, won, over, means, count)


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Estimate without bias the chance that one of k samples is right (Chen et al. 2021, eq. 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
