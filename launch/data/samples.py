"""The papers' training questions, as samples by seed of the data sets that people download."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlenv.config import DataConfig, SourceConfig

MULTI_TURN = "Multi-turn Dialogue"
"""SynSQL's style that PaVeRL-SQL leaves out."""


@dataclass(frozen=True, slots=True)
class Part:
    """A data set of a sample, and more settings of its `SourceConfig`."""

    name: str
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """What a paper trains on.

    Attributes:
        about: Where the paper says so, and what is our choice.
        cfg: The packaged config of its run.
        total: Questions to learn from; None for all.
        validation: Questions of other databases, to choose a checkpoint by; where a paper names
            none, those of the configs.
    """

    about: str
    cfg: str
    parts: Sequence[Part]
    total: int | None = None
    validation: int = 200
    drop_empty_gold: bool = True

    def data(self, sources: Mapping[str, SourceConfig], **more: Any) -> DataConfig:
        """Write the settings that draw the sample from the data sets that are there."""
        own = {"total": self.total, "drop_empty_gold": self.drop_empty_gold}
        parts = [sources[part.name].model_dump() | dict(part.more) for part in self.parts]
        return DataConfig.model_validate({"sources": parts, **own, **more})


_BIRD, _SPIDER = Part("bird-train"), Part("spider-train")
_LEVELS = ("Simple", "Moderate", "Complex", "Highly Complex")

SAMPLES: Mapping[str, Sample] = {
    "progress": Sample(
        "Progress-SQL, appendix B: 20,000 of BIRD, Spider and SynSQL; equal shares are ours",
        "progress.yaml",
        (_BIRD, _SPIDER, Part("synsql")),
        total=20_000,
    ),
    "expo": Sample(
        "EXPO-SQL, section 4.1: 5,000 Complex questions of SynSQL, a new draw",
        "expo.yaml",
        (Part("synsql", {"levels": ("Complex",)}),),
        total=5_000,
    ),
    "paverl-bird": Sample(
        "PaVeRL-SQL, table I: 8,600 of BIRD, 429 of other databases",
        "paverl.yaml",
        (_BIRD,),
        total=8_600,
        validation=429,
        drop_empty_gold=False,
    ),
    "paverl-spider": Sample(
        "PaVeRL-SQL, table I: 8,000 of Spider, 648 of other databases",
        "paverl.yaml",
        (_SPIDER,),
        total=8_000,
        validation=648,
        drop_empty_gold=False,
    ),
    "paverl-synsql": Sample(
        "PaVeRL-SQL, table I: 10,000 of SynSQL, its levels alike, no dialogues; 175 to validate",
        "paverl.yaml",
        tuple(
            Part("synsql", {"levels": (level,), "exclude_styles": (MULTI_TURN,)})
            for level in _LEVELS
        ),
        total=10_000,
        validation=175,
    ),
    "astra": Sample(
        "SQL-ASTRA, section 3.1: all of BIRD whose golds run",
        "astra.yaml",
        (_BIRD,),
        drop_empty_gold=False,
    ),
    "astra-both": Sample(
        "SQL-ASTRA, table 2: all of BIRD and Spider whose golds run",
        "astra.yaml",
        (_BIRD, _SPIDER),
        drop_empty_gold=False,
    ),
}
