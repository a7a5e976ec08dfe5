"""Flash attention to one set of keys: splash on TPUs, cuDNN on NVIDIA GPUs, JAX itself elsewhere.

`minirl.model.attention` joins several sets. Neither library differentiates its log-sum-exp, but
their backward kernels compute what is needed if they are handed the log-sum-exp and the values over
all sets. These are no public functions: the names below that begin with `_SPLASH` and `_CUDNN` are
the only private ones used, and the tests call them all.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn_kernels
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jaxtyping import Array, Float

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
    """A set of keys and values; of B rows of queries, those of a row of keys are side by side."""

    k_XLKE: Array
    v_XLKE: Array
    number_XL: Array  # what each key belongs to, from 1; 0 is padding
    query_number_BT: Array  # a query looks at keys of its number


class Partial(NamedTuple):
    """Attention to one set of keys, of queries in any shape, in fp32 and not normalised."""

    values: Float[Array, "... E"]  # sum over the keys of exp(score - peak) v
    peak: Float[Array, "... 1"]
    total: Float[Array, "... 1"]  # sum of exp(score - peak)

    @property
    def out(self) -> Float[Array, "... E"]:
        """Normalised values; finite where a query sees no key."""
        return self.values / self.total

    @property
    def lse(self) -> Float[Array, "..."]:
        """The log-sum-exp of the scores; far below all others where a query sees no key."""
        return (self.peak + jnp.log(self.total))[..., 0]


@dataclass(frozen=True)
class Kernel:
    """Flash attention to one set of keys.

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


def partial_attention(scores: Float[Array, "... Q L"], v: Float[Array, "... L E"]) -> Partial:
    """Attend to one set of keys, from scores in fp32 of scaled queries."""
    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    return Partial(_product(weights.astype(v.dtype), v), peak, total)


def join(parts: Sequence[Partial]) -> Partial:
    """Join attention of the same queries to several sets of keys.

    The rescaling of online softmax (arXiv:1805.02867).
    """
    peak = functools.reduce(jnp.maximum, [part.peak for part in parts])
    scales = [jnp.exp(part.peak - peak) for part in parts]
    values, total = (
        sum(scale * one for scale, one in zip(scales, ones, strict=True))
        for ones in ([part.values for part in parts], [part.total for part in parts])
    )
    return Partial(values, peak, total)


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


class _Blocks:
    """Queries XTHE by key/value head (Y = X x K), in C blocks of M = R x t: t places of R heads."""

    def __init__(self, block_bytes: int, q_XTHE: Array, keys: KeySet) -> None:
        self.X, self.T, H, _ = q_XTHE.shape
        L, self.K = keys.k_XLKE.shape[1:3]
        self.R = H // self.K
        query_bytes = 4 * L * self.R
        self.C = -(-self.T // max(block_bytes // query_bytes, 1))
        self.t = -(-self.T // self.C)
        # Small heads are taken several at a time.
        self._together = max(block_bytes // (query_bytes * self.t), 1)

    def over_heads(self, function: Any, keys: KeySet, *blocks: Array) -> Any:
        """Map over heads: (k_LE, v_LE, number_L), (numbers Ct, C), blocks of the queries."""
        k, v = (
            array.swapaxes(1, 2).reshape(self.X * self.K, *array.shape[1::2])
            for array in (keys.k_XLKE, keys.v_XLKE)
        )
        number_YL = jnp.repeat(keys.number_XL, self.K, axis=0)
        padded = jnp.pad(keys.query_number_BT, ((0, 0), (0, self.C * self.t - self.T)))
        number_YCt = jnp.repeat(padded.reshape(self.X, self.C, self.t), self.K, axis=0)
        arrays = ((k, v, number_YL), number_YCt, *blocks)
        return jax.lax.map(lambda xs: function(*xs), arrays, batch_size=self._together)

    def split(self, array_XTHE: Array) -> Array:
        """Bring an array XTHE as Y, C, M, E."""
        missing = self.C * self.t - self.T
        array_XTHE = jnp.pad(array_XTHE, ((0, 0), (0, missing), (0, 0), (0, 0)))
        parts = array_XTHE.reshape(self.X, self.C, self.t, self.K, self.R, -1)
        parts = parts.transpose(0, 3, 1, 4, 2, 5)
        return parts.reshape(self.X * self.K, self.C, self.R * self.t, -1)

    def merge(self, array_YCME: Array) -> Array:
        """Undo `split`."""
        parts = array_YCME.reshape(self.X, self.K, self.C, self.R, self.t, -1)
        parts = parts.transpose(0, 2, 4, 1, 3, 5)
        return parts.reshape(self.X, self.C * self.t, self.K * self.R, -1)[:, : self.T]

    def merge_keys(self, array_YLE: Array) -> Array:
        """Bring gradients of keys back as XLKE."""
        return array_YLE.reshape(self.X, self.K, *array_YLE.shape[1:]).swapaxes(1, 2)

    def scores(
        self, c: Array, q_ME: Array, number_t: Array, k_LE: Array, number_L: Array, *, causal: bool
    ) -> Array:
        """Return the masked scores of a block, ML."""
        is_seen_TL = number_t[:, None] == number_L[None]
        if causal:
            place_t = c * self.t + jnp.arange(self.t)
            is_seen_TL &= place_t[:, None] >= jnp.arange(len(number_L))[None]
        return jnp.where(jnp.tile(is_seen_TL, (self.R, 1)), _product(q_ME, k_LE.T), MASKED)


def _blockwise_forward(
    block_bytes: int, q_XTHE: Array, keys: KeySet, *, causal: bool
) -> tuple[Array, Array]:
    blocks = _Blocks(block_bytes, q_XTHE, keys)

    def head(set_: tuple[Array, ...], number_Ct: Array, q_CME: Array) -> Partial:
        k_LE, v_LE, number_L = set_

        def block(xs: tuple[Array, Array, Array]) -> Partial:
            c, number_t, q_ME = xs
            scores = blocks.scores(c, q_ME, number_t, k_LE, number_L, causal=causal)
            return partial_attention(scores, v_LE)

        return jax.lax.map(block, (jnp.arange(blocks.C), number_Ct, q_CME))

    q = blocks.split(q_XTHE * q_XTHE.shape[-1] ** -0.5)
    attended = Partial(*map(blocks.merge, blocks.over_heads(head, keys, q)))
    return attended.out.astype(q_XTHE.dtype), attended.lse


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
    blocks = _Blocks(block_bytes, q_XTHE, keys)

    def head(set_: tuple[Array, ...], number_Ct: Array, *queries: Array) -> tuple[Array, ...]:
        k_LE, v_LE, number_L = set_

        def block(total: tuple[Array, Array], xs: tuple[Array, ...]) -> tuple[Any, Array]:
            c, number_t, q_ME, dout_ME, lse_M1, delta_M1 = xs
            scores_ML = blocks.scores(c, q_ME, number_t, k_LE, number_L, causal=causal)
            # A query that sees no key has a log-sum-exp as low as its scores.
            p_ML = jnp.where(scores_ML > MASKED, jnp.exp(scores_ML - lse_M1), 0.0)
            ds_ML = p_ML * (_product(dout_ME, v_LE.T) - delta_M1)
            p_ML, ds_ML = p_ML.astype(v_LE.dtype), ds_ML.astype(k_LE.dtype)
            dk_LE = total[0] + _product(ds_ML.T, q_ME)
            dv_LE = total[1] + _product(p_ML.T, dout_ME)
            return (dk_LE, dv_LE), _product(ds_ML, k_LE)

        zeros = jnp.zeros(k_LE.shape, jnp.float32)
        xs = (jnp.arange(blocks.C), number_Ct, *queries)
        (dk_LE, dv_LE), dq_CME = jax.lax.scan(block, (zeros, zeros), xs)
        return dq_CME, dk_LE, dv_LE

    scale, dtype = q_XTHE.shape[-1] ** -0.5, q_XTHE.dtype
    delta_XTH1 = (dout_XTHE.astype(jnp.float32) * out_XTHE).sum(-1, keepdims=True)
    queries = (q_XTHE * scale, dout_XTHE, lse_XTH[..., None], delta_XTH1)
    dq, dk, dv = blocks.over_heads(head, keys, *map(blocks.split, queries))
    dk, dv = (blocks.merge_keys(array).astype(dtype) for array in (dk, dv))
    return (blocks.merge(dq) * scale).astype(dtype), dk, dv


def _product(a: Array, b: Array) -> Array:
    """Multiply into fp32, which softmax is computed in."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def splash(*, interpret: bool = False) -> Kernel:
    """Return JAX's splash attention, a kernel for TPUs; `interpret` runs it on any device.

    With separate backward kernels of queries and of keys: the fused one holds the gradient of the
    queries once for every block of keys. tokamax's newer splash returns no log-sum-exp.
    """
    return Kernel(
        functools.partial(_splash_forward, interpret=interpret),
        functools.partial(_splash_backward, interpret=interpret),
        lambda _q: True,
    )


def _splash_forward(
    q_XTHE: Array, keys: KeySet, *, causal: bool, interpret: bool
) -> tuple[Array, Array]:
    call, *arguments = _splash_arguments(q_XTHE, keys, causal=causal, interpret=interpret)
    out_XHTE, (lse_XHT,) = jax.vmap(call)(*arguments)
    T = q_XTHE.shape[1]
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
    call, *arguments = _splash_arguments(q_XTHE, keys, causal=causal, interpret=interpret)
    settings = dict(call.kwargs)
    order = ("save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name")
    order += ("mask_function", "attn_logits_soft_cap", "interpret")

    def backward(q: Array, k: Array, v: Array, numbers: Any, out: Array, lse: Array, dout: Array):
        saved = (q, k, v, numbers, None, out, lse, call.dq_mask_info, call.dkv_mask_info)
        return _SPLASH_BACKWARD(*(settings[name] for name in order), saved, dout)[3:6]

    values = (_heads_first(array) for array in (out_XTHE, lse_XTH, dout_XTHE))
    gradients = jax.vmap(backward)(*arguments, *values)
    dq, dk, dv = (array.swapaxes(1, 2) for array in gradients)
    T, L = q_XTHE.shape[1], keys.k_XLKE.shape[1]
    return dq[:, :T] * q_XTHE.shape[-1] ** -0.5, dk[:, :L], dv[:, :L]


def _splash_arguments(
    q_XTHE: Array, keys: KeySet, *, causal: bool, interpret: bool
) -> tuple[Any, ...]:
    """Return the kernel, and its arguments heads first and padded to whole blocks."""
    H, E = q_XTHE.shape[2:]
    q, k, v = map(_heads_first, (q_XTHE * E**-0.5, keys.k_XLKE, keys.v_XLKE))
    numbers = splash_attention_kernel.SegmentIds(
        _to_lanes(keys.query_number_BT, axis=1), _to_lanes(keys.number_XL, axis=1)
    )
    call = _splash_kernel(q.shape[2], k.shape[2], H, causal=causal, interpret=interpret)
    return call, q, k, v, numbers


@functools.lru_cache
def _splash_kernel(T: int, L: int, H: int, *, causal: bool, interpret: bool) -> Any:
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
            interpret=interpret,
        )


def _heads_first(array_XTH: Array) -> Array:
    return _to_lanes(array_XTH.swapaxes(1, 2), axis=2)


def _to_lanes(array: Array, *, axis: int) -> Array:
    """Pad with zeros, which as a number is padding."""
    missing = -array.shape[axis] % _LANES
    widths = [(0, missing if place == axis else 0) for place in range(array.ndim)]
    return jnp.pad(array, widths) if missing else array


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
