"""What an evaluation is of, by contents: the same wherever weights and data lie."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.config import JobConfig
from launch.data.preflight import rooted
from launch.testsets import Split
from sqlenv.config import SourceConfig
from sqlenv.data.layouts import locate
from sqlenv.data.prepared import DATABASES
from sqlenv.data.records import read_records
from sqlenv.executor.database import fingerprint

if TYPE_CHECKING:
    from launch.policy import PolicySource

_MODEL_FILES = (".json", ".safetensors", ".jinja")
_SMALL_BYTES = 1_000_000
"""Larger files of a checkpoint, of which most are the optimizer's, are told apart by their names,
which Orbax draws by chance, and sizes."""


def digest(files: Collection[Path]) -> str:
    """Digest files by name and contents: the same on every machine, whatever the paths."""
    with ThreadPoolExecutor() as threads:
        contents = threads.map(fingerprint, files)
        lines = sorted(f"{path.name} {found}" for path, found in zip(files, contents, strict=True))
    return _short(os.fsencode("\n".join(lines)))


def weights(source: PolicySource) -> str:
    """Digest what a policy is read from: model, tokenizer, checkpoint and form of its adapters."""
    model = [path for path in source.model.iterdir() if path.suffix in _MODEL_FILES]
    lora = source.lora and source.lora.model_dump(mode="json")
    parts: list[Any] = [digest([path for path in model if path.is_file()]), lora]
    if source.checkpoint is not None:
        parts += sorted(_files(source.checkpoint))
    return _short(json.dumps(parts).encode())


def _files(checkpoint: Path) -> Iterator[tuple[str, int, str]]:
    for path in checkpoint.rglob("*"):
        if path.is_file():
            size = path.stat().st_size
            contents = fingerprint(path) if size <= _SMALL_BYTES else ""
            yield str(path.relative_to(checkpoint)), size, contents


def data(config: JobConfig, split: Split) -> dict[str, Any]:
    """Give the settings of a job's data without its paths, and digests of what a split is read
    from. Of demo data the settings say it all.

    Raises:
        UserError: A source is not there, or is damaged.
    """
    settings = config.data.model_dump(mode="json", exclude={"root": True})
    for section in settings.values():
        for source in section.get("sources", ()) if isinstance(section, dict) else ():
            source.pop("path")
    if config.data.root is None:
        return settings
    chosen = rooted(config.data.of(split), config.data.root).sources
    return {**settings, "measured": [_contents(source) for source in chosen]}


def _contents(source: SourceConfig) -> dict[str, str]:
    location = locate(source)
    if location.layout == "prepared":
        return {"files": digest([*location.files, location.root / DATABASES])}
    names = {
        str(record.get("db_id") or record.get("db"))
        for file in location.files
        for record in read_records(file)
    }
    databases = [path for name in names if (path := location.database(name))]
    return {"files": digest(location.files), "databases": digest(databases)}


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
