"""PaVeRL-SQL's learning rate."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minirl.config import OptimizerConfig
from minirl.train.optimizer import learning_rate

RAMP = json.loads((Path(__file__).parents[1] / "data" / "schedule.json").read_text())["ramp_cosine"]


def test_flat_ramp_cosine():
    config = OptimizerConfig(
        learning_rate=1e-5,
        schedule="ramp_cosine",
        final_fraction=RAMP["final_fraction"],
    )
    rate = learning_rate(config, steps=RAMP["steps"])
    counts = jnp.array([int(count) for count in RAMP["shares"]])
    shares = np.array(jax.jit(rate)(counts)) / 1e-5
    np.testing.assert_allclose(shares, list(RAMP["shares"].values()), atol=1e-6)
    # Beyond the end it stays low.
    assert float(rate(2000)) == pytest.approx(1e-7)
