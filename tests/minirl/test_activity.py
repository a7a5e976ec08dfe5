"""What a process says of what it is doing: in a step of training, and while it compiles."""

from __future__ import annotations

import re
import threading
import time
from itertools import groupby

import jax
import pytest

from minirl.run import activity, distributed
from minirl.sample import decode
from minirl.train.update import Learner

from . import toy_run

LINES = {
    "prompts": re.compile(r"prompts (\d)/4, episodes 0/32"),
    "tokens": re.compile(r"prompts (\d)/4, (\d+) tokens( \([\d,]+/s\))?, episodes (\d+)/32"),
    "update": re.compile(r"update: micro-batch (\d)/2"),
}


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """Return what is said before each program of a sampler, each micro-batch and each update."""
    lines: list[str] = []

    def noting(owner, name):
        function = getattr(owner, name)

        def call(*arguments, **options):
            lines.append(activity.status())
            return function(*arguments, **options)

        call.__dict__["_cache_size"] = getattr(function, "_cache_size", None)
        monkeypatch.setattr(owner, name, call)

    noting(decode, "fill")
    noting(decode, "decode")
    noting(distributed, "check")
    noting(Learner, "_put")
    return lines


def test_a_step_tells_prompts_then_tokens_then_micro_batches(toy, tmp_path, said):
    """Four groups of eight on sixteen slots: two prompts at a time, then two micro-batches."""
    toy_run.make_trainer(toy, tmp_path, kl_every=None).step()
    kinds = [next(k for k, form in LINES.items() if form.fullmatch(line)) for line in said if line]
    assert [kind for kind, _ in groupby(kinds)] == ["prompts", "tokens", "update"]
    of = {kind: [LINES[kind].fullmatch(line) for line in said] for kind in LINES}
    found = {kind: [match for match in matches if match] for kind, matches in of.items()}
    assert [int(match[1]) for match in found["prompts"]] == [0, 1, 2]  # two fills, then a decode
    assert [int(match[1]) for match in found["update"]][:1] == [0]
    for number, last in ((1, 4), (4, 32)):
        counts = [int(match[number]) for match in found["tokens"]]
        assert counts == sorted(counts)
        assert counts[-1] <= last
    tokens = [int(match[2]) for match in found["tokens"]]
    assert tokens == sorted(tokens)
    assert max(int(match[1]) for match in found["tokens"]) == 4
    assert any(match[3] for match in found["tokens"])
    assert activity.status() == ""


def test_a_block_that_fails_says_no_more():
    def fail():
        with activity.doing(lambda: "much"):
            assert activity.status() == "much"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert activity.status() == ""


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

    with activity.doing(lambda: "prompts 0/8"):
        outer(1.0).block_until_ready()
        assert seen == ["prompts 0/8, compiling for 0 s"]
        outer(2.0).block_until_ready()
        assert activity.status() == "prompts 0/8"
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
