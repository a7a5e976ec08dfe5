"""What is kept, that it comes back as it was, and what a user is told of a damaged one."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
import time
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from minirl.errors import UserError
from minirl.run.checkpoint import Checkpoints, best_step
from minirl.train.update import TrainState

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


def assert_equal(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for leaf, twin in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert leaf.dtype == twin.dtype
        np.testing.assert_array_equal(leaf, twin)


def save_all(folder, scores, *, keep=2):
    checkpoints = Checkpoints(folder, keep=keep)
    for step, score in scores.items():
        checkpoints.save(step, make_tree(step), {"step": step}, score=score)
    checkpoints.close()


def steps_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def restore(folder, like, *, step=1):
    checkpoints = Checkpoints(folder)
    try:
        return checkpoints.restore(step, like)
    finally:
        checkpoints.close()


def test_the_newest_and_the_best_are_kept(tmp_path):
    save_all(tmp_path, {1: 0.1, 2: 0.9, 3: 0.3, 4: -1.0, 5: 0.4})
    assert steps_in(tmp_path) == [2, 4, 5]
    checkpoints = Checkpoints(tmp_path)
    assert (checkpoints.newest_step(), checkpoints.best_step()) == (5, 2)
    # A run that goes on remembers the scores, and a better one takes the place of the best.
    checkpoints.save(6, make_tree(6), {}, score=0.95)
    checkpoints.close()
    assert steps_in(tmp_path) == [5, 6]


def test_a_checkpoint_of_a_stop_is_kept_until_the_next_planned_one(tmp_path):
    save_all(tmp_path, {2: 0.9, 4: 0.1, 6: -1.0})
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.leave(6, make_tree(6), {})  # there is one
        checkpoints.leave(7, make_tree(7), {"step": 7})
        assert steps_in(tmp_path) == [2, 4, 6, 7]
        assert (checkpoints.newest_step(), checkpoints.best_step()) == (7, 2)
    with closing(Checkpoints(tmp_path)) as checkpoints:
        assert checkpoints.restore_newest(make_tree(), dict[str, int])[1] == {"step": 7}
        checkpoints.save(8, make_tree(8), {}, score=0.2)
        checkpoints.leave(9, make_tree(9), {"step": 9})
    assert steps_in(tmp_path) == [2, 6, 8, 9]
    with closing(Checkpoints(tmp_path)) as checkpoints:
        # The step that was whole but for its evaluation is planned.
        checkpoints.save(9, make_tree(9), {"step": -9}, score=0.95)
        checkpoints.wait()
        assert checkpoints.restore_newest(make_tree(), dict[str, int])[1] == {"step": -9}
    assert steps_in(tmp_path) == [8, 9]


def test_an_empty_folder_has_none(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new")
    assert (checkpoints.newest_step(), checkpoints.best_step()) == (0, None)
    checkpoints.close()


def test_what_is_restored_equals_what_was_saved(tmp_path):
    save_all(tmp_path, {1: 0.5, 7: 0.25})
    # The tree handed in gives shapes and types only.
    tree, facts = restore(tmp_path, make_tree(seed=99), step=7)
    assert_equal(tree, make_tree(7))
    assert facts == {"step": 7}
    assert isinstance(tree, TrainState)


def test_facts_of_another_kind_are_told_with_their_place(tmp_path):
    folder, kind = tmp_path / "checkpoints", dict[str, int]
    save_all(folder, {1: 0.5})
    with closing(Checkpoints(folder)) as checkpoints:
        assert checkpoints.restore_newest(make_tree(), kind)[1] == {"step": 1}
        checkpoints.leave(2, make_tree(2), {"step": "two"})
        with pytest.raises(UserError, match=r"checkpoints/2: facts: step should be .*delete that"):
            checkpoints.restore_newest(make_tree(), kind)
    with closing(Checkpoints(folder)) as checkpoints:
        checkpoints.save(3, make_tree(3), {"step": []}, score=0.0)
        checkpoints.wait()
        with pytest.raises(UserError, match="checkpoints/3: facts: step should be"):
            checkpoints.restore_newest(make_tree(), kind)


def test_an_update_right_after_a_save_does_not_reach_the_file(tmp_path):
    # Large enough that writing is still under way when the arrays are given to the update.
    overwrite = jax.jit(lambda leaf: leaf * 0 - 1, donate_argnums=0)
    leaf = jnp.arange(2**20, dtype=jnp.float32)
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"w": leaf}, {}, score=0.0)
        leaf = overwrite(leaf)
        leaf.block_until_ready()
    checkpoints.close()
    like = {"w": jnp.zeros_like(leaf)}
    np.testing.assert_array_equal(restore(tmp_path, like)[0]["w"], np.arange(2**20))
    np.testing.assert_array_equal(restore(tmp_path, like, step=2)[0]["w"], -1)


@pytest.mark.parametrize(
    ("like", "named"),
    [
        (make_tree(width=32), "embed"),
        ({"other": jnp.zeros(3)}, "other"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, like, named):
    save_all(tmp_path, {1: 0.0})
    with pytest.raises(UserError, match="another model") as info:
        restore(tmp_path, like)
    message = str(info.value)
    assert "\n" not in message
    assert named in message
    assert str(tmp_path / "1") in message
    assert "run.dir" in message


def test_a_step_that_is_not_there_is_refused(tmp_path):
    save_all(tmp_path, {1: 0.0})
    with pytest.raises(UserError) as info:
        restore(tmp_path, make_tree(), step=2)
    assert "\n" not in str(info.value)


def outcome(folder, like):
    """Return the restored tree, or the one line that the user is told."""
    try:
        return restore(folder, like)[0]
    except UserError as error:
        message = str(error)
        assert "\n" not in message
        assert str(folder / "1") in message
        assert "delete" in message
        return message


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_whichever_file_is_cut_the_user_is_told_or_nothing_is_lost(tmp_path, kept):
    whole, tree = tmp_path / "whole", make_tree(1)
    save_all(whole, {1: 0.0})
    harmful = []
    names = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * kept)])
        result = outcome(folder, tree)
        if isinstance(result, str):
            harmful.append(name)
        else:
            assert_equal(result, tree)
    # The arrays themselves lie in the largest file.
    assert max(names, key=lambda name: (whole / name).stat().st_size) in harmful
    assert len(harmful) >= 4


def test_what_a_killed_save_left_is_no_checkpoint(tmp_path):
    save_all(tmp_path, {1: 0.0})
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp-1")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest_step() == 1
    checkpoints.save(2, make_tree(2), {}, score=0.0)
    checkpoints.close()
    assert_equal(restore(tmp_path, make_tree(), step=2)[0], make_tree(2))


def test_what_is_written_shares_no_memory_with_what_may_be_overwritten(tmp_path, monkeypatch):
    checkpoints, written = Checkpoints(tmp_path), []
    monkeypatch.setattr(
        checkpoints._manager, "save", lambda step, args, **_: written.append(args["tree"].item)
    )
    leaf = jnp.arange(1024.0)
    checkpoints.save(1, {"w": leaf}, {}, score=0.0)
    ((copy,),) = (tree.values() for tree in written)
    assert copy.unsafe_buffer_pointer() != leaf.unsafe_buffer_pointer()
    np.testing.assert_array_equal(copy, leaf)
    checkpoints.close()


def assert_told_and_over(folder, told):
    """One line that names the folder, and no thread of Orbax that holds the process."""
    assert "\n" not in told
    assert f"{folder}: no checkpoint can be written there" in told
    until = time.monotonic() + 60
    while alive := [t for t in threading.enumerate() if type(t).__module__.startswith("orbax")]:
        assert time.monotonic() < until, alive
        time.sleep(0.01)


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "checkpoints").write_text("x")
    with pytest.raises(UserError) as info:
        Checkpoints(tmp_path / "checkpoints")
    assert_told_and_over(tmp_path / "checkpoints", str(info.value))


def test_a_checkpoint_whose_folder_cannot_be_made_is_told_and_ends(tmp_path, monkeypatch):
    """A full disk at the start of a save; in the background Orbax would wait for the folder."""
    save_all(tmp_path, {1: 0.0})
    checkpoints = Checkpoints(tmp_path)
    mkdir = os.mkdir

    def full(path, *rest, **named):
        if "orbax-checkpoint-tmp" in os.fspath(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
        mkdir(path, *rest, **named)

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(UserError, match="No space left on device") as info:
        checkpoints.save(2, make_tree(2), {}, score=0.0)
    checkpoints.close()
    assert_told_and_over(tmp_path, str(info.value))
    assert_equal(restore(tmp_path, make_tree())[0], make_tree(1))


def test_a_disk_with_too_little_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    save_all(tmp_path, {1: 0.0})
    checkpoints = Checkpoints(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_500_000))
    with pytest.raises(UserError, match=r"it takes 4\.0 MB, and 1\.5 MB are free") as info:
        checkpoints.save(2, {"w": jnp.zeros(1_000_000)}, {}, score=0.0)
    checkpoints.close()
    assert_told_and_over(tmp_path, str(info.value))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]


@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_an_array_that_cannot_be_written_is_told_by_the_next_call(tmp_path, monkeypatch, call):
    """A full disk in the middle of a save comes from TensorStore, as a `ValueError`."""
    save_all(tmp_path, {1: 0.0})
    checkpoints = Checkpoints(tmp_path)
    error = ValueError("RESOURCE_EXHAUSTED: " + "a/long/path/" * 20 + ": No space left on device")

    async def full(*_arguments, **_named):
        raise error

    monkeypatch.setattr("orbax.checkpoint._src.serialization.serialization.ts.open", full)
    checkpoints.save(2, make_tree(2), {}, score=0.0)
    last = {"save": lambda: checkpoints.save(3, make_tree(3), {}, score=0.0)}
    with pytest.raises(UserError, match="No space left on device") as info:
        last.get(call, getattr(checkpoints, call))()
    checkpoints.close()
    assert_told_and_over(tmp_path, str(info.value))
    monkeypatch.undo()
    assert steps_in(tmp_path) == [1]
    assert_equal(restore(tmp_path, make_tree())[0], make_tree(1))


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '{"score": "x"}', '{"score": null}', "\x00"])
def test_a_damaged_score_names_its_checkpoint(tmp_path, text):
    save_all(tmp_path, {1: 0.5, 4: 0.25})
    path = tmp_path / "4" / "metrics" / "metrics"
    path.write_text(text)
    for read in (Checkpoints, best_step):
        with pytest.raises(UserError) as caught:
            read(tmp_path)
        assert str(caught.value).startswith(f"{path}: ")
        assert f"delete {tmp_path / '4'} to resume from the one before" in str(caught.value)
    shutil.rmtree(tmp_path / "4")
    assert best_step(tmp_path) == 1
