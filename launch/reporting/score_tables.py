"""What every reward family says of files of predictions or of episodes, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import fmean

from rich.table import Table as RichTable

from launch.reporting.tables import fitting
from rewards.expo.reward import CASES
from rewards.progress.diagnosis import CATEGORIES, labels_of, mismatches
from rewards.workbench import MODES, STATUSES, PairScore
from sqlenv.prompts.tags import TAG_SENTENCES

Means = tuple[str, Mapping[str, float]]
"""The name of a file, and its means."""

_Value = Callable[[PairScore], float | None]
"""What is averaged; None for a pair of which it cannot be said."""


def _share(test: Callable[[PairScore], object]) -> _Value:
    return lambda score: 100.0 * bool(test(score))


def _errors(*categories: str) -> _Value:
    """Give the mean share of categories in which a prediction differs, in percent."""

    def value(score: PairScore) -> float | None:
        labels = labels_of(score.diagnosis)
        if labels is None:
            return None
        found = mismatches(labels)
        return 100.0 * fmean(found[category] for category in categories)

    return value


_FAMILIES: tuple[Mapping[str, _Value], ...] = (
    {f"{one} %": _share(lambda score, one=one: score.status == one) for one in STATUSES},
    {f"EX {mode} %": _share(lambda score, mode=mode: score.ex[mode]) for mode in MODES},
    {
        "Progress-SQL struct": lambda score: score.diagnosis.struct,
        "Progress-SQL lex": lambda score: score.lexical,
    },
    {
        "EXPO-SQL clause reward": lambda score: score.expo,
        **{
            f"EXPO-SQL {case} %": _share(lambda score, case=case: score.verdict.case == case)
            for case in CASES
        },
    },
    {
        "PaVeRL-SQL EX_f": lambda score: score.ex_f,
        "PaVeRL-SQL EX_b": lambda score: score.ex_b,
        "PaVeRL-SQL reward": lambda score: score.paverl,
    },
    {"SQL-ASTRA CSMR": lambda score: score.csmr},
)
"""What the table of the families shows, a section a family."""
_TREE: tuple[Mapping[str, _Value], ...] = (
    {"not parsed %": _share(lambda score: not score.diagnosis.pred_parsed)},
    {
        **{f"{category} errors %": _errors(category) for category in CATEGORIES},
        "average errors %": _errors(*CATEGORIES),
    },
    {
        f"{tag} %": _share(lambda score, tag=tag: tag in score.diagnosis.tags)
        for tag in TAG_SENTENCES
    },
)
"""What the table of Progress-SQL's diagnostic tree shows: table 8, then every tag."""
_EPISODES: Mapping[str, str] = {
    "correct": "correct",
    "turns": "turns",
    "progressive": "Progress-SQL",
    "one_shot": "Progress-SQL, one-shot baseline",
    "expo": "EXPO-SQL, clauses of the last query",
    "paverl": "PaVeRL-SQL",
    "astra": "SQL-ASTRA",
}
_COUNT = "questions"


def pair_means(scores: Sequence[PairScore]) -> dict[str, float]:
    """Average what the families say of predictions; shares in percent, 0 without predictions."""
    means: dict[str, float] = {_COUNT: len(scores)}
    for section in (*_TREE, *_FAMILIES):
        for name, value in section.items():
            found = [number for score in scores if (number := value(score)) is not None]
            means[name] = fmean(found) if found else 0.0
    return means


def episode_means(rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the families' rewards of episodes."""
    return {
        label: fmean(each[name] for each in rewards) if rewards else 0.0
        for name, label in _EPISODES.items()
    }


def render_pairs(means: Sequence[Means], *, width: int) -> list[RichTable]:
    """Lay out what `pair_means` says of each file, one column a file; files that do not fit beside
    the others in a terminal of this width have tables of their own.
    """
    return [
        *_tables("Diagnostic tree", [(_COUNT,), *_TREE], means, width),
        *_tables("Reward families, means", _FAMILIES, means, width),
    ]


def render_episodes(means: Sequence[Means], *, width: int) -> list[RichTable]:
    """Lay out the mean rewards of files of episodes, one column a file."""
    return list(_tables("Trajectory rewards, means", [_EPISODES.values()], means, width))


def _tables(
    title: str, sections: Sequence[Iterable[str]], means: Sequence[Means], width: int
) -> Iterator[RichTable]:
    names = [name for section in sections for name in section]
    forms = [",d" if name == _COUNT else "z.1f" if name.endswith("%") else "z.3f" for name in names]
    columns = [
        (file, *(format(each[name], form) for name, form in zip(names, forms, strict=True)))
        for file, each in means
    ]
    ends = list(accumulate(len(list(section)) for section in sections))
    return fitting(title, [("", *names), *columns], naming=1, width=width, sections=ends)
