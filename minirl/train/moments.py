"""An optimizer's moments in bfloat16: half the memory, the same maths."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

# What optax calls the first and the second moment in the states of its rules.
_MOMENTS = ("mu", "nu")


class RoundedState(NamedTuple):
    """The state of a rule, its moments in bfloat16.

    Attributes:
        count: Updates so far; decides how the next one rounds.
        inner: The rule's own state.
    """

    count: Array
    inner: optax.OptState


def in_bfloat16(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keep the moments of a rule in bfloat16 between its updates, which are made in float32.

    Numbers are rounded up or down at random, so that they are right on average. To the nearest,
    a second moment could never fall: with beta2 = 0.999 an update takes off a thousandth, and
    bfloat16 tells numbers apart that differ by 1/256 (stochastic rounding: Gupta et al. 2015,
    arXiv:1502.02551; for Adam's moments: Zamirai et al. 2020, arXiv:2010.06192). The randomness
    depends on the count of updates alone.
    """

    def init(params: Any) -> RoundedState:
        # Moments start at zero, which every type holds.
        state = _map_moments(lambda _n, leaf: leaf.astype(jnp.bfloat16), rule.init(params))
        return RoundedState(jnp.zeros((), jnp.int32), state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, RoundedState]:
        whole = _map_moments(lambda _n, leaf: leaf.astype(jnp.float32), state.inner)
        updates, inner = rule.update(updates, whole, params)
        key = jax.random.fold_in(jax.random.key(0), state.count)

        def keep(number: int, leaf: Array) -> Array:
            return round_at_random(leaf, jax.random.fold_in(key, number))

        return updates, RoundedState(state.count + 1, _map_moments(keep, inner))

    return optax.GradientTransformation(init, update)


def round_at_random(x: Float[Array, "..."], key: Array) -> Float[Array, "..."]:
    """Round to one of the two neighbours in bfloat16, to the nearer one more often.

    Args:
        x: In float32; finite.
        key: Decides; the mean over keys is x.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    # The lower half of the bits is cut off; noise carries into the upper half as often as it says.
    upper = ((bits + noise) >> 16).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(upper, jnp.bfloat16)


def _map_moments(function: Any, state: Any) -> Any:
    """Apply a function of (number of the leaf, leaf) to every moment in a state."""
    leaves, tree = jax.tree.flatten_with_path(state)
    mapped = [
        function(number, leaf) if _is_moment(path) else leaf
        for number, (path, leaf) in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, mapped)


def _is_moment(path: tuple[Any, ...]) -> bool:
    return any(getattr(entry, "name", None) in _MOMENTS for entry in path)
