"""What is kept, that it comes back as it was, and what a user is told of a damaged one."""

import errno
import gc
import os
import re
import shutil
import threading
import time
from contextlib import closing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from minirl.exchange import UserError
from minirl.run.checkpoint import Checkpoints, best_step, read_params
from minirl.train.update import TrainState
from tests.plain_model import assert_same
from tests.waiting import wait_until

# Where one array of a damaged checkpoint cannot be read, Orbax leaves its reads of the others
# behind: they find their event loop closed, or are never awaited.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind():
    """Let what Orbax left end and be collected here, not in the middle of another file's test."""
    yield
    time.sleep(1)
    gc.collect()


def make_tree(seed=0, *, width=24) -> Any:
    """Make weights of two kinds with their optimizer state."""
    rng = np.random.default_rng(seed)
    params: Any = {
        "embed": jnp.asarray(rng.normal(size=(32, width)), jnp.float32),
        "layers": [jnp.asarray(rng.normal(size=width), jnp.bfloat16) for _ in range(2)],
    }
    state = optax.adamw(1e-3).init(params)
    return TrainState(params, jax.tree.map(lambda leaf: leaf + 1, state))


def save_all(folder, scores):
    with closing(Checkpoints(folder)) as checkpoints:
        for step, score in scores.items():
            checkpoints.save(step, make_tree(step), {"step": step}, score=score)


def steps_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def restore(folder, like, kind=dict):
    with closing(Checkpoints(folder)) as checkpoints:
        return checkpoints.restore_newest(like, kind)


def test_a_step_that_is_written_anew_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    """A stop came between a step and its evaluation, and a kill while it was written with that."""
    save_all(tmp_path, {3: None})

    def killed(*_, **__):
        raise KeyboardInterrupt

    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(checkpoints._manager, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(3, make_tree(3), {"step": 3}, score=0.5)
    tree, facts = restore(tmp_path, make_tree(99))
    assert_same(tree, make_tree(3))
    assert facts == {"step": 3}
    save_all(tmp_path, {3: 0.5})
    assert best_step(tmp_path) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_the_newest_and_of_an_older_best_the_weights_are_kept_also_across_a_resume(tmp_path):
    with closing(Checkpoints(tmp_path / "new")) as checkpoints:
        assert (checkpoints.newest_step(), checkpoints.best_step()) == (0, None)
    save_all(tmp_path, {1: 0.1, 2: 0.9, 3: 0.3, 4: None, 5: 0.4})
    assert steps_in(tmp_path) == [2, 4, 5]
    assert sorted(path.parent.name for path in tmp_path.glob("*/optimizer")) == ["4", "5"]
    assert_same(read_params(tmp_path / "2", make_tree().params), make_tree(2).params)
    left = shutil.copytree(tmp_path, tmp_path / "left")
    for step in (4, 5):  # whoever deletes the newest two does not go on from the best
        shutil.rmtree(left / f"{step}")
    with closing(Checkpoints(left)) as checkpoints:
        assert (checkpoints.newest_step(), checkpoints.best_step()) == (0, 2)
    with closing(Checkpoints(tmp_path)) as checkpoints:
        assert (checkpoints.newest_step(), checkpoints.best_step()) == (5, 2)
        # What a stop leaves, where there is none of this step, is one of the newest and not the
        # best.
        for step in (5, 6):
            checkpoints.leave(step, make_tree(9), {})
        assert steps_in(tmp_path) == [2, 5, 6]
        assert (checkpoints.newest_step(), checkpoints.best_step()) == (6, 2)
        assert_same(read_params(tmp_path / "5", make_tree().params), make_tree(5).params)
        # A better one takes the place of the best, and of what a stop left before its evaluation.
        checkpoints.save(6, make_tree(6), {"step": 6}, score=0.95)
    assert (steps_in(tmp_path), best_step(tmp_path)) == ([5, 6], 6)
    assert restore(tmp_path, make_tree())[1] == {"step": 6}


def test_what_is_restored_equals_what_was_saved_in_a_folder_of_any_name(tmp_path):
    folder = tmp_path / "p[x]*" / "r 1ü?"
    save_all(folder, {1: 0.5, 7: 0.25})
    # The tree handed in gives shapes and types only.
    tree, facts = restore(folder, make_tree(seed=99))
    assert_same(tree, make_tree(7))
    assert facts == {"step": 7}
    moved = folder.rename(tmp_path / "plain")
    assert best_step(moved) == 1
    assert_same(read_params(moved / "7", tree.params), tree.params)
    with pytest.raises(UserError, match=r"/7: facts: step .*delete that"):
        restore(moved, make_tree(), dict[str, list])
    wider, other = make_tree(width=32), make_tree()._replace(opt_state={"other": jnp.zeros(3)})
    for like, named in ((wider, "embed"), (other, "other")):
        told = rf"7: a checkpoint of another model: .*{named}.*run\.dir"
        with pytest.raises(UserError, match=told):
            restore(moved, like)


def test_whichever_file_is_cut_the_user_is_told_or_nothing_is_lost(tmp_path):
    whole, tree = tmp_path / "whole", make_tree(1)
    save_all(whole, {1: 0.0})
    harmful, told = [], []
    names = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        try:
            assert_same(restore(folder, tree)[0], tree)
        except UserError as error:
            harmful.append(name)
            told.append(re.fullmatch(rf".*{folder}/1.*delete.*", str(error)))
    # The arrays themselves lie in the largest file.
    assert max(names, key=lambda name: (whole / name).stat().st_size) in harmful
    assert len(harmful) >= 6
    assert all(told)


def test_what_is_written_shares_no_memory_with_what_may_be_overwritten(tmp_path, monkeypatch):
    checkpoints, written = Checkpoints(tmp_path), []
    monkeypatch.setattr(checkpoints._manager, "save", lambda step, args, **_: written.append(args))
    leaves = jnp.arange(1024.0), jnp.arange(64.0)
    checkpoints.save(1, TrainState(*({"w": leaf} for leaf in leaves)), {}, score=0.0)  # ty: ignore
    written = [written[0][name].item for name in ("tree", "optimizer")]
    for tree, leaf in zip(written, leaves, strict=True):
        (copy,) = tree.values()
        assert copy.unsafe_buffer_pointer() != leaf.unsafe_buffer_pointer()
        np.testing.assert_array_equal(copy, leaf)
    checkpoints.close()


def full_at_the_folder(monkeypatch):
    """A full disk at the start of a save; in the background Orbax would wait for the folder."""
    mkdir = os.mkdir

    def full(path, *rest, **named):
        if "orbax-checkpoint-tmp" in os.fspath(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
        mkdir(path, *rest, **named)

    monkeypatch.setattr(os, "mkdir", full)


def full_at_an_array(monkeypatch):
    """A full disk in the middle of a save comes from TensorStore, as a `ValueError`."""
    error = ValueError("RESOURCE_EXHAUSTED: " + "a/long/path/" * 20 + ": No space left on device")

    async def full(*_arguments, **_named):
        raise error

    monkeypatch.setattr("orbax.checkpoint._src.serialization.serialization.ts.open", full)


@pytest.mark.parametrize(
    ("fill", "call"),
    [(full_at_the_folder, "save"), (full_at_an_array, "close")],
)
def test_a_full_disk_is_told_by_this_call_or_the_next_and_nothing_waits(
    tmp_path, monkeypatch, fill, call
):
    """One that has no room from the start is in `test_hosts.py`."""
    save_all(tmp_path, {1: 0.0})
    checkpoints = Checkpoints(tmp_path)
    fill(monkeypatch)
    save = partial(checkpoints.save, 2, make_tree(2), {}, score=0.0)
    calls = [save, save if call == "save" else getattr(checkpoints, call)]
    with pytest.raises(UserError, match="No space left on device") as info:
        _ = [one() for one in calls]
    checkpoints.close()
    assert f"{tmp_path}: no checkpoint can be written there" in str(info.value)
    assert "\n" not in str(info.value)
    # No thread of Orbax holds the process.
    threads = threading.enumerate
    wait_until(lambda: not any(type(one).__module__.startswith("orbax") for one in threads()))
    monkeypatch.undo()
    assert steps_in(tmp_path) == [1]
    assert_same(restore(tmp_path, make_tree())[0], make_tree(1))


def test_what_a_kill_left_is_no_checkpoint_and_takes_no_room_for_ever(tmp_path):
    """The run goes on and saves this step or others: a state for 7B would be 91 GB, once a kill."""
    save_all(tmp_path, {1: 0.0})
    for name in ("2.orbax-checkpoint-tmp-1", "4.orbax-checkpoint-tmp"):
        left = shutil.copytree(tmp_path / "1", tmp_path / name)
        (left / "metrics" / "metrics").write_text("{")
    assert best_step(tmp_path) == 1  # who only looks leaves them
    assert len([*tmp_path.glob("*-tmp*")]) == 2
    with closing(Checkpoints(tmp_path)) as checkpoints:
        assert checkpoints.newest_step() == 1
        for step in (2, 3):
            checkpoints.save(step, make_tree(step), {}, score=0.0)
    assert_same(restore(tmp_path, make_tree())[0], make_tree(3))
    assert not [*tmp_path.rglob("*-tmp*")]
    assert steps_in(tmp_path) == [2, 3]


@pytest.mark.parametrize("text", ["{", "{}", '{"score": null}'])
def test_a_damaged_score_names_its_checkpoint(tmp_path, text):
    save_all(tmp_path, {1: 0.5, 4: 0.25})
    path = tmp_path / "4" / "metrics" / "metrics"
    path.write_text(text)
    for read in (Checkpoints, best_step):
        with pytest.raises(UserError, match=f"^{path}: .*delete {tmp_path / '4'} to resume"):
            read(tmp_path)
    shutil.rmtree(tmp_path / "4")
    assert best_step(tmp_path) == 1
