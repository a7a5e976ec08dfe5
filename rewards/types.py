"""What a reward family is asked of an episode, and says of it.

The learner, which imports none of this, has protocols named `CreditSpan` and `Score`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlenv.types import AttemptKind


@dataclass(frozen=True, slots=True)
class CreditSpan:
    """Credit for the characters [start, end) of the reply of one turn (0-based)."""

    turn: int
    start: int
    end: int
    value: float


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one trajectory.

    Attributes:
        total: What the learner maximises, dimensionless.
        correct: Execution match of the last attempt; never shaped.
        parts: The named summands of `total`.
        spans: Clause-level credit, empty for trajectory-level families.
    """

    total: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[CreditSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of an episode that is over: its text, its query, and what it was."""

    text: str
    sql: str
    kind: AttemptKind = "answer"
