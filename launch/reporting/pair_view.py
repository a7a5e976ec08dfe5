"""One prediction beside its gold query, as a page in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text
from rich.tree import Tree

from launch.reporting.tables import SHOWN_ROWS, clean
from rewards.progress.normalisation import known_columns
from rewards.progress.tree import Node, build_tree
from rewards.workbench import PairScore
from sqlenv.envs.diagnosed import describe_failure
from sqlenv.evaluators.equality import is_ordered
from sqlenv.prompts.tags import TAG_SENTENCES
from sqlenv.types import Row, Table, Value

_CELL_CHARS = 40
_COLUMN_CHARS = 12  # of the terminal's width for a column of results
_SOUGHT_ROWS = 50  # rows of each side among which the most alike are paired
_DIFFERS = "bold red"
_SAME = "green"
_CLAUSES = ("select", "tables", "join", "where", "group", "having", "order")

RowPair = tuple[Row | None, Row | None]


def render_page(
    sql: str,
    gold_sql: str,
    score: PairScore,
    columns: Mapping[str, Sequence[str]] | None = None,
    *,
    width: int = 120,
) -> Group:
    """Lay a prediction out: clauses, results, trees and what every family says."""
    trees = (_tree("gold", gold_sql, columns), _tree("prediction", sql, columns))
    return Group(
        Panel(Text(clean(gold_sql)), title="gold", title_align="left"),
        Panel(_clauses(sql, score), title="prediction, by clause reward", title_align="left"),
        _results(score, gold_sql, width),
        Columns(trees, padding=(0, 4)),
        _tags(score),
        _numbers(score),
    )


def align(gold: Table, predicted: Table, *, in_order: bool) -> list[RowPair]:
    """Pair the rows of two results: by their place if `in_order`; else rows that differ, the most
    alike together, then equal rows. None stands where a side has no row.
    """
    if in_order:
        return list(zip_longest(gold.rows, predicted.rows))
    equal = Counter(gold.rows) & Counter(predicted.rows)
    rest = (list((Counter(side.rows) - equal).elements()) for side in (gold, predicted))
    # Rows that differ come first: a page shows only the beginning.
    return [*_pair_by_likeness(*rest), *((row, row) for row in equal.elements())]


def _pair_by_likeness(gold: list[Row], predicted: list[Row]) -> Iterator[RowPair]:
    """Pair each gold row with the predicted one that shares most cells, then what is left."""
    apart: list[Row] = []
    near, far = predicted[:_SOUGHT_ROWS], predicted[_SOUGHT_ROWS:]
    for row in gold[:_SOUGHT_ROWS]:
        shared = [sum(a == b for a, b in zip(row, other, strict=False)) for other in near]
        best = max(range(len(near)), key=shared.__getitem__, default=None)
        if best is None or not shared[best]:
            apart.append(row)
        else:
            yield row, near.pop(best)
    yield from zip_longest([*apart, *gold[_SOUGHT_ROWS:]], [*near, *far])


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


def _results(score: PairScore, gold_sql: str, width: int) -> RenderableType:
    """Show both results as one table of paired rows, and why one of them is none."""
    results = {"gold": score.gold, "predicted": score.predicted}
    parts: list[RenderableType] = []
    for name, result in results.items():
        if not isinstance(result, Table):
            text = Text(clean(describe_failure(result)), style=_DIFFERS)
            parts.append(Panel(text, title=f"{name} result"))
    gold, predicted = (
        each if isinstance(each, Table) else Table((), ()) for each in results.values()
    )
    pairs = align(gold, predicted, in_order=is_ordered(gold_sql))
    names = [_beside(*pair) for pair in zip_longest(gold.columns, predicted.columns)]
    lines = [names, *map(_line, pairs[:SHOWN_ROWS])]
    columns = list(zip_longest(*lines, fillvalue=Text("")))
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


def _line(pair: RowPair) -> list[Text]:
    gold, predicted = pair
    if gold is not None and predicted is not None:
        return [_beside(*each) for each in zip_longest(map(_cell, gold), map(_cell, predicted))]
    sign = "+" if gold is None else "-"
    return [Text(f"{sign} {_cell(value)}", style=_DIFFERS) for value in gold or predicted or ()]


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


def _tree(title: str, sql: str, columns: Mapping[str, Sequence[str]] | None) -> Tree:
    root = build_tree(sql, known_columns(columns))
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
