"""Files and folders: read as a user may have written them, written whole or not at all, known by
contents; a folder of results belongs to the settings and questions that it was made with.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import apsw
import yaml

from launch.config import flat
from minirl.exchange import UserError
from minirl.run.files import PART, read_json, whole_file
from sqlenv.data.loading import question_digest
from sqlenv.executor.database import fingerprint
from sqlenv.types import Example

_log = logging.getLogger(__name__)

CONFIG, VERSIONS, DATA, RESULT = "config.yaml", "versions.json", "data.json", "result.json"
ANSWERS = "answers.jsonl"
"""What was answered in an evaluation, or in a place of a run, so far."""
WARM = "warm"
"""Where a run folder keeps what belongs to its warm start."""
SCREENING, SCREENED_SHARES = "screening.jsonl", "screening.json"
"""What a run's screening found: a line for each question, and the shares that they come to."""
WARM_MODEL = Path(WARM, "model")
"""The model that it made."""
_LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "transformers", "sqlglot", "apsw")
_ELSEWHERE = ("rollout.sglang.", "run.dir", "run.tracker")
_ELSEWHERE += ("executor.workers", "train.env_workers")
# A run may be moved with its model and its data, which are known by their contents (`DATA`).
_ELSEWHERE += ("model.path", "data.root")
# What a smaller memory needs; numbers differ by rounding alone, as on another mesh.
_ELSEWHERE += ("train.batching.", "warm_start.batching.", "model.remat")
_ELSEWHERE += ("sampler.slots", "sampler.cache_gb")
_MODEL, _CHECKPOINT, _DATABASES = "model", "checkpoint", "databases"  # in data.json
_SMALL_BYTES = 2**20
# With only these files a folder is still free.
_BEFORE_WORK = frozenset({CONFIG, VERSIONS, DATA})
_ADVICE = "delete it to go on"
_MODEL_FILES = (".json", ".safetensors", ".jinja")


def read_text(path: Path) -> str:
    """Read a file of text, with or without a byte order mark; all line ends become line feeds."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_new(path: Path, option: str) -> None:
    """Raise a `UserError` if a file with content is there, which may be anything of the user's, or
    none can be made.
    """
    if path.is_dir():
        raise UserError(f"{option} {path}: is a folder; name a file")
    if path.is_file() and path.stat().st_size:
        raise UserError(f"{option} {path}: is there already, and is not written over; name another")
    check_place(path.parent, key=option)


def write_json(path: Path, value: Any) -> None:
    """Write a file that is there whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, and its folder where there is none."""
    with whole_file(path) as file:
        file.write(text)


def digest(files: Collection[Path]) -> str:
    """Digest files by name and contents: the same on every machine, whatever the paths."""
    with ThreadPoolExecutor() as threads:
        contents = threads.map(fingerprint, files)
        lines = sorted(f"{path.name} {found}" for path, found in zip(files, contents, strict=True))
    return bytes_digest(os.fsencode("\n".join(lines)))


def model_digest(folder: Path) -> str:
    """Digest what a policy is read from: weights, their shape, tokenizer and template."""
    files = [path for path in folder.iterdir() if path.suffix in _MODEL_FILES and path.is_file()]
    return digest(files)


def database_digest(examples: Iterable[Example]) -> str:
    """Digest the databases of questions."""
    return digest([path for path in {one.database for one in examples} if path.is_file()])


def bytes_digest(content: bytes) -> str:
    """Digest bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


def versions(*libraries: str) -> dict[str, str]:
    """Name the versions that results may depend on; SQLite's decides which queries run."""
    found = {"python": platform.python_version(), "sqlite": apsw.sqlite_lib_version()}
    for name in libraries:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # the SQL side works without the learner's
            found[name] = "not installed"
    return found


def check_settings(folder: Path, settings: str, *, key: str = "run.dir") -> None:
    """Raise a `UserError` if a folder was made with other settings, or holds something else.

    Settings are YAML of everything that decides what will be in the folder, which may be missing or
    empty; `key` is what a person sets to name another one.
    """
    _check_no_file(folder, key)
    names = _names(folder)
    # Settings that somebody wrote by hand have no versions beside them.
    others = names - _BEFORE_WORK
    if (others and CONFIG not in names) or names == {CONFIG}:
        raise UserError(
            f"{folder}: holds files that are not a run (such as {min(others or names)}); "
            f"set {key} to another folder"
        )
    if not others:
        return
    try:
        text = (folder / CONFIG).read_text(encoding="utf-8", errors="replace")
        old = _deciding(yaml.safe_load(text))
    except (yaml.YAMLError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{folder / CONFIG}: is damaged ({said:.60}); bring it back") from None
    new = _deciding(yaml.safe_load(settings))
    for name in dict.fromkeys([*new, *old]):
        if old.get(name) != new.get(name):
            raise UserError(
                f"{folder}: holds results of other settings ({name} is {old.get(name)!r} there "
                f"and {new.get(name)!r} here); set {key} to another folder"
            )


def _names(folder: Path) -> set[str]:
    """List what is in a folder, but what a kill left of a file being written."""
    paths = folder.iterdir() if folder.exists() else ()
    return {path.name for path in paths if not path.match(f".*{PART}")}


def _deciding(values: dict[str, Any]) -> dict[str, Any]:
    """Flatten settings but those of paths, devices, memory, cores, servers and trackers."""
    found = flat({key: value for key, value in values.items() if key != "mesh"})
    return {key: value for key, value in found if not key.startswith(_ELSEWHERE)}


def check_place(folder: Path, *, key: str) -> None:
    """Raise a `UserError` if a folder cannot be made or written; nothing is left there."""
    _check_no_file(folder, key)
    path = folder.absolute()
    ground = next(place for place in (path, *path.parents) if place.exists())
    try:
        # What may be written is not always writable: a full disk, /proc, a file system mounted so.
        with TemporaryDirectory(prefix=".", suffix=PART, dir=ground):
            pass
    except OSError as error:
        raise UserError(f"{key} {folder}: {ground} cannot be written ({error.strerror})") from None


def _check_no_file(folder: Path, key: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; set {key} to another folder")


@contextmanager
def claimed(folder: Path, settings: str, *, key: str = "run.dir") -> Generator[Path]:
    """Make a folder with its settings and versions, and lock it until the block ends.

    What was made for it is removed again if no work came to it.

    Raises:
        UserError: The folder belongs to other settings or to another process.
    """
    check_place(folder, key=key)
    fresh = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    handle = _locked(folder, key=key)
    try:
        check_settings(folder, settings, key=key)
        if _names(folder) <= _BEFORE_WORK:
            (folder / DATA).unlink(missing_ok=True)  # of a start that came to nothing
        _note_versions(folder / VERSIONS)
        write_text(folder / CONFIG, settings)
        yield folder
    finally:
        if fresh and _names(folder) <= _BEFORE_WORK:
            with suppress(OSError):  # something else came to a parent in the meantime
                for path in folder.iterdir():
                    path.unlink()
                for path in fresh:
                    path.rmdir()
        os.close(handle)


def _locked(folder: Path, *, key: str) -> int:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(
            f"{folder}: another process writes here; wait for it, or set {key} to another folder"
        ) from None
    except OSError as error:
        _log.warning("%s: cannot be locked (%s); start no second process here", folder, error)
    return handle


def fingerprints(
    splits: Mapping[Any, Sequence[Example]],
    model: Path | None = None,
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Return number and fingerprint of the questions of each split, and the fingerprints of their
    databases, of a model that is none of the run's own, and of a checkpoint.
    """
    facts: dict[str, Any] = {
        name: {"questions": len(each), "fingerprint": question_digest(each)}
        for name, each in splits.items()
    }
    if splits:
        facts[_DATABASES] = {"fingerprint": database_digest(chain(*splits.values()))}
    if model is not None:
        facts[_MODEL] = {"fingerprint": model_digest(model)}
    if checkpoint is not None:
        # No two saves of weights have the same small files, which say where the arrays lie; these
        # themselves would take minutes.
        files = [path for path in Path(checkpoint, "tree").rglob("*") if path.is_file()]
        small = [path for path in files if path.stat().st_size < _SMALL_BYTES]
        facts[_CHECKPOINT] = {"fingerprint": digest(small)}
    return facts


def check_alike(found: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raise a `UserError` if this process has read something else than the first."""
    for name in found:
        if found[name] != facts[name]:
            raise UserError(
                f"{_told(name)}: this process has read something else than process 0; give all "
                "hosts the same files (a gold query that takes too long on one is dropped there: "
                "see executor.timeout_s)"
            )


def claim_data(folder: Path, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Note the `fingerprints` of what a run begins with, beside those noted before; a `UserError`
    if it began with others.
    """
    path = folder / DATA
    old = read_json(path, dict[str, Any], advice=_ADVICE) if path.exists() else {}
    if changed := [name for name in facts if old.get(name, facts[name]) != facts[name]]:
        is_split = "questions" in facts[changed[0]]
        slow = ", or a gold query took too long then or now (executor.timeout_s)" * is_split
        raise UserError(
            f"{_told(changed[0])}: the files are others than when {folder} was begun{slow}; "
            f"bring them back, or start in another folder ({path} may be deleted to go on)"
        )
    if (known := {**old, **facts}) != old:
        write_json(path, known)
    return facts


def _told(name: str) -> str:
    return {_MODEL: "model.path", _CHECKPOINT: "--checkpoint"}.get(name, f"data.{name}")


def _note_versions(path: Path) -> None:
    now = versions(*_LIBRARIES)
    then = read_json(path, dict[str, str], advice=_ADVICE) if path.exists() else now
    for name in (name for name in now if then.get(name) != now[name]):
        _log.warning(
            "%s: was begun with %s %s, now %s: numbers may differ",
            path.parent, name, then.get(name), now[name],
        )  # fmt: skip
    write_json(path, now)
