"""Tables of a command's answer fit a terminal of 80 columns."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch import cli
from launch.tables import RunResult, show_run, show_table


@pytest.fixture
def shown(monkeypatch) -> io.StringIO:
    file = io.StringIO()
    monkeypatch.setattr(cli, "output", Console(file=file, width=80))
    return file


def paired(points: float, **more: Any) -> dict[str, Any]:
    told = {"difference": points, "ci95": (points - 0.1, points + 0.1), "p": 0.5, "questions": 9}
    beside = {"means": (0, 0), "ci95_databases": None, "only_first": None, "only_second": None}
    return told | beside | more


def result(accuracy: dict[str, Any], gains: dict[str, Any]) -> RunResult:
    failing = dict(zip(accuracy, (83, 70, 5), strict=False))
    return RunResult(
        questions=500, databases=5, rule="witness", accuracy=accuracy, gains=gains,
        failing=failing, mean_turns_first=2.0, mean_turns=1.5,
        rewards_first={"alignment F": 0.25}, rewards={"alignment F": 0.5},
    )  # fmt: skip


def test_the_result_of_a_run_fits_a_terminal(shown):
    sure = {"mean": 1.0, "ci95": (0.9, 1.0)}
    accuracy = {"witness": sure, "set": {"mean": 0.5, "ci95": (0.9, 1.0)}}
    gains = {"run": {"witness": paired(-1.0), "set": paired(0.0)}}
    show_run(result({"before": accuracy, "after": accuracy}, gains), Path("runs/x"))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("┏") for line in lines) == 2  # of questions, of training
    assert shown.getvalue().count("100.0 % [90.0, 100.0]") == 2
    assert "judged by witness" in lines[0]
    assert re.search(r"set \[95 %\] +│ +50\.0 % .* 50\.0 % ", shown.getvalue())
    assert re.search(r"queries that fail +│ +83 │ +70 ", shown.getvalue())
    assert "databases" not in shown.getvalue()


def test_three_places_have_a_column_each_and_the_gains_below(shown):
    over = {"ci95_databases": (0.2, 0.4)}
    accuracy = {"witness": {"mean": 0.3, "ci95": (0.25, 0.35)} | over}
    accuracy |= {"mean@8": {"mean": 0.2, "ci95": (0.1, 0.3)}}
    flips = {"only_first": 4, "only_second": 11}
    stages = {"warm start": 0.02, "run": 0.05, "reinforcement": 0.03}
    gains = {
        stage: {"witness": paired(points, **over, **flips), "mean@8": paired(2 * points)}
        for stage, points in stages.items()
    }
    cli.output.width = 120
    show_run(result(dict.fromkeys(("before", "between", "after"), accuracy), gains), Path("x"))
    rows = [re.split(r" *[│┃] *", line)[1:-1] for line in shown.getvalue().splitlines()]
    rows = [row for row in rows if row]
    assert rows[:8] == [
        ["", "before", "between", "after"],
        ["execution accuracy [95 %]", *["30.0 % [25.0, 35.0]"] * 3],
        ["over 5 databases", *["[20.0, 40.0]"] * 3],
        ["gain in points [95 %]", "", "2.0 [-8.0, 12.0]", "5.0 [-5.0, 15.0]"],
        ["over 5 databases", "", *["[20.0, 40.0]"] * 2],
        ["questions won, lost", "", "11, 4", "11, 4"],
        ["by reinforcement", "", "", "3.0 [-7.0, 13.0]"],
        ["over 5 databases", "", "", "[20.0, 40.0]"],
    ]
    assert rows[8:13] == [
        ["questions won, lost", "", "", "11, 4"],
        ["mean@8 [95 %]", *["20.0 % [10.0, 30.0]"] * 3],
        ["gain in points [95 %]", "", "4.0 [-6.0, 14.0]", "10.0 [0.0, 20.0]"],
        ["by reinforcement", "", "", "6.0 [-4.0, 16.0]"],
        ["queries that fail", "83", "70", "5"],
    ]
    assert rows[13:15] == [["", "first steps", "last steps"], ["turns", "2.00", "1.50"]]


def test_columns_that_do_not_fit_come_below_with_the_names(shown):
    heads = ["set", *(f"a head of some length {number}" for number in range(4))]
    show_table("Sets", [heads, ["bird", *"1234"], ["spider", *"5678"]], sections=(1,))
    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("spider") == text.count("┏━") == 2
    assert all(number in text for number in "12345678")
