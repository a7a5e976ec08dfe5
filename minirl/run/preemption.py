"""Preemption: a cluster's SIGTERM, Ctrl-C, or a terminal that is closed.

A signal may come between any two operations, also where arrays were donated to an update and
nothing holds the new ones yet. So the handler only records it, and work that can be abandoned calls
`check`. JAX's preemption service does neither: it needs `jax.distributed` even for one process,
knows SIGTERM alone, and answers at the next step, after minutes of rollout.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

POLL_S = 0.2
"""Longest wait between two checks for a signal."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Preempted(BaseException):
    """Work was abandoned because of a signal; its text says what is saved."""

    def __init__(self, number: int, saved: str = "what is done is saved") -> None:
        super().__init__(saved)
        self.signal = signal.Signals(number)


class _Received:
    """The number of the signal that came, of which a process has one handler."""

    def __init__(self) -> None:
        self.signal: int | None = None
        # Takes this process's signal or None; returns one that any process had.
        self.shared: Callable[[int | None], int | None] = lambda signal: signal

    def handle(self, number: int, _frame: FrameType | None = None) -> None:
        if number == signal.SIGINT == self.signal:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait
        if number == signal.SIGHUP:
            _leave_terminal()
        self.signal = number


def _leave_terminal() -> None:
    """Print no more to a terminal that is gone: that would fail, in the middle of saving."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


_received = _Received()


@contextmanager
def watched() -> Generator[None]:
    """Record signals while the block runs, but for those that are ignored, as SIGHUP by nohup; a
    second Ctrl-C interrupts at once.
    """
    heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _received.handle) for number in heard}
    try:
        yield
    finally:
        _received.signal = None
        for number, handler in before.items():
            signal.signal(number, handler)


def share(shared: Callable[[int | None], int | None]) -> None:
    """Let the processes of a run know of each other's signals (`_Received.shared`)."""
    _received.shared = shared


def noticed() -> int | None:
    """Return the signal that came to any process of the run; None without any."""
    return _received.shared(_received.signal)


def check() -> None:
    """Raise `Preempted` if a signal came: for work that loses nothing when it is abandoned."""
    number = noticed()
    if number is not None:
        raise Preempted(number)
