"""Checkpoints: weights, optimizer state and the progress of a run, through Orbax.

A kill inside a save leaves the checkpoints before it whole.
"""

from __future__ import annotations

import glob
import logging
import shutil
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import product
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from pydantic import BaseModel

from minirl.exchange import UserError
from minirl.run import distributed
from minirl.run.files import check, read_json

# Orbax logs every save, and tracebacks of errors that it also raises.
logging.getLogger("absl").setLevel(logging.CRITICAL)

_DELETE = "delete that folder to resume from the one before"
_UNREADABLE = f"the checkpoint cannot be read ({{}}); {_DELETE}"
_UNWRITABLE = (
    "no checkpoint can be written there ({}); those before it are whole: fix that and run the same "
    "command again to resume"
)
# What is in a checkpoint: the weights, the state of the optimizer, without which only these can be
# read, and, where they are an average, those that are averaged.
_TREE, _OPTIMIZER, _RAW, _FACTS = "tree", "optimizer", "raw", "facts"
# Newest checkpoints that are kept.
_KEPT = 2
_ASIDE = "-replaced"
_SCORE = itemgetter("score")
Tree = Any
_Kind = TypeVar("_Kind")


class Checkpoints:
    """The checkpoints of one phase of a run: the newest two, and the best by a score.

    A tree has `params`, `opt_state` and `policy`: the weights that are read from a checkpoint,
    which are others than `params` where it has an `average`. Of an older best there are these
    alone, in half to a third of the room: a run goes on from the newest.

    All methods that write raise a `UserError` if this, or what was written before, has failed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        with _writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        distributed.from_first(self._settle)
        policies = ocp.checkpoint_managers
        best = policies.BestN(get_metric_fn=_SCORE, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            best_fn=_SCORE,
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(_KEPT), best]),
            enable_async_checkpointing=True,
            # What a kill inside a save left, up to all of a state, of a step that none may save
            # again.
            cleanup_tmp_directories=True,
            # Where a folder cannot be made in the background, Orbax's other threads wait for it for
            # 20 minutes, and the process with them.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        arrays = {name: ocp.StandardCheckpointHandler() for name in (_TREE, _RAW, _OPTIMIZER)}
        kinds = {**arrays, _FACTS: ocp.JsonCheckpointHandler()}
        self._manager = _open(self._folder, item_handlers=kinds, options=options)

    def save(
        self, step: int, tree: Tree, facts: Mapping[str, Any], *, score: float | None = None
    ) -> None:
        """Write a checkpoint after so many updates in the background.

        The arrays may be donated as soon as this returns; facts are what else a resume needs, as
        JSON. The best checkpoint is that of the largest score; without one it never is.
        """
        self.wait()
        # Of all processes: in Orbax the others would wait for one that stops here.
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        distributed.gather(lambda: self._check_disk(needed))
        if jax.default_backend() == "cpu":
            # A host copy of a CPU array is the array itself, and the next update overwrites it.
            tree = jax.tree.map(lambda leaf: leaf.copy(), tree)
        items = {_TREE: _saved(tree.policy), _OPTIMIZER: _saved(tree.opt_state)}
        items |= {} if tree.average is None else {_RAW: _saved(tree.params)}
        args = ocp.args.Composite(**items, facts=ocp.args.JsonSave(dict(facts)))
        metrics = None if score is None else {"score": score}
        with _writing(self._folder):
            if step in self._manager.all_steps():
                # A stop came between the step and its evaluation. Orbax writes over no step: the
                # old one stays beside until the new one is whole.
                distributed.from_first(lambda: self._put_aside(step))
                self._manager.delete(step)
            self._manager.save(step, args=args, metrics=metrics, force=True)

    def leave(self, step: int, tree: Tree, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint because the run is being stopped, unless there is one of this step."""
        self.wait()
        if step != self.newest_step():
            self.save(step, tree, facts)
            self.wait()

    def _check_disk(self, needed: int) -> None:
        """Raise an error for a full disk before Orbax finds it half way, with many errors."""
        free = shutil.disk_usage(self._folder).free
        with _writing(self._folder):
            if needed > free:
                raise OSError(f"{needed / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint to go on from; 0 without any."""
        steps = self._manager.all_steps()
        return max((n for n in steps if (self._folder / str(n) / _OPTIMIZER).is_dir()), default=0)

    def best_step(self) -> int | None:
        """Return the step of the best checkpoint, or of the newest where none has a score."""
        return self._manager.best_step() or self._manager.latest_step()

    def restore_newest(self, like: Tree, kind: type[_Kind]) -> tuple[Tree, _Kind]:
        """Read the newest checkpoint as a tree like this one, and facts of this kind.

        Raises:
            UserError: It is damaged, or belongs to another model or optimizer.
        """
        step = self.newest_step()
        where = self._folder / str(step)
        raw = _TREE if like.average is None else _RAW
        params = read_params(where, like.params, item=raw)
        opt_state = read_params(where, like.opt_state, item=_OPTIMIZER)
        average = None if like.average is None else read_params(where, like.average)
        with _reporting(where, _UNREADABLE):
            args = ocp.args.Composite(facts=ocp.args.JsonRestore())
            facts = self._manager.restore(step, args=args)[_FACTS]
        tree = like._replace(params=params, opt_state=opt_state, average=average)
        return tree, check(kind, facts, where=f"{where}: facts", advice=_DELETE)

    def wait(self) -> None:
        """Wait for what is being written."""
        with _writing(self._folder):
            self._manager.wait_until_finished()
            if distributed.is_first():
                self._settle()
        older = sorted(self._manager.all_steps())[:-_KEPT]
        for step, item in product(older if distributed.is_first() else (), (_OPTIMIZER, _RAW)):
            shutil.rmtree(self._folder / str(step) / item, ignore_errors=True)

    def _put_aside(self, step: int) -> None:
        """Leave an empty folder in the place of a checkpoint, for Orbax to delete."""
        place = self._folder / str(step)
        place.rename(self._folder / f".{step}{_ASIDE}")
        place.mkdir()

    def _settle(self) -> None:
        """Remove what a whole checkpoint took the place of; bring back what none did."""
        for aside in self._folder.glob(f".*{_ASIDE}"):
            place = self._folder / aside.name[1 : -len(_ASIDE)]
            if (place / _TREE).is_dir():
                shutil.rmtree(aside)
            else:
                shutil.rmtree(place, ignore_errors=True)
                aside.rename(place)

    def close(self) -> None:
        """Wait for what is being written, and end."""
        try:
            self.wait()
        finally:
            self._manager.close()


def given_up(tree: Tree) -> Tree:
    """Delete arrays, of which others may hold references, and return their shapes and shardings."""

    def give_up(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        leaf.delete()
        return shape

    return jax.tree.map(give_up, tree)


def best_step(folder: Path) -> int | None:
    """Return the step that `Checkpoints.best_step` does for a folder, which is left as it is."""
    options = ocp.CheckpointManagerOptions(best_fn=_SCORE, read_only=True)
    with _open(folder.absolute(), options=options) as manager:
        return manager.best_step() or manager.latest_step()


def read_params(where: Path, like: Tree, *, item: str = _TREE) -> Tree:
    """Read the weights of the checkpoint in a folder, as `Checkpoints.restore_newest` does."""
    folder, expected = _plain(where.absolute() / item), _named(like)
    abstract = jax.tree.map(_placed, expected)
    how = ocp.checkpoint_utils.construct_restore_args(abstract)
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
        with _reporting(where, _UNREADABLE):
            args = ocp.args.PyTreeRestore(abstract, restore_args=how, partial_restore=True)
            restored = reader.restore(folder, args=args)
    # What has no sharding is in host memory, which is freed array by array.
    found = (restored.pop(name) for name in expected)
    arrays = [jax.device_put(one) if isinstance(one, np.ndarray) else one for one in found]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    """Describe an array to restore, without a sharding where it lies on one device.

    To that Orbax would commit the array. A model's are not when it is loaded or made, and JAX
    compiles each program anew for those that are.
    """
    on_one = isinstance(leaf.sharding, SingleDeviceSharding)
    sharding = None if on_one else leaf.sharding
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


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
