"""A prediction beside its gold query in the terminal: what is shown, marked, and that it fits."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launch.reporting.pair_view import align, clean, render_page
from rewards.workbench import Workbench
from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.types import SqlError, Table

from .conftest import example


@pytest.fixture(scope="module")
def bench():
    with Executor(ExecutorConfig(isolation="thread", workers=1)) as executor:
        yield Workbench(executor, lambda _example: {"emp": ["name", "dept", "sal"]})


def page(
    bench: Workbench, database: Path, gold: str, pred: str, *, width: int = 140,
    changed: Mapping[str, Any] | None = None, **how: Any,
) -> str:  # fmt: skip
    score = replace(bench.score(example(database, gold), pred), **changed or {})
    out = Console(file=io.StringIO(), width=width, **how)
    out.print(render_page(pred, gold, score, {"emp": ["name", "dept", "sal"]}, width=out.width))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_the_page_marks_what_differs(bench, database):
    pred = "SELECT name, sal + (sal = 30) AS sal FROM emp ORDER BY rowid"
    text = page(bench, database, "SELECT name, sal FROM emp", pred)
    assert text.count("30 ≠ 31") == text.count("≠") == 1
    for said in ("SELECT -0.50", "ORDER BY +0.50", "SELECT_ERROR", "select: emp.name, emp.sal"):
        assert said in text
    assert "test_suite False" in text
    missing = page(bench, database, "SELECT name FROM emp", "SELECT name FROM emp WHERE sal > 10")
    assert missing.count("- '") >= 1


@pytest.mark.parametrize("width", [60, 80, 140])
def test_results_fit_however_wide(bench, database, width):
    """Columns that do not fit are left out, those that differ last."""
    wide = Table(tuple(f"column_{n}" for n in range(40)), (tuple(range(40)),))
    other = Table(wide.columns, ((*range(30), "x", *range(31, 40)),))
    for predicted in (other, SqlError("no such column: " + "x" * 90)):
        results = {"gold": wide, "predicted": predicted}
        text = page(bench, database, "SELECT", "SELECT", width=width, changed=results)
        assert all(len(line) <= width for line in text.splitlines())
        assert "30 ≠ 'x'" in text if predicted is other else "no such column" in text


def test_the_page_colours_clauses_by_reward(bench, database):
    pred, gold = "SELECT name FROM emp ORDER BY age", "SELECT name FROM emp"
    text = page(bench, database, gold, pred, force_terminal=True, color_system="standard")
    assert "\x1b[33mSELECT name\x1b[0m" in text  # not to blame for the error
    assert "\x1b[1;31mORDER BY age\x1b[0m" in text
    assert "no such column: age" in text


@pytest.mark.parametrize(
    "pred", ["", "\x1b[2Jx", "SELECT '[red]' AS \"[/]\"", "SELECT x'00', '\x1b[1m'", "DROP TABLE t"]
)
def test_the_page_shows_any_prediction(bench, database, pred):
    text = page(bench, database, "SELECT name FROM nowhere", pred)
    assert "\x1b" not in text
    assert "no such table: nowhere" in text
    page(bench, database, "SELECT name FROM emp", pred)


def table(*rows: Any) -> Table:
    return Table(tuple("abc"[: len(rows[0])] if rows else "a"), rows)


def test_rows_are_paired():
    gold, predicted = table((1, "a"), (2, "b"), (3, "c")), table((2, "b"), (3, "x"))
    assert align(gold, predicted, in_order=True) == [
        ((1, "a"), (2, "b")),
        ((2, "b"), (3, "x")),
        ((3, "c"), None),
    ]
    assert align(gold, predicted, in_order=False) == [
        ((3, "c"), (3, "x")),
        ((1, "a"), None),
        ((2, "b"), (2, "b")),
    ]


rows = st.lists(st.tuples(st.integers(0, 3)), max_size=8)


@given(rows, rows, st.booleans())
def test_every_row_is_shown_once(left, right, in_order):
    pairs = align(table(*left), table(*right), in_order=in_order)
    assert sorted(row for row, _ in pairs if row is not None) == sorted(left)
    assert sorted(row for _, row in pairs if row is not None) == sorted(right)


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text):
    assert all(c.isprintable() or c in "\n\t" for c in clean(text))
