"""`launch.train` with a native sampler that is worse than the learner on purpose.

    python -m benchmarks._worse_sampler 2 bfloat16 --accel cpu --cfg progress-demo.yaml

It samples with weights of so many updates before, rounded to this type. Validation does not.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
from flax import nnx

from launch import cli, train

# Who evaluates keeps the sampler that it has imported.
from launch.evaluation import checkpoint, sampling  # noqa: F401
from minirl.sample.sampler import NativeSampler
from minirl.train import rollouts


def main(arguments: list[str]) -> None:
    """Train with the sampler that the first two arguments describe."""
    lag, dtype, *rest = arguments

    class Worse(NativeSampler):
        def __init__(self, *model: Any, **settings: Any) -> None:
            super().__init__(*model, **settings)
            self._pushed: deque[tuple[nnx.State, int]] = deque(maxlen=int(lag) + 1)

        def set_weights(self, weights: nnx.State, *, version: int) -> None:
            self._pushed.append((jax.tree.map(rounded, weights), version))
            oldest, its_version = self._pushed[0]
            super().set_weights(oldest, version=its_version)

    def rounded(leaf: jax.Array) -> jax.Array:
        return jnp.copy(leaf.astype(dtype).astype(leaf.dtype))  # the update takes the leaf itself

    def make_sampler(*model: Any, servers: None = None, **settings: Any) -> NativeSampler:
        return Worse(*model, **settings)

    with patch.object(rollouts, "make_sampler", make_sampler):
        train.main(rest)


if __name__ == "__main__":
    cli.run(main)
