"""Checkpoints: weights, optimizer state and where the run stands, through Orbax.

Orbax writes beside and renames, so a kill inside a save leaves the checkpoints before it whole.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from pydantic import BaseModel

from minirl.errors import UserError
from minirl.reading import read_json

# Orbax reports every save at INFO, and of one that fails the traceback at ERROR; we tell the user.
logging.getLogger("absl").setLevel(logging.CRITICAL)

Tree = Any


class Checkpoints:
    """The checkpoints of one phase of a run: the newest few, and the best by a score.

    Args:
        folder: Made if it is not there.
        keep: How many of the newest are kept.

    Raises:
        UserError: The folder cannot be made, or the score of a checkpoint there cannot be read.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self._folder = folder.absolute()
        with _writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        policies = ocp.checkpoint_managers
        self._manager = _open(
            self._folder,
            item_handlers={
                "tree": ocp.StandardCheckpointHandler(),
                "facts": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(
                    [
                        policies.LatestN(keep),
                        policies.BestN(get_metric_fn=_score, reverse=False, n=1),
                    ]
                ),
                best_fn=_score,
                enable_async_checkpointing=True,
                # Where a folder cannot be made in the background, Orbax's other threads wait for it
                # for 20 minutes, and the process with them.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            ),
        )

    def save(self, step: int, tree: Tree, facts: Mapping[str, Any], *, score: float) -> None:
        """Write a checkpoint in the background.

        Args:
            step: Updates done.
            tree: Arrays; they may be donated as soon as this returns.
            facts: Anything else that a resume needs, as JSON.
            score: What the best checkpoint is chosen by, the larger the better.

        Raises:
            UserError: It cannot be written, or the one before could not.
        """
        self.wait()
        self._check_room(tree)
        if jax.default_backend() == "cpu":
            # A host copy of a CPU array is the array itself, and the next update overwrites it.
            tree = jax.tree.map(lambda leaf: leaf.copy(), tree)
        with _writing(self._folder):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    tree=ocp.args.StandardSave(_named(tree)), facts=ocp.args.JsonSave(dict(facts))
                ),
                metrics={"score": score},
                force=True,
            )

    def _check_room(self, tree: Tree) -> None:
        """Refuse what the disk has no room for; found in the middle it leaves much noise."""
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise _unwritable(
                self._folder, f"it takes {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free"
            )

    def latest_step(self) -> int | None:
        """Return the newest complete checkpoint's step."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """Return the best checkpoint's step."""
        return self._manager.best_step()

    def restore(self, step: int, like: Tree) -> tuple[Tree, dict[str, Any]]:
        """Read a checkpoint.

        Args:
            step: Which one.
            like: A tree of the same structure, for shapes, types and shardings.

        Raises:
            UserError: The checkpoint is damaged, or belongs to another model or optimizer.
        """
        where = self._folder / str(step)
        self._check(where, step, like)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _named(like))
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    tree=ocp.args.StandardRestore(abstract), facts=ocp.args.JsonRestore()
                ),
            )
        # Orbax and TensorStore raise many types for a damaged file.
        except Exception as error:  # noqa: BLE001
            raise _damaged(where, error) from None
        leaves = [restored["tree"][name] for name in _named(like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), restored["facts"]

    def _check(self, where: Path, step: int, like: Tree) -> None:
        """Compare names and shapes before anything is read."""
        try:
            stored = dict(self._manager.item_metadata(step)["tree"])
            shapes = {name: tuple(leaf.shape) for name, leaf in stored.items()}
        except Exception as error:  # noqa: BLE001
            raise _damaged(where, error) from None
        _compare(where, shapes, _named(like))

    def wait(self) -> None:
        """Wait for what is being written.

        Raises:
            UserError: It cannot be written.
        """
        with _writing(self._folder):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for what is being written, and end.

        Raises:
            UserError: It cannot be written.
        """
        try:
            self.wait()
        finally:
            # Orbax tells of an error once.
            self._manager.close()


def best_step(folder: Path) -> int | None:
    """Return the step of the best checkpoint in a folder, which is left as it is."""
    options = ocp.CheckpointManagerOptions(best_fn=_score, read_only=True)
    with _open(folder.absolute(), options=options) as manager:
        return manager.best_step()


def read_params(where: Path, like: Tree) -> Tree:
    """Read the weights of a checkpoint, without the optimizer's state.

    Args:
        where: Folder of one checkpoint.
        like: Weights of the same structure, for shapes, types and shardings.

    Raises:
        UserError: The checkpoint is damaged, or belongs to another model.
    """
    prefix = jax.tree_util.keystr((jax.tree_util.GetAttrKey("params"),))
    wanted = {prefix + name: leaf for name, leaf in _named(like).items()}
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
    path = where.absolute() / "tree"
    try:
        with ocp.PyTreeCheckpointer() as reader:
            stored = dict(reader.metadata(path).item_metadata)
            shapes = {name: tuple(leaf.shape) for name, leaf in stored.items()}
            _compare(where, shapes, wanted)
            restored = reader.restore(
                path,
                args=ocp.args.PyTreeRestore(
                    abstract,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
                    partial_restore=True,
                ),
            )
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001
        raise _damaged(where, error) from None
    leaves = [restored[name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _compare(where: Path, stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Any]) -> None:
    """Raise a `UserError` unless all that is wanted is stored in the same shape."""
    for name, leaf in wanted.items():
        if stored.get(name) != tuple(leaf.shape):
            raise UserError(
                f"{where}: a checkpoint of another model: {name} is "
                f"{stored.get(name, 'missing')} there and {tuple(leaf.shape)} here; "
                "use the settings it was made with, or another run.dir"
            )


class _Scores(BaseModel):
    """What Orbax chooses the best checkpoint by."""

    score: float


def _open(folder: Path, **settings: Any) -> ocp.CheckpointManager:
    """Open a folder of checkpoints; Orbax reads the score of each at once."""
    for scores in sorted(folder.glob("*/metrics/metrics")):
        checkpoint = scores.parents[1]
        if checkpoint.name.isdigit():  # and not what a kill inside a save left
            advice = f"delete {checkpoint} to go on from the one before"
            read_json(scores, _Scores, advice=advice)
    return ocp.CheckpointManager(folder, **settings)


def _score(metrics: Mapping[str, float]) -> float:
    return metrics["score"]


def _named(tree: Tree) -> dict[str, Any]:
    """Flatten to names, so that structures of libraries may change."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


@contextmanager
def _writing(folder: Path) -> Generator[None]:
    """Turn an error of writing into a line for the user; TensorStore raises `ValueError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise _unwritable(folder, _reason(error)) from None


def _unwritable(folder: Path, reason: str) -> UserError:
    return UserError(
        f"{folder}: no checkpoint can be written there ({reason}); those before it are whole: mend "
        "that, and the same command goes on from the newest"
    )


def _reason(error: Exception) -> str:
    """Say an error in a line; of a long one the middle is left out, the cause comes last."""
    words = " ".join(str(error).split())
    words = words if len(words) <= 160 else f"{words[:60]} ... {words[-100:]}"
    return f"{type(error).__name__}: {words}"


def _damaged(where: Path, error: Exception) -> UserError:
    return UserError(
        f"{where}: the checkpoint cannot be read ({_reason(error)}); "
        "delete that folder to go on from the one before"
    )
