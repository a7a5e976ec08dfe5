"""Flash attention of libraries: splash (in JAX) on TPUs, cuDNN's on NVIDIA GPUs.

Each attends to one set of keys; `minirl.model.attention` joins several sets. Neither library
differentiates its log-sum-exp, but their backward kernels compute what is needed if they are handed
the log-sum-exp and the values over all sets. These kernels are no public functions: the names below
that begin with `_SPLASH` and `_CUDNN` are the only private ones used, and the tests call them all.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn_kernels
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jaxtyping import Array

from minirl.errors import UserError

_SPLASH_BACKWARD = splash_attention_kernel._splash_attention_bwd
# The public function of `jax.nn` has the kernel's log-sum-exp, but rounds it to bf16.
_CUDNN_FORWARD = cudnn_kernels.dot_product_attention
_CUDNN_BACKWARD = cudnn_kernels._dot_product_attention_bwd_p_wrapper
_CUDNN_BACKWARD_ARGUMENTS = cudnn_kernels._dot_product_attention_bwd_impl
# The score of a key that is not seen: finite, so that all keys of a query may be masked.
MASKED = -1e30
# Rows of a splash kernel's blocks are lanes of the hardware's registers, or multiples.
_LANES = 128
_LARGEST_BLOCK = 512
# The floats that cuDNN takes, and a bias that masks a key (larger ones meet a fault of cuDNN).
_CUDNN_MASKED = {jnp.dtype(jnp.bfloat16): -(2.0**41), jnp.dtype(jnp.float16): -(2.0**15)}
_CUDNN_LARGEST_HEAD = 128


class KeySet(NamedTuple):
    """A set of keys, and who looks at them.

    Attributes:
        k_XLKE: Keys; the B rows of queries are X x (B / X), those of a row of keys side by side.
        v_XLKE: Values.
        number_XL: What each key belongs to, from 1; 0 is padding.
        query_number_BT: What each query looks at: keys of the same number.
    """

    k_XLKE: Array
    v_XLKE: Array
    number_XL: Array
    query_number_BT: Array


@dataclass(frozen=True)
class Kernel:
    """Flash attention to one set of keys, by one library.

    Attributes:
        forward: (q_XTHE, keys, causal=) -> (values XTHE, log-sum-exp XTH in fp32); queries that
            see no key have any finite values, and a log-sum-exp far below all others.
        backward: (q_XTHE, keys, values, log-sum-exp, gradient of the values, causal=) -> gradients
            of (q, k, v).
        serves: Whether it takes q_BTHE.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
    serves: Callable[..., bool]


def splash(*, interpret: bool = False) -> Kernel:
    """Return JAX's splash attention, a kernel for TPUs.

    With separate backward kernels of queries and of keys: the fused one holds the gradient of the
    queries once for every block of keys. tokamax's newer splash returns no log-sum-exp.

    Args:
        interpret: Run it by Pallas' interpreter, on any device.
    """
    return Kernel(
        functools.partial(_splash_forward, interpret=interpret),
        functools.partial(_splash_backward, interpret=interpret),
        lambda _q: True,
    )


def _splash_forward(
    q_XTHE: Array, keys: KeySet, *, causal: bool, interpret: bool
) -> tuple[Array, Array]:
    call, q, k, v, numbers, T = _splash_arguments(q_XTHE, keys, causal=causal, interpret=interpret)
    out_XHTE, (lse_XHT,) = jax.vmap(call)(q, k, v, numbers)
    return out_XHTE.swapaxes(1, 2)[:, :T], lse_XHT.swapaxes(1, 2)[:, :T]


def _splash_backward(
    q_XTHE: Array,
    keys: KeySet,
    out_XTHE: Array,
    lse_XTH: Array,
    dout_XTHE: Array,
    *,
    causal: bool,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    call, q, k, v, numbers, T = _splash_arguments(q_XTHE, keys, causal=causal, interpret=interpret)
    settings = dict(call.kwargs)
    order = ("save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name")
    order += ("mask_function", "attn_logits_soft_cap", "interpret")

    def backward(q: Array, k: Array, v: Array, numbers: Any, out: Array, lse: Array, dout: Array):
        saved = (q, k, v, numbers, None, out, lse, call.dq_mask_info, call.dkv_mask_info)
        return _SPLASH_BACKWARD(*(settings[name] for name in order), saved, dout)[3:6]

    values = (_heads_first(array) for array in (out_XTHE, lse_XTH, dout_XTHE))
    dq, dk, dv = jax.vmap(backward)(q, k, v, numbers, *values)
    L = keys.k_XLKE.shape[1]
    dq, dk, dv = (array.swapaxes(1, 2) for array in (dq, dk, dv))
    return dq[:, :T] * q_XTHE.shape[-1] ** -0.5, dk[:, :L], dv[:, :L]


def _splash_arguments(
    q_XTHE: Array, keys: KeySet, *, causal: bool, interpret: bool
) -> tuple[Any, ...]:
    """Return the kernel, and its arguments heads first and padded to whole blocks."""
    _, T, H, E = q_XTHE.shape
    q = _heads_first(q_XTHE * E**-0.5)
    k, v = _heads_first(keys.k_XLKE), _heads_first(keys.v_XLKE)
    numbers = splash_attention_kernel.SegmentIds(
        _to_lanes(keys.query_number_BT, axis=1), _to_lanes(keys.number_XL, axis=1)
    )
    call = _splash_kernel(q.shape[2], k.shape[2], H, causal=causal, interpret=interpret)
    return call, q, k, v, numbers, T


@functools.lru_cache
def _splash_kernel(T: int, L: int, H: int, *, causal: bool, interpret: bool) -> Any:
    kind = splash_attention_mask.CausalMask if causal else splash_attention_mask.FullMask
    rows, columns = _block(T), _block(L)
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
            interpret=interpret,
        )


def _heads_first(array_XTH: Array) -> Array:
    return _to_lanes(array_XTH.swapaxes(1, 2), axis=2)


def _to_lanes(array: Array, *, axis: int) -> Array:
    """Pad with zeros, which as a number is padding."""
    missing = -array.shape[axis] % _LANES
    widths = [(0, missing if place == axis else 0) for place in range(array.ndim)]
    return jnp.pad(array, widths) if missing else array


def _block(length: int) -> int:
    """Return the largest block that divides a length, itself a multiple of the lanes."""
    return math.gcd(length, _LARGEST_BLOCK)


def cudnn(*, packed: bool) -> Kernel:
    """Return cuDNN's flash attention, for 16-bit floats on NVIDIA GPUs from Ampere on.

    Args:
        packed: Whether a row holds keys of several numbers: they are told apart by a bias, one for
            all heads and layers (cuDNN's own offsets are silently wrong in JAX before 0.11.1 where
            query heads share key/value heads). Otherwise a row's keys are one piece, padded on the
            right, and cuDNN is passed its length.
    """
    masked = _cudnn_bias if packed else _cudnn_lengths
    return Kernel(
        functools.partial(_cudnn_forward, masked),
        functools.partial(_cudnn_backward, masked),
        _cudnn_serves,
    )


def _cudnn_serves(q_BTHE: Array) -> bool:
    E = q_BTHE.shape[-1]
    return q_BTHE.dtype in _CUDNN_MASKED and E <= _CUDNN_LARGEST_HEAD and E % 8 == 0


class _CudnnMask(NamedTuple):
    """What cuDNN is passed to leave keys out; None where that is not needed.

    Attributes:
        kind: Kind of mask.
        bias_X1TL: Added to the scores.
        queries_X, keys_X: Lengths, at least 1.
        has_keys_X: Rows with any key: a length of zero is undefined, so that such a row attends to
            one key, and its log-sum-exp is masked.
    """

    kind: Any
    bias_X1TL: Array | None = None
    queries_X: Array | None = None
    keys_X: Array | None = None
    has_keys_X: Array | None = None


def _cudnn_bias(q_XTHE: Array, keys: KeySet, *, causal: bool) -> _CudnnMask:
    is_seen_XTL = keys.query_number_BT[:, :, None] == keys.number_XL[:, None]
    masked = _CUDNN_MASKED[q_XTHE.dtype]
    bias_XTL = jnp.where(is_seen_XTL, 0.0, masked).astype(q_XTHE.dtype)
    kind = cudnn_kernels.MaskType.CAUSAL if causal else cudnn_kernels.MaskType.NO_MASK
    return _CudnnMask(kind, bias_XTL[:, None])


def _cudnn_lengths(q_XTHE: Array, keys: KeySet, *, causal: bool) -> _CudnnMask:
    if causal:  # queries never see padding on the right
        return _CudnnMask(cudnn_kernels.MaskType.CAUSAL)
    length_X = jnp.sum(keys.number_XL != 0, axis=1, dtype=jnp.int32)
    queries_X = jnp.full(*q_XTHE.shape[:2], jnp.int32)
    kind = cudnn_kernels.MaskType.PADDING
    return _CudnnMask(kind, None, queries_X, jnp.maximum(length_X, 1), length_X > 0)


def _cudnn_forward(
    masked: Callable[..., _CudnnMask], q_XTHE: Array, keys: KeySet, *, causal: bool
) -> tuple[Array, Array]:
    mask = masked(q_XTHE, keys, causal=causal)
    out_XTHE, lse_XHT = _CUDNN_FORWARD(
        q_XTHE,
        keys.k_XLKE,
        keys.v_XLKE,
        bias=mask.bias_X1TL,
        q_seqlen=mask.queries_X,
        kv_seqlen=mask.keys_X,
        scale=q_XTHE.shape[-1] ** -0.5,
        mask_type=mask.kind,
        return_residual=True,
    )
    if mask.has_keys_X is not None:
        lse_XHT = jnp.where(mask.has_keys_X[:, None, None], lse_XHT, MASKED)
    return out_XTHE, lse_XHT.swapaxes(1, 2)


def _cudnn_backward(
    masked: Callable[..., _CudnnMask],
    q_XTHE: Array,
    keys: KeySet,
    out_XTHE: Array,
    lse_XTH: Array,
    dout_XTHE: Array,
    *,
    causal: bool,
) -> tuple[Array, Array, Array]:
    mask = masked(q_XTHE, keys, causal=causal)
    if mask.has_keys_X is not None:
        lse_XTH = jnp.where(mask.has_keys_X[:, None, None], lse_XTH, -MASKED)
        dout_XTHE = jnp.where(mask.has_keys_X[:, None, None, None], dout_XTHE, 0)
    none = jnp.zeros(0, q_XTHE.dtype)
    arrays = {
        "query": q_XTHE,
        "key": keys.k_XLKE,
        "value": keys.v_XLKE,
        "bias": none if mask.bias_X1TL is None else mask.bias_X1TL,
        "q_seqlen": none if mask.queries_X is None else mask.queries_X,
        "kv_seqlen": none if mask.keys_X is None else mask.keys_X,
        "q_offsets": none,
        "kv_offsets": none,
        "page_table_k": none,
        "page_table_v": none,
        "activation": lse_XTH.swapaxes(1, 2),
        "fwd_output": out_XTHE,
        "grad_output": dout_XTHE.astype(none.dtype),
    }
    settings = {
        "scale": q_XTHE.shape[-1] ** -0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (mask.bias_X1TL is not None, False),  # a bias, and no gradient of it
        "mask_type": mask.kind,
        "layout": cudnn_kernels.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
    settings |= _cudnn_newer_settings((*arrays, *settings))
    dq, dk, dv, *_ = _CUDNN_BACKWARD.bind(*arrays.values(), **settings)
    return dq, dk, dv


def _cudnn_newer_settings(known: tuple[str, ...]) -> dict[str, Any]:
    """Return further arguments of this version of JAX; untested versions are refused.

    A primitive takes its arrays by position: another order would silently mix them up.
    """
    found = tuple(inspect.signature(_CUDNN_BACKWARD_ARGUMENTS).parameters)
    if found == known:
        return {}
    # Changes of scores, from 0.12; arguments of the change are arrays after all others.
    if found == (*known[:13], "score_mod_args", *known[13:], "score_mod"):
        return {"score_mod": None}
    raise UserError(
        f"jax {jax.__version__}: the gradient of cuDNN's attention takes other arguments than in "
        "the versions that were tried; install jax>=0.10,<0.13"
    )
