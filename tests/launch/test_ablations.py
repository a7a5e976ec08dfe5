"""Every ablation that docs/papers.md lists is a set of overrides that a run accepts."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from launch.config import load_config

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"
# The name, two blanks or more, the config, two blanks or more, the overrides.
_LINE = re.compile(r"(?P<name>\S.*?) {2,}(?P<config>[\w-]+\.yaml) {2,}(?P<overrides>.+)")


class Ablation(NamedTuple):
    name: str
    config: str
    overrides: tuple[str, ...]


def listed() -> list[Ablation]:
    """Read the lines of all blocks of the page; every line of a block has to be one."""
    blocks = re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [(_LINE.fullmatch(line), line) for line in "".join(blocks).splitlines()]
    assert [line for match, line in lines if not match] == []
    found = (match.groups() for match, _ in lines if match)
    return [Ablation(name, config, tuple(shlex.split(words))) for name, config, words in found]


def test_the_ablations_of_all_papers_are_listed():
    count = Counter(ablation.config.removesuffix(".yaml") for ablation in listed())
    # Progress-SQL's table 3; EXPO-SQL's tables 4, 5, 6 and 11; SQL-ASTRA's tables 1 and 4.
    assert count >= Counter(progress=5, expo=10, paverl=2, astra=9)


@pytest.mark.parametrize("size", ["", "-demo"])
@pytest.mark.parametrize("ablation", listed(), ids=lambda ablation: ablation.name)
def test_an_ablation_is_accepted_and_changes_what_it_names_alone(ablation, size):
    name = ablation.config.replace(".yaml", f"{size}.yaml")
    full, changed = load_config(name, []), load_config(name, ablation.overrides)
    assert changed != full
    keys = [override.partition("=")[0] for override in ablation.overrides]
    for key, override in zip(keys, ablation.overrides, strict=True):
        wanted = yaml.safe_load(override.partition("=")[2])
        found = reduce(getitem, key.split("."), changed.model_dump(mode="json"))
        # A section that was named whole has its other keys by default.
        assert found == (found | wanted if isinstance(wanted, dict) else wanted)
    sections = {key.split(".")[0] for key in keys}
    assert changed.model_dump(exclude=sections) == full.model_dump(exclude=sections)
