"""Evaluation targets: a policy of ours, or a model behind an endpoint.

An evaluation is known by contents: it is the same wherever weights and data lie.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.config import JobConfig
from launch.data.preflight import rooted
from launch.evaluation.digests import digest, short
from launch.evaluation.results import ModelFacts
from launch.evaluation.testsets import Split
from launch.run_folder import PLACES
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.layouts import locate
from sqlenv.data.prepared import DATABASES
from sqlenv.data.records import read_records
from sqlenv.executor.database import fingerprint

if TYPE_CHECKING:
    from launch.policy import PolicySource

# How calls are made may change between two starts, and so may the address of a server.
_MANNERS = {"parallel", "timeout_s", "retries"}
_MODEL_FILES = (".json", ".safetensors", ".jinja")
_SMALL_BYTES = 1_000_000
"""Larger files of a checkpoint, of which most are the optimizer's, are told apart by their names,
which Orbax draws by chance, and sizes."""


@dataclass(frozen=True, slots=True)
class Target:
    """Who is evaluated; its name is for folders.

    The identity is what decides the answers: the endpoint's model, not its address (`url`), since a
    server may move; of a policy in this process the digest of its weights, not their path.
    """

    name: str
    identity: str
    url: str = ""
    policy: PolicySource | None = None

    @classmethod
    def find(
        cls, config: JobConfig, url: str | None, model: str | None, checkpoint: Path | None
    ) -> Target:
        """Find whom the command line names; a `UserError` if there is no such policy."""
        if url and model:
            return cls(model.replace("/", "-"), model, url=url)
        from launch.policy import find_policy  # imports JAX

        source = find_policy(config, checkpoint)
        return cls(source.name, _of_weights(source), policy=source)

    def sampler(self, config: JobConfig) -> str | None:
        """Name the sampler of a policy where it is not the native one."""
        backend = config.rollout.backend
        return None if self.policy is None or backend == "native" else backend

    def facts(self, config: JobConfig) -> ModelFacts:
        """Describe the model, as a table of runs has to know it."""
        policy = self.policy
        if policy is None:
            return ModelFacts(self.name, self.identity)
        run = policy.run
        base = run.model.path if run else policy.model
        return ModelFacts(
            self.name,
            str(policy.model),
            str(policy.checkpoint) if policy.checkpoint else None,
            self.identity,
            base.name if base else "tiny",
            run.reward.kind if run else None,
            self.sampler(config),
        )

    def settings(self, config: JobConfig, section: Split, **more: str) -> Mapping[str, Any]:
        """List what decides the samples: of the job, only what evaluation looks at."""
        used = {"seed", "prompt", "env", "executor", "evaluation"}
        who: dict[str, Any]
        if self.policy is None:
            who = {"endpoint": self.identity}
            place = self.identity
        else:
            used |= {"sampler"}
            backend = config.rollout.backend
            who = {"weights": self.identity, "dtype": config.model.dtype, "backend": backend}
            place = str((self.policy.checkpoint or self.policy.model).resolve())
        if self.policy is None or more.get("decode", "").startswith("judge"):
            who["verbal"] = config.verbal.model_dump(mode="json", exclude=_MANNERS)
        return {
            **who,
            **more,
            **config.model_dump(mode="json", include=used),
            "data": _data(config, section),
            # For people; what these are is said by contents.
            PLACES: {"model": place, "data": str(config.data.root)},
        }


def _of_weights(source: PolicySource) -> str:
    model = [path for path in source.model.iterdir() if path.suffix in _MODEL_FILES]
    lora = source.lora and source.lora.model_dump(mode="json")
    parts: list[Any] = [digest([path for path in model if path.is_file()]), lora]
    if source.checkpoint is not None:
        parts += sorted(_files(source.checkpoint))
    return short(json.dumps(parts).encode())


def _files(checkpoint: Path) -> Iterator[tuple[str, int, str]]:
    for path in filter(Path.is_file, checkpoint.rglob("*")):
        size = path.stat().st_size
        contents = fingerprint(path) if size <= _SMALL_BYTES else ""
        yield str(path.relative_to(checkpoint)), size, contents


def _data(config: JobConfig, split: Split) -> dict[str, Any]:
    """Give the settings of a job's data without its paths, and digests of what a split is read
    from. Of demo data the settings say it all.
    """
    settings = config.data.model_dump(mode="json", exclude={"root": True})
    for section in settings.values():
        for source in section.get("sources", ()) if isinstance(section, dict) else ():
            source.pop("path")
    if config.data.root is None:
        return settings
    return {**settings, "measured": of_sources(rooted(config.data.of(split), config.data.root))}


def of_sources(data: DataConfig) -> list[dict[str, str]]:
    """Digest the question files and databases that a split is read from."""
    return [_contents(source) for source in data.sources]


def _contents(source: SourceConfig) -> dict[str, str]:
    location = locate(source)
    if location.layout == "prepared":
        return {"files": digest([*location.files, location.root / DATABASES])}
    records = (record for file in location.files for record in read_records(file))
    names = {str(record.get("db_id") or record.get("db")) for record in records}
    databases = [path for name in names if (path := location.database(name))]
    return {"files": digest(location.files), "databases": digest(databases)}
