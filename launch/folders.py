"""Folders of results: each belongs to the settings that it was made with, and to no others."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import apsw
import yaml

from launch.config import JobConfig, dump
from launch.texts import write_json, write_text
from minirl.run.files import PART, read_json
from sqlenv.data.loading import fingerprint
from sqlenv.errors import UserError
from sqlenv.types import Example

_log = logging.getLogger(__name__)

CONFIG = "config.yaml"
VERSIONS = "versions.json"
DATA = "data.json"
RESULT = "result.json"
PLACES = "places"
"""Settings that say where weights and data lay, for people: what they are is said by contents."""
_LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "transformers", "sqlglot", "apsw")
# A folder with no more than these holds no work yet, and other settings may have it.
_BEFORE_WORK = frozenset({CONFIG, VERSIONS})


def check_run(config: JobConfig) -> None:
    """Refuse a run folder that is not this run's, before anything is made; see `check`."""
    check(config.folder, dump(config), key="run.dir")


def claimed_run(config: JobConfig) -> AbstractContextManager[Path]:
    """Make the run folder, or find the same run's; see `claimed`."""
    return claimed(config.folder, dump(config), key="run.dir")


def check(folder: Path, settings: str, *, key: str) -> None:
    """Refuse a folder that was made with other settings, or that holds something else.

    Args:
        folder: May be missing, empty, or made by `claim`.
        settings: YAML of everything that decides what will be in the folder.
        key: What a person sets to name another folder.

    Raises:
        UserError: It does not belong to these settings.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; set {key} to another folder")
    # What a kill left of a file being written is nobody's work.
    paths = folder.iterdir() if folder.exists() else ()
    names = {path.name for path in paths if not path.match(f".*{PART}")}
    if CONFIG not in names:
        if names:
            raise UserError(
                f"{folder}: holds files that are not a run (such as {min(names)}); "
                f"set {key} to another folder"
            )
        return
    old = (folder / CONFIG).read_text(encoding="utf-8", errors="replace")
    old, settings = _deciding(old), _deciding(settings)
    if old != settings and not _is_untouched(names):
        raise UserError(
            f"{folder}: holds results of other settings ({_difference(old, settings)}); "
            f"set {key} to another folder, or repeat the settings of its {CONFIG}"
        )


def _deciding(settings: str) -> str:
    """Return settings without those of devices, servers and places: a run may go on on others."""
    try:
        values = yaml.safe_load(settings)
    except yaml.YAMLError:
        return settings
    if not isinstance(values, dict):
        return settings
    values.pop("mesh", None)
    values.pop(PLACES, None)
    if isinstance(values.get("rollout"), dict):
        values["rollout"].pop("sglang", None)
    return yaml.safe_dump(values)


def check_place(folder: Path, *, key: str) -> None:
    """Refuse a folder that `claim` could not make or write; nothing is left there.

    Raises:
        UserError: It lies below a file, or where this user may not write.
    """
    path = folder.absolute()
    try:
        ground = next(place for place in (path, *path.parents) if place.exists())
    except OSError as error:
        raise _unwritable(folder, error.strerror, key=key) from None
    if not ground.is_dir():
        raise _unwritable(folder, f"{ground} is a file", key=key)
    try:
        # What may be written is not always writable: a full disk, /proc, a file system mounted so.
        with TemporaryDirectory(prefix=".", dir=ground):
            pass
    except OSError as error:
        raise _unwritable(folder, f"{ground}: {error.strerror}", key=key) from None


def claim(folder: Path, settings: str, *, key: str) -> Path:
    """Write settings and versions into a folder that `check` admits.

    Raises:
        UserError: The folder belongs to other settings, or cannot be written.
    """
    check(folder, settings, key=key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CONFIG, settings)
        _note_versions(folder / VERSIONS)
    except OSError as error:
        raise _unwritable(folder, error.strerror, key=key) from None
    return folder


@contextmanager
def claimed(folder: Path, settings: str, *, key: str) -> Generator[Path]:
    """Claim a folder, and keep other processes out of it until the block ends.

    What was made for it goes again if no work came to it.

    Raises:
        UserError: The folder belongs to other settings or to another process, or cannot be written.
    """
    fresh = [path for path in (folder, *folder.parents) if not path.exists()]
    with _locked(folder, key=key):
        try:
            yield claim(folder, settings, key=key)
        finally:
            if fresh:
                _remove_without_work(fresh)


def _remove_without_work(made: Sequence[Path]) -> None:
    """Remove a folder that no work came to, and the folders that were made for it.

    Args:
        made: The folder, then its parents from the inside out.
    """
    with suppress(OSError):  # it is gone, or something else came to a parent in the meantime
        paths = list(made[0].iterdir())
        if _is_untouched({path.name for path in paths}):
            for path in paths:
                path.unlink()
            for path in made:
                path.rmdir()


@contextmanager
def _locked(folder: Path, *, key: str) -> Generator[None]:
    """Make a folder, and keep other processes that ask for it out until the block ends.

    Raises:
        UserError: Another process has it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(folder, error.strerror, key=key) from None
    with ExitStack() as stack:
        stack.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder}: another process writes here; wait for it, "
                f"or set {key} to another folder"
            ) from None
        except OSError as error:
            _log.warning("%s: cannot be locked (%s); start no second process here", folder, error)
        yield


def _unwritable(folder: Path, reason: str | None, *, key: str) -> UserError:
    return UserError(f"{folder}: cannot be written ({reason}); set {key} to another folder")


def fingerprints(splits: Mapping[Any, Sequence[Example]]) -> dict[str, Any]:
    """Return number and fingerprint of the questions of each split."""
    return {
        name: {"questions": len(examples), "fingerprint": fingerprint(examples)}
        for name, examples in splits.items()
    }


def check_alike(facts: Sequence[Mapping[str, Any]]) -> None:
    """Refuse processes of one run that have read other questions.

    Args:
        facts: The `fingerprints` of each.

    Raises:
        UserError: They differ.
    """
    for process, found in enumerate(facts):
        for name in facts[0]:
            if found[name] != facts[0][name]:
                raise UserError(
                    f"data.{name}: process {process} has read other questions than process 0; give "
                    "all hosts the same files (a gold query that takes too long on one is dropped "
                    "there: see executor.timeout_s)"
                )


def claim_data(folder: Path, splits: Mapping[Any, Sequence[Example]]) -> dict[str, Any]:
    """Note which questions a folder's results are of; refuse others when it is resumed.

    Returns:
        Number and fingerprint of the questions of each split.

    Raises:
        UserError: The folder holds results of other questions.
    """
    facts = fingerprints(splits)
    path = folder / DATA
    if path.exists():
        old = read_json(path, dict[str, Any], advice="delete it to go on")
        changed = [name for name in facts if old.get(name) != facts[name]]
        if changed:
            raise UserError(
                f"data.{changed[0]}: the files hold other questions than when {folder} was begun; "
                f"bring them back, or start in another folder ({path} may be deleted to go on)"
            )
    write_json(path, facts)
    return facts


def versions() -> dict[str, str]:
    """Name the versions that results may depend on; SQLite's decides which queries run."""
    return {
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        **{name: _version(name) for name in _LIBRARIES},
    }


def _version(library: str) -> str:
    """Return a library's version; the SQL side works without the learner's."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "not installed"


def _note_versions(path: Path) -> None:
    """Write the versions down, and warn of those that changed since the work began."""
    now = versions()
    advice = "delete it to go on"
    then = read_json(path, dict[str, str], advice=advice) if path.exists() else now
    if changed := [name for name in now if then.get(name) != now[name]]:
        name = changed[0]
        _log.warning(
            "%s %s began %s, and goes on with %s: numbers may differ from one run's",
            name, then.get(name, "of no version"), path.parent, now[name],
        )  # fmt: skip
    write_json(path, now)


def _is_untouched(names: Collection[str]) -> bool:
    return _BEFORE_WORK.issuperset(names)


def _difference(old: str, new: str) -> str:
    """Name the first key that differs, with both values."""
    try:
        there = dict(flat(yaml.safe_load(old), ""))
    except yaml.YAMLError:
        return f"its {CONFIG} is damaged"
    here = dict(flat(yaml.safe_load(new), ""))
    for key in [*here, *there]:
        if there.get(key) != here.get(key):
            return f"{key} is {_said(there, key)} there and {_said(here, key)} here"
    return "written differently"


def _said(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Give every setting with its path, such as `train.steps`."""
    if not isinstance(value, dict | list):
        yield path, value
        return
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield from flat(child, f"{path}.{key}" if path else str(key))
