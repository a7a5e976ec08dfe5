"""Checkpoints: weights, optimizer state and the progress of a run, through Orbax.

A kill inside a save leaves the checkpoints before it whole. One that is made because the run is
stopped is kept until the next planned one, so that a resumed run ends with the checkpoints of one
that was never stopped.
"""

from __future__ import annotations

import glob
import logging
import math
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from pydantic import BaseModel

from minirl.exchange import UserError
from minirl.run import distributed
from minirl.run.files import check, read_json

# Orbax logs every save, and tracebacks of errors that it also raises.
logging.getLogger("absl").setLevel(logging.CRITICAL)

_log = logging.getLogger(__name__)
_DELETE = "delete that folder to resume from the one before"
_UNREADABLE = f"the checkpoint cannot be read ({{}}); {_DELETE}"
_UNWRITABLE = (
    "no checkpoint can be written there ({}); those before it are whole: fix that and run the same "
    "command again to resume"
)
# In a folder of checkpoints: the state of the optimizer, without which only weights can be read.
_OPTIMIZER = "optimizer"
# In a checkpoint whose weights are an average: those that are averaged.
_RAW = "raw"
# Newest checkpoints that are kept.
_KEPT = 2
Tree = Any
_Kind = TypeVar("_Kind")


def _score(metrics: Mapping[str, float]) -> float:
    return metrics["score"] if metrics.get("planned", 1) else -math.inf


class Checkpoints:
    """The checkpoints of one phase of a run: the newest two, and the best by a score.

    A tree has `params`, `opt_state` and `policy`: the weights that are read from a checkpoint,
    which are others than `params` where it has an `average`. Of the best there are weights alone,
    in half to a third of the room: a run goes on from the newest.

    All methods that write raise a `UserError` if this, or what was written before, has failed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_measured = folder.absolute(), False
        with _writing(self._folder):
            (self._folder / _OPTIMIZER).mkdir(parents=True, exist_ok=True)

        def open_in(folder: Path, name: str) -> ocp.CheckpointManager:
            # Both write at a time: without names of their own, processes would take a step's
            # barrier of one for that of the other.
            together = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name)
            options = ocp.CheckpointManagerOptions(
                best_fn=_score,
                enable_async_checkpointing=True,
                # What a kill inside a save left, up to all of a state, of a step that none may save
                # again.
                cleanup_tmp_directories=True,
                # Where a folder cannot be made in the background, Orbax's other threads wait for it
                # for 20 minutes, and the process with them.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                multiprocessing_options=together,
            )
            kinds = {
                "tree": ocp.StandardCheckpointHandler(multiprocessing_options=together),
                _RAW: ocp.StandardCheckpointHandler(multiprocessing_options=together),
                "facts": ocp.JsonCheckpointHandler(multiprocessing_options=together),
            }
            return _open(folder, item_handlers=kinds, options=options)

        self._weights = open_in(self._folder, "weights")
        self._optimizers = open_in(self._folder / _OPTIMIZER, _OPTIMIZER)
        self._managers = self._weights, self._optimizers

    def save(self, step: int, tree: Tree, facts: Mapping[str, Any], *, score: float) -> None:
        """Write a checkpoint after so many updates in the background.

        The arrays may be donated as soon as this returns; facts are what else a resume needs, as
        JSON. The best checkpoint is that of the largest score. The first one is waited for: its
        time says how long a stop takes.
        """
        began = perf_counter()
        self._save(step, tree, facts, {"score": score})
        if not self._is_measured:
            self._is_measured = True
            self.wait()
            size, needed_s = _bytes(tree), perf_counter() - began
            _log.info(
                "a checkpoint of %.3g GB takes %.3g s: SIGKILL should come no sooner than %.0f s "
                "after SIGTERM", size / 1e9, needed_s, grace_s(needed_s),
            )  # fmt: skip

    def leave(self, step: int, tree: Tree, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint because the run is being stopped, unless there is one of this step.

        Weights go first: where the time is too short, they are whole.
        """
        self.wait()
        if step != self.newest_step():
            self._save(step, tree, facts, {"score": 0.0, "planned": 0.0}, between=self._finish)
            self.wait()

    def _save(
        self,
        step: int,
        tree: Tree,
        facts: Mapping[str, Any],
        metrics: dict[str, float],
        *,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.wait()
        # Of all processes: in Orbax the others would wait for one that stops here.
        distributed.gather(lambda: self._check_disk(_bytes(tree)))
        if jax.default_backend() == "cpu":
            # A host copy of a CPU array is the array itself, and the next update overwrites it.
            tree = jax.tree.map(lambda leaf: leaf.copy(), tree)
        with _writing(self._folder):
            for manager in self._managers:
                if step in manager.all_steps():
                    # A stop came between the step and its evaluation.
                    manager.delete(step)
            items = {"tree": _saved(tree.policy), "facts": ocp.args.JsonSave(dict(facts))}
            items |= {} if tree.average is None else {_RAW: _saved(tree.params)}
            args = ocp.args.Composite(**items)
            self._weights.save(step, args=args, metrics=metrics, force=True)
            between()
            args = ocp.args.Composite(tree=_saved(tree.opt_state))
            self._optimizers.save(step, args=args, metrics=metrics, force=True)

    def _check_disk(self, needed: int) -> None:
        """Raise an error for a full disk before Orbax finds it half way, with many errors."""
        free = shutil.disk_usage(self._folder).free
        with _writing(self._folder):
            if needed > free:
                raise OSError(f"{needed / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")

    def _whole(self) -> list[int]:
        """Return the steps that a run can go on from, in order."""
        return sorted({*self._weights.all_steps()} & {*self._optimizers.all_steps()})

    def newest_step(self) -> int:
        """Return the step of the newest complete checkpoint; 0 without any."""
        return max(self._whole(), default=0)

    def best_step(self) -> int | None:
        """Return the best checkpoint's step."""
        return self._weights.best_step()

    def restore_newest(self, like: Tree, kind: type[_Kind]) -> tuple[Tree, _Kind]:
        """Read the newest checkpoint as a tree like this one, and facts of this kind.

        Raises:
            UserError: It is damaged, or belongs to another model or optimizer.
        """
        step = self.newest_step()
        where = self._folder / str(step)
        params = read_raw_params(where, like.params)
        opt_state = read_params(self._folder / _OPTIMIZER / str(step), like.opt_state)
        average = None if like.average is None else read_params(where, like.average)
        with _reporting(where, _UNREADABLE):
            args = ocp.args.Composite(facts=ocp.args.JsonRestore())
            facts = self._weights.restore(step, args=args)["facts"]
        tree = like._replace(params=params, opt_state=opt_state, average=average)
        return tree, check(kind, facts, where=f"{where}: facts", advice=_DELETE)

    def wait(self) -> None:
        """Wait for what is being written, and delete what is no longer kept."""
        self._finish()
        whole = self._whole()
        facts = ((step, self._weights.metrics(step) or {}) for step in whole)
        planned = [step for step, numbers in facts if numbers.get("planned", 1)]
        kept = {*planned[-_KEPT:], *whole[-1:]}
        with _writing(self._folder):
            for step in self._weights.all_steps():
                # Without an optimizer's state: the step is made again, and its score may be another
                # one. The best until then must not go for it.
                if step > self.newest_step():
                    self._weights.delete(step)
            for manager, others in ((self._optimizers, set()), (self._weights, {self.best_step()})):
                for step in sorted({*manager.all_steps()} - kept - others):
                    manager.delete(step)

    def _finish(self) -> None:
        with _writing(self._folder), ExitStack() as stack:
            for manager in self._managers:  # of both, whatever one of them says
                stack.callback(manager.wait_until_finished)

    def close(self) -> None:
        """Wait for what is being written, and end."""
        try:
            self.wait()
        finally:
            for manager in self._managers:  # Orbax raises an error once
                manager.close()


def grace_s(checkpoint_s: float) -> float:
    """Return how long a stop may take, from the seconds of a checkpoint.

    At a stop one may still be being written, and the last micro-batch is finished before.
    """
    return 2 * checkpoint_s + 60


def given_up(tree: Tree) -> Tree:
    """Delete arrays, of which others may hold references, and return their shapes and shardings."""

    def give_up(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        leaf.delete()
        return shape

    return jax.tree.map(give_up, tree)


def best_step(folder: Path) -> int | None:
    """Return the step of the best checkpoint in a folder, which is left as it is."""
    options = ocp.CheckpointManagerOptions(best_fn=_score, read_only=True)
    with _open(folder.absolute(), options=options) as manager:
        return manager.best_step()


def read_raw_params(where: Path, like: Tree) -> Tree:
    """Read the weights that updates change, of which a checkpoint may hold the average too."""
    return read_params(where, like, item=_RAW if (where / _RAW).is_dir() else "tree")


def read_params(where: Path, like: Tree, *, item: str = "tree") -> Tree:
    """Read the weights of the checkpoint in a folder, as `Checkpoints.restore_newest` does."""
    expected = _named(like)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, expected)
    with _opened(where, expected, item=item) as restore:
        restored = restore(abstract, ocp.checkpoint_utils.construct_restore_args(abstract))
    return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in expected])


@contextmanager
def stored_params(where: Path, like: Tree) -> Generator[Callable[[str], np.ndarray]]:
    """Let weights of the checkpoint in a folder be read one at a time, whole, into host memory.

    Yields:
        Reads a parameter by its path (`layers.q`); a `UserError` is that of `read_params`.
    """
    expected = _named(like)
    paths = (
        ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
        for path, _ in jax.tree.leaves_with_path(like)
    )
    names = dict(zip(paths, expected, strict=True))
    with _opened(where, expected) as restore:

        def read(path: str) -> np.ndarray:
            name = names[path]
            how = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
            return restore({name: expected[name]}, how)[name]

        yield read


@contextmanager
def _opened(
    where: Path, expected: Mapping[str, Any], *, item: str = "tree"
) -> Generator[Callable[..., Any]]:
    """Open the arrays of a checkpoint, once names and shapes are compared with what is expected."""
    folder = _plain(where.absolute() / item)
    with ocp.PyTreeCheckpointer() as reader:
        with _reporting(where, _UNREADABLE):
            stored = dict(reader.metadata(folder).item_metadata)
            shapes = {name: tuple(leaf.shape) for name, leaf in stored.items()}
        for name, leaf in expected.items():
            if shapes.get(name) != tuple(leaf.shape):
                raise UserError(
                    f"{where}: a checkpoint of another model: {name} is "
                    f"{shapes.get(name, 'missing')} there and {tuple(leaf.shape)} here; "
                    "use the settings it was made with, or another run.dir"
                )

        def restore(arrays: Mapping[str, Any], how: Mapping[str, Any]) -> Mapping[str, Any]:
            with _reporting(where, _UNREADABLE):
                args = ocp.args.PyTreeRestore(arrays, restore_args=how, partial_restore=True)
                return reader.restore(folder, args=args)

        yield restore


@cache
def _plain(folder: Path) -> Path:
    """Return a folder's path; where Orbax would take that for a pattern, the path of a link to it,
    which this process has until it ends.
    """
    if glob.escape(str(folder)) == str(folder):
        return folder
    _LINKS.append(TemporaryDirectory(prefix="checkpoints-"))
    link = Path(_LINKS[-1].name) / folder.name
    link.symlink_to(folder)
    return link


_LINKS: list[TemporaryDirectory[str]] = []


class _Scores(BaseModel):
    score: float


def _open(folder: Path, **settings: Any) -> ocp.CheckpointManager:
    """Open a folder of checkpoints; Orbax reads the score of each at once."""
    for scores in sorted(folder.glob("*/metrics/metrics")):
        step = scores.parents[1]
        if step.name.isdigit():  # and not what a kill inside a save left
            read_json(scores, _Scores, advice=f"delete {step} to resume from the one before")
    return ocp.CheckpointManager(_plain(folder), **settings)


def _bytes(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _saved(tree: Tree) -> ocp.args.StandardSave:
    return ocp.args.StandardSave(_named(tree))


def _named(tree: Tree) -> dict[str, Any]:
    """Flatten to names, so that structures of libraries may change."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


@contextmanager
def _reporting(
    where: Path, words: str, kinds: tuple[type[Exception], ...] = (Exception,)
) -> Generator[None]:
    """Turn errors of Orbax and TensorStore, or those of these kinds, into a line for the user."""
    try:
        yield
    except kinds as error:
        reason = " ".join(str(error).split())
        # Of a long one the middle is left out: the cause comes last.
        reason = reason if len(reason) <= 160 else f"{reason[:60]} ... {reason[-100:]}"
        raise UserError(f"{where}: {words.format(f'{type(error).__name__}: {reason}')}") from None


def _writing(folder: Path) -> AbstractContextManager[None]:
    return _reporting(folder, _UNWRITABLE, (OSError, ValueError))  # TensorStore raises the latter
