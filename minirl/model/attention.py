"""What a query may look at: the functions that a `Decoder` takes as `attend`.

A query may look at several sets of keys: the shared prompt, the tokens of its own trajectory.
Attention to one set gives normalised values and the log-sum-exp of its scores (`Partial`), and
`join` weighs the values of all sets by exp(lse_set - lse): so attention to a prompt kept once a
group equals attention to a copy in every row.

The gradient of a set needs only the joined values and log-sum-exp: the probabilities are
exp(score - lse), and the gradient of a score is p (dout . v - dout . out), as in ring attention
(arXiv:2310.01889).

On TPUs and NVIDIA GPUs kernels of libraries compute it where they serve the call
(`minirl.model.kernels`); everywhere else `blockwise`, flash attention in JAX itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from minirl.model.decoder import Attend
from minirl.model.kernels import MASKED, Kernel, KeySet, cudnn, splash
from minirl.model.sharding import axes_spec, axis_parts


class Segments(NamedTuple):
    """What each token belongs to; 0 is padding everywhere.

    A unit is a row of prefixes with the rows of answers to them, side by side. Where nothing is
    packed it is one group, and all numbers are 1.

    Attributes:
        prefix_NP: Number (from 1) of the group of each prefix token, within its unit.
        group_BC: Number of the group that each answer token belongs to, the same in its unit.
        own_BC: Number (from 1) of the trajectory that each answer token belongs to, within its row.
    """

    prefix_NP: Int[Array, "N P"]
    group_BC: Int[Array, "B C"]
    own_BC: Int[Array, "B C"]


class Partial(NamedTuple):
    """Attention to one set of keys, of queries in any shape.

    Attributes:
        out: Values, normalised over the set; finite where a query sees no key of it.
        lse: Log-sum-exp of the scores, in fp32; far below all others where no key is seen.
    """

    out: Float[Array, "... E"]
    lse: Float[Array, "..."]


def partial_attention(scores: Float[Array, "... Q L"], v: Float[Array, "... L E"]) -> Partial:
    """Attend to one set of keys.

    Args:
        scores: In fp32, of scaled queries; `MASKED` where a key is not seen.
        v: Values.

    Returns:
        Values in fp32, and their log-sum-exp.
    """
    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    return Partial(_product(weights.astype(v.dtype), v) / total, (peak + jnp.log(total))[..., 0])


def join(parts: Sequence[Partial]) -> Partial:
    """Join attention of the same queries to several sets of keys; values in fp32.

    The rescaling of online softmax (arXiv:1805.02867).
    """
    lse = functools.reduce(jnp.logaddexp, [part.lse for part in parts])
    terms = [jnp.exp(part.lse - lse)[..., None] * part.out.astype(jnp.float32) for part in parts]
    return Partial(functools.reduce(jnp.add, terms), lse)


def causal(numbers_BT: Int[Array, "B T"] | None = None, *, mesh: Mesh | None = None) -> Attend:
    """Attend to earlier tokens of the same number in the row, and to the token itself.

    The new cache of a layer is its keys and values, (k_BTKE, v_BTKE). What padding attends to has
    no meaning, and is finite.

    Args:
        numbers_BT: What each token belongs to, from 1, pieces side by side; 0 is padding. None
            where every row is one piece, padded on the right.
        mesh: What rows and heads are split over.
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
    finite.

    Args:
        segments: What each token belongs to.
        packed: Whether a row may hold more than one trajectory, or a prefix row more than one
            group; cuDNN serves only rows that do not.
        mesh: What rows and heads are split over.
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

    Args:
        kernel: Computes attention to one set.
        q_BTHE: Queries, not scaled.
        sets: What they look at.
        causal: For each set, whether a query only sees keys up to its own place.
        mesh: What the arrays are split over: rows, and heads. A kernel is opaque to the compiler,
            so each device is handed its part. Key/value heads are repeated until the mesh divides
            them; where it does not divide the query heads, all heads are on every device.

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
    sets = tuple(_repeat_heads(keys, parts) for keys in sets)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(activations, tuple(KeySet(*split) for _ in sets)),
        out_specs=activations,
        check_vma=False,
    )(q_BTHE, sets)


def _repeat_heads(keys: KeySet, parts: int) -> KeySet:
    """Repeat key/value heads until they can be shared out."""
    K = keys.k_XLKE.shape[2]
    times = math.lcm(K, parts) // K
    k, v = (jnp.repeat(array, times, axis=2) for array in (keys.k_XLKE, keys.v_XLKE))
    return keys._replace(k_XLKE=k, v_XLKE=v) if times > 1 else keys


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
        parts.append(Partial(out.reshape(q_BTHE.shape), lse.reshape(q_BTHE.shape[:3])))
    joined = parts[0] if len(parts) == 1 else join(parts)
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


def blockwise(block_bytes: int) -> Kernel:
    """Return flash attention in JAX itself, for any device and call.

    Args:
        block_bytes: Scores computed at a time. The gradient passes over such a block several
            times, so that on a CPU it should lie in a core's cache.
    """
    return Kernel(
        functools.partial(_blockwise_forward, block_bytes),
        functools.partial(_blockwise_backward, block_bytes),
        lambda _q: True,
    )


class _Queries(NamedTuple):
    """C blocks of M queries of one key/value head; `place_CM` is theirs in the row."""

    q_CME: Array
    number_CM: Array
    place_CM: Array


class _Blocks:
    """Shapes of blocks: queries XTHE by key/value head (Y = X x K), C blocks of M = R x t each."""

    def __init__(self, block_bytes: int, q_XTHE: Array, keys: KeySet) -> None:
        self.X, self.T, H, _ = q_XTHE.shape
        L, self.K = keys.k_XLKE.shape[1:3]
        self.R = H // self.K
        query_bytes = 4 * L * self.R
        self.C = -(-self.T // max(block_bytes // query_bytes, 1))
        self.t = -(-self.T // self.C)
        # Small heads are taken several at a time.
        self._together = max(block_bytes // (query_bytes * self.t), 1)

    def over_heads(self, function: Any, *arrays: Any) -> Any:
        return jax.lax.map(lambda xs: function(*xs), arrays, batch_size=self._together)

    def split(self, array_XTHE: Array) -> Array:
        """Bring an array XTHE as Y, C, M, E."""
        missing = self.C * self.t - self.T
        if missing:
            array_XTHE = jnp.pad(array_XTHE, ((0, 0), (0, missing), (0, 0), (0, 0)))
        parts = array_XTHE.reshape(self.X, self.C, self.t, self.K, self.R, -1)
        parts = parts.transpose(0, 3, 1, 4, 2, 5)
        return parts.reshape(self.X * self.K, self.C, self.R * self.t, -1)

    def split_numbers(self, array_XT: Array) -> Array:
        """Bring what all heads have alike as Y, C, M."""
        shape = (*array_XT.shape, self.K * self.R, 1)
        return self.split(jnp.broadcast_to(array_XT[..., None, None], shape))[..., 0]

    def queries(self, q_XTHE: Array, keys: KeySet) -> _Queries:
        place_XT = jnp.broadcast_to(jnp.arange(self.T)[None], (self.X, self.T))
        return _Queries(
            self.split(q_XTHE * q_XTHE.shape[-1] ** -0.5),
            self.split_numbers(keys.query_number_BT),
            self.split_numbers(place_XT),
        )

    def keys(self, keys: KeySet) -> tuple[Array, Array, Array]:
        """Return keys and values, YLE, and the numbers of keys, YL."""
        k, v = (
            array.swapaxes(1, 2).reshape(self.X * self.K, *array.shape[1::2])
            for array in (keys.k_XLKE, keys.v_XLKE)
        )
        return k, v, jnp.repeat(keys.number_XL, self.K, axis=0)

    def merge(self, array_YCME: Array) -> Array:
        """Undo `split`."""
        parts = array_YCME.reshape(self.X, self.K, self.C, self.R, self.t, -1)
        parts = parts.transpose(0, 2, 4, 1, 3, 5)
        return parts.reshape(self.X, self.C * self.t, self.K * self.R, -1)[:, : self.T]

    def merge_keys(self, array_YLE: Array) -> Array:
        """Bring gradients of keys back as XLKE."""
        return array_YLE.reshape(self.X, self.K, *array_YLE.shape[1:]).swapaxes(1, 2)


def _blockwise_forward(
    block_bytes: int, q_XTHE: Array, keys: KeySet, *, causal: bool
) -> tuple[Array, Array]:
    def head(queries: _Queries, k_LE: Array, v_LE: Array, number_L: Array) -> Partial:
        def block(one: _Queries) -> Partial:
            scores_ML = _masked_scores(one, k_LE, number_L, causal=causal)
            return partial_attention(scores_ML, v_LE)

        return jax.lax.map(block, queries)

    blocks = _Blocks(block_bytes, q_XTHE, keys)
    queries = blocks.queries(q_XTHE, keys)
    out, lse = blocks.over_heads(head, queries, *blocks.keys(keys))
    return blocks.merge(out).astype(q_XTHE.dtype), blocks.merge(lse[..., None])[..., 0]


def _blockwise_backward(
    block_bytes: int,
    q_XTHE: Array,
    keys: KeySet,
    out_XTHE: Array,
    lse_XTH: Array,
    dout_XTHE: Array,
    *,
    causal: bool,
) -> tuple[Array, Array, Array]:
    def head(
        queries: _Queries,
        lse_CM: Array,
        delta_CM: Array,
        dout_CME: Array,
        k_LE: Array,
        v_LE: Array,
        number_L: Array,
    ) -> tuple[Array, Array, Array]:
        def block(total: tuple[Array, Array], xs: Any) -> tuple[tuple[Array, Array], Array]:
            one, lse_M, delta_M, dout_ME = xs
            scores_ML = _masked_scores(one, k_LE, number_L, causal=causal)
            # A query that sees no key has a log-sum-exp as low as its scores.
            is_seen_ML = scores_ML > MASKED
            p_ML = jnp.where(is_seen_ML, jnp.exp(scores_ML - lse_M[:, None]), 0.0)
            ds_ML = p_ML * (_product(dout_ME, v_LE.T) - delta_M[:, None])
            p_ML, ds_ML = p_ML.astype(v_LE.dtype), ds_ML.astype(k_LE.dtype)
            dk_LE = total[0] + _product(ds_ML.T, one.q_CME)
            dv_LE = total[1] + _product(p_ML.T, dout_ME)
            return (dk_LE, dv_LE), _product(ds_ML, k_LE)

        zeros = jnp.zeros(k_LE.shape, jnp.float32)
        (dk_LE, dv_LE), dq_CME = jax.lax.scan(
            block, (zeros, zeros), (queries, lse_CM, delta_CM, dout_CME)
        )
        return dq_CME, dk_LE, dv_LE

    blocks = _Blocks(block_bytes, q_XTHE, keys)
    delta_XTH = (dout_XTHE.astype(jnp.float32) * out_XTHE.astype(jnp.float32)).sum(-1)
    lse, delta = (blocks.split(array[..., None])[..., 0] for array in (lse_XTH, delta_XTH))
    queries, dout = blocks.queries(q_XTHE, keys), blocks.split(dout_XTHE)
    dq, dk, dv = blocks.over_heads(head, queries, lse, delta, dout, *blocks.keys(keys))
    dq_XTHE = blocks.merge(dq) * q_XTHE.shape[-1] ** -0.5
    dk, dv = (blocks.merge_keys(array).astype(q_XTHE.dtype) for array in (dk, dv))
    return dq_XTHE.astype(q_XTHE.dtype), dk, dv


def _masked_scores(one: _Queries, k_LE: Array, number_L: Array, *, causal: bool) -> Array:
    """Return the scores of a block's queries, ML."""
    is_seen_ML = one.number_CM[:, None] == number_L[None]
    if causal:
        is_seen_ML &= one.place_CM[:, None] >= jnp.arange(len(number_L))[None]
    return jnp.where(is_seen_ML, _product(one.q_CME, k_LE.T), MASKED)


def _product(a: Array, b: Array) -> Array:
    """Multiply into fp32, which softmax is computed in."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


# By the platform of the devices; a block of 256 kB lies in the cache of a CPU's core twice.
_KERNELS = {"tpu": splash(), "gpu": cudnn(packed=False), "cpu": blockwise(2**18)}
_PACKED_KERNELS = {"gpu": cudnn(packed=True)}
# For other devices, and for calls that the libraries' kernels do not serve.
_FALLBACK = blockwise(2**29)


def _kernel(q_BTHE: Array, mesh: Mesh | None, *, packed: bool) -> Kernel:
    """Choose by the platform of the devices, which may be only described (to compile ahead)."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    kernel = _KERNELS.get(platform, _FALLBACK)
    if packed:
        kernel = _PACKED_KERNELS.get(platform, kernel)
    return kernel if kernel.serves(q_BTHE) else _FALLBACK
