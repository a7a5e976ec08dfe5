"""What a process says while it compiles."""

from __future__ import annotations

import threading
import time

import jax
import pytest

from minirl.run import activity


def test_it_is_compiling_only_while_it_compiles(monkeypatch):
    monkeypatch.setattr(activity, "_LEAST_S", 0.0)
    activity.watch_compiler()
    seen: list[str] = []

    @jax.jit
    def outer(x):
        @jax.jit
        def inner(x):
            return x + 1

        # Tracing what lies inside of this ends before this ends.
        x = inner(x)
        asker = threading.Thread(target=lambda: seen.append(activity.status()))
        asker.start()
        asker.join()
        return x * 2

    outer(1.0).block_until_ready()
    assert seen == ["compiling for 0 s"]
    outer(2.0).block_until_ready()
    assert len(seen) == 1
    assert activity.status() == ""


def test_a_program_that_does_not_compile_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(activity, "_LEAST_S", 0.0)
    activity.watch_compiler()
    with pytest.raises(ZeroDivisionError):
        jax.jit(lambda x: x / (0 // 0))(1.0)
    assert activity.status() == ""


def test_short_compilations_are_not_worth_a_word():
    activity.watch_compiler()
    seen: list[str] = []
    jax.jit(lambda x: (seen.append(activity.status()), x)[1])(1.0)

    def slow(x):
        time.sleep(1.1)
        seen.append(activity.status())
        return x

    jax.jit(slow)(1.0)
    assert seen == ["", "compiling for 1 s"]
