"""cuDNN's flash attention for NVIDIA GPUs.

JAX does not differentiate its log-sum-exp, but its backward kernel computes what is needed if it is
handed the log-sum-exp and the values over all sets. `_FORWARD` and `_BACKWARD` are private names of
JAX; the tests call both, and check the arguments.
"""

from __future__ import annotations

import inspect
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
_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_LARGEST_HEAD = 128


def cudnn() -> Kernel:
    """Return cuDNN's flash attention, for 16-bit floats on NVIDIA GPUs from Ampere on.

    cuDNN is passed the number of keys of each row. Its own offsets, which could tell several pieces
    of a row apart, are silently wrong in JAX before 0.11.1 where query heads share key/value heads.
    """
    return Kernel(_forward, _backward, _serves)


def _serves(q_BTHE: Array) -> bool:
    E = q_BTHE.shape[-1]
    return q_BTHE.dtype in _FLOATS and E <= _LARGEST_HEAD and E % 8 == 0


class _Mask(NamedTuple):
    """What cuDNN is passed to leave keys out; None where that is not needed.

    Attributes:
        kind: Kind of mask.
        queries_X, keys_X: Lengths, at least 1.
        has_keys_X: Rows with any key: a length of zero is undefined, so that such a row attends to
            one key, and its log-sum-exp is masked.
    """

    kind: Any
    queries_X: Array | None = None
    keys_X: Array | None = None
    has_keys_X: Array | None = None


def _mask(q_XTHE: Array, keys: KeySet) -> _Mask:
    length_X = keys.length_X
    if length_X is None:  # queries never see padding on the right
        return _Mask(cudnn_kernels.MaskType.CAUSAL)
    queries_X = jnp.full(*q_XTHE.shape[:2], jnp.int32)
    kind = cudnn_kernels.MaskType.PADDING
    return _Mask(kind, queries_X, jnp.maximum(length_X, 1), length_X > 0)


def _forward(q_XTHE: Array, keys: KeySet) -> tuple[Array, Array]:
    mask = _mask(q_XTHE, keys)
    out_XTHE, lse_XHT = _FORWARD(
        q_XTHE,
        keys.k_XLKE,
        keys.v_XLKE,
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
    q_XTHE: Array,
    keys: KeySet,
    out_XTHE: Array,
    lse_XTH: Array,
    dout_XTHE: Array,
) -> tuple[Array, Array, Array]:
    mask = _mask(q_XTHE, keys)
    if mask.has_keys_X is not None:
        lse_XTH = jnp.where(mask.has_keys_X[:, None, None], lse_XTH, -MASKED)
        dout_XTHE = jnp.where(mask.has_keys_X[:, None, None, None], dout_XTHE, 0)
    none = jnp.zeros(0, q_XTHE.dtype)
    arrays = {
        "query": q_XTHE,
        "key": keys.k_XLKE,
        "value": keys.v_XLKE,
        "bias": none,
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
        "variadic_args": (False, False),  # no bias, and no gradient of one
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
