"""The papers' training questions, as samples by seed of the data sets that people download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launch.config import DataSection, load_config


@dataclass(frozen=True, slots=True)
class Sample:
    """What a paper trains on: `data.train` of a packaged config, perhaps with other settings.

    `about` says where the paper says so, and what is our choice. `data.held_out` of the config is
    the number of questions of other databases, to choose a checkpoint by.
    """

    about: str
    cfg: str
    overrides: tuple[str, ...] = ()

    def data(self) -> DataSection:
        """Read the config's section."""
        return load_config(self.cfg, self.overrides).data


_LEVELS = ("Simple", "Moderate", "Complex", "Highly Complex")
_NO_DIALOGUES = "layout: synsql, path: ., exclude_styles: [Multi-turn Dialogue]"
_BY_LEVEL = ", ".join(f"{{{_NO_DIALOGUES}, levels: [{level}]}}" for level in _LEVELS)
_SPIDER = "{layout: spider, path: .}"
_ALL = ("data.train.total=null", "train.epochs=null")

SAMPLES: Mapping[str, Sample] = {
    "progress": Sample(
        "Progress-SQL, appendix B: 20,000 of BIRD, Spider and SynSQL; equal shares are ours",
        "progress.yaml",
    ),
    "expo": Sample(
        "EXPO-SQL, section 4.1: 5,000 Complex questions of SynSQL, a new draw", "expo.yaml"
    ),
    "paverl-bird": Sample(
        "PaVeRL-SQL, table I: 8,600 of BIRD, 429 of other databases", "paverl.yaml"
    ),
    "paverl-spider": Sample(
        "PaVeRL-SQL, table I: 8,000 of Spider, 648 of other databases",
        "paverl.yaml",
        (f"data.train.sources=[{_SPIDER}]", "data.train.total=8000", "data.held_out=648"),
    ),
    "paverl-synsql": Sample(
        "PaVeRL-SQL, table I: 10,000 of SynSQL, its levels alike, no dialogues; 175 to validate",
        "paverl.yaml",
        (
            f"data.train.sources=[{_BY_LEVEL}]",
            *("data.train.total=10000", "data.held_out=175", "data.train.drop_empty_gold=true"),
        ),
    ),
    "astra": Sample("SQL-ASTRA, section 3.1: all of BIRD whose golds run", "astra.yaml", _ALL),
    "astra-both": Sample(
        "SQL-ASTRA, table 2: all of BIRD and Spider whose golds run",
        "astra.yaml",
        (f"data.train.sources=[{{layout: bird, path: .}}, {_SPIDER}]", *_ALL),
    ),
}
