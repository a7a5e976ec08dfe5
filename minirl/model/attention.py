"""What a query may look at: the functions that a `Decoder` takes as `attend`.

Scores over several sets of keys (the shared prompt, the answer's own tokens) are normalised
together, so that attending to a prompt kept once a group equals attending to a copy in every row.

On TPUs and NVIDIA GPUs flash attention of kept libraries computes it (`minirl.model.kernels`), on
CPUs our own (`minirl.model.blocks`), where that serves the call; everywhere else the plain version
below, which says what all of them mean. It cuts queries into chunks where scores would be large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from minirl.model import blocks, kernels
from minirl.model.decoder import Attend
from minirl.model.sharding import axis_parts

# Largest array of scores that the plain version holds at once on a device, in bytes.
SCORES_BYTES = 2**29
# By the platform of the devices.
_KERNELS = {"tpu": kernels.splash(), "gpu": kernels.cudnn(), "cpu": blocks.blocks()}


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
        if kernel is None:
            out_BTHE = _plain_causal(q_BTHE, k_BTKE, v_BTKE, numbers_BT, mesh=mesh)
        else:
            number_BT = jnp.ones(q_BTHE.shape[:2], jnp.int32) if numbers_BT is None else numbers_BT
            own = kernels.Keys(k_BTKE, v_BTKE, number_BT, number_BT)
            out_BTHE = kernels.attend(kernel, q_BTHE, (own,), causal=(True,), mesh=mesh)
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
            group. Where it may not, nothing but the padding of prefixes need be masked, which is
            quicker; cuDNN serves only that.
        mesh: What rows and heads are split over.
    """

    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any) -> tuple[Array, Any]:
        k_NPKE, v_NPKE = cache
        kernel = _kernel(q_BTHE, mesh, packed=packed)
        if kernel is None:
            arrays = (q_BTHE, k_BTKE, v_BTKE, k_NPKE, v_NPKE)
            return _plain_shared(*arrays, segments, packed=packed, mesh=mesh), cache
        prefix = kernels.Keys(k_NPKE, v_NPKE, segments.prefix_NP, segments.group_BC)
        own = kernels.Keys(k_BTKE, v_BTKE, segments.own_BC, segments.own_BC)
        sets = (prefix, own)
        return kernels.attend(kernel, q_BTHE, sets, causal=(False, True), mesh=mesh), cache

    return attend


def _kernel(q_BTHE: Array, mesh: Mesh | None, *, packed: bool) -> kernels.Kernel | None:
    """Choose by the platform of the devices; None is the plain version.

    A mesh may be of devices that are only described, to compile ahead of time.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    kernel = _KERNELS.get(platform)
    return kernel if kernel is not None and kernel.serves(q_BTHE, packed=packed) else None


def _plain_causal(
    q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, numbers_BT: Array | None, *, mesh: Mesh | None
) -> Array:
    B, T, H, E = q_BTHE.shape
    K = k_BTKE.shape[2]
    q_BTKRE = (q_BTHE * E**-0.5).reshape(B, T, K, H // K, E)

    def look(start: Array | int, q_BXKRE: Array, numbers_BX: Array | None) -> Array:
        q_BKRXE = q_BXKRE.transpose(0, 2, 3, 1, 4)
        mask = _earlier(start, q_BXKRE.shape[1], T)[None]
        if numbers_BT is not None and numbers_BX is not None:
            mask &= numbers_BX[:, :, None] == numbers_BT[:, None]
        scores = _product("bkrxe,bske->bkrxs", q_BKRXE, k_BTKE) + _bias(mask)[:, None, None]
        weights = jax.nn.softmax(scores)
        out = jnp.einsum("bkrxs,bske->bkrxe", weights.astype(v_BTKE.dtype), v_BTKE)
        return out.transpose(0, 3, 1, 2, 4)

    chunks = _chunks((B, H, T), T, mesh)
    return _in_chunks(look, q_BTKRE, numbers_BT, chunks=chunks).reshape(B, T, H, E)


def _plain_shared(
    q_BTHE: Array,
    k_BTKE: Array,
    v_BTKE: Array,
    k_NPKE: Array,
    v_NPKE: Array,
    segments: Segments,
    *,
    packed: bool,
    mesh: Mesh | None,
) -> Array:
    B, T, H, E = q_BTHE.shape
    N, P, K, _ = k_NPKE.shape
    G, R = B // N, H // K
    k_NKGTE = k_BTKE.reshape(N, G, T, K, E).transpose(0, 3, 1, 2, 4)
    v_NKGTE = v_BTKE.reshape(N, G, T, K, E).transpose(0, 3, 1, 2, 4)

    def masks(start: Array | int, numbers: Any, X: int) -> tuple[Array, Array]:
        """Return what the queries may see of the prefix and of their own row, each NG(RX)."""
        prefix, own = (segments.prefix_NP != 0)[:, None, None], _earlier(start, X, T)[None, None]
        if not packed:
            return _bias(prefix), jnp.tile(_bias(own), (1, 1, R, 1))
        group_NGX, own_NGX = (array.reshape(N, G, X) for array in numbers)
        prefix &= group_NGX[..., None] == segments.prefix_NP[:, None, None]
        own &= own_NGX[..., None] == segments.own_BC.reshape(N, G, 1, T)
        return jnp.tile(_bias(prefix), (1, 1, R, 1)), jnp.tile(_bias(own), (1, 1, R, 1))

    def look(start: Array | int, q_BXKRE: Array, numbers: Any) -> Array:
        # Heads go outside, so that each product is one matrix product a group and head (M = R x X).
        X = q_BXKRE.shape[1]
        q = q_BXKRE.reshape(N, G, X, K, R, E).transpose(0, 3, 1, 4, 2, 5)
        q_NKGME = q.reshape(N, K, G, R * X, E)
        see_prefix, see_own = masks(start, numbers, X)
        to_prefix = _product("nkgme,npke->nkgmp", q_NKGME, k_NPKE) + see_prefix[:, None]
        to_own = _product("nkgme,nkgte->nkgmt", q_NKGME, k_NKGTE) + see_own[:, None]
        peak = jnp.maximum(to_prefix.max(-1, keepdims=True), to_own.max(-1, keepdims=True))
        peak = jax.lax.stop_gradient(peak)
        to_prefix, to_own = jnp.exp(to_prefix - peak), jnp.exp(to_own - peak)
        total = to_prefix.sum(-1, keepdims=True) + to_own.sum(-1, keepdims=True)
        out = jnp.einsum("nkgmp,npke->nkgme", to_prefix.astype(v_NPKE.dtype), v_NPKE)
        out += jnp.einsum("nkgmt,nkgte->nkgme", to_own.astype(v_NKGTE.dtype), v_NKGTE)
        out = (out / total).astype(q_BTHE.dtype).reshape(N, K, G, R, X, E)
        return out.transpose(0, 2, 4, 1, 3, 5).reshape(B, X, K, R, E)

    q_BTKRE = (q_BTHE * E**-0.5).reshape(B, T, K, R, E)
    numbers = (segments.group_BC, segments.own_BC) if packed else None
    chunks = _chunks((N, H, G * T), P + T, mesh)
    return _in_chunks(look, q_BTKRE, numbers, chunks=chunks).reshape(B, T, H, E)


def _chunks(sizes: tuple[int, int, int], keys: int, mesh: Mesh | None) -> int:
    """Return into how many chunks of queries scores are cut, from rows, heads, queries, keys."""
    rows, heads, queries = sizes
    parts = axis_parts("batch", rows, mesh) * axis_parts("heads", heads, mesh)
    chunks = 1
    while 4 * rows * heads * queries * keys // (parts * chunks) > SCORES_BYTES:
        chunks *= 2
    return chunks


def _in_chunks(
    look: Callable[[Array | int, Array, Any], Array], q_BT: Array, numbers: Any, *, chunks: int
) -> Array:
    """Let queries look chunk by chunk of positions; their gradient computes scores anew."""
    T = q_BT.shape[1]
    length = max(-(-T // chunks), 1)
    if length >= T:
        return look(0, q_BT, numbers)
    chunks = -(-T // length)

    def cut(array_BT: Array) -> Array:
        missing = [(0, 0), (0, chunks * length - T), *[(0, 0)] * (array_BT.ndim - 2)]
        array = jnp.pad(array_BT, missing)
        return jnp.moveaxis(array.reshape(-1, chunks, length, *array.shape[2:]), 1, 0)

    starts = jnp.arange(chunks) * length
    parts = jax.lax.map(
        lambda xs: jax.checkpoint(look)(*xs), (starts, cut(q_BT), jax.tree.map(cut, numbers))
    )
    joined = jnp.moveaxis(parts, 0, 1)
    return joined.reshape(joined.shape[0], chunks * length, *joined.shape[3:])[:, :T]


def _product(subscripts: str, a: Array, b: Array) -> Array:
    """Multiply into fp32, which softmax is computed in."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _bias(mask: Bool[Array, "..."]) -> Array:
    """Turn a mask into what is added to scores; finite, so that a row may be masked whole."""
    return jnp.where(mask, 0.0, -1e30)


def _earlier(start: Array | int, X: int, T: int) -> Bool[Array, "X T"]:
    """Tell for the queries from a position on which keys do not come after them."""
    return start + jnp.arange(X)[:, None] >= jnp.arange(T)[None]
