"""The page of `claims.py`: tables of what its runs came to, between marks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from rich.progress import track

from benchmarks import markdown
from benchmarks._claims_credit import read_blame
from benchmarks._claims_data import VARIANTS
from benchmarks._claims_outcomes import (
    Answers,
    Outcome,
    Runs,
    SampledAnswers,
    load,
    read_answers,
    read_outcome,
    save,
)
from benchmarks._claims_statistics import (
    Claim,
    TestResult,
    Verdicts,
    crossed_bootstrap,
    test_claims,
)

_MINIMUM_ANSWERS = 20
"""Wrong answers of a kind that make a row of their own."""
_SPREAD = ("95 % interval", "seeds, lowest to highest")
_ARMS_HEAD = ("arm", "seeds", "start %", "after %", *_SPREAD, "synonyms %")
_ARMS_HEAD += ("renamed %", "turns", "wrong, advantage above 0 %", "minutes a run")
_CLAIMS_HEAD = ("source", "expected better", "than", "points", "95 % interval", "p", "p (Holm)")
_CLAIMS_HEAD += ("here",)
_ANSWERS_HEAD = ("answers", "seeds", "right %", *_SPREAD, "any sample right %", "contested")
_ANSWERS_HEAD += ("contested: right %", "at random %", "judgements", "read %")
_COMPARED_HEAD = (
    "change",
    *_CLAIMS_HEAD[1:-2],
    "both, %",
    "both without it, %",
    "points without it",
)
_BLAME_HEAD = ("arm", "wrong clauses", "answers", "faulty clause blamed %")
_BLAME_HEAD += ("only the faulty clause blamed %", "a correct clause blamed %")
_BLAME = "blame"
_BLAMING = ("clause", "clause-types", "clause-steps")
"""Arms whose credit tells clauses apart."""


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
    answered: Mapping[tuple[str, int], Path],
    data: Path,
) -> None:
    """Write the tables between their marks on a page, and what they are made of beside it.

    Runs that are there already stay, but for those of the same name and seed. The table of blame,
    whose answers are not kept, is written where all runs of its arms are finished.
    """
    runs, answers = load(page.with_suffix(".json"))
    replaced = 0
    for (name, seed), stages in finished.items():
        outcome, known = read_outcome(stages), runs.setdefault(name, {})
        replaced += known.get(seed, outcome) != outcome
        known[seed] = outcome
    for (name, seed), folder in track(answered.items(), "answers"):
        answers.setdefault(name, {})[seed] = read_answers(folder, data)
    right = {
        name: {seed: one.after[VARIANTS[0]] for seed, one in by_seed.items()}
        for name, by_seed in runs.items()
    } | {
        name: {seed: one.right for seed, one in by_seed.items()}
        for name, by_seed in answers.items()
    }
    tables = {
        mark: [
            *_table_of_arms(part.arms, runs),
            _table_of_answers(part.answers, answers),
            (_table_of_claims if part.is_test else _table_of_changes)(part.claims, right),
        ]
        for mark, part in parts.items()
    }
    if {(arm, seed) for arm in _BLAMING for seed in runs.get(arm, ())} <= finished.keys():
        tables[_BLAME] = [markdown(_BLAME_HEAD, _blame_rows(finished))]
    text = page.read_text(encoding="utf-8")
    for mark, found in tables.items():
        start, end = _marks(mark)
        before, _, rest = text.partition(start)
        text = "\n\n".join([before + start, *found, end + rest.partition(end)[2]])
    page.write_text(text, encoding="utf-8")
    save(page.with_suffix(".json"), runs, answers)
    if replaced:
        print(f"{page}: {replaced} runs replace others, such as those of another processor")


def _table_of_arms(arms: Iterable[str], outcomes: Runs) -> tuple[str, str]:
    found = {name: outcomes[name] for name in arms if name in outcomes}
    seconds = [one.seconds for by_seed in found.values() for one in by_seed.values()]
    return (
        f"{len(seconds)} runs; together {sum(seconds) / 60:.0f} minutes of one core.",
        markdown(_ARMS_HEAD, (_arm_row(name, by_seed) for name, by_seed in found.items())),
    )


def _table_of_answers(names: Iterable[str], answers: Answers) -> str:
    found = (_answers_row(name, answers[name]) for name in names if name in answers)
    return markdown(_ANSWERS_HEAD, found)


def _table_of_claims(claims: Sequence[Claim], right: Mapping[str, Verdicts]) -> str:
    return markdown(_CLAIMS_HEAD, map(_claim_row, test_claims(claims, right)))


def _table_of_changes(claims: Sequence[Claim], right: Mapping[str, Verdicts]) -> str:
    """No claim is decided here: no correction, no verdict."""
    rows = (
        (*_claim_row(one)[:-2], *_levels(one.claim, right)) for one in test_claims(claims, right)
    )
    return markdown(_COMPARED_HEAD, rows)


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


def _answers_row(name: str, by_seed: Mapping[int, SampledAnswers]) -> tuple[str, ...]:
    found = list(by_seed.values())
    contested = sum(one.contested for one in found)
    chosen, chance = (
        sum(share * one.contested for share, one in zip(shares, found, strict=True))
        for shares in ([one.chosen for one in found], [one.chance for one in found])
    )
    asked, read = sum(one.asked for one in found), sum(one.read for one in found)
    return (
        name,
        str(len(found)),
        *_spread([one.right for one in found]),
        _percent(mean(one.any_right for one in found)),
        f"{contested:,}",
        *(_percent(share / max(contested, 1)) for share in (chosen, chance)),
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
        for kind in (kind for kind, count in by_kind.most_common() if count >= _MINIMUM_ANSWERS):
            part = [one for one in found if kind in ("all", one.wrong)]
            shares = (
                mean(one.wrong in one.blamed for one in part),
                mean(one.blamed == {one.wrong} for one in part),
                mean(bool(one.blamed - {one.wrong}) for one in part),
            )
            yield (arm, kind, f"{len(part):,}", *map(_percent, shares))


def _claim_row(result: TestResult) -> tuple[str, ...]:
    claim, found = result.claim, result.difference
    return (
        claim.source,
        claim.better,
        claim.worse,
        f"{100 * found.mean:+.1f}",
        f"[{100 * found.low:+.1f}, {100 * found.high:+.1f}]",
        f"{found.p:.4f}",
        f"{result.corrected:.4f}",
        result.verdict,
    )


def _levels(claim: Claim, right: Mapping[str, Verdicts]) -> tuple[str, str, str]:
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
