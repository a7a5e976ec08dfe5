"""The names of what accuracy is measured on: a job's own splits, and published test sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Literal

from exchange import UserError
from sqlenv.config import OFFICIAL, ExecutorConfig
from sqlenv.data.layouts import SETS, NamedSet

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""The splits of a job's config."""
TEST_SETS: Mapping[str, NamedSet] = {name: one for name, one in SETS.items() if one.comparators}
"""Published test sets."""
_LONGEST_S = 1_000_000


def sample_numbers(count: int, limit: int | None, *, seed: int) -> Sequence[int]:
    """Choose at most so many of some questions by seed; give their numbers in order."""
    if limit is None or count <= limit:
        return range(count)
    return sorted(Random(f"{seed} limit").sample(range(count), limit))


def read_limits(timeout_s: float | None) -> ExecutorConfig:
    """Make the settings that official comparators run queries with, for `--timeout-s`."""
    if timeout_s is None:
        return OFFICIAL
    if not 0 < timeout_s <= _LONGEST_S:
        raise UserError(
            f"--timeout-s {timeout_s}: write a number of seconds above 0, {_LONGEST_S:,} at most"
        )
    return OFFICIAL.model_copy(update={"timeout_s": timeout_s})
