"""Checkpoints: weights, optimizer state and the progress of a run, through Orbax.

A kill inside a save leaves the checkpoints before it whole. One that is made because the run is
stopped is kept until the next planned one, so that a resumed run ends with the checkpoints of one
that was never stopped.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from pydantic import BaseModel

from minirl.errors import UserError
from minirl.run.files import check, read_json

# Orbax logs every save, and tracebacks of errors that it also raises.
logging.getLogger("absl").setLevel(logging.CRITICAL)

_DELETE = "delete that folder to resume from the one before"
_UNREADABLE = f"the checkpoint cannot be read ({{}}); {_DELETE}"
_UNWRITABLE = (
    "no checkpoint can be written there ({}); those before it are whole: fix that and run the same "
    "command again to resume"
)
Tree = Any
_Kind = TypeVar("_Kind")


def _score(metrics: Mapping[str, float]) -> float:
    return metrics["score"] if metrics.get("planned", 1) else -math.inf


@dataclass(frozen=True)
class _NewestPlanned:
    """Orbax's policy for the newest planned checkpoints, and for one after them."""

    keep: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        del context
        planned = [one.step for one in checkpoints if (one.metrics or {}).get("planned", 1)]
        kept = {*planned[-self.keep :], *(one.step for one in checkpoints[-1:])}
        return [one.step in kept for one in checkpoints]


class Checkpoints:
    """The checkpoints of one phase of a run: the newest few, and the best by a score.

    All methods that write raise a `UserError` if this, or what was written before, has failed.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self._folder = folder.absolute()
        with _writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        policies = ocp.checkpoint_managers
        best = policies.BestN(get_metric_fn=_score, reverse=False, n=1)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([_NewestPlanned(keep), best]),
            best_fn=_score,
            enable_async_checkpointing=True,
            # Where a folder cannot be made in the background, Orbax's other threads wait for it for
            # 20 minutes, and the process with them.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        kinds = {"tree": ocp.StandardCheckpointHandler(), "facts": ocp.JsonCheckpointHandler()}
        self._manager = _open(self._folder, item_handlers=kinds, options=options)

    def save(self, step: int, tree: Tree, facts: Mapping[str, Any], *, score: float) -> None:
        """Write a checkpoint after so many updates in the background.

        The arrays may be donated as soon as this returns; facts are what else a resume needs, as
        JSON. The best checkpoint is that of the largest score.
        """
        self._save(step, tree, facts, {"score": score})

    def leave(self, step: int, tree: Tree, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint because the run is being stopped, unless there is one of this step."""
        self.wait()
        if step != self.newest_step():
            self._save(step, tree, facts, {"score": 0.0, "planned": 0.0})
            self.wait()

    def _save(
        self, step: int, tree: Tree, facts: Mapping[str, Any], metrics: dict[str, float]
    ) -> None:
        self.wait()
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        free = shutil.disk_usage(self._folder).free
        with _writing(self._folder):
            if needed > free:  # Orbax would find it half way, with many errors
                raise OSError(f"{needed / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")
        if jax.default_backend() == "cpu":
            # A host copy of a CPU array is the array itself, and the next update overwrites it.
            tree = jax.tree.map(lambda leaf: leaf.copy(), tree)
        args = ocp.args.Composite(
            tree=ocp.args.StandardSave(_named(tree)), facts=ocp.args.JsonSave(dict(facts))
        )
        with _writing(self._folder):
            if step in self._manager.all_steps():
                # A stop came between the step and its evaluation.
                self._manager.delete(step)
            self._manager.save(step, args=args, metrics=metrics, force=True)

    def newest_step(self) -> int:
        """Return the step of the newest complete checkpoint; 0 without any."""
        return self._manager.latest_step() or 0

    def best_step(self) -> int | None:
        """Return the best checkpoint's step."""
        return self._manager.best_step()

    def restore_newest(self, like: Tree, kind: type[_Kind]) -> tuple[Tree, _Kind]:
        """Read the newest checkpoint as a tree like this one, and facts of this kind.

        Raises:
            UserError: It is damaged, or belongs to another model or optimizer.
        """
        step = self.newest_step()
        where = self._folder / str(step)
        tree = _read(where, like, _named(like))
        with _reporting(where, _UNREADABLE):
            args = ocp.args.Composite(facts=ocp.args.JsonRestore())
            facts = self._manager.restore(step, args=args)["facts"]
        return tree, check(kind, facts, where=f"{where}: facts", advice=_DELETE)

    def wait(self) -> None:
        """Wait for what is being written."""
        with _writing(self._folder):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for what is being written, and end."""
        try:
            self.wait()
        finally:
            # Orbax raises an error once.
            self._manager.close()


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


def read_params(where: Path, like: Tree) -> Tree:
    """Read the weights of the checkpoint in a folder, as `Checkpoints.restore_newest` does."""
    return _read(where, like, {_PARAMS + name: leaf for name, leaf in _named(like).items()})


@contextmanager
def stored_params(where: Path, like: Tree) -> Generator[Callable[[str], np.ndarray]]:
    """Let weights of the checkpoint in a folder be read one at a time, whole, into host memory.

    Yields:
        Reads a parameter by its path (`layers.q`); a `UserError` is that of `read_params`.
    """
    expected = {_PARAMS + name: leaf for name, leaf in _named(like).items()}
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


_PARAMS = jax.tree_util.keystr((jax.tree_util.GetAttrKey("params"),))


def _read(where: Path, like: Tree, expected: Mapping[str, Any]) -> Tree:
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, dict(expected))
    with _opened(where, expected) as restore:
        restored = restore(abstract, ocp.checkpoint_utils.construct_restore_args(abstract))
    return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in expected])


@contextmanager
def _opened(where: Path, expected: Mapping[str, Any]) -> Generator[Callable[..., Any]]:
    """Open the arrays of a checkpoint, once names and shapes are compared with what is expected."""
    folder = where.absolute() / "tree"
    with ocp.PyTreeCheckpointer() as reader:
        with _reporting(where, _UNREADABLE):
            stored = dict(reader.metadata(folder).item_metadata)
            found = {name: tuple(leaf.shape) for name, leaf in stored.items()}
        for name, leaf in expected.items():
            if found.get(name) != tuple(leaf.shape):
                raise UserError(
                    f"{where}: a checkpoint of another model: {name} is "
                    f"{found.get(name, 'missing')} there and {tuple(leaf.shape)} here; "
                    "use the settings it was made with, or another run.dir"
                )

        def restore(arrays: Mapping[str, Any], how: Mapping[str, Any]) -> Mapping[str, Any]:
            with _reporting(where, _UNREADABLE):
                args = ocp.args.PyTreeRestore(arrays, restore_args=how, partial_restore=True)
                return reader.restore(folder, args=args)

        yield restore


class _Scores(BaseModel):
    score: float


def _open(folder: Path, **settings: Any) -> ocp.CheckpointManager:
    """Open a folder of checkpoints; Orbax reads the score of each at once."""
    for scores in sorted(folder.glob("*/metrics/metrics")):
        step = scores.parents[1]
        if step.name.isdigit():  # and not what a kill inside a save left
            read_json(scores, _Scores, advice=f"delete {step} to resume from the one before")
    return ocp.CheckpointManager(folder, **settings)


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
