"""Evaluation targets: a policy of ours, or a model behind an endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.config import JobConfig
from launch.data.preflight import rooted
from launch.evaluation.digests import of_sources, of_weights
from launch.evaluation.results import ModelFacts
from launch.evaluation.testsets import Split
from launch.run_folder import PLACES

if TYPE_CHECKING:
    from launch.policy import PolicySource

# How calls are made may change between two starts, and so may the address of a server.
_MANNERS = {"parallel", "timeout_s", "retries"}


@dataclass(frozen=True, slots=True)
class Target:
    """Who is evaluated.

    Attributes:
        name: Short, for the names of folders.
        identity: What decides the answers: the endpoint's model, not its address, since a server
            may move; of a policy the digest of its weights, not their path.
        url: Of the endpoint; empty for a policy in this process.
    """

    name: str
    identity: str
    url: str = ""
    policy: PolicySource | None = None

    @classmethod
    def find(
        cls, config: JobConfig, url: str | None, model: str | None, checkpoint: Path | None
    ) -> Target:
        """Find whom the command line names.

        Raises:
            UserError: There is no such policy.
        """
        if url and model:
            return cls(model.replace("/", "-"), model, url=url)
        from launch.policy import find_policy  # imports JAX

        source = find_policy(config, checkpoint)
        return cls(source.name, of_weights(source), policy=source)

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
        judging = more.get("decode", "").startswith("judge")
        verbal = config.verbal.model_dump(mode="json", exclude=_MANNERS)
        if self.policy is None:
            who: dict[str, Any] = {"endpoint": self.identity}
            manner = {key: verbal[key] for key in ("max_tokens", "send_seed")}
            place = self.identity
        else:
            used |= {"sampler"}
            who = {"weights": self.identity, "dtype": config.model.dtype}
            if sampler := self.sampler(config):
                who["rollout"] = {"backend": sampler}
            manner = {}
            place = str((self.policy.checkpoint or self.policy.model).resolve())
        manner = {"verbal": verbal if judging else manner}
        return {
            **who,
            **more,
            **(manner if manner["verbal"] else {}),
            **config.model_dump(mode="json", include=used),
            "data": _data(config, section),
            # For people; what these are is said by contents.
            PLACES: {"model": place, "data": str(config.data.root)},
        }


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
