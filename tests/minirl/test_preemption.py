"""A run that is stopped by a signal, at any moment, ends later as if it never had been."""

from __future__ import annotations

import signal

import jax
import numpy as np
import pytest

from minirl.config import GuardConfig, OptimizerConfig
from minirl.run import preemption
from minirl.run.preemption import Preempted

from . import toy_run

# Gradients are compared with few others, and some are skipped: a resume has to know them.
COURSE = {
    "steps": 6,
    "checkpoint_every": 3,
    "optimizer": OptimizerConfig(learning_rate=0.1, weight_decay=0.0, max_grad_norm=1e-3),
    "guard": GuardConfig(max_spike=1.1, window=2),
}


def send(number=signal.SIGTERM):
    # The handler has run when this returns; after os.kill Python 3.11 may run it later.
    signal.raise_signal(number)


def trainer_of(toy, folder, moment="", step=0):
    """Make a trainer that is sent a signal at a moment of a step."""
    trainer = toy_run.make_trainer(toy, folder, validate=validate, **COURSE)
    owner = {
        "advance": trainer._sampler,
        "_accumulate": trainer._learner,
        "_apply": trainer._learner,
        "save": trainer._checkpoints,
    }
    if moment:
        target = owner.get(moment, trainer)
        function = getattr(target, moment)

        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            # A checkpoint is written after its step, everything else happens within it.
            if trainer.steps_done + (moment != "save") == step:
                send()
            return result

        setattr(target, moment, call)
    return trainer


def validate(params, version):
    preemption.check()  # as the rollouts of an evaluation do
    return toy_run.ACCURACY[version]


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer = trainer_of(toy, folder)
    trainer.run(lambda *_: None)
    return trainer, folder


# After which call the signal comes, in which step, and how many steps are whole then.
STOPS = (
    ("advance", 2, 1),
    ("_micro_batches", 2, 1),
    # The step is whole but for its validation.
    ("_apply", 2, 2),
    ("advance", 5, 4),
    ("save", 6, 6),
)


def test_stopped_five_times(toy, whole, tmp_path):
    skipped = [line["update/skipped"] for line in toy_run.metrics_of(whole[1])]
    assert set(skipped) == {0.0, 1.0}
    planned = []
    for moment, step, saved in STOPS:
        trainer = trainer_of(toy, tmp_path, moment, step)
        with preemption.watched(), pytest.raises(Preempted, match=f"all {saved} steps") as info:
            trainer.run(lambda *_: None)
        assert info.value.signal == signal.SIGTERM
        planned.append(sorted(path.name for path in (tmp_path / "checkpoints").iterdir()))
    # Where a stop has left one, it goes when the next planned one is there.
    assert planned == [["1"], ["1"], ["2"], ["3", "4"], ["3", "6"]]
    trainer = trainer_of(toy, tmp_path)
    trainer.run(lambda *_: pytest.fail("there is nothing left"))
    assert toy_run.without_times(tmp_path) == toy_run.without_times(whole[1])
    name = "trajectories.jsonl"
    assert (tmp_path / name).read_bytes() == (whole[1] / name).read_bytes()
    for ours, theirs in zip(
        jax.tree.leaves(trainer._state), jax.tree.leaves(whole[0]._state), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_a_second_ctrl_c_does_not_wait():
    # A shell lets what it starts in the background ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with preemption.watched():
        send(signal.SIGINT)
        with pytest.raises(Preempted):
            preemption.check()
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    preemption.check()
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_a_notice_is_shared():
    told = []
    before = preemption._received.shared
    try:
        preemption.share(lambda own: told.append(own) or signal.SIGTERM)
        with pytest.raises(Preempted):
            preemption.check()
        assert told == [None]
    finally:
        preemption.share(before)
