"""The means of every reward family over files of predictions or of episodes, as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from rich.markup import escape
from rich.table import Table as RichTable

from rewards.expo import CASES
from rewards.workbench import MODES, STATUSES, PairScore

Means = tuple[str, Mapping[str, float]]
"""The name of a file, and its means."""

_Value = Callable[[PairScore], float]

_PAIR_ROWS: tuple[Mapping[str, _Value], ...] = (
    {
        f"{status} %": lambda score, status=status: 100.0 * (score.status == status)
        for status in STATUSES.values()
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
"""What a table of predictions shows, a section a family."""

EPISODE_ROWS: Mapping[str, str] = {
    "correct": "correct",
    "turns": "turns",
    "progressive": "Progress-SQL",
    "one_shot": "Progress-SQL, one-shot baseline",
    "expo": "EXPO-SQL, clauses of the last query",
    "paverl": "PaVeRL-SQL",
    "astra": "SQL-ASTRA",
}


def pair_means(scores: Sequence[PairScore]) -> dict[str, float]:
    """Average what the families say of predictions; shares in percent, 0 without predictions."""
    rows = {name: value for section in _PAIR_ROWS for name, value in section.items()}
    return {name: _mean([value(score) for score in scores]) for name, value in rows.items()}


def episode_means(rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the families' rewards of episodes."""
    return {name: _mean([each[name] for each in rewards]) for name in EPISODE_ROWS}


def render_pairs(means: Sequence[Means]) -> RichTable:
    """Lay out the means of files of predictions, one column a file."""
    table = _table("Reward families, means", means)
    for section in _PAIR_ROWS:
        for name in section:
            digits = 1 if name.endswith("%") else 3
            table.add_row(name, *(f"{each[name]:.{digits}f}" for _, each in means))
        table.add_section()
    return table


def render_episodes(means: Sequence[Means]) -> RichTable:
    """Lay out the mean rewards of files of episodes, one column a file."""
    table = _table("Trajectory rewards, means", means)
    for name, title in EPISODE_ROWS.items():
        table.add_row(title, *(f"{each[name]:.3f}" for _, each in means))
    return table


def _table(title: str, means: Sequence[Means]) -> RichTable:
    table = RichTable("", *(escape(name) for name, _ in means), title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
