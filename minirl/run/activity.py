"""How long JAX's compiler has been at work.

The compiler is listened to (`watch_compiler`), and a display asks from a thread of its own
(`status`). The work itself never asks: the words depend on time.
"""

from __future__ import annotations

import threading
from functools import cache
from time import perf_counter

# What JAX's events of tracing, lowering and compiling begin with.
_COMPILER = "/jax/core/compile/"
# Shorter compilations are not worth a word.
_LEAST_S = 1.0

# By thread: when its first event began, and how many are open, for one lies inside of another.
_compiling: dict[int, tuple[float, int]] = {}


def status() -> str:
    """Say how long a program has been compiled for; empty where none is."""
    now = perf_counter()
    longest_s = max((now - began for began, _ in list(_compiling.values())), default=-1.0)
    return f"compiling for {longest_s:.0f} s" if longest_s >= _LEAST_S else ""


@cache
def watch_compiler() -> None:
    """Listen to JAX's compiler from now on, once."""
    from jax import monitoring  # commands without a model do without JAX

    monitoring.register_scalar_listener(_begin)
    monitoring.register_event_duration_secs_listener(_end)


def _begin(event: str, value: float, **facts: str | int) -> None:
    del value, facts
    if event.startswith(_COMPILER):
        began, count = _compiling.get(thread := threading.get_ident(), (perf_counter(), 0))
        _compiling[thread] = began, count + 1


def _end(event: str, duration_secs: float, **facts: str | int) -> None:
    del duration_secs, facts
    if event.startswith(_COMPILER) and (thread := threading.get_ident()) in _compiling:
        began, count = _compiling.pop(thread)
        if count > 1:
            _compiling[thread] = began, count - 1
