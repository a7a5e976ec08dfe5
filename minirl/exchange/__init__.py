"""What the learner and the SQL side exchange. Without JAX, and all that the SQL side imports of the
learner.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


class UserError(Exception):
    """A mistake of the user: one line with what is wrong, where, and what to do."""


class LostError(UserError):
    """Servers or environments are gone; what is done can be saved, to go on from later."""


@contextmanager
def named(key: str) -> Generator[None]:
    """Lead mistakes that are found by the setting or option that they are of."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; the role is system, user, assistant or tool."""

    role: str
    content: str


ROLES = re.compile(r"<(?=[|\uff5c][^<>\s]{1,40}[|\uff5c]>|/?s>|</?SYS>>)|\[(?=/?INST\])")
"""Begins the tokens of roles as models write them: for texts that another's tokenizer reads."""


def broken(text: str, marks: re.Pattern[str] = ROLES) -> str:
    """Break the marks of turns in a text after their first characters, by a ZERO WIDTH SPACE, of
    which a reader sees nothing.
    """
    return marks.sub("\\g<0>\u200b", text)


@dataclass(frozen=True, slots=True)
class CreditSpan:
    """The credit of each token in the characters [start, end) of the reply of a turn (from 0)."""

    turn: int
    start: int
    end: int
    value: float


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one episode.

    Attributes:
        total: What the learner maximises, dimensionless.
        correct: Whether the answer is right; never shaped.
        parts: The named summands of `total`.
        spans: Credit of parts of replies (clauses, turns), empty for rewards of whole episodes.
    """

    total: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[CreditSpan, ...] = ()
