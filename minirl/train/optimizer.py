"""AdamW or Muon: clipping, updates that are skipped, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers, muon

from minirl.config import GuardConfig, OptimizerConfig, SftConfig, TrainConfig
from minirl.exchange import UserError
from minirl.model.sharding import MATRICES, param_path
from minirl.run.files import naming
from minirl.types import TokenRow

# Learning rate by steps done.
Rate = Callable[[Any], Any]

# A layer's matrices are [layer, out, in].
_MATRIX = MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
# Muon's own momentum, and the size of its steps relative to AdamW's (arXiv:2502.16982).
_MUON_MOMENTUM, _MUON_RMS = 0.95, 0.2
# Shares of the steps that `ramp_cosine` is low for, and at its maximum after.
_FLAT_SHARE, _RAMP_SHARE = 0.03, 0.1


def make_optimizer(
    config: OptimizerConfig, *, guard: GuardConfig | None = None
) -> optax.GradientTransformationExtraArgs:
    """Build AdamW or Muon, with clipping by global norm and skipped updates.

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
            muon_weight_dimension_numbers=_matrices,
            consistent_rms=_MUON_RMS,
        )
    clipped = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), rule)
    return guarded(clipped, guard or GuardConfig(), least=config.max_grad_norm)


def _matrices(params: Any) -> Any:
    # Which axes of each layer's matrices are its input and its output.

    def axes(path: tuple[Any, ...], _leaf: Any) -> MuonDimensionNumbers | None:
        return _MATRIX if param_path(path).rpartition(".")[2] in MATRICES else None

    return jax.tree.map_with_path(axes, params)


def learning_rate(config: OptimizerConfig, *, steps: int) -> Rate:
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


class GuardState(NamedTuple):
    """The rule's own state; norms of the last updates that were applied, the newest last, NaN where
    there were fewer; and the number of updates skipped in a row, up to now.
    """

    inner: optax.OptState
    norms_W: Array
    skipped: Array


def guarded(
    rule: optax.GradientTransformation, config: GuardConfig, *, least: float
) -> optax.GradientTransformationExtraArgs:
    """Skip updates whose loss or gradient is not finite, or whose gradient norm is a spike.

    A skipped update leaves weights and the rule's state as they are. `update` takes the loss as
    `value`, as optax's own rules that look at it do; `least` is that of `norm_limit`.
    """
    masked = optax.transforms.conditionally_mask(
        rule, lambda step, **known: known["is_sound"], forward_extra_args=True
    )

    def init(params: Any) -> GuardState:
        norms_W = jnp.full(config.window, jnp.nan)
        return GuardState(masked.init(params), norms_W, jnp.zeros((), jnp.int32))

    def update(
        updates: Any, state: Any, params: Any = None, *, value: Any = 0.0
    ) -> tuple[Any, GuardState]:
        norm = optax.tree.norm(updates)
        limit = norm_limit(state, config, least=least)
        is_sound = jnp.isfinite(value) & jnp.isfinite(norm) & (norm <= limit)
        updates, inner = masked.update(updates, state.inner, params, is_sound=is_sound)
        norms_W = jnp.where(is_sound, jnp.roll(state.norms_W, -1).at[-1].set(norm), state.norms_W)
        return updates, GuardState(inner, norms_W, jnp.where(is_sound, 0, state.skipped + 1))

    return optax.GradientTransformationExtraArgs(init, update)


def norm_limit(state: GuardState, config: GuardConfig, *, least: float) -> Array:
    """Return the largest gradient norm that is applied; inf while too few norms are known.

    It is `max_spike` times the median of the last norms, and of no less than `least`.
    """
    if config.max_spike is None:
        return jnp.asarray(math.inf)
    limit = config.max_spike * jnp.maximum(jnp.median(state.norms_W), least)
    return jnp.where(jnp.isnan(limit), math.inf, limit)


def stop_after_skips(
    state: Any,
    config: TrainConfig | SftConfig,
    stats: Mapping[str, float],
    groups: Sequence[Sequence[TokenRow]],
    *,
    step: int,
    folder: Path,
    key: str,
) -> None:
    """End a run in which too many updates in a row were skipped, by a `UserError`.

    The rows of the last one are written to `skipped.npz`, for a person to look at. The key is the
    path of the guard's settings.
    """
    if not stats["skipped"] or int(state.skipped) < config.guard.max_skipped:
        return
    limit = float(norm_limit(state, config.guard, least=config.optimizer.max_grad_norm))
    path = folder / "skipped.npz"
    # A line for each token of the update: `group` and `row` say whose it is.
    numbered = [(n, row) for n, group in enumerate(groups) for row in group]
    tokens: dict[str, list[Any]] = {
        "group": [np.full(len(row.ids), n) for n, row in numbered],
        "row": [np.full(len(row.ids), b) for b, (_, row) in enumerate(numbered)],
        "advantage": [np.full(len(row.ids), row.advantage, np.float32) for _, row in numbered],
    }
    for name in ("ids", "is_action", "logprobs"):
        tokens[name] = [getattr(row, name) for _, row in numbered]
    arrays: dict[str, Any] = {name: np.concatenate(parts) for name, parts in tokens.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        np.savez_compressed(path, **arrays)
    raise UserError(
        f"step {step}: {int(state.skipped)} updates in a row were skipped; the last one's loss is "
        f"{stats['loss']:.3g}, its gradient's norm {stats['grad_norm']:.3g}, the largest allowed "
        f"{limit:.3g}. Look in {path} for log-probabilities and advantages that are not finite; "
        f"begin another run with a lower learning rate or with other limits ({key})"
    )
