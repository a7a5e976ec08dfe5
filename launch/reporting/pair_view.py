"""One prediction beside its gold query, as a page in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text
from rich.tree import Tree

from launch.reporting.pairing import IndexPair, pair_results
from launch.tables import SHOWN_ROWS, clean
from rewards.execution import KnownColumns
from rewards.progress.tree import Node, build_tree
from rewards.workbench import PairScore
from sqlenv.evaluators.equality import is_ordered
from sqlenv.prompts.tags import TAG_SENTENCES
from sqlenv.types import Result, Row, Table, Value, describe_failure

_CELL_CHARS = 40
_COLUMN_CHARS = 12  # of the terminal's width for a column of results
_DIFFERS = "bold red"
_SAME = "green"
_CLAUSES = ("select", "tables", "join", "where", "group", "having", "order")


def render_page(
    sql: str,
    gold_sql: str,
    score: PairScore,
    columns: KnownColumns | None = None,
    *,
    width: int = 120,
) -> Group:
    """Lay a prediction out: clauses, results, trees and what every family says."""
    trees = (_tree("gold", gold_sql, columns), _tree("prediction", sql, columns))
    return Group(
        Panel(Text(clean(gold_sql)), title="gold", title_align="left"),
        Panel(_clauses(sql, score), title="prediction, by clause reward", title_align="left"),
        _results(score.gold, score.predicted, gold_sql, width),
        *_witness(score, gold_sql, width),
        Columns(trees, padding=(0, 4)),
        _tags(score),
        _numbers(score),
    )


def _clauses(sql: str, score: PairScore) -> RenderableType:
    """Colour each clause by its reward: the highest green, the lowest red."""
    if not score.rewards:
        return Text("no SQL", style=_DIFFERS)
    text = Text()
    for clause, reward in score.clauses():
        style = _SAME if reward > 0 else _DIFFERS
        if score.verdict.case == "error" and reward > min(score.rewards):
            style = "yellow"
        text.append(clean(clause.text(sql)), style=style)
        text.append(f"  {clause.kind} {reward:+.2f}\n", style="dim")
    text.rstrip()
    return text


def _witness(score: PairScore, gold_sql: str, width: int) -> Iterator[RenderableType]:
    """Show the small database on which a query that looks right is wrong."""
    found = score.refutation
    if found is None:
        if score.witnesses:
            yield Text(f"right on {score.witnesses} witnesses too", style=_SAME)
        return
    yield Text(
        f"right by luck: on witness {found.number} of {score.witnesses}, with these rows, the "
        "queries give different results",
        style=_DIFFERS,
    )
    for name, rows in found.tables.items():
        if isinstance(rows, Table):
            table = RichTable(*map(clean, rows.columns), title=clean(name), title_justify="left")
            for row in rows.rows:
                table.add_row(*(clean(_cell(value)) for value in row))
            yield table
    yield _results(found.gold, found.predicted, gold_sql, width)


def _results(
    gold_result: Result, predicted_result: Result, gold_sql: str, width: int
) -> RenderableType:
    """Show both results as one table of paired rows, and why one of them is none."""
    results = {"gold": gold_result, "predicted": predicted_result}
    parts: list[RenderableType] = []
    for name, result in results.items():
        if not isinstance(result, Table):
            text = Text(clean(describe_failure(result)), style=_DIFFERS)
            parts.append(Panel(text, title=f"{name} result"))
    gold, predicted = (
        each if isinstance(each, Table) else Table((), ()) for each in results.values()
    )
    found = pair_results(gold.rows, predicted.rows, widths=(gold.width, predicted.width))
    # Rows that differ come first: a page shows only the beginning.
    pairs = sorted(
        found.rows,
        key=lambda row: None not in row and not found.differs(gold.rows, predicted.rows, row),
    )
    if is_ordered(gold_sql):
        pairs = list(zip_longest(range(len(gold.rows)), range(len(predicted.rows))))
    names = [_beside(_at(gold.columns, a), _at(predicted.columns, b)) for a, b in found.columns]
    lines = [names, *(_line(gold, predicted, row, found.columns) for row in pairs[:SHOWN_ROWS])]
    columns = list(zip(*lines, strict=True))
    # Of columns that do not fit those that differ come first.
    same = [all(cell.style != _DIFFERS for cell in column) for column in columns]
    first = sorted(range(len(columns)), key=same.__getitem__)
    shown = [columns[at] for at in sorted(first[: max(1, width // _COLUMN_CHARS)])]
    table = RichTable(*(Column(cells[0], overflow="ellipsis", no_wrap=True) for cells in shown))
    for row in zip(*(cells[1:] for cells in shown), strict=True):
        table.add_row(*row)
    sizes = [f"{len(each.rows):,} rows, {each.width} columns" for each in (gold, predicted)]
    title = f"gold result: {sizes[0]}; predicted result: {sizes[1]}"
    if len(shown) < len(columns) or len(pairs) > SHOWN_ROWS:
        title += f"; here {len(lines) - 1} rows, {len(shown)} columns"
    return Group(*parts, Text(title, style="bold"), table)


def _line(gold: Table, own: Table, row: IndexPair, columns: Sequence[IndexPair]) -> list[Text]:
    first, second = (
        None if n is None else side.rows[n] for side, n in zip((gold, own), row, strict=True)
    )
    if first is not None and second is not None:
        return [_beside(_text(first, a), _text(second, b)) for a, b in columns]
    sign, places = (
        ("+", [b for _, b in columns]) if first is None else ("-", [a for a, _ in columns])
    )
    one = first or second or ()
    return [Text("" if n is None else f"{sign} {_cell(one[n])}", style=_DIFFERS) for n in places]


def _text(row: Row, place: int | None) -> str | None:
    return None if place is None else _cell(row[place])


def _at(names: Sequence[str], place: int | None) -> str | None:
    return None if place is None else names[place]


def _beside(gold: str | None, predicted: str | None) -> Text:
    """Show two texts as one where they are the same; a mark as well as a colour tells others."""
    if gold == predicted:
        return Text(clean(gold or ""))
    return Text(clean(f"{gold or ''} ≠ {predicted or ''}"), style=_DIFFERS)


def _cell(value: Value) -> str:
    """Write a value so that text and number can be told apart."""
    if value is None:
        return "NULL"
    if isinstance(value, str | bytes):
        value = value[:_CELL_CHARS]
    return repr(value)[:_CELL_CHARS]


def _tree(title: str, sql: str, columns: KnownColumns | None) -> Tree:
    root = build_tree(sql, columns)
    tree = Tree(Text(f"{title} tree", style="bold"))
    if root is None:
        tree.add(Text("does not parse", style=_DIFFERS))
    for child in root.children if root else ():
        _grow(tree, child)
    return tree


def _grow(tree: Tree, node: Node) -> None:
    branch = tree.add(Text(clean(f"{node.kind} {node.name}".strip()), style="bold"))
    for name in _CLAUSES:
        if features := getattr(node.profile, name, None):
            is_distinct = name == "select" and getattr(node.profile, "distinct", False)
            distinct = "distinct " if is_distinct else ""
            branch.add(Text(clean(f"{distinct}{name}: {', '.join(sorted(features))}")))
    for child in node.children:
        _grow(branch, child)


def _tags(score: PairScore) -> RenderableType:
    diagnosis = score.diagnosis
    if diagnosis.tags:
        lines = [f"{tag}: {TAG_SENTENCES[tag]}" for tag in diagnosis.tags]
    elif not (diagnosis.pred_parsed and diagnosis.gold_parsed):
        lines = ["no tags: a query does not parse"]
    else:
        lines = ["no tags: the structures agree"]
    return Text("\n".join(lines), style="yellow" if diagnosis.tags else "dim")


def _numbers(score: PairScore) -> RichTable:
    """Show the record of a score, but for what stands above."""
    table = RichTable(show_header=False)
    for name, said in score.record().items():
        parts = said if isinstance(said, dict) else {"": said}
        shown = {key: each for key, each in parts.items() if key not in ("tags", "rewards")}
        table.add_row(name, "  ".join(f"{key} {_number(each)}" for key, each in shown.items()))
    return table


def _number(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
