"""One prediction beside its gold query, as a page in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.panel import Panel
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text
from rich.tree import Tree

from rewards.config import TreeConfig
from rewards.progress.normalisation import schema_of
from rewards.progress.tree import Node, build_tree
from rewards.workbench import PairScore
from sqlenv.envs.diagnosed import describe_failure
from sqlenv.envs.tags import TAG_SENTENCES
from sqlenv.evaluators.equality import is_ordered
from sqlenv.types import Result, Row, Table, Value

SHOWN_ROWS = 20
_CELL_CHARS = 40
_SOUGHT_ROWS = 50  # rows of each side among which the most alike are paired
_DIFFERS = "bold red"
_SAME = "green"
_CLAUSES = ("select", "tables", "join", "where", "group", "having", "order")
_NO_CELL = object()  # stands where the other result has no cell

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
        shared = [differing_cells(row, other).count(False) for other in near]
        best = max(range(len(near)), key=shared.__getitem__, default=None)
        if best is None or not shared[best]:
            apart.append(row)
        else:
            yield row, near.pop(best)
    yield from zip_longest([*apart, *gold[_SOUGHT_ROWS:]], [*near, *far])


def differing_cells(left: Row | None, right: Row | None) -> list[bool]:
    """Say of each column whether two rows differ there; a cell that one lacks differs."""
    pairs = zip_longest(left or (), right or (), fillvalue=_NO_CELL)
    return [ours is not theirs and ours != theirs for ours, theirs in pairs]


def clean(text: str) -> str:
    """Replace what a terminal would obey, such as escape sequences; line ends stay."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
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


def _results(score: PairScore, gold_sql: str, width: int) -> RenderableType:
    gold, predicted = score.gold, score.predicted
    if isinstance(gold, Table) and isinstance(predicted, Table):
        pairs = align(gold, predicted, in_order=is_ordered(gold_sql))
    elif isinstance(gold, Table):
        pairs = [(row, None) for row in gold.rows]
    else:
        pairs = [(None, row) for row in predicted.rows] if isinstance(predicted, Table) else []
    sides = (("gold result", gold), ("predicted result", predicted))
    half = (width - 1) // 2
    return Columns([_result(*titled, pairs, side, half) for side, titled in enumerate(sides)])


def _result(
    title: str, result: Result, pairs: Sequence[RowPair], side: int, width: int
) -> RenderableType:
    if not isinstance(result, Table):
        return Panel(
            Text(clean(describe_failure(result)), style=_DIFFERS), title=title, width=width
        )
    rows = [_cells(pair, side, result.width) for pair in pairs[:SHOWN_ROWS]]
    names = [Text(clean(name)[:_CELL_CHARS]) for name in result.columns]
    shown = _fitting(list(zip(names, *rows, strict=True)), width)
    table = RichTable(*(Column(names[at]) for at in shown))
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    left_out = [f"the first {SHOWN_ROWS} of {len(pairs):,}"] if len(pairs) > SHOWN_ROWS else []
    left_out += [f"{len(shown)} of {result.width} columns"] if len(shown) < result.width else []
    table.caption = "; ".join(left_out) or None
    count = f"{len(result.rows):,} rows, {result.width} columns"
    return Constrain(Group(Text(f"{title}: {count}", style="bold"), table), width)


def _fitting(columns: Sequence[Sequence[Text]], width: int) -> list[int]:
    """Choose columns that fit side by side, and of these first the ones with marks."""
    sizes = [max(cell.cell_len for cell in column) + 3 for column in columns]
    plain = [not any(cell.style == _DIFFERS for cell in column) for column in columns]
    chosen: list[int] = []
    for at in sorted(range(len(columns)), key=plain.__getitem__):
        if not chosen or 1 + sizes[at] + sum(sizes[other] for other in chosen) <= width:
            chosen.append(at)
    return sorted(chosen)


def _cells(pair: RowPair, side: int, width: int) -> list[Text]:
    row = pair[side]
    if row is None:
        return [Text("")] * width
    # A mark as well as a colour: pages are also read in files.
    return [
        Text(f"≠ {_cell(value)}", style=_DIFFERS) if differs else Text(_cell(value))
        for value, differs in zip(row, differing_cells(*pair), strict=False)
    ]


def _cell(value: Value) -> str:
    """Write a value so that text and number can be told apart."""
    if value is None:
        return "NULL"
    if isinstance(value, str | bytes):
        value = value[:_CELL_CHARS]
    return repr(value)[:_CELL_CHARS]


def _tree(title: str, sql: str, columns: Mapping[str, Sequence[str]] | None) -> Tree:
    root = build_tree(sql, schema_of(columns), TreeConfig())
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
    verdict = score.verdict
    blamed = ", ".join(verdict.clauses[number].kind for number in sorted(verdict.blamed))
    differences = ", ".join(sorted(verdict.differences))
    expo = f"{verdict.case}  differences {differences or 'none'}  blamed {blamed or 'none'}"
    table = RichTable("", "", show_header=False)
    for name, line in {
        "status": f"{score.status}, {score.seconds:.3f} s",
        "EX": "  ".join(f"{mode} {int(ok)}" for mode, ok in score.ex.items()),
        "Progress-SQL": f"struct {score.diagnosis.struct:.3f}  lexical {score.lexical:.3f}",
        "EXPO-SQL": expo,
        "PaVeRL-SQL": f"EX_f {score.ex_f:.3f}  EX_b {score.ex_b:.0f}  reward {score.paverl:.2f}",
        "SQL-ASTRA": f"CSMR {score.csmr:.3f}",
    }.items():
        table.add_row(name, line)
    return table
