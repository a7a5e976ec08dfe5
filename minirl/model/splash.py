"""JAX's splash attention, flash attention for TPUs.

It does not differentiate its log-sum-exp, but its backward kernel computes what is needed if it is
handed the log-sum-exp and the values over all sets. `_BACKWARD` is a private name of JAX; the tests
call it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jaxtyping import Array

from minirl.model.kernels import Kernel, KeySet

_BACKWARD = splash_attention_kernel._splash_attention_bwd
# Rows of a splash kernel's blocks are lanes of the hardware's registers, or multiples.
_LANES = 128
_LARGEST_BLOCK = 512


def _forward(q_XTHE: Array, keys: KeySet) -> tuple[Array, Array]:
    call, *arguments = _arguments(q_XTHE, keys)
    out_XHTE, (lse_XHT,) = jax.vmap(call)(*arguments)
    T = q_XTHE.shape[1]
    return out_XHTE.swapaxes(1, 2)[:, :T], lse_XHT.swapaxes(1, 2)[:, :T]


def _backward(
    q_XTHE: Array, keys: KeySet, out_XTHE: Array, lse_XTH: Array, dout_XTHE: Array
) -> tuple[Array, Array, Array]:
    call, *arguments = _arguments(q_XTHE, keys)
    settings = dict(call.kwargs)
    order = ("save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name")
    order += ("mask_function", "attn_logits_soft_cap", "interpret")

    def backward(q: Array, k: Array, v: Array, numbers: Any, out: Array, lse: Array, dout: Array):
        saved = (q, k, v, numbers, None, out, lse, call.dq_mask_info, call.dkv_mask_info)
        return _BACKWARD(*(settings[name] for name in order), saved, dout)[3:6]

    values = (_heads_first(array) for array in (out_XTHE, lse_XTH, dout_XTHE))
    gradients = jax.vmap(backward)(*arguments, *values)
    dq, dk, dv = (array.swapaxes(1, 2) for array in gradients)
    (T, _, E), L = q_XTHE.shape[1:], keys.k_XLKE.shape[1]
    dk = dk.reshape(*dk.shape[:3], -1, E).sum(axis=3)
    return dq[:, :T, :, :E] * E**-0.5, dk[:, :L], dv[:, :L]


def _arguments(q_XTHE: Array, keys: KeySet) -> tuple[Any, ...]:
    """Return the kernel, and its arguments heads first and padded to whole blocks."""
    H = q_XTHE.shape[2]
    q_XTHF = _scaled(q_XTHE)
    k_XLKF = jnp.tile(keys.k_XLKE, q_XTHF.shape[-1] // q_XTHE.shape[-1])
    q, k, v = map(_heads_first, (q_XTHF, k_XLKF, keys.v_XLKE))
    is_causal = keys.length_X is None
    # Queries attend to keys of their number; those of padding are on the right, or have another.
    queries_XT = jnp.ones((len(q), q.shape[2]), jnp.int32)
    keys_XL = jnp.ones((len(k), k.shape[2]), jnp.int32)
    if keys.length_X is not None:
        keys_XL = (jnp.arange(k.shape[2])[None] < keys.length_X[:, None]).astype(jnp.int32)
    numbers = splash_attention_kernel.SegmentIds(queries_XT, keys_XL)
    call = _kernel(q.shape[2], k.shape[2], H, causal=is_causal)
    return call, q, k, v, numbers


def _scaled(q_XTHE: Array) -> Array:
    """Scale queries in fp32, which the kernel does not; F is E or 2 E.

    Where rounding to their type takes something off, that stands beside them, and keys stand twice:
    so scores are scaled as exactly as by other kernels. Heads of 64 have a scale of 1/8.
    """
    kind, scale = jnp.finfo(q_XTHE.dtype), 1 / math.sqrt(q_XTHE.shape[-1])
    exact = q_XTHE.astype(jnp.float32) * scale
    if kind.bits == 32 or math.frexp(scale)[0] == 0.5:
        return exact.astype(q_XTHE.dtype)
    # Of two conversions the compiler would make none.
    rounded = jax.lax.reduce_precision(exact, kind.nexp, kind.nmant)
    return jnp.concatenate([rounded, exact - rounded], axis=-1).astype(q_XTHE.dtype)


@functools.lru_cache
def _kernel(T: int, L: int, H: int, *, causal: bool) -> Any:
    kind = splash_attention_mask.CausalMask if causal else splash_attention_mask.FullMask
    # The largest blocks that divide the lengths, themselves multiples of the lanes.
    rows, columns = math.gcd(T, _LARGEST_BLOCK), math.gcd(L, _LARGEST_BLOCK)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    # What it knows of the mask's blocks are constants, the same in every trace.
    with jax.ensure_compile_time_eval():
        return splash_attention_kernel.make_splash_mha_single_device(
            splash_attention_mask.MultiHeadMask([kind((T, L))] * H),
            block_sizes=sizes,
            save_residuals=True,
        )


def _heads_first(array_XTH: Array) -> Array:
    """Put heads before positions, and pad these with zeros, which as a number is padding."""
    widths = [(0, 0)] * array_XTH.ndim
    widths[2] = (0, -array_XTH.shape[1] % _LANES)
    return jnp.pad(array_XTH.swapaxes(1, 2), widths)


SPLASH = Kernel(_forward, _backward)
"""JAX's splash attention. With separate backward kernels of queries and of keys: the fused one
holds the gradient of the queries once for every block of keys. tokamax's newer splash returns no
log-sum-exp."""
