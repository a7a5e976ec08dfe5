"""The result of a finished run, as the terminal shows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel
from rich.table import Table as RichTable

from launch import cli

_Interval = tuple[float, float]


class Result(BaseModel):
    """What result.json holds that the terminal shows."""

    questions: int
    ex_before: float
    ex_before_ci95: _Interval
    ex_after: float
    ex_after_ci95: _Interval
    gain: float
    gain_ci95: _Interval
    mean_turns_first: float
    mean_turns: float
    rewards_first: Mapping[str, float]
    rewards: Mapping[str, float]
    refuted_share_first: float | None = None
    refuted_share: float | None = None


def show(result: Result, folder: Path) -> None:
    """Print what a run learned, where it is, and the command that shows more."""
    cli.output.print(_table(result))
    cli.output.print(f"Run folder: {folder}", soft_wrap=True)
    command = cli.command("launch.report", folder)
    cli.output.print(f"To look at it: {command}", soft_wrap=True, markup=False)


def _table(found: Result) -> RichTable:
    table = RichTable("", "before", "after", title="Held-out questions and training episodes")
    asked = f"execution accuracy, {found.questions} questions (95 % interval)"
    before = _points(found.ex_before, found.ex_before_ci95, " %")
    table.add_row(asked, before, _points(found.ex_after, found.ex_after_ci95, " %"))
    table.add_row("gain in points (95 % interval)", "", _points(found.gain, found.gain_ci95))
    table.add_section()
    turns = (f"{mean:.2f}" for mean in (found.mean_turns_first, found.mean_turns))
    table.add_row("turns of a training episode (first and last 10 steps)", *turns)
    if found.refuted_share is not None and found.refuted_share_first is not None:
        luck = (f"{100 * one:.1f} %" for one in (found.refuted_share_first, found.refuted_share))
        table.add_row("of the answers that look right, refuted by a witness", *luck)
    for name, value in found.rewards.items():
        table.add_row(f"reward: {name}", f"{found.rewards_first[name]:.3f}", f"{value:.3f}")
    return table


def _points(share: float, interval: _Interval, unit: str = "") -> str:
    low, high = interval
    return f"{100 * share:.1f}{unit} [{100 * low:.1f}, {100 * high:.1f}]"
