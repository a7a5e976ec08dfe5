"""Does EXPO-SQL's credit blame the clause that is wrong? Read from the answers of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewards.expo.clauses import ClauseKind, scan_clauses


@dataclass(frozen=True, slots=True)
class Blame:
    """A wrong answer that differs from the gold query in clauses of one kind, which it has.

    Attributes:
        wrong: That kind.
        blamed: Kinds with a clause whose credit is below 0.
    """

    wrong: ClauseKind
    blamed: frozenset[ClauseKind]


def read_blame(run: Path) -> Iterator[Blame]:
    """Read the answers of single-turn episodes that ran, were wrong, and differ in one kind."""
    with (run / "trajectories.jsonl").open(encoding="utf-8") as file:
        for group in map(json.loads, file):
            for trajectory in group.get("trajectories", ()):
                [turn] = trajectory["turns"]
                if not trajectory["correct"] and turn["result"]["status"] == "ok":
                    yield from _blame(group["gold"], turn, trajectory["spans"])


def _blame(gold: str, turn: Mapping[str, Any], spans: Sequence[Sequence[float]]) -> Iterator[Blame]:
    sql = turn["sql"]
    own, wanted = _by_kind(sql), _by_kind(gold)
    differing = [kind for kind in own.keys() | wanted.keys() if own.get(kind) != wanted.get(kind)]
    if len(differing) != 1 or differing[0] not in own:
        return
    place = turn["reply"].index(sql)
    blamed = {
        clause.kind
        for clause in scan_clauses(sql)
        for _, start, end, credit in spans
        if credit < 0 and start <= clause.start + place < end
    }
    yield Blame(differing[0], frozenset(blamed))


def _by_kind(sql: str) -> dict[ClauseKind, list[str]]:
    found: dict[ClauseKind, list[str]] = {}
    for clause in scan_clauses(sql):
        found.setdefault(clause.kind, []).append(" ".join(clause.text(sql).lower().split()))
    return {kind: sorted(texts) for kind, texts in found.items()}
