"""How long JAX's compiler has been at work.

The compiler is listened to (`watch_compiler`), and a display asks from a thread of its own
(`status`). The work itself never asks: the words depend on time.

What a compilation has freed is returned to the system before its program runs, which else would
take its memory beside it.
"""

from __future__ import annotations

from functools import cache
from time import perf_counter

from minirl.exchange.memory import trim

# What JAX's events of tracing, lowering and compiling begin with.
_COMPILER = "/jax/core/compile/"
# Shorter compilations are not worth a word.
_LEAST_S = 1.0

# When its events began that have not ended, the longest open one first: one lies inside of another.
_open: list[float] = []


def status() -> str:
    """Say how long a program has been compiled for; empty where none is."""
    seconds = max((perf_counter() - began for began in _open[:1]), default=-1.0)
    return f"compiling for {seconds:.0f} s" if seconds >= _LEAST_S else ""


@cache
def watch_compiler() -> None:
    """Listen to JAX's compiler from now on, once."""
    from jax import monitoring  # commands without a model do without JAX

    monitoring.register_scalar_listener(_begin)
    monitoring.register_event_duration_secs_listener(_end)


def _begin(event: str, value: float, **facts: str | int) -> None:
    del value, facts
    if event.startswith(_COMPILER):
        _open.append(perf_counter())


def _end(event: str, duration_secs: float, **facts: str | int) -> None:
    del facts
    if event.startswith(_COMPILER) and _open:
        _open.pop()
        if duration_secs >= _LEAST_S:
            trim()
