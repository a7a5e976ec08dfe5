"""What the runs of `claims.py` say: differences over questions and seeds, and the page of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks import markdown
from benchmarks._claims_credit import read_blame
from benchmarks._claims_data import QUESTIONS, VARIANTS

RESAMPLES = 10_000
LEAST = 0.01
"""The least gain that counts (docs/claims.md)."""
LEVEL = 0.05
_FEWEST = 20
"""Wrong answers of a kind that make a row of their own."""
_SPREAD = ("95 % interval", "seeds, lowest to highest")
_ARMS_HEAD = ("arm", "seeds", "start %", "after %", *_SPREAD, "synonyms %")
_ARMS_HEAD += ("renamed %", "turns", "wrong, advantage above 0 %", "minutes a run")
_CLAIMS_HEAD = ("source", "expected better", "than", "points", "95 % interval", "p", "p (Holm)")
_CLAIMS_HEAD += ("here",)
_VOTES_HEAD = ("answers", "seeds", "right %", *_SPREAD, "any sample right %")
_VOTES_HEAD += ("judgements", "read %")
_COMPARED_HEAD = (
    "change",
    *_CLAIMS_HEAD[1:-2],
    "both, %",
    "both without it, %",
    "points without it",
)
_BLAME_HEAD = ("arm", "wrong clauses", "answers", "it is blamed %", "it alone %")
_BLAME_HEAD += ("a correct clause is blamed %",)
_BLAME = "blame"
_BLAMING = ("clause", "clause-types", "clause-steps")
"""Arms whose credit tells clauses apart."""
_PACKED = (*VARIANTS, "right")
"""Names of the lists of verdicts in the data."""
Rights = Mapping[int, Sequence[bool]]
"""Whether each question as it was generated was right, by seed."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to learn: settings beside the config of its start, for each stage."""

    name: str
    start: str
    stages: tuple[dict[str, str], ...]

    def changed(self, word: str, settings: Mapping[str, str]) -> Arm:
        """Return the arm with more settings in all stages, named by a word for them."""
        return Arm(
            f"{self.name}-{word}", self.start, tuple({**one, **settings} for one in self.stages)
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """What a paper says: one arm is better than another."""

    source: str
    better: str
    worse: str


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the page: arms, answers by several samples, and what is said of them.

    Attributes:
        is_test: Whether claims are decided; elsewhere `source` of a claim is a change of both arms.
    """

    arms: Collection[str]
    answers: Collection[str]
    claims: Sequence[Claim]
    is_test: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

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
class Votes:
    """What came of answers by several samples.

    Attributes:
        right: Whether each question was answered right.
        any_right: Share of the questions of which a sample was right: what a perfect choice has.
            Of candidates that were judged, it is not counted.
        asked, read: Judgements that were asked for, and those that could be read.
    """

    right: Sequence[bool]
    any_right: float | None
    asked: int
    read: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean difference of accuracy, its 95 % interval, and the two-sided p-value."""

    mean: float
    low: float
    high: float
    p: float


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim, what the runs say of it, and the p-value corrected for all claims."""

    claim: Claim
    difference: Difference
    corrected: float
    verdict: str


def has_marks(page: Path, parts: Iterable[str]) -> bool:
    """Tell whether a page has the places of all tables."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    return all(_marks(part)[0] in text and _marks(part)[1] in text for part in (*parts, _BLAME))


def _marks(part: str) -> tuple[str, str]:
    return f"<!-- {part} -->", f"<!-- end of {part} -->"


def write(
    page: Path,
    parts: Mapping[str, Part],
    finished: Mapping[tuple[str, int], Sequence[Path]],
    voted: Mapping[tuple[str, int], Path],
) -> None:
    """Write the tables between their marks on a page, and the data beside it.

    Runs that the data has and `finished` and `voted` have not stay. Who is blamed is not in the
    data: that table stays where no run tells it.
    """
    outcomes, votes = _read_data(page.with_suffix(".json"))
    for (name, seed), stages in finished.items():
        outcomes.setdefault(name, {})[seed] = read_outcome(stages)
    for (name, seed), path in voted.items():
        votes.setdefault(name, {})[seed] = _read_votes(path)
    right = {
        name: {seed: one.after[VARIANTS[0]] for seed, one in by_seed.items()}
        for name, by_seed in outcomes.items()
    } | {
        name: {seed: one.right for seed, one in by_seed.items()} for name, by_seed in votes.items()
    }
    tables = {
        mark: [
            *_table_of_arms(part.arms, outcomes),
            _table_of_votes(part.answers, votes),
            (_table_of_claims if part.is_test else _table_of_changes)(part.claims, right),
        ]
        for mark, part in parts.items()
    }
    if blamed := [*_blame_rows(finished)]:
        tables[_BLAME] = [markdown(_BLAME_HEAD, blamed)]
    text = page.read_text(encoding="utf-8")
    for mark, found in tables.items():
        start, end = _marks(mark)
        before, _, rest = text.partition(start)
        text = "\n\n".join([before + start, *found, end + rest.partition(end)[2]])
    page.write_text(text, encoding="utf-8")
    data = [
        {kind: name, "seed": seed, **_packed(asdict(one))}
        for kind, found in (("arm", outcomes), ("answers", votes))
        for name, by_seed in found.items()
        for seed, one in by_seed.items()
    ]
    page.with_suffix(".json").write_text(
        "[\n" + ",\n".join(map(json.dumps, data)) + "\n]\n", encoding="utf-8"
    )


def _read_data(path: Path) -> tuple[dict[str, dict[int, Outcome]], dict[str, dict[int, Votes]]]:
    """Read the data that `write` wrote: outcomes of arms, and of answers by several samples."""
    outcomes: dict[str, dict[int, Outcome]] = {}
    votes: dict[str, dict[int, Votes]] = {}
    for one in map(_unpacked, json.loads(path.read_text()) if path.exists() else ()):
        arm, answers, seed = one.pop("arm", None), one.pop("answers", None), one.pop("seed")
        if arm is not None:
            outcomes.setdefault(arm, {})[seed] = Outcome(**one)
        else:
            votes.setdefault(answers, {})[seed] = Votes(**one)
    return outcomes, votes


def _table_of_arms(
    arms: Iterable[str], outcomes: Mapping[str, Mapping[int, Outcome]]
) -> tuple[str, str]:
    found = {name: outcomes[name] for name in arms if name in outcomes}
    seconds = [one.seconds for by_seed in found.values() for one in by_seed.values()]
    return (
        f"{len(seconds)} runs; together {sum(seconds) / 60:.0f} minutes of one core.",
        markdown(_ARMS_HEAD, (_arm_row(name, by_seed) for name, by_seed in found.items())),
    )


def _table_of_votes(names: Iterable[str], votes: Mapping[str, Mapping[int, Votes]]) -> str:
    return markdown(_VOTES_HEAD, (_vote_row(name, votes[name]) for name in names if name in votes))


def _table_of_claims(claims: Sequence[Claim], right: Mapping[str, Rights]) -> str:
    return markdown(_CLAIMS_HEAD, map(_claim_row, judge(claims, right)))


def _table_of_changes(claims: Sequence[Claim], right: Mapping[str, Rights]) -> str:
    """No claim is decided here: no correction, no verdict."""
    rows = ((*_claim_row(one)[:-2], *_levels(one.claim, right)) for one in judge(claims, right))
    return markdown(_COMPARED_HEAD, rows)


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


def _read_votes(path: Path) -> Votes:
    verdicts = json.loads(path.read_text())
    right = [question["scores"]["set"] == 1 for question in verdicts["questions"]]
    shares, notes = verdicts["pass_at"].values(), verdicts["notes"]
    read = notes.get("judged", 0)
    return Votes(right, max(shares, default=None), read + notes.get("left_out", 0), read)


def _verdicts(folder: Path) -> dict[str, list[bool]]:
    """Read whether each question was right; the variants follow one another."""
    correct = [json.loads(line)["correct"] for line in (folder / "predictions.jsonl").open()]
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
        for line in (stage / "trajectories.jsonl").open()
        for trajectory in json.loads(line).get("trajectories", ())
        if not trajectory["correct"] and trajectory["advantage"] is not None
    ]
    return mean(advantage > 0 for advantage in advantages) if advantages else 0.0


def judge(claims: Sequence[Claim], right: Mapping[str, Rights]) -> list[Finding]:
    """Test every claim whose two sides have seeds in common; `right` by the name of a side."""
    differences: list[tuple[Claim, Difference]] = []
    for claim in claims:
        better, worse = right.get(claim.better, {}), right.get(claim.worse, {})
        seeds = sorted(better.keys() & worse.keys())
        if seeds:
            one, other = (
                np.array([side[seed] for seed in seeds], float) for side in (better, worse)
            )
            differences.append((claim, crossed_bootstrap(one - other)))
    corrected = holm([difference.p for _, difference in differences])
    return [
        Finding(claim, difference, p, verdict(difference, p))
        for (claim, difference), p in zip(differences, corrected, strict=True)
    ]


def crossed_bootstrap(differences: np.ndarray, *, seed: int = 0) -> Difference:
    """Resample seeds and questions, both with replacement, of differences [seeds, questions].

    Of verdicts in place of differences, the interval is that of an accuracy.

    A resample has the same questions for each of its seeds, as the runs have. The p-value is twice
    the share of resampled means on the side of zero that has fewer, a zero included.
    """
    rng = np.random.default_rng(seed)
    seeds, questions = differences.shape
    by_seed = rng.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES) / seeds
    by_question = rng.multinomial(questions, np.full(questions, 1 / questions), RESAMPLES)
    means = ((by_seed @ differences) * (by_question / questions)).sum(axis=1)
    fewest = min(int((means <= 0).sum()), int((means >= 0).sum()))
    low, high = np.percentile(means, [2.5, 97.5])
    p = min(1.0, 2 * (fewest + 1) / (RESAMPLES + 1))
    return Difference(float(differences.mean()), float(low), float(high), p)


def holm(values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm 1979)."""
    corrected, highest = [0.0] * len(values), 0.0
    for rank, number in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, values[number] * (len(values) - rank)))
        corrected[number] = highest
    return corrected


def verdict(difference: Difference, corrected: float) -> str:
    """Say what a difference means for a claim; docs/claims.md has the rule."""
    if corrected < LEVEL and difference.mean > 0:
        return "confirmed"
    if difference.high < LEAST:
        return "refuted"
    return "undecided"


def _arm_row(name: str, outcomes: Mapping[int, Outcome]) -> tuple[str, ...]:
    runs = list(outcomes.values())
    return (
        name,
        str(len(runs)),
        _percent(mean(mean(one.before[VARIANTS[0]]) for one in runs)),
        *_spread([one.after[VARIANTS[0]] for one in runs]),
        *(_percent(mean(mean(one.after[variant]) for one in runs)) for variant in VARIANTS[1:]),
        f"{mean(one.turns for one in runs):.2f}",
        _percent(mean(one.pushed_up for one in runs)),
        f"{mean(one.seconds for one in runs) / 60:.1f}",
    )


def _vote_row(name: str, answers: Mapping[int, Votes]) -> tuple[str, ...]:
    votes = list(answers.values())
    shares = [one.any_right for one in votes if one.any_right is not None]
    asked, read = sum(one.asked for one in votes), sum(one.read for one in votes)
    return (
        name,
        str(len(votes)),
        *_spread([one.right for one in votes]),
        _percent(mean(shares)) if shares else "-",
        f"{asked:,}",
        _percent(read / asked) if asked else "-",
    )


def _spread(right: Sequence[Sequence[bool]]) -> tuple[str, str, str]:
    """Write the mean over seeds, its interval, and the lowest and the highest seed."""
    found, seeds = crossed_bootstrap(np.array(right, float)), [mean(one) for one in right]
    return (
        _percent(found.mean),
        f"[{_percent(found.low)}, {_percent(found.high)}]",
        f"{_percent(min(seeds))} to {_percent(max(seeds))}",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _blame_rows(finished: Mapping[tuple[str, int], Sequence[Path]]) -> Iterator[tuple[str, ...]]:
    for arm in _BLAMING:
        runs = [stages[0] for (name, _), stages in finished.items() if name == arm]
        found = [one for run in runs for one in read_blame(run)]
        by_kind = Counter(["all"] * len(found) + [one.wrong for one in found])
        for kind in (kind for kind, count in by_kind.most_common() if count >= _FEWEST):
            part = [one for one in found if kind in ("all", one.wrong)]
            shares = (
                mean(one.wrong in one.blamed for one in part),
                mean(one.blamed == {one.wrong} for one in part),
                mean(bool(one.blamed - {one.wrong}) for one in part),
            )
            yield (arm, kind, f"{len(part):,}", *map(_percent, shares))


def _claim_row(finding: Finding) -> tuple[str, ...]:
    claim, found = finding.claim, finding.difference
    return (
        claim.source,
        claim.better,
        claim.worse,
        f"{100 * found.mean:+.1f}",
        f"[{100 * found.low:+.1f}, {100 * found.high:+.1f}]",
        f"{found.p:.4f}",
        f"{finding.corrected:.4f}",
        finding.verdict,
    )


def _levels(claim: Claim, right: Mapping[str, Rights]) -> tuple[str, str, str]:
    """Write both accuracies with and without a change, over the seeds that all four sides have."""
    names, change = (claim.better, claim.worse), f"-{claim.source}"
    changed = [right.get(name, {}) for name in names]
    plain = [right.get(name.removesuffix(change), {}) for name in names]
    seeds = set.intersection(*(set(one) for one in (*changed, *plain)))
    if not seeds:
        return "-", "-", "-"
    levels = [mean(mean(one[seed]) for seed in seeds) for one in (*changed, *plain)]
    words = [_percent(level) for level in levels]
    points = f"{100 * (levels[2] - levels[3]):+.1f}"
    return ", ".join(words[:2]), ", ".join(words[2:]), points


def _packed(value: Any) -> Any:
    """Write lists of verdicts as texts of 0 and 1."""
    if isinstance(value, dict):
        return {name: _packed(one) for name, one in value.items()}
    return "".join("01"[one] for one in value) if isinstance(value, list) else value


def _unpacked(value: Any, name: str = "") -> Any:
    """Read what `_packed` wrote."""
    if isinstance(value, dict):
        return {key: _unpacked(one, key) for key, one in value.items()}
    return [digit == "1" for digit in value] if name in _PACKED else value
