"""Log-probabilities and entropies of trained tokens, without the logits of all tokens at once.

A vocabulary has some 150,000 entries: the logits of 64,000 tokens in fp32 would be 40 GB, and their
gradient as much. Here logits exist for a chunk of tokens at a time, in the forward pass and again
in the backward pass, and not at all for tokens that are not trained on.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from minirl.model.sharding import axis_parts, constrain

# Largest array of logits that a device holds at once, in bytes.
LOGITS_BYTES = 2**29
# Least chunks of a part of the rows: the last one is padded, and few tokens are trained on.
_CHUNKS = 8
_HIDDEN, _LOGITS = ("batch", "position", "model"), ("batch", "position", "vocab")


def project(
    hidden_BCD: Float[Array, "B C D"],
    table_VD: Float[Array, "V D"],
    target_BC: Int[Array, "B C"],
    is_trained_BC: Bool[Array, "B C"],
    *,
    temperature: float,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
    """Return the log-probability of every target, and the entropy of its distribution.

    Logits are hidden states times the table, in fp32, over the temperature. Trained tokens are
    sorted to the front and computed in chunks; chunks without any are skipped.

    Args:
        hidden_BCD: Final hidden states.
        table_VD: The output projection, in the dtype of its weights. Its gradient is a sum in fp32,
            and is not rounded if the weights are not.
        target_BC: The next token of each position.
        is_trained_BC: Positions to compute.
        temperature: Divides the logits.
        mesh: What rows and vocabulary are split over. Every part of the rows is sorted by itself;
            the gradient of the table is summed over the parts once, at the end.

    Returns:
        Log-probabilities of the targets, and entropies, which have no gradient; 0 where nothing is
        trained.
    """
    B, C, D = hidden_BCD.shape
    V = table_VD.shape[0]
    parts = axis_parts("batch", B, mesh)
    by_part = (parts, B * C // parts)
    token_bytes = 4 * V // axis_parts("vocab", V, mesh)
    length = max(1, min(LOGITS_BYTES // token_bytes, -(-by_part[1] // _CHUNKS)))
    cut = _Cut(length, temperature, mesh, table_VD.dtype)
    tokens = (target_BC.reshape(by_part), is_trained_BC.reshape(by_part))
    logp, entropy = _in_chunks(cut, hidden_BCD.reshape(*by_part, D), table_VD, *tokens)
    return logp.reshape(target_BC.shape), jax.lax.stop_gradient(entropy.reshape(B, C))


def _of_logits(logits_TV: Array, target_T: Array) -> tuple[Array, Array]:
    """Return log-probabilities of the targets, and entropies; any dimensions before V."""
    total_T = jax.nn.logsumexp(logits_TV, axis=-1)
    logp_T = jnp.take_along_axis(logits_TV, target_T[..., None], axis=-1)[..., 0] - total_T
    return logp_T, total_T - jnp.sum(jax.nn.softmax(logits_TV) * logits_TV, axis=-1)


class _Cut(NamedTuple):
    """How tokens are cut: into chunks of `length` of every part of the rows."""

    length: int
    temperature: float
    mesh: Mesh | None
    table_dtype: Any


class _Chunks:
    """The tokens of X parts, T each, trained ones first, in chunks of Q.

    Attributes:
        number: How many chunks hold a trained token of any part.
    """

    def __init__(
        self, cut: _Cut, hidden_XTD: Array, table_VD: Array, target_XT: Array, is_trained_XT: Array
    ) -> None:
        self._cut, self._hidden_XTD, self._table_VD = cut, hidden_XTD, table_VD
        self._target_XT, self._count_X = target_XT, is_trained_XT.sum(axis=1)
        self._order_XT = jnp.argsort(~is_trained_XT, axis=1, stable=True)
        self.number = -(-self._count_X.max() // cut.length)

    def __getitem__(self, n: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Return tokens XQ, which are trained XQ, hidden states XQD, targets XQ, logits XQV."""
        cut = self._cut
        slot_Q = n * cut.length + jnp.arange(cut.length)
        # The last chunk may end after the last token.
        token_XQ = self._order_XT[:, jnp.minimum(slot_Q, self._order_XT.shape[1] - 1)]
        hidden_XQD = jnp.take_along_axis(self._hidden_XTD, token_XQ[..., None], axis=1)
        hidden_XQD = constrain(hidden_XQD, _HIDDEN, cut.mesh)
        target_XQ = jnp.take_along_axis(self._target_XT, token_XQ, axis=1)
        pair = hidden_XQD, self._table_VD
        logits_XQV = jnp.einsum("xqd,vd->xqv", *pair, preferred_element_type=jnp.float32)
        logits_XQV = constrain(logits_XQV / cut.temperature, _LOGITS, cut.mesh)
        is_trained_XQ = slot_Q[None] < self._count_X[:, None]
        return token_XQ, is_trained_XQ, hidden_XQD, target_XQ, logits_XQV

    def zeros(self, *rest: int, dtype: Any = jnp.float32) -> Array:
        """Return zeros for the tokens of all chunks, in order."""
        (X, T), length = self._order_XT.shape, self._cut.length
        zeros = jnp.zeros((X, -(-T // length) * length, *rest), dtype)
        return constrain(zeros, _HIDDEN[: zeros.ndim], self._cut.mesh)

    def back(self, array: Array) -> Array:
        """Bring values of ordered tokens back to the tokens' places."""
        slot_XT = jnp.argsort(self._order_XT, axis=1)
        slot = slot_XT.reshape(*slot_XT.shape, *(1,) * (array.ndim - 2))
        return jnp.take_along_axis(array, slot, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_chunks(
    cut: _Cut, hidden_XTD: Array, table_VD: Array, target_XT: Array, is_trained_XT: Array
) -> tuple[Array, Array]:
    table_VD = _ready(cut, hidden_XTD, table_VD)
    return _of_chunks(_Chunks(cut, hidden_XTD, table_VD, target_XT, is_trained_XT))


def _ready(cut: _Cut, hidden_XTD: Array, table_VD: Array) -> Array:
    """Return the one copy of the table that all chunks use: whole, in the computation's type."""
    # The barrier keeps XLA from gathering it in the type of the weights, which is twice the bytes.
    table_VD = jax.lax.optimization_barrier(table_VD.astype(hidden_XTD.dtype))
    return constrain(table_VD, ("vocab", "model"), cut.mesh)


def _of_chunks(chunks: _Chunks) -> tuple[Array, Array]:
    def add(n: Array, results: tuple[Array, Array]) -> tuple[Array, ...]:
        _, is_trained_XQ, _, target_XQ, logits_XQV = chunks[n]
        found = (jnp.where(is_trained_XQ, one, 0.0) for one in _of_logits(logits_XQV, target_XQ))
        return tuple(_write(result, n, one) for result, one in zip(results, found, strict=True))

    empty = chunks.zeros(), chunks.zeros()
    logp, entropy = jax.lax.fori_loop(0, chunks.number, add, empty)
    return chunks.back(logp), chunks.back(entropy)


def _in_chunks_forward(cut: _Cut, *primals: Any) -> tuple[tuple[Array, Array], Any]:
    """Keep the arrays, and a number where the table has a gradient: with adapters it has none."""
    hidden_XTD, table_VD, *tokens = (primal.value for primal in primals)
    arrays = (hidden_XTD, _ready(cut, hidden_XTD, table_VD), *tokens)
    table_is_trained = jnp.zeros(()) if primals[1].perturbed else None
    return _of_chunks(_Chunks(cut, *arrays)), (arrays, table_is_trained)


def _in_chunks_backward(cut: _Cut, known: Any, gradients: tuple[Array, Array]) -> tuple[Any, ...]:
    """Compute the logits of each chunk anew: their gradient is (is target - probability) dlogp."""
    arrays, table_is_trained = known
    hidden_XTD, table_VD, *_ = arrays
    X, (V, D), dtype = len(hidden_XTD), table_VD.shape, hidden_XTD.dtype
    chunks = _Chunks(cut, *arrays)

    def add(n: Array, total: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
        dhidden, dtable_XVD = total
        token_XQ, is_trained_XQ, hidden_XQD, target_XQ, logits_XQV = chunks[n]
        dlogp_XQ = jnp.take_along_axis(gradients[0], token_XQ, axis=1)
        scale_XQ1 = jnp.where(is_trained_XQ, dlogp_XQ, 0.0)[..., None] / cut.temperature
        # A comparison is fused into what follows, and a scatter is not.
        at_target_XQV = jnp.where(target_XQ[..., None] == jnp.arange(V)[None, None], scale_XQ1, 0.0)
        dlogits_XQV = at_target_XQV - jax.nn.softmax(logits_XQV) * scale_XQ1
        dlogits_XQV = dlogits_XQV.astype(dtype)
        dhidden_XQD = jnp.einsum("xqv,vd->xqd", dlogits_XQV, table_VD)
        dhidden = _write(dhidden, n, dhidden_XQD)
        if dtable_XVD is None:
            return dhidden, None
        dtable_XVD += jnp.einsum(
            "xqv,xqd->xvd", dlogits_XQV, hidden_XQD, preferred_element_type=jnp.float32
        )
        return dhidden, constrain(dtable_XVD, ("batch", "vocab", "model"), cut.mesh)

    dtable_XVD = None
    if table_is_trained is not None:
        dtable_XVD = constrain(jnp.zeros((X, V, D)), ("batch", "vocab", "model"), cut.mesh)
    start = (chunks.zeros(D, dtype=dtype), dtable_XVD)
    dhidden, dtable_XVD = jax.lax.fori_loop(0, chunks.number, add, start)
    if dtable_XVD is None:
        return chunks.back(dhidden), None, None, None
    dtable_VD = constrain(dtable_XVD.sum(axis=0), ("vocab", "width"), cut.mesh)
    return chunks.back(dhidden), dtable_VD.astype(cut.table_dtype), None, None


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward, symbolic_zeros=True)


def _write(array: Array, n: Array, chunk: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, chunk, n * chunk.shape[1], axis=1)
