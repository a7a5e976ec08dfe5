"""Notice that this process is about to be stopped: a cluster's SIGTERM, or Ctrl-C.

A signal may come between any two operations, also where arrays were handed to an update and nothing
holds the new ones yet. So it is only noted; work that can be abandoned asks `check` now and then.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

LOOK_S = 0.2
"""Longest wait between two looks for a signal."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preempted(BaseException):
    """Work was abandoned because of a signal, as by `KeyboardInterrupt`; says what is saved.

    Attributes:
        signal: Which one.
    """

    def __init__(self, number: int, saved: str = "what is done is saved") -> None:
        super().__init__(saved)
        self.signal = signal.Signals(number)


class _Notice:
    """What this process knows of its end; signals belong to the process, and so does this."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.look: Callable[[int | None], int | None] = lambda own: own

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        if number == signal.SIGINT == self.signal:
            raise KeyboardInterrupt  # whoever asks twice does not want to wait
        self.signal = number


_notice = _Notice()


@contextmanager
def watched() -> Generator[None]:
    """Note signals while the block runs, in place of being ended by them.

    A second Ctrl-C interrupts at once.
    """
    before = {number: signal.signal(number, _notice.note) for number in _SIGNALS}
    try:
        yield
    finally:
        _notice.signal = None
        for number, handler in before.items():
            signal.signal(number, handler)


def share(look: Callable[[int | None], int | None]) -> None:
    """Let processes that work together know of each other's notice.

    Args:
        look: Takes the signal that this process had, or None; gives one that any of them had.
    """
    _notice.look = look


def noticed() -> int | None:
    """Return the signal that came, to this process or to one that works with it; else None."""
    return _notice.look(_notice.signal)


def check() -> None:
    """Stop here if a signal came: for work that loses nothing when it is abandoned.

    Raises:
        Preempted: It came.
    """
    number = noticed()
    if number is not None:
        raise Preempted(number)
