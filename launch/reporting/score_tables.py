"""What every reward family says of files of predictions or of episodes, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from rich.markup import escape
from rich.table import Column
from rich.table import Table as RichTable

from rewards.expo.reward import CASES
from rewards.progress.diagnosis import CATEGORIES, labels_of, mismatches
from rewards.workbench import MODES, STATUSES, PairScore
from sqlenv.envs.tags import TAG_SENTENCES

Means = tuple[str, Mapping[str, float]]
"""The name of a file, and its means."""

_Value = Callable[[PairScore], float | None]
"""What is averaged; None for a pair of which it cannot be said."""

_FAMILIES: tuple[Mapping[str, _Value], ...] = (
    {
        f"{status} %": lambda score, status=status: 100.0 * (score.status == status)
        for status in STATUSES
    },
    {f"EX {mode} %": lambda score, mode=mode: 100.0 * score.ex[mode] for mode in MODES},
    {
        "Progress-SQL struct": lambda score: score.diagnosis.struct,
        "Progress-SQL lex": lambda score: score.lexical,
    },
    {
        "EXPO-SQL clause reward": lambda score: score.expo,
        **{
            f"EXPO-SQL {case} %": lambda score, case=case: 100.0 * (score.verdict.case == case)
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


def _errors(*categories: str) -> _Value:
    """Give the mean share of categories in which a prediction differs, in percent."""

    def value(score: PairScore) -> float | None:
        labels = labels_of(score.diagnosis)
        if labels is None:
            return None
        found = mismatches(labels)
        return 100.0 * fmean(found[category] for category in categories)

    return value


_TREE: tuple[Mapping[str, _Value], ...] = (
    {"not parsed %": lambda score: 100.0 * (not score.diagnosis.pred_parsed)},
    {
        **{f"{category} errors %": _errors(category) for category in CATEGORIES},
        "average errors %": _errors(*CATEGORIES),
    },
    {
        f"{tag} %": lambda score, tag=tag: 100.0 * (tag in score.diagnosis.tags)
        for tag in TAG_SENTENCES
    },
)
"""What the table of Progress-SQL's diagnostic tree shows: table 8, then every tag."""

EPISODE_ROWS: Mapping[str, str] = {
    "correct": "correct",
    "turns": "turns",
    "progressive": "Progress-SQL",
    "one_shot": "Progress-SQL, one-shot baseline",
    "expo": "EXPO-SQL, clauses of the last query",
    "paverl": "PaVeRL-SQL",
    "astra": "SQL-ASTRA",
}
_COUNT = "questions"
_NAME_CHARS = 14
"""Longer names of files are broken into several lines."""


def pair_means(scores: Sequence[PairScore]) -> dict[str, float]:
    """Average what the families say of predictions; shares in percent, 0 without predictions."""
    return {
        _COUNT: len(scores),
        **{
            name: _mean([found for score in scores if (found := value(score)) is not None])
            for section in (*_TREE, *_FAMILIES)
            for name, value in section.items()
        },
    }


def episode_means(rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the families' rewards of episodes."""
    return {name: _mean([each[name] for each in rewards]) for name in EPISODE_ROWS}


def render_pairs(means: Sequence[Means], *, width: int) -> list[RichTable]:
    """Lay out the means of files of predictions, one column a file.

    Args:
        means: What `pair_means` says of each file.
        width: Of the terminal; files that do not fit beside the others have tables of their own.
    """
    tree, families = ([{name: name for name in part} for part in all] for all in (_TREE, _FAMILIES))
    return [
        *_tables("Diagnostic tree", [{_COUNT: _COUNT}, *tree], means, width),
        *_tables("Reward families, means", families, means, width),
    ]


def render_episodes(means: Sequence[Means], *, width: int) -> list[RichTable]:
    """Lay out the mean rewards of files of episodes, one column a file."""
    return list(_tables("Trajectory rewards, means", [EPISODE_ROWS], means, width))


def _tables(
    title: str, sections: Sequence[Mapping[str, str]], means: Sequence[Means], width: int
) -> Iterator[RichTable]:
    """Lay out the rows of each section, which are given with what to call them."""
    longest = max(len(label) for section in sections for label in section.values())
    fitting = max(1, (width - longest - 4) // (_NAME_CHARS + 3))
    for at in range(0, len(means), fitting):
        block = means[at : at + fitting]
        names = [
            Column(escape(name), justify="right", max_width=_NAME_CHARS, overflow="fold")
            for name, _ in block
        ]
        table = RichTable(Column(no_wrap=True), *names, title=title)
        for section in sections:
            for key, label in section.items():
                digits = 1 if label.endswith("%") else 3
                table.add_row(label, *(_shown(each[key], digits) for _, each in block))
            table.add_section()
        yield table


def _shown(value: float, digits: int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
