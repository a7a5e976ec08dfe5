"""A run that ends at any moment, by an error, a signal or a kill, goes on as if it never had."""

from __future__ import annotations

import signal

import pytest

from minirl.run import preemption
from minirl.run.preemption import Preempted
from tests.plain_model import assert_same

from . import toy_run
from .processes import LIMIT_S, ends, start


class DiedError(Exception):
    """Stands for a kill: the trainer it went through is not used again."""


def die():
    raise DiedError


# What ends a run, in which step, before which call (of a mini-batch), and the checkpoints there are
# then: the newest two and the best; they are due every second step.
LIVES = (
    (die, 2, "advance", 1, []),
    # The step is whole but for its validation.
    (toy_run.be_told, 2, "_apply", 1, ["2"]),
    (toy_run.die, 4, "rename", 1, ["2"]),
    (die, 6, "update", 2, ["2", "4"]),
    (toy_run.be_told, 6, "advance", 1, ["2", "4", "5"]),
    (toy_run.be_told, 6, "save", 1, ["2", "5", "6"]),
)


@pytest.mark.timeout(LIMIT_S + 120)
def test_a_run_of_everything_that_ends_six_times(toy, copies, tmp_path):
    """Two stages, dynamic sampling, mini-batches, a correction, skipped updates."""
    whole = toy_run.take_course(toy, tmp_path / "whole", "all")
    toy_run.run(whole, "all", lambda *_: None)
    lines = toy_run.metrics_of(tmp_path / "whole")
    assert {line["update/skipped"] for line in lines} > {0.0}
    # Dynamic sampling fills the batch or gives up.
    rounds = [line["groups/rounds"] for line in lines]
    assert max(rounds) > 1
    assert whole._facts.rollouts == sum(rounds)
    assert all(n == 3 or line["groups/trained"] == 4 for n, line in zip(rounds, lines, strict=True))
    folder = tmp_path / "run"
    for end, step, moment, nth, saved in LIVES:
        if end is toy_run.die:
            ((code, _, errors),) = ends(start(copies, [folder, "all", moment, step]))
            assert code == -signal.SIGKILL, errors
        else:
            trainer = toy_run.take_course(toy, folder, "all")
            toy_run.arm(trainer, moment, step, end, nth=nth)
            with preemption.watched(), pytest.raises(DiedError if end is die else Preempted):
                toy_run.run(trainer, "all", lambda *_: None)
        names = sorted(path.name for path in (folder / "checkpoints").glob("[0-9]*"))
        assert [name for name in names if "tmp" not in name] == saved
        assert (names == saved) == (end is not toy_run.die)
    trainer = toy_run.take_course(toy, folder, "all")
    assert trainer.steps_done == whole.steps_done == 6
    toy_run.run(trainer, "all", lambda *_: pytest.fail("there is nothing left"))
    assert toy_run.without_times(folder) == toy_run.without_times(tmp_path / "whole")
    sampled = (folder / toy_run.SAMPLED).read_bytes()
    assert sampled == (tmp_path / "whole" / toy_run.SAMPLED).read_bytes()
    assert_same(trainer._state, whole._state)


def test_a_second_ctrl_c_does_not_wait():
    # A shell lets what it starts in the background ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with preemption.watched():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Preempted):
            preemption.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    preemption.check()
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
