"""Which clauses make a result wrong: clause-wise execution (EXPO-SQL, algorithm 1, appendix A.2).

A step whose effect is among the differences between the gold result and the predicted one is
blamed. Parts of the prediction are compared with the corresponding ones of the gold query: the
operands of a set operation, and the query before ORDER BY and LIMIT choose rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from rewards.expo.attributes import is_distinct
from rewards.expo.clauses import Clause, item_name, scan_clauses
from rewards.expo.differences import (
    CANDIDATES,
    OF_COLUMNS,
    Differences,
    leads_away,
)
from rewards.expo.steps import (
    MAX_STEP_ROWS,
    Part,
    Step,
    Steps,
    first_rows,
)
from sqlenv.sql.extraction import sources
from sqlenv.types import Table

_EVERY: Differences = frozenset(CANDIDATES)
_REMOVAL: Differences = frozenset({"row_subset", "row_emptied", "row_dedup"})
# The differences that a step can make; others are not looked for.
_POSSIBLE: dict[Part, Differences] = {
    "source": _EVERY,
    "where": _REMOVAL,
    "select": _EVERY,
    "having": _REMOVAL,
    "limit": _REMOVAL,
    "order": frozenset({"row_order"}),
    "compound": frozenset(),
}
_NOTHING: Differences = frozenset()
_MISSING: Differences = frozenset({"row_subset"})
_MORE: Differences = frozenset({"row_superset"})
_ORDER: Differences = frozenset({"row_order"})


def find_blamed(steps: Steps, golds: Steps, sought: Differences) -> frozenset[int]:
    """Number the clauses whose own effect is part of what is wrong with the result.

    None if no clause stands out. The gold query's result has its columns named by their
    attributes, `sought` is what sets the results apart (D*).
    """
    plan, theirs = steps.plan, golds.plan
    if cut := _blame_cut(steps, golds, sought):
        return cut
    if len(plan.operands) == 1:
        chain = (*plan.operands[0], *plan.tail)
        return _blame_part(chain, theirs.body, steps, golds, sought)
    blamed: set[int] = set()
    is_paired = len(plan.operands) == len(theirs.operands)
    for at, chain in enumerate(plan.operands):
        gold = theirs.operands[at][-1] if is_paired else theirs.body
        if wanted := _apart(steps, chain[-1], golds, gold):
            blamed |= _blame_part(chain, gold, steps, golds, wanted)
    blamed |= _blame_chain([plan.body, *plan.tail], steps, sought)
    return frozenset(blamed) or _before_operators(steps.clauses, len(plan.operands))


def _blame_cut(steps: Steps, golds: Steps, sought: Differences) -> frozenset[int]:
    """Blame LIMIT, the ORDER BY before it, or both, where the rows that they choose from are
    right.
    """
    order, limit = steps.plan.order, steps.plan.limit
    is_cut = limit or (order and golds.plan.limit)
    if not is_cut or sought & OF_COLUMNS or not _is_right_before(steps, golds):
        return frozenset()
    is_size = len(steps.result.rows) == len(golds.result.rows)
    is_window = steps.window == golds.window if golds.plan.limit else is_size
    if order and limit and not is_window and not _is_right_order(order, steps, golds):
        return frozenset((*order.clauses, *limit.clauses))
    chosen = order if order and (is_window or not limit) else limit
    return frozenset(chosen.clauses if chosen else ())


def _is_right_order(order: Step, steps: Steps, golds: Steps) -> bool:
    """Tell whether the gold query's rows are those that its own LIMIT would take from the rows as
    the prediction orders them; True where that cannot be told.
    """
    rows, gold = steps.rows(order), golds.result
    start = int(golds.window[1]) if golds.window[1].isdigit() else 0
    if rows is None or len(rows.rows) < start + len(gold.rows):
        return True
    chosen = Table(rows.columns, rows.rows[start : start + len(gold.rows)])
    found = steps.differences(gold, order, steps.named(order, chosen))
    return not (found if golds.plan.order else found - _ORDER)


def _is_right_before(steps: Steps, golds: Steps) -> bool:
    """Tell whether ORDER BY and LIMIT choose from the same rows as in the gold query; if it has no
    LIMIT, from all rows of its result, and maybe more.
    """
    body, gold = steps.plan.body, golds.plan.body
    rows = steps.rows(body)
    if rows and len(rows.rows) > MAX_STEP_ROWS:
        return bool(golds.plan.limit) and steps.count(body) == golds.count(gold)
    found = _apart(steps, body, golds, gold)
    return found is not None and found <= (_NOTHING if golds.plan.limit else _MORE)


def _apart(steps: Steps, step: Step, golds: Steps, gold: Step) -> Differences | None:
    """Name what sets a part of the prediction apart from one of the gold query, order aside."""
    own, reference = steps.rows(step), golds.rows(gold)
    if own is None or reference is None:
        return None
    own, reference = steps.named(step, own), golds.named(gold, reference)
    return steps.differences(reference, step, own) - _ORDER


def candidates(clauses: Sequence[Clause], sought: Differences) -> frozenset[int]:
    """Number the clauses that can cause one of the differences (table 12)."""
    kinds = {kind for difference in sought for kind in CANDIDATES[difference]}
    return frozenset(number for number, clause in enumerate(clauses) if clause.kind in kinds)


def with_items(sql: str, blamed: frozenset[int]) -> frozenset[int]:
    """Add the WITH items where a blamed FROM or JOIN reads one (table 15)."""
    clauses = scan_clauses(sql)
    items = {n: item_name(c.text(sql)) for n, c in enumerate(clauses) if c.kind == "WITH"}
    reading = [clauses[n] for n in blamed if clauses[n].kind in ("FROM", "JOIN")] if items else []
    read = {s.table for c in reading for s in sources(sql) if c.start <= s.start < c.stop}
    return blamed | frozenset(items) if read & {*items.values()} else blamed


def _blame_part(
    chain: Sequence[Step], gold: Step, steps: Steps, golds: Steps, wanted: Differences
) -> frozenset[int]:
    """Blame clauses of a part for what sets it apart (algorithm 1).

    If no step makes the difference, the clauses that can make it are blamed, if possible those of
    the first step that leaves other rows than the gold query's. A SELECT that computes values is
    not blamed for the rows that it gets. SELECT and GROUP BY are one step, which is blamed if only
    one of the queries has a GROUP BY: without it SQLite gives one row, that of a maximum too.
    """
    part = [step for step in chain if step not in steps.plan.tail]
    parting = _parting(part, steps, gold, golds)
    if parting and parting.star and "row_partial" in wanted:
        return frozenset(parting.clauses)
    select = next(step for step in part if step.part == "select")
    is_apart = wanted == {"row_disjoint"} or parting is select
    if is_apart and _groups(steps, select) != _groups(golds, gold):
        return frozenset(select.clauses)
    blamed = _blame_chain(chain, steps, wanted)
    if "col_count" in wanted:
        blamed |= _blame_source(chain[0], steps, golds.result.width)
    if blamed:
        return frozenset(blamed)
    near = frozenset(parting.clauses if parting else ())
    able = candidates(steps.clauses, wanted) & {number for step in chain for number in step.clauses}
    is_alike = is_distinct(steps.sql, chain[0].operand) == is_distinct(golds.sql, gold.operand)
    if "row_created" in wanted or ("row_dedup" in wanted and is_alike):
        able |= near  # a filter lets through what the gold query's does not
    return with_items(steps.sql, able & near or able or near)


def _groups(steps: Steps, step: Step) -> bool:
    """Tell whether the SELECT of a step has a GROUP BY."""
    return any(c.kind == "GROUP BY" and c.operand == step.operand for c in steps.clauses)


def _parting(chain: Sequence[Step], steps: Steps, gold: Step, golds: Steps) -> Step | None:
    """Find the first step that leaves more or fewer rows than the gold query's, else SELECT.

    `gold` is the part that the chain corresponds to. None if one of them has no FROM, if a step
    does not run, or if the prediction lacks the clause. If a WHERE reads tables that the gold query
    joins, rows are compared from there on.
    """
    gold_chain = next((found for found in golds.plan.operands if found[-1] is gold), ())
    own, known = ({step.part: step for step in found} for found in (chain, gold_chain))
    if not ("source" in own and "source" in known):
        return None
    step, reference = own["source"], known["source"]
    moved = (_tables(own.get("where", step)) - _tables(step)) & _tables(reference)
    parts: tuple[Part, ...] = ("source", "where", "select", "having")
    for part in parts:
        step, reference = own.get(part, step), known.get(part, reference)
        if part == "source" and moved:
            continue
        counts = steps.count(step), golds.count(reference)
        if None in counts or counts[0] != counts[1]:
            return None if None in counts else own.get(part)
    return own["select"]


def _tables(step: Step) -> set[str]:
    return {source.table for source in sources(step.sql)}


def _blame_source(step: Step, steps: Steps, gold_width: int) -> set[int]:
    """Blame FROM and its JOINs where they have fewer columns than the gold result (figure 5)."""
    table = steps.rows(step) if step.part == "source" else None
    return set(step.clauses) if table and table.width < gold_width else set()


def _blame_chain(chain: Sequence[Step], steps: Steps, wanted: Differences) -> set[int]:
    """Blame the steps that make a difference which is sought (algorithm 1)."""
    blamed: set[int] = set()
    is_of_rows = "row_disjoint" in wanted and not wanted & OF_COLUMNS
    for at in range(1, len(chain)):
        step = chain[at]
        sought = wanted & _POSSIBLE[step.part]
        # If all rows differ under the right columns, a filter may have removed the gold's (A.1).
        if step.part in ("where", "having") and is_of_rows:
            sought |= _MISSING
        if not sought or steps.rows(step) is None:
            continue
        # A step that cannot run is taken together with the next one that can.
        before = next((n for n in range(at - 1, -1, -1) if steps.rows(chain[n])), None)
        if before is not None and _change(steps, chain[before], step, sought) & sought:
            blamed.update(n for step in chain[before + 1 : at + 1] for n in step.clauses)
    return blamed


def _change(steps: Steps, before: Step, after: Step, sought: Differences) -> Differences:
    """Name what a step changes, as far as it is sought."""
    left, right = steps.rows(before), steps.rows(after)
    assert left is not None
    assert right is not None
    is_removal = _POSSIBLE[after.part] == _REMOVAL and bool(right.rows)
    if is_removal and len(left.rows) > MAX_STEP_ROWS:
        counts = [steps.count(step) for step in (before, after)] if sought & _MISSING else []
        return _MISSING if None not in counts and len(set(counts)) == 2 else _NOTHING
    left, right = first_rows(left, MAX_STEP_ROWS), first_rows(right, MAX_STEP_ROWS)
    if after.part == "order":
        # Both have the same rows, though the first ones may all differ.
        return _NOTHING if left.rows == steps.like(right, left).rows else _ORDER
    if "col_name" in sought:
        left, right = steps.named(before, left), steps.named(after, right)
    found = steps.differences(left, after, right)
    is_width = "col_count" in found and not sought & OF_COLUMNS
    return found - {"row_disjoint"} if is_width else found


def _before_operators(clauses: Sequence[Clause], operands: int) -> frozenset[int]:
    """Number the clauses that the operators of a set operation are counted with (section 3.1)."""
    last = {clause.operand: number for number, clause in enumerate(clauses)}
    return frozenset(last[operand] for operand in range(operands - 1))


def blame_by_execution(steps: Steps, gold: Table) -> frozenset[int]:
    """Number the clauses whose steps lead away from the gold result, without types (table 5)."""
    plan = steps.plan
    chains = [(*plan.operands[0], *plan.tail)]
    if len(plan.operands) > 1:
        chains = [*plan.operands, (plan.body, *plan.tail)]
    blamed: set[int] = set()
    for chain in chains:
        blamed |= _blame_away(chain, steps, gold) | _blame_source(chain[0], steps, gold.width)
    return frozenset(blamed)


def _blame_away(chain: Sequence[Step], steps: Steps, gold: Table) -> set[int]:
    blamed: set[int] = set()
    before: Table | None = None
    waiting: list[int] = []
    for step in chain:
        waiting += step.clauses
        after = steps.rows(step)
        if after is None:
            continue
        after = steps.like(after, gold)
        # The first rows of a large result do not tell what a filter removes.
        is_cut = before is not None and len(before.rows) > MAX_STEP_ROWS and step.part != "order"
        if before is not None and not (is_cut and after.rows) and leads_away(gold, before, after):
            blamed.update(waiting)
        before, waiting = after, []
    return blamed
