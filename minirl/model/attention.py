"""What a query may look at: the functions that a `Decoder` takes as `attend`.

A query may look at several sets of keys: the shared prompt, the tokens of its own trajectory.
Attention to each is joined (`minirl.model.kernels:join`), so that attention to a prompt kept once a
group equals attention to a copy in every row.

The gradient of a set needs only the joined values and log-sum-exp: the probabilities are
exp(score - lse), and the gradient of a score is p (dout . v - dout . out), as in ring attention
(arXiv:2310.01889).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from minirl.model.cudnn import cudnn
from minirl.model.decoder import Attend
from minirl.model.kernels import Kernel, KeySet, Partial, blockwise, join
from minirl.model.sharding import axes_spec, axis_parts, platform_of
from minirl.model.splash import splash


class Segments(NamedTuple):
    """What each token belongs to; 0 is padding everywhere.

    A unit is a row of prefixes with the rows of answers to them, side by side. Where nothing is
    packed it is one group, and all numbers are 1.
    """

    prefix_NP: Int[Array, "N P"]  # group of each prefix token, from 1 within its unit
    group_BC: Int[Array, "B C"]  # group of each answer token, the same in its unit
    own_BC: Int[Array, "B C"]  # trajectory of each answer token, from 1 within its row


def causal(numbers_BT: Int[Array, "B T"] | None = None, *, mesh: Mesh | None = None) -> Attend:
    """Attend to earlier tokens of the same number in the row, and to the token itself.

    The new cache of a layer is its keys and values, (k_BTKE, v_BTKE). What padding attends to has
    no meaning, and is finite. Numbers are from 1, pieces side by side, and 0 is padding; None where
    every row is one piece, padded on the right.
    """

    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any) -> tuple[Array, Any]:
        del cache
        kernel = _kernel(q_BTHE, mesh, packed=numbers_BT is not None)
        number_BT = jnp.ones(q_BTHE.shape[:2], jnp.int32) if numbers_BT is None else numbers_BT
        own = KeySet(k_BTKE, v_BTKE, number_BT, number_BT)
        out_BTHE = attend_to_sets(kernel, q_BTHE, [own], causal=[True], mesh=mesh)
        return out_BTHE, (k_BTKE, v_BTKE)

    return attend


def shared_prefix(segments: Segments, *, packed: bool = True, mesh: Mesh | None = None) -> Attend:
    """Attend to all prefix tokens of the group, and to earlier tokens of the own trajectory.

    Rows come as B = N x G, those of a unit side by side. A layer's cache is its prefix,
    (k_NPKE, v_NPKE); it is returned unchanged. What padding attends to has no meaning, and is
    finite. `packed` rows may hold several trajectories, or prefixes of several groups, which cuDNN
    does not serve.
    """

    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any) -> tuple[Array, Any]:
        k_NPKE, v_NPKE = cache
        kernel = _kernel(q_BTHE, mesh, packed=packed)
        prefix = KeySet(k_NPKE, v_NPKE, segments.prefix_NP, segments.group_BC)
        own = KeySet(k_BTKE, v_BTKE, segments.own_BC, segments.own_BC)
        sets, order = [prefix, own], [False, True]
        return attend_to_sets(kernel, q_BTHE, sets, causal=order, mesh=mesh), cache

    return attend


def attend_to_sets(
    kernel: Kernel,
    q_BTHE: Array,
    sets: Sequence[KeySet],
    *,
    causal: Sequence[bool],
    mesh: Mesh | None = None,
) -> Array:
    """Attend to several sets of keys together.

    A kernel is opaque to the compiler, so each device is handed its part of rows and heads.
    Key/value heads are repeated until the mesh divides them; where it does not divide the query
    heads, all heads are on every device.

    Args:
        kernel: Computes attention to one set.
        q_BTHE: Queries, not scaled.
        sets: What they look at.
        causal: For each set, whether a query only sees keys up to its own place.
        mesh: Of the devices.

    Returns:
        Attended values, BTHE; finite where a query sees nothing.
    """
    function = functools.partial(_attend, kernel, tuple(causal))
    if mesh is None:
        return function(q_BTHE, tuple(sets))
    heads = q_BTHE.shape[2]
    parts = axis_parts("heads", heads, mesh)
    rows_of_keys = min(keys.k_XLKE.shape[0] for keys in sets)
    row, head = axes_spec(("batch", "heads"), (rows_of_keys, heads), mesh)
    activations = PartitionSpec(row, None, head, None)
    numbers = PartitionSpec(row, None)
    split: Any = (activations, activations, numbers, numbers)
    key_heads = sets[0].k_XLKE.shape[2]
    times = math.lcm(key_heads, parts) // key_heads
    if times > 1:
        sets = [
            keys._replace(
                k_XLKE=jnp.repeat(keys.k_XLKE, times, axis=2),
                v_XLKE=jnp.repeat(keys.v_XLKE, times, axis=2),
            )
            for keys in sets
        ]
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(activations, tuple(KeySet(*split) for _ in sets)),
        out_specs=activations,
        check_vma=False,
    )(q_BTHE, tuple(sets))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    kernel: Kernel, causal: tuple[bool, ...], q_BTHE: Array, sets: tuple[KeySet, ...]
) -> Array:
    return _attend_forward(kernel, causal, q_BTHE, sets)[0]


def _attend_forward(
    kernel: Kernel, causal: tuple[bool, ...], q_BTHE: Array, sets: tuple[KeySet, ...]
) -> tuple[Array, Any]:
    parts = []
    for keys, is_causal in zip(sets, causal, strict=True):
        out, lse = kernel.forward(_by_key_row(q_BTHE, keys), _flat(keys), causal=is_causal)
        values = out.reshape(q_BTHE.shape).astype(jnp.float32)
        lse_BTH1 = lse.reshape(*q_BTHE.shape[:3], 1)
        parts.append(Partial(values, lse_BTH1, jnp.ones_like(lse_BTH1)))
    joined = join(parts)
    out_BTHE = joined.out.astype(q_BTHE.dtype)
    return out_BTHE, (q_BTHE, sets, out_BTHE, joined.lse)


def _attend_backward(
    kernel: Kernel, causal: tuple[bool, ...], saved: Any, dout_BTHE: Array
) -> tuple[Array, tuple[KeySet, ...]]:
    q_BTHE, sets, out_BTHE, lse_BTH = saved
    dq_BTHE = jnp.zeros(q_BTHE.shape, jnp.float32)
    gradients = []
    for keys, is_causal in zip(sets, causal, strict=True):
        arrays = (q_BTHE, out_BTHE, lse_BTH, dout_BTHE)
        q, out, lse, dout = (_by_key_row(array, keys) for array in arrays)
        dq, dk, dv = kernel.backward(q, _flat(keys), out, lse, dout, causal=is_causal)
        dq_BTHE += dq.reshape(q_BTHE.shape).astype(jnp.float32)
        # Numbers have no gradient.
        gradients.append(keys._replace(k_XLKE=dk, v_XLKE=dv, number_XL=None, query_number_BT=None))
    return dq_BTHE.astype(q_BTHE.dtype), tuple(gradients)


_attend.defvjp(_attend_forward, _attend_backward)


def _by_key_row(array_BT: Array, keys: KeySet) -> Array:
    """Put all queries that look at a row of keys into one row."""
    X = keys.k_XLKE.shape[0]
    return array_BT.reshape(X, -1, *array_BT.shape[2:])


def _flat(keys: KeySet) -> KeySet:
    return keys._replace(query_number_BT=_by_key_row(keys.query_number_BT, keys))


# By the platform of the devices; a block of 256 kB lies in the cache of a CPU's core twice.
_KERNELS = {"tpu": splash(), "gpu": cudnn(packed=False), "cpu": blockwise(2**18)}
_PACKED_KERNELS = {"gpu": cudnn(packed=True)}
# For other devices, and for calls that the libraries' kernels do not serve.
_FALLBACK = blockwise(2**29)


def _kernel(q_BTHE: Array, mesh: Mesh | None, *, packed: bool) -> Kernel:
    platform = platform_of(mesh)
    kernel = _KERNELS.get(platform, _FALLBACK)
    if packed:
        kernel = _PACKED_KERNELS.get(platform, kernel)
    return kernel if kernel.serves(q_BTHE) else _FALLBACK
