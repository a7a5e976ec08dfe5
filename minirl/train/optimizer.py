"""AdamW or Muon: clipping, updates that are skipped, and the learning rate of each step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from minirl.config import OptimizerConfig
from minirl.exchange import UserError
from minirl.model.sharding import MATRICES, param_path

# A layer's matrices are [layer, out, in].
_MATRIX = MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
# Muon's own momentum, and the size of its steps relative to AdamW's (arXiv:2502.16982).
_MUON_MOMENTUM, _MUON_RMS = 0.95, 0.2
# Shares of the steps that `ramp_cosine` is low for, and at its maximum after.
_FLAT_SHARE, _RAMP_SHARE = 0.03, 0.1
MOST_SKIPPED = 5
"""Updates in a row with a gradient that is not finite, which end a run."""


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Build AdamW or Muon, with clipping by global norm; an update with a gradient that is not
    finite is skipped, and leaves weights and state as they are.

    Its updates are those of a learning rate of 1: the rate depends on the step, of which filters
    and skips leave any number of updates (`learning_rate`).
    """
    decay, kept = config.weight_decay, jnp.dtype(config.moments)
    if config.kind == "adamw":
        rule = optax.adamw(1.0, b2=config.beta2, mu_dtype=kept, weight_decay=decay)
    else:
        rule = muon(
            1.0,
            beta=_MUON_MOMENTUM,
            weight_decay=decay,
            mu_dtype=kept,
            adam_weight_decay=decay,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=partial(jax.tree.map_with_path, _axes),
            consistent_rms=_MUON_RMS,
        )
    clipped = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), rule)
    return optax.apply_if_finite(clipped, MOST_SKIPPED)


def _axes(path: tuple[Any, ...], _weight: Any) -> MuonDimensionNumbers | None:
    # Which axes of a layer's matrix are its input and its output.
    return _MATRIX if param_path(path).rpartition(".")[2] in MATRICES else None


def learning_rate(config: OptimizerConfig, *, steps: int) -> Callable[[Any], Any]:
    """Return the learning rate as a function of the steps done; a cosine ends at `steps`.

    `ramp_cosine` is PaVeRL-SQL's (section III-C): low for 3 % of the steps, at the maximum after
    10 %, then a cosine.

    Note:
        Its rise is continuous, as the paper's words have it; the released code counts it from
        step 0, so that the rate jumps where the flat part ends.
    """
    peak, low = config.learning_rate, config.final_fraction * config.learning_rate
    top: Any = config.warmup_steps
    rise = optax.linear_schedule(peak / max(1, top), peak, top)
    if config.schedule == "ramp_cosine":
        whole: Any = steps  # of which optax takes parts of a step too
        flat, top = _FLAT_SHARE * whole, _RAMP_SHARE * whole
        rise = optax.linear_schedule(low, peak, top - flat, transition_begin=flat)
    after = optax.constant_schedule(peak)
    if config.schedule != "constant":
        after = optax.cosine_decay_schedule(peak, max(1, steps - top), config.final_fraction)
    return optax.join_schedules([rise, after], [top])


def stop_after_skips(state: Any, *, step: int) -> None:
    """End a run in which `MOST_SKIPPED` updates in a row were skipped, by a `UserError`."""
    if int(state.notfinite_count) >= MOST_SKIPPED:
        raise UserError(
            f"step {step}: the gradients of {MOST_SKIPPED} updates in a row were not finite; begin "
            "another run with a lower learning rate"
        )
