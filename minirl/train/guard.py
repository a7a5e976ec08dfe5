"""Updates that would harm the weights: gradients that are no numbers, or far larger than others.

Whether an update is skipped is decided inside of it (`update.Learner`); here is what it is compared
with, and what happens after too many.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import BaseModel, NonNegativeInt

from minirl.config import GuardConfig
from minirl.errors import UserError
from minirl.run.files import naming
from minirl.train.batching import TokenRow


class GuardFacts(BaseModel):
    """What a checkpoint keeps of a `Guard`, so that a run that goes on decides the same."""

    norms: list[float] = []
    skipped: NonNegativeInt = 0


class Guard:
    """Knows how large gradients have been, and how many updates in a row were skipped.

    Args:
        config: What counts as a spike, and how many updates may be skipped.
        max_grad_norm: Norm to which gradients are cut: none below it is a spike.
        folder: Where the batch goes that ends the run.
        key: Where the settings stand, for the message.
    """

    def __init__(
        self, config: GuardConfig, *, max_grad_norm: float, folder: Path, key: str
    ) -> None:
        self._config, self._least, self._folder, self._key = config, max_grad_norm, folder, key
        self.restart()

    def restart(self, facts: GuardFacts | None = None) -> None:
        """Begin with what a checkpoint knows, or with nothing."""
        facts = facts or GuardFacts()
        self._norms = deque(facts.norms, self._config.window)
        self._skipped = facts.skipped

    @property
    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep."""
        return GuardFacts(norms=list(self._norms), skipped=self._skipped).model_dump()

    @property
    def limit(self) -> float:
        """Return the largest norm of a gradient that is applied; inf while none is known."""
        spike, window = self._config.max_spike, self._config.window
        if spike is None or len(self._norms) < window:
            return math.inf
        return spike * max(median(self._norms), self._least)

    def note(
        self, stats: Mapping[str, float], groups: Sequence[Sequence[TokenRow]], *, step: int
    ) -> None:
        """Take in how an update went.

        Args:
            stats: Of `update.Learner.update`.
            groups: What it was made of.
            step: The run's, for the message.

        Raises:
            UserError: So many updates in a row were skipped that the run ends.
        """
        norm = stats["grad_norm"]
        if not stats["skipped"]:
            self._norms.append(norm)
            self._skipped = 0
            return
        limit = self.limit
        self._skipped += 1
        if self._skipped < self._config.max_skipped:
            return
        path = self._folder / "skipped.npz"
        save_rows(path, groups)
        raise UserError(
            f"step {step}: {self._skipped} updates in a row were skipped; the last one's loss is "
            f"{stats['loss']:.3g}, its gradient's norm {norm:.3g}, the largest allowed {limit:.3g}."
            f" Its batch is in {path}: look for log-probabilities and advantages that are not "
            "finite or far from the others'; begin another run with a lower learning rate or with "
            f"other limits ({self._key})"
        )


def save_rows(path: Path, groups: Sequence[Sequence[TokenRow]]) -> None:
    """Write rows for a person to look at with NumPy.

    `ids`, `is_action`, `logprobs` and `advantage` are those of all rows, one after the other;
    `start`, `prompt_length` and `group` have a number a row.
    """
    rows = [row for group in groups for row in group]
    lengths = [len(row.ids) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        np.savez_compressed(
            path,
            ids=np.concatenate([row.ids for row in rows]),
            is_action=np.concatenate([row.is_action for row in rows]),
            logprobs=np.concatenate([row.logprobs for row in rows]),
            advantage=np.concatenate(
                [np.broadcast_to(np.float32(row.advantage), len(row.ids)) for row in rows]
            ),
            start=np.cumsum([0, *lengths[:-1]]),
            prompt_length=np.array([row.prompt_length for row in rows]),
            group=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        )
