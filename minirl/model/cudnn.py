"""cuDNN's flash attention for NVIDIA GPUs.

JAX does not differentiate its log-sum-exp, but its backward kernel computes what is needed if it is
handed the log-sum-exp and the values over all sets. What is called are private names of JAX, since
its public function asks the devices that are here for what they can, and they may be described; the
tests call both, and check the arguments.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn_kernels
from jaxtyping import Array

from minirl.model.kernels import MASKED, Kernel, KeySet

# Changes of scores, which JAX 0.12 has; the primitives take what these functions do.
_FORWARD = inspect.signature(cudnn_kernels._dot_product_attention_fwd_impl)
_NEWER = {"score_mod": None} if "score_mod" in _FORWARD.parameters else {}
_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
# Compute capability of the only GPUs with a gradient for heads of more than 128.
_HOPPER = "9."


def _serves(q_BTHE: Array, device: Any) -> bool:
    is_hopper, E = device.compute_capability.startswith(_HOPPER), q_BTHE.shape[-1]
    return q_BTHE.dtype in _FLOATS and E % 8 == 0 and (256 if is_hopper else 128) >= E


def _with_keys(array_X: Array, keys: KeySet, *, otherwise: float) -> Array:
    """Replace what belongs to rows without any key."""
    if keys.length_X is None:
        return array_X
    has_keys_X = jnp.expand_dims(keys.length_X > 0, range(1, array_X.ndim))
    return jnp.where(has_keys_X, array_X, otherwise)


def _forward(q_XTHE: Array, keys: KeySet) -> tuple[Array, Array]:
    out_XTHE, lse_XHT = _bind(
        cudnn_kernels._dot_product_attention_fwd_p_wrapper, q_XTHE, keys, is_training=True
    )
    return out_XTHE, _with_keys(lse_XHT, keys, otherwise=MASKED).swapaxes(1, 2)


def _backward(
    q_XTHE: Array,
    keys: KeySet,
    out_XTHE: Array,
    lse_XTH: Array,
    dout_XTHE: Array,
) -> tuple[Array, Array, Array]:
    lse_XTH = _with_keys(lse_XTH, keys, otherwise=-MASKED)
    dout_XTHE = _with_keys(dout_XTHE, keys, otherwise=0)
    attended = lse_XTH.swapaxes(1, 2), out_XTHE, dout_XTHE.astype(q_XTHE.dtype)
    primitive = cudnn_kernels._dot_product_attention_bwd_p_wrapper
    dq, dk, dv, *_ = _bind(primitive, q_XTHE, keys, *attended)
    return dq, dk, dv


def _bind(primitive: Any, q_XTHE: Array, keys: KeySet, *attended: Array, **more: Any) -> Any:
    """Call a kernel; the first of its arrays and most settings are the same forward and back."""
    none = jnp.zeros(0, q_XTHE.dtype)
    kind, *lengths = _mask(q_XTHE, keys)
    # Queries, keys, values, bias; lengths; two offsets and two page tables.
    arrays = [q_XTHE, *keys[:2], none, *lengths, *[none] * 4, *attended]
    settings = {
        "scale": q_XTHE.shape[-1] ** -0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of one
        "mask_type": kind,
        "layout": cudnn_kernels.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
        **_NEWER,
        **more,
    }
    return primitive.bind(*[none if array is None else array for array in arrays], **settings)


def _mask(q_XTHE: Array, keys: KeySet) -> tuple[Any, Array | None, Array | None]:
    """Return the kind of mask, and the lengths of queries and keys where it has lengths."""
    if keys.length_X is None:  # queries never see padding on the right
        return cudnn_kernels.MaskType.CAUSAL, None, None
    queries_X = jnp.full(*q_XTHE.shape[:2], jnp.int32)
    # A length of zero is undefined: such a row attends to one key, and is masked (`_with_keys`).
    return cudnn_kernels.MaskType.PADDING, queries_X, jnp.maximum(keys.length_X, 1)


CUDNN = Kernel(_forward, _backward, _serves)
"""cuDNN's flash attention, for 16-bit floats on NVIDIA GPUs from Ampere on.

cuDNN is passed the number of keys of each row. Its own offsets, which could tell several pieces of
a row apart, are silently wrong in JAX before 0.11.1 where query heads share key/value heads."""
