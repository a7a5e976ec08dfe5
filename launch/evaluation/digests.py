"""What an evaluation is of, by contents: the same wherever weights and data lie."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.layouts import locate
from sqlenv.data.prepared import DATABASES
from sqlenv.data.records import read_records
from sqlenv.executor.database import fingerprint
from sqlenv.types import Observation

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
    return short(os.fsencode("\n".join(lines)))


def short(content: bytes) -> str:
    """Digest bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


def of_weights(source: PolicySource) -> str:
    """Digest what a policy is read from: model, tokenizer, checkpoint and form of its adapters."""
    model = [path for path in source.model.iterdir() if path.suffix in _MODEL_FILES]
    lora = source.lora and source.lora.model_dump(mode="json")
    parts: list[Any] = [digest([path for path in model if path.is_file()]), lora]
    if source.checkpoint is not None:
        parts += sorted(_files(source.checkpoint))
    return short(json.dumps(parts).encode())


def _files(checkpoint: Path) -> Iterator[tuple[str, int, str]]:
    for path in checkpoint.rglob("*"):
        if path.is_file():
            size = path.stat().st_size
            contents = fingerprint(path) if size <= _SMALL_BYTES else ""
            yield str(path.relative_to(checkpoint)), size, contents


def of_prompts(prompts: Iterable[Observation]) -> str:
    """Digest the prompts of all questions, as the model is shown them."""
    total = hashlib.sha256()
    for prompt in prompts:
        total.update(json.dumps([[m.role, m.content] for m in prompt]).encode())
    return total.hexdigest()[:16]


def of_sources(data: DataConfig) -> list[dict[str, str]]:
    """Digest the question files and databases that a split is read from.

    Raises:
        UserError: A source is not there, or is damaged.
    """
    return [_contents(source) for source in data.sources]


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
