"""Spider 2's comparison of result tables, which it reads from CSV files with pandas.

Source: xlang-ai/Spider2, spider2-lite/evaluation_suite/evaluate.py, at e12c5f1e6550. A prediction's
rows go through a CSV file there, so that its values get the types that pandas guesses from text;
here through a text, with pandas as well (`pip install '.[spider2]'`).
"""

from __future__ import annotations

import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minirl.exchange import UserError
from sqlenv.types import Row, Table

CsvCell = str | int | float | bool
"""A value as pandas reads it; NaN where there is none."""
CsvColumn = tuple[CsvCell, ...]

_TOLERANCE = 0.01
_CHUNK_ROWS = 500  # rows that the program writes at a time; pandas chooses types for each such part
_VARIANT = re.compile(r"_[a-z]\Z")


@dataclass(frozen=True, slots=True)
class Reference:
    """What a question of Spider 2 takes for right: of each result the columns to look for.

    `tables` are these results with all of their columns.
    """

    golds: tuple[tuple[CsvColumn, ...], ...]
    ignore_order: bool = False
    tables: tuple[Table, ...] = field(default=(), compare=False)


def read_references(folder: Path) -> dict[str, Reference]:
    """Read the gold results of all questions, by `instance_id`, from the suite's folder `gold/`."""
    standard, results = folder / "spider2lite_eval.jsonl", folder / "exec_result"
    if not results.is_dir():
        raise UserError(f"{results}: no such folder; give the gold folder of Spider 2's evaluation")
    files: defaultdict[str, list[Path]] = defaultdict(list)
    for path in sorted(results.glob("*.csv")):
        files[_VARIANT.sub("", path.stem)].append(path)
    references = {}
    for record in map(json.loads, _read(standard).splitlines()):
        name, chosen = record["instance_id"], record.get("condition_cols")
        references[name] = _reference(name, files[name], chosen, record.get("ignore_order"))
    return references


def _reference(name: str, files: Sequence[Path], chosen: Any, ignore_order: Any) -> Reference:
    """Read the golds of a question as far as the program does: it stops where columns lack."""
    alone = [path for path in files if path.stem == name]
    frames = [_frame(_read(path)) for path in alone or files]
    choices = _choices(chosen, len(frames), is_base=bool(alone))
    golds: list[tuple[CsvColumn, ...]] = []
    for frame, columns in zip(frames, choices, strict=False):
        try:
            golds.append(_columns(frame.iloc[:, columns] if columns else frame))
        except (IndexError, TypeError):
            break
    tables = tuple([_table(_columns(frame)) for frame in frames])
    return Reference(tuple(golds), bool(ignore_order), tables)


def _choices(chosen: Any, count: int, *, is_base: bool) -> list[Any]:
    """Say which columns of each gold to look for, none for all.

    Of one file with a letter behind its name the program takes the first number, and 0 for none.
    """
    if chosen in (None, [], [[]], [None]):
        return [[]] * count
    is_nested = all(isinstance(each, list) for each in chosen)
    if is_base or (count > 1 and not is_nested):
        return [chosen] * count
    return [each if isinstance(each, list) else [each] if each else [] for each in chosen]


def fenced_sql(text: str) -> str:
    """Return what stands in the first fence marked `sql`, else the whole text."""
    found, end, _ = text.partition("```sql\n")[2].partition("\n```")
    return found.strip() if end else text


def agrees(predicted: Table, reference: Reference) -> bool:
    """Say whether every gold column equals some predicted column, for any of the gold results.

    Names, other columns and the order of columns do not matter; the rows of each column are
    compared in order, or sorted as text. Numbers agree within 0.01, and no value is the same as 0.
    """

    def prepare(column: CsvColumn) -> CsvColumn:
        column = tuple([0 if value != value else value for value in column])
        if not reference.ignore_order:
            return column
        return tuple(sorted(column, key=lambda one: (str(one), isinstance(one, int | float))))

    def is_there(gold: CsvColumn) -> bool:
        gold = prepare(gold)
        return any(len(gold) == len(one) and all(map(_equal, gold, one)) for one in columns)

    columns = [prepare(column) for column in columns_of_rows(predicted.rows, predicted.width)]
    return any(all(map(is_there, golds)) for golds in reference.golds)


def _equal(one: CsvCell, other: CsvCell) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return math.isclose(float(one), float(other), abs_tol=_TOLERANCE)


def as_read(result: Table) -> Table:
    """Give a result the values that it has once written to a file and read, as the golds."""
    read = _table(columns_of_rows(result.rows, result.width))
    return replace(read, columns=result.columns)


def _table(columns: Sequence[CsvColumn]) -> Table:
    """Lay columns out as a result: NaN is no value. Nothing that reads it looks at names."""
    values = ((None if value != value else value for value in column) for column in columns)
    return Table(("",) * len(columns), tuple(zip(*values, strict=True)))


def columns_of_rows(rows: Sequence[Row], width: int) -> tuple[CsvColumn, ...]:
    """Type the values of a result as pandas does once it wrote them to a file and read them."""
    pandas, text = _pandas(), io.StringIO()
    text.write(",".join(f"c{number}" for number in range(width)) + "\n")
    for start in range(0, len(rows), _CHUNK_ROWS):
        part = pandas.DataFrame.from_records(list(rows[start : start + _CHUNK_ROWS]))
        part.to_csv(text, header=False, index=False)
    return _columns(_frame(text.getvalue()))


def _frame(text: str) -> Any:
    """Read a CSV file with a header; an empty one has no columns."""
    pandas = _pandas()
    return pandas.read_csv(io.StringIO(text)) if text.strip() else pandas.DataFrame()


def _columns(frame: Any) -> tuple[CsvColumn, ...]:
    """Take columns out as the program does, which makes all numbers of one type."""
    return tuple([tuple(column) for column in frame.transpose().to_numpy().tolist()])


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise UserError("spider2-local is judged with pandas: pip install '.[spider2]'") from None
    return pandas


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); download it again") from None
