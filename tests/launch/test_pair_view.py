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

from launch.reporting.pair_view import clean, render_page
from launch.reporting.pairing import pair_results
from rewards.execution import columns_of
from rewards.workbench import Workbench
from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.types import SqlError, Table

from .conftest import example


@pytest.fixture(scope="module")
def bench():
    with Executor(ExecutorConfig(workers=1)) as executor:
        yield Workbench(executor)


def page(
    bench: Workbench, database: Path, gold: str, pred: str, *, width: int = 140,
    changed: Mapping[str, Any] | None = None, **how: Any,
) -> str:  # fmt: skip
    asked = example(database, gold)
    score = replace(bench.score(asked, pred), **changed or {})
    out = Console(file=io.StringIO(), width=width, **how)
    out.print(render_page(pred, gold, score, columns_of(asked), width=out.width))
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


def test_columns_are_paired_by_their_values_before_their_places():
    """A right column beside an extra one is right, wherever it is."""
    gold = [("a", 1), ("b", 2)]
    found = pair_results(gold, [(0, "b", 2), (0, "a", 1)], widths=(2, 3))
    assert found.columns == [(0, 1), (1, 2), (None, 0)]
    assert found.rows == [(0, 1), (1, 0)]
    own = [(1, "a"), (2, "x")]
    found = pair_results(gold, own, widths=(2, 2))
    assert found.columns == [(0, 1), (1, 0)]
    assert [found.differs(gold, own, row) for row in found.rows] == [[], [0]]


def test_rows_are_paired_by_their_cells():
    gold, own = [(1, "a"), (2, "b"), (3, "c")], [(2, "b"), (3, "x"), (9, "y")]
    found = pair_results(gold, own, widths=(2, 2))
    assert found.rows == [(0, None), (1, 0), (2, 1), (None, 2)]
    assert pair_results([(1,)], [(2,)], widths=(1, 1)).rows == [(0, 0)]
    assert pair_results([], [(2, [3])], widths=(1, 2)).rows == [(None, 0)]


rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=8)


@given(rows, rows)
def test_every_row_and_column_is_shown_once(left, right):
    found = pair_results(left, right, widths=(2, 2))
    for pairs, count in ((found.rows, len(left)), (found.columns, 2)):
        assert sorted(a for a, _ in pairs if a is not None) == [*range(count)]
    assert sorted(b for _, b in found.rows if b is not None) == [*range(len(right))]


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text):
    assert all(c.isprintable() or c in "\n\t" for c in clean(text))
