"""cuDNN's flash attention for NVIDIA GPUs.

JAX does not differentiate its log-sum-exp, but its backward kernel computes what is needed if it is
handed the log-sum-exp and the values over all sets. `_FORWARD` and `_BACKWARD` are private names of
JAX; the tests call both, and check the arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn_kernels
from jaxtyping import Array

from minirl.errors import UserError
from minirl.model.kernels import MASKED, Kernel, KeySet

# The public function of `jax.nn` has the kernel's log-sum-exp, but rounds it to bf16.
_FORWARD = cudnn_kernels.dot_product_attention
_BACKWARD = cudnn_kernels._dot_product_attention_bwd_p_wrapper
_BACKWARD_ARGUMENTS = cudnn_kernels._dot_product_attention_bwd_impl
# The floats that cuDNN takes, and a bias that masks a key (larger ones meet a fault of cuDNN).
_MASKED = {jnp.dtype(jnp.bfloat16): -(2.0**41), jnp.dtype(jnp.float16): -(2.0**15)}
_LARGEST_HEAD = 128


def cudnn(*, packed: bool) -> Kernel:
    """Return cuDNN's flash attention, for 16-bit floats on NVIDIA GPUs from Ampere on.

    Args:
        packed: Whether a row holds keys of several numbers: they are told apart by a bias, one for
            all heads and layers (cuDNN's own offsets are silently wrong in JAX before 0.11.1 where
            query heads share key/value heads). Otherwise a row's keys are one piece, padded on the
            right, and cuDNN is passed its length.
    """
    masked = _bias if packed else _lengths
    return Kernel(
        functools.partial(_forward, masked),
        functools.partial(_backward, masked),
        _serves,
    )


def _serves(q_BTHE: Array) -> bool:
    E = q_BTHE.shape[-1]
    return q_BTHE.dtype in _MASKED and E <= _LARGEST_HEAD and E % 8 == 0


class _Mask(NamedTuple):
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


def _bias(q_XTHE: Array, keys: KeySet, *, causal: bool) -> _Mask:
    is_seen_XTL = keys.query_number_BT[:, :, None] == keys.number_XL[:, None]
    masked = _MASKED[q_XTHE.dtype]
    bias_XTL = jnp.where(is_seen_XTL, 0.0, masked).astype(q_XTHE.dtype)
    kind = cudnn_kernels.MaskType.CAUSAL if causal else cudnn_kernels.MaskType.NO_MASK
    return _Mask(kind, bias_XTL[:, None])


def _lengths(q_XTHE: Array, keys: KeySet, *, causal: bool) -> _Mask:
    if causal:  # queries never see padding on the right
        return _Mask(cudnn_kernels.MaskType.CAUSAL)
    length_X = jnp.sum(keys.number_XL != 0, axis=1, dtype=jnp.int32)
    queries_X = jnp.full(*q_XTHE.shape[:2], jnp.int32)
    kind = cudnn_kernels.MaskType.PADDING
    return _Mask(kind, None, queries_X, jnp.maximum(length_X, 1), length_X > 0)


def _forward(
    masked: Callable[..., _Mask], q_XTHE: Array, keys: KeySet, *, causal: bool
) -> tuple[Array, Array]:
    mask = masked(q_XTHE, keys, causal=causal)
    out_XTHE, lse_XHT = _FORWARD(
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


def _backward(
    masked: Callable[..., _Mask],
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
    settings |= _newer_settings((*arrays, *settings))
    dq, dk, dv, *_ = _BACKWARD.bind(*arrays.values(), **settings)
    return dq, dk, dv


def _newer_settings(known: tuple[str, ...]) -> dict[str, Any]:
    """Return further arguments of this version of JAX; untested versions are refused.

    A primitive takes its arrays by position: another order would silently mix them up.
    """
    found = tuple(inspect.signature(_BACKWARD_ARGUMENTS).parameters)
    if found == known:
        return {}
    # Changes of scores, from 0.12; arguments of the change are arrays after all others.
    if found == (*known[:13], "score_mod_args", *known[13:], "score_mod"):
        return {"score_mod": None}
    raise UserError(
        f"jax {jax.__version__}: the gradient of cuDNN's attention takes other arguments than in "
        "the versions that were tried; install jax>=0.10,<0.13"
    )
