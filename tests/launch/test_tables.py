"""Tables of a command's answer fit a terminal of 80 columns."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from launch import cli
from launch.tables import Accuracies, RunResult, show_run, show_table


@pytest.fixture
def shown(monkeypatch) -> io.StringIO:
    file = io.StringIO()
    monkeypatch.setattr(cli, "output", Console(file=file, width=80))
    return file


def test_the_result_of_a_run_is_one_table(shown):
    ci95 = (0.9, 1.0)
    result = RunResult(
        questions=500, ex_before=1.0, ex_before_ci95=ci95, ex_after=1.0, ex_after_ci95=ci95,
        gain=-1.0, gain_ci95=(-1.0, -0.9), mean_turns_first=2.0, mean_turns=1.5,
        rewards_first={"alignment F": 0.25}, rewards={"alignment F": 0.5}, rule="witness",
        official={"set": Accuracies(
            ex_before=0.5, ex_before_ci95=ci95, ex_after=0.5, ex_after_ci95=ci95,
            gain=0.0, gain_ci95=ci95,
        )},
    )  # fmt: skip
    show_run(result, Path("runs/x"))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("┏") for line in lines) == 1
    assert shown.getvalue().count("100.0 % [90.0, 100.0]") == 2
    assert "judged by witness" in lines[0]
    assert re.search(r"by set \[95 %\] +│ +50\.0 % .* 50\.0 % ", shown.getvalue())


def test_columns_that_do_not_fit_come_below_with_the_names(shown):
    heads = ["set", *(f"a head of some length {number}" for number in range(4))]
    show_table("Sets", [heads, ["bird", *"1234"], ["spider", *"5678"]], sections=(1,))
    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("spider") == text.count("┏━") == 2
    assert all(number in text for number in "12345678")
