"""What every reward family says of files of predictions or of episodes, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
_NAME_CHARS = 14  # longer names of files are broken into several lines


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
    longest = max(len(name) for section in sections for name in section)
    fitting = max(1, (width - longest - 4) // (_NAME_CHARS + 3))
    for at in range(0, len(means), fitting):
        block = means[at : at + fitting]
        names = [
            Column(escape(name), justify="right", max_width=_NAME_CHARS, overflow="fold")
            for name, _ in block
        ]
        table = RichTable(Column(no_wrap=True), *names, title=title)
        for section in sections:
            for name in section:
                form = ",d" if name == _COUNT else ".1f" if name.endswith("%") else ".3f"
                table.add_row(name, *(format(each[name], form) for _, each in block))
            table.add_section()
        yield table
