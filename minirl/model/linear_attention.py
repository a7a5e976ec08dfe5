"""Gated DeltaNet (arXiv:2412.06464), the linear attention of Qwen3.5, in the form of its files.

Each value head H keeps a memory S, keys by values, that every token decays and corrects (Eq. 10):

    S' = e^g S;   u = beta (v - S'^T k);   S = S' + k u^T;   o = S^T q

with g <= 0 and 0 < beta < 1. Queries, keys and values first pass a causal convolution of W tokens,
so that a row goes on from its memory and from its last W - 1 tokens before the convolution: its
`State`. Value head h reads the query and the key of key head h // (H / K).

The rule is computed in fp32, token by token or in chunks (`_in_chunks`); both are the same but for
rounding. Padding, which is on the right, neither decays nor writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Tokens of a chunk, as in the references.
_CHUNK = 64
# Of the length of queries and keys (FLA's, inside of the root).
_LENGTH_EPS = 1e-6


class Inputs(NamedTuple):
    """What a layer's rule gets of rows of tokens; queries, keys and values before the convolution.

    Attributes:
        g_BTH: Log of what a token leaves of the memory, in fp32.
        beta_BTH: How much of the error of the memory it corrects, in fp32.
    """

    q_BTKE: Any
    k_BTKE: Any
    v_BTHU: Any
    g_BTH: Any
    beta_BTH: Any


class Kernels(NamedTuple):
    """The convolution's weights by head, of queries, keys and values; the last tap is the token's
    own.
    """

    q_KEW: Any
    k_KEW: Any
    v_HUW: Any


class State(NamedTuple):
    """What rows leave to the tokens after them.

    Attributes:
        memory_BHUE: In fp32.
        tails: Of queries, keys and values, the last W - 1 before the convolution.
    """

    memory_BHUE: Any
    tails: Any


Recur = Callable[[Inputs, Kernels, Any], tuple[Array, Any]]
"""(inputs, kernels, the layer's cache) -> (outputs BTHU, the layer's new cache)."""


def no_state(inputs: Inputs, kernels: Kernels) -> State:
    """Return the state of rows without a token."""
    B, _, K, E = inputs.k_BTKE.shape
    H, U, W = kernels.v_HUW.shape
    shapes = ((B, W - 1, K, E), (B, W - 1, K, E), (B, W - 1, H, U))
    tails = tuple(jnp.zeros(shape, inputs.k_BTKE.dtype) for shape in shapes)
    return State(jnp.zeros((B, H, U, E), jnp.float32), tails)


def run(
    inputs: Inputs, kernels: Kernels, state: State, count_B: Int[Array, "B"]
) -> tuple[Float[Array, "B T H U"], State]:
    """Run the rule over rows of tokens, from a state.

    Args:
        inputs: Rows, padded on the right.
        kernels: In the type of the computation.
        state: Of each row.
        count_B: How many tokens it has; with 0 its state stays as it is.

    Returns:
        Outputs, in the type of the inputs, without meaning in padding; and the new states.
    """
    *values, g_BTH, beta_BTH = inputs
    T, dtype = g_BTH.shape[1], inputs.v_BTHU.dtype
    extended = jax.tree.map(_after, state.tails, tuple(values))
    q, k, v = jax.tree.map(_convolved, extended, tuple(kernels))
    q, k = (jnp.repeat(_unit(x), v.shape[2] // k.shape[2], axis=2) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    is_token_BT1 = (jnp.arange(T)[None] < count_B[:, None])[..., None]
    g_BTH, beta_BTH = (jnp.where(is_token_BT1, x, 0.0) for x in (g_BTH, beta_BTH))
    rule = _of_one_token if T == 1 else _in_chunks
    with jax.default_matmul_precision("highest"):
        o_BTHU, memory = rule(q, k, v, g_BTH, beta_BTH, state.memory_BHUE)
    tails = jax.tree.map(lambda array: _window(array, count_B, array.shape[1] - T), extended)
    return o_BTHU.astype(dtype), State(memory, tails)


def _after(tail_BWKE: Array, x_BTKE: Array) -> Array:
    return jnp.concatenate([tail_BWKE.astype(x_BTKE.dtype), x_BTKE], axis=1)


def _convolved(x_BSKE: Array, kernel_KEW: Array) -> Array:
    """Return SiLU of the causal convolution, rounded to the type of the inputs, in fp32."""
    W, T = kernel_KEW.shape[-1], x_BSKE.shape[1] - kernel_KEW.shape[-1] + 1
    x32, kernel32 = x_BSKE.astype(jnp.float32), kernel_KEW.astype(jnp.float32)
    y_BTKE = sum(x32[:, w : w + T] * kernel32[None, None, :, :, w] for w in range(W))
    return jax.nn.silu(y_BTKE).astype(x_BSKE.dtype).astype(jnp.float32)


def _window(array_BSKE: Array, start_B: Array, size: int) -> Array:
    """Return so many tokens of each row, from its own start on."""
    cut = lambda array, start: jax.lax.dynamic_slice_in_dim(array, start, size)  # noqa: E731
    return jax.vmap(cut)(array_BSKE, start_B)


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _LENGTH_EPS)


def _of_one_token(
    q: Array, k: Array, v: Array, g_BTH: Array, beta_BTH: Array, memory_BHUE: Array
) -> tuple[Array, Array]:
    """Run the rule for one token a row, without a product that would reorder the memory."""
    q_BH1E, k_BH1E = q[:, 0, :, None], k[:, 0, :, None]
    memory_BHUE = memory_BHUE * jnp.exp(g_BTH[:, 0])[..., None, None]
    known_BHU = jnp.sum(memory_BHUE * k_BH1E, axis=3)
    u_BHU = beta_BTH[:, 0, :, None] * (v[:, 0] - known_BHU)
    memory_BHUE = memory_BHUE + u_BHU[..., None] * k_BH1E
    return jnp.sum(memory_BHUE * q_BH1E, axis=3)[:, None], memory_BHUE


def _in_chunks(
    q: Array, k: Array, v: Array, g_BTH: Array, beta_BTH: Array, memory_BHUE: Array
) -> tuple[Array, Array]:
    """Run the rule for chunks of C tokens, one after the other (section 3.3).

    Inside of a chunk the corrections solve (I + L) V = beta (v - e^G k S), with G the sum of g up
    to a token and L_ij = beta_i (k_i . k_j) e^(G_i - G_j) below the diagonal; S is the memory
    before the chunk, so that all but its part is solved for all chunks at once.
    """
    B, T, H, U = v.shape
    size = min(_CHUNK, 1 << (T - 1).bit_length())
    Z = -(-T // size)

    def cut(x: Array) -> Array:
        """Bring BTH and the rest to ZBHC and the rest."""
        rest = range(4, x.ndim + 1)
        padding = [(0, 0), (0, Z * size - T), *[(0, 0)] * (x.ndim - 2)]
        chunks = jnp.pad(x, padding).reshape(B, Z, size, *x.shape[2:])
        return chunks.transpose(1, 0, 3, 2, *rest)

    q, k, v, g, beta = map(cut, (q, k, v, g_BTH, beta_BTH))
    total = jnp.cumsum(g, axis=-1)  # G
    is_past_CC = jnp.tril(jnp.ones((size, size), bool))[None, None, None]
    # Masked before the exponential: it could overflow, and its gradient be no number.
    between = jnp.where(is_past_CC, total[..., :, None] - total[..., None, :], -jnp.inf)
    decay = jnp.exp(between)
    beta, from_start = beta[..., None], jnp.exp(total)[..., None]
    k_t = k.swapaxes(-1, -2)
    sides = jnp.concatenate([beta * v, beta * from_start * k], axis=-1)
    system = beta * (k @ k_t) * decay
    # With one axis before their own two: XLA's products of arrays with more end a process on CPUs.
    inverse = _inverse(system.reshape(-1, size, size)).reshape(system.shape)
    solved = inverse @ sides
    # To the end of the chunk, and over all of it.
    to_end = jnp.exp(total[..., -1:] - total)[..., None]
    over = from_start[..., -1:, :]
    xs = (solved[..., :U], solved[..., U:], (q @ k_t) * decay, from_start * q, to_end * k, over)

    def add(memory: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        own, read, scores, q, k, over = xs
        corrections = own - read @ memory
        outputs = q @ memory + scores @ corrections
        return over * memory + k.swapaxes(-1, -2) @ corrections, outputs

    memory_BHEU, o = jax.lax.scan(add, memory_BHUE.swapaxes(2, 3), xs)
    return o.transpose(1, 0, 3, 2, 4).reshape(B, Z * size, H, U)[:, :T], memory_BHEU.swapaxes(2, 3)


@jax.custom_vjp
def _inverse(matrix_XCC: Float[Array, "X C C"]) -> Float[Array, "X C C"]:
    """Invert I + L, with L what is below the diagonal of a matrix; C is a power of two.

    By its halves, as exactly as by substitution:

        (A 0; B D)^-1 = (A^-1 0; -D^-1 B A^-1  D^-1)

    Note:
        Powers of L would lose three digits where keys are alike. LAPACK's solver waits for threads
        that the devices of a CPU's mesh have: all of them could wait for each other.
    """
    half = matrix_XCC.shape[-1] // 2
    if half == 0:
        return jnp.ones_like(matrix_XCC)
    diagonal = jnp.concatenate([matrix_XCC[:, :half, :half], matrix_XCC[:, half:, half:]])
    first, second = jnp.split(_inverse(diagonal), 2)
    corner = -second @ matrix_XCC[:, half:, :half] @ first
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=2)
    return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=2)], axis=1)


def _inverse_forward(matrix_XCC: Array) -> tuple[Array, Array]:
    inverse_XCC = _inverse(matrix_XCC)
    return inverse_XCC, inverse_XCC


def _inverse_backward(inverse_XCC: Array, gradient_XCC: Array) -> tuple[Array]:
    transposed_XCC = inverse_XCC.swapaxes(1, 2)
    # A backward pass is traced where the caller's precision no longer holds.
    with jax.default_matmul_precision("highest"):
        product_XCC = transposed_XCC @ gradient_XCC @ transposed_XCC
    return (jnp.tril(-product_XCC, k=-1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
