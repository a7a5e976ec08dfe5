"""Flash attention of kept libraries: splash (in JAX) on TPUs, cuDNN's on NVIDIA.

A query may look at several sets of keys: the shared prompt, the tokens of its own trajectory. A
kernel looks at one set and gives, beside the attended values, the log-sum-exp of the scores. Values
of the sets add up with weights exp(lse_set - lse), where lse is the log-sum-exp over all sets.

Neither library differentiates its log-sum-exp. But a backward kernel computes the probabilities
anew, as exp(score - lse), and the gradient of a score as p (dout . v - dout . out): given the `lse`
and `out` over all sets it returns that set's share of the gradient, as in ring attention
(arXiv:2310.01889). This backward kernel is no public function of either library: the names below
that begin with `_SPLASH` and `_CUDNN` are the only private ones used, and the tests call them all.
One set of keys alone needs none of this: there cuDNN is called by the public function of `jax.nn`.
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
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from minirl.errors import UserError
from minirl.model.sharding import axes_spec, axis_parts

_SPLASH_BACKWARD = splash_attention_kernel._splash_attention_bwd
# The public function of `jax.nn` has the kernel's log-sum-exp, but rounds it to bf16.
_CUDNN_FORWARD = cudnn_kernels.dot_product_attention
_CUDNN_BACKWARD = cudnn_kernels._dot_product_attention_bwd_p_wrapper
_CUDNN_BACKWARD_ARGUMENTS = cudnn_kernels._dot_product_attention_bwd_impl
# Less than any score; exp of it is 0.
NOTHING = -1e30
# Rows of a splash kernel's blocks are lanes of the hardware's registers, or multiples.
_LANES = 128
_LARGEST_BLOCK = 512
_CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)
_CUDNN_LARGEST_HEAD = 128


class Keys(NamedTuple):
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
        serves: Whether it takes (q_BTHE, packed=several numbers in a row).
        alone: (q_XTHE, keys, causal=) -> values XTHE, with their own gradient, where there is only
            one set of keys; None takes the two above.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
    serves: Callable[..., bool]
    alone: Callable[..., Array] | None = None


def attend(
    kernel: Kernel,
    q_BTHE: Array,
    sets: Sequence[Keys],
    *,
    causal: Sequence[bool],
    mesh: Mesh | None = None,
) -> Array:
    """Attend to several sets of keys together.

    Args:
        kernel: Whose kernels compute it.
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
    if kernel.alone is not None and len(sets) == 1:
        function = functools.partial(
            _attend_alone, functools.partial(kernel.alone, causal=causal[0])
        )
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
        in_specs=(activations, tuple(Keys(*split) for _ in sets)),
        out_specs=activations,
        check_vma=False,
    )(q_BTHE, sets)


def _repeat_heads(keys: Keys, parts: int) -> Keys:
    """Repeat key/value heads until they can be shared out."""
    K = keys.k_XLKE.shape[2]
    times = math.lcm(K, parts) // K
    k, v = (jnp.repeat(array, times, axis=2) for array in (keys.k_XLKE, keys.v_XLKE))
    return keys._replace(k_XLKE=k, v_XLKE=v) if times > 1 else keys


def _attend_alone(alone: Callable[..., Array], q_BTHE: Array, sets: tuple[Keys, ...]) -> Array:
    (keys,) = sets
    return alone(_beside(q_BTHE, keys), _flat(keys)).reshape(q_BTHE.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    kernel: Kernel, causal: tuple[bool, ...], q_BTHE: Array, sets: tuple[Keys, ...]
) -> Array:
    return _attend_forward(kernel, causal, q_BTHE, sets)[0]


def _attend_forward(
    kernel: Kernel, causal: tuple[bool, ...], q_BTHE: Array, sets: tuple[Keys, ...]
) -> tuple[Array, Any]:
    outs, lses = [], []
    for keys, is_causal in zip(sets, causal, strict=True):
        out, lse = kernel.forward(_beside(q_BTHE, keys), _flat(keys), causal=is_causal)
        outs.append(out.reshape(q_BTHE.shape))
        lses.append(lse.reshape(q_BTHE.shape[:3]))
    lse_BTH = functools.reduce(jnp.logaddexp, lses)
    if len(sets) == 1:
        return outs[0], (q_BTHE, sets, outs[0], lse_BTH)
    shares = [jnp.exp(lse - lse_BTH)[..., None] for lse in lses]
    out = sum(share * one.astype(jnp.float32) for share, one in zip(shares, outs, strict=True))
    out_BTHE = jnp.asarray(out).astype(q_BTHE.dtype)
    return out_BTHE, (q_BTHE, sets, out_BTHE, lse_BTH)


def _attend_backward(
    kernel: Kernel, causal: tuple[bool, ...], saved: Any, dout_BTHE: Array
) -> tuple[Array, tuple[Keys, ...]]:
    q_BTHE, sets, out_BTHE, lse_BTH = saved
    dq_BTHE = jnp.zeros(q_BTHE.shape, jnp.float32)
    gradients = []
    for keys, is_causal in zip(sets, causal, strict=True):
        arrays = [_beside(array, keys) for array in (q_BTHE, out_BTHE, lse_BTH, dout_BTHE)]
        q, out, lse, dout = arrays
        dq, dk, dv = kernel.backward(q, _flat(keys), out, lse, dout, causal=is_causal)
        dq_BTHE += dq.reshape(q_BTHE.shape).astype(jnp.float32)
        # Numbers have no gradient.
        gradients.append(keys._replace(k_XLKE=dk, v_XLKE=dv, number_XL=None, query_number_BT=None))
    return dq_BTHE.astype(q_BTHE.dtype), tuple(gradients)


_attend.defvjp(_attend_forward, _attend_backward)


def _beside(array_BT: Array, keys: Keys) -> Array:
    """Put all queries that look at a row of keys into one row."""
    X = keys.k_XLKE.shape[0]
    return array_BT.reshape(X, -1, *array_BT.shape[2:])


def _flat(keys: Keys) -> Keys:
    return keys._replace(query_number_BT=_beside(keys.query_number_BT, keys))


def splash(*, interpret: bool = False) -> Kernel:
    """Return JAX's splash attention, a kernel for TPUs.

    The two backward kernels, of queries and of keys, are apart: the fused one holds the gradient of
    the queries once for every block of keys. tokamax has a newer splash, but its public function
    returns no log-sum-exp, and it asks for one fixed old release of typeguard.

    Args:
        interpret: Run it by Pallas' interpreter, on any device.
    """
    return Kernel(
        functools.partial(_splash_forward, interpret=interpret),
        functools.partial(_splash_backward, interpret=interpret),
        lambda _q, *, packed: True,
    )


def _splash_forward(
    q_XTHE: Array, keys: Keys, *, causal: bool, interpret: bool
) -> tuple[Array, Array]:
    call, q, k, v, numbers, T = _splash_arguments(q_XTHE, keys, causal=causal, interpret=interpret)
    out_XHTE, (lse_XHT,) = jax.vmap(call)(q, k, v, numbers)
    return out_XHTE.swapaxes(1, 2)[:, :T], lse_XHT.swapaxes(1, 2)[:, :T]


def _splash_backward(
    q_XTHE: Array,
    keys: Keys,
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
    q_XTHE: Array, keys: Keys, *, causal: bool, interpret: bool
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


def cudnn() -> Kernel:
    """Return cuDNN's flash attention, for 16-bit floats on NVIDIA GPUs of the last generations.

    It is told lengths and no numbers: a row's keys are one piece, padded on the right. Several
    pieces in a row would need cuDNN's offsets, which JAX before 0.11.1 gets wrong, without a word,
    where query heads share key/value heads.
    """
    return Kernel(_cudnn_forward, _cudnn_backward, _cudnn_serves, _cudnn_alone)


def _cudnn_serves(q_BTHE: Array, *, packed: bool) -> bool:
    E = q_BTHE.shape[-1]
    return not packed and q_BTHE.dtype in _CUDNN_DTYPES and E <= _CUDNN_LARGEST_HEAD and E % 8 == 0


def _cudnn_lengths(keys: Keys, *, causal: bool) -> tuple[Array | None, Array]:
    """Return how many keys the rows have, where that need be told, and which rows have any.

    Causal queries never see what is padded on the right: no lengths. A length of zero is not
    defined: such a row looks at one key, whose share is taken out.
    """
    if causal:
        return None, jnp.ones(keys.k_XLKE.shape[0], bool)
    length_X = jnp.sum(keys.number_XL != 0, axis=1, dtype=jnp.int32)
    return jnp.maximum(length_X, 1), length_X > 0


def _cudnn_alone(q_XTHE: Array, keys: Keys, *, causal: bool) -> Array:
    length_X, has_keys_X = _cudnn_lengths(keys, causal=causal)
    # JAX takes its empty bias for one, whose gradient asks for even lengths.
    q, k, v = (
        jnp.pad(array, ((0, 0), (0, array.shape[1] % 2), (0, 0), (0, 0)))
        for array in (q_XTHE, keys.k_XLKE, keys.v_XLKE)
    )
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, key_value_seq_lengths=length_X, implementation="cudnn"
    )
    return jnp.where(has_keys_X[:, None, None, None], out[:, : q_XTHE.shape[1]], 0)


def _cudnn_mask(q_XTHE: Array, length_X: Array | None) -> tuple[Any, Array | None]:
    """Return the kind of mask, and lengths of queries: all of them are looked at."""
    if length_X is None:
        return cudnn_kernels.MaskType.CAUSAL, None
    return cudnn_kernels.MaskType.PADDING, jnp.full(*q_XTHE.shape[:2], jnp.int32)


def _cudnn_forward(q_XTHE: Array, keys: Keys, *, causal: bool) -> tuple[Array, Array]:
    length_X, has_keys_X = _cudnn_lengths(keys, causal=causal)
    kind, queries_X = _cudnn_mask(q_XTHE, length_X)
    out_XTHE, lse_XHT = _CUDNN_FORWARD(
        q_XTHE,
        keys.k_XLKE,
        keys.v_XLKE,
        q_seqlen=queries_X,
        kv_seqlen=length_X,
        scale=q_XTHE.shape[-1] ** -0.5,
        mask_type=kind,
        return_residual=True,
    )
    return out_XTHE, jnp.where(has_keys_X[:, None, None], lse_XHT, NOTHING).swapaxes(1, 2)


def _cudnn_backward(
    q_XTHE: Array, keys: Keys, out_XTHE: Array, lse_XTH: Array, dout_XTHE: Array, *, causal: bool
) -> tuple[Array, Array, Array]:
    length_X, has_keys_X = _cudnn_lengths(keys, causal=causal)
    kind, queries_X = _cudnn_mask(q_XTHE, length_X)
    none = jnp.zeros(0, q_XTHE.dtype)
    arrays = {
        "query": q_XTHE,
        "key": keys.k_XLKE,
        "value": keys.v_XLKE,
        "bias": none,
        "q_seqlen": none if queries_X is None else queries_X,
        "kv_seqlen": none if length_X is None else length_X,
        "q_offsets": none,
        "kv_offsets": none,
        "page_table_k": none,
        "page_table_v": none,
        "activation": jnp.where(has_keys_X[:, None, None], lse_XTH, -NOTHING).swapaxes(1, 2),
        "fwd_output": out_XTHE,
        "grad_output": jnp.where(has_keys_X[:, None, None, None], dout_XTHE, 0).astype(none.dtype),
    }
    settings = {
        "scale": q_XTHE.shape[-1] ** -0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # neither a bias nor its gradient
        "mask_type": kind,
        "layout": cudnn_kernels.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
    settings |= _cudnn_newer_settings((*arrays, *settings))
    dq, dk, dv, *_ = _CUDNN_BACKWARD.bind(*arrays.values(), **settings)
    return dq, dk, dv


def _cudnn_newer_settings(known: tuple[str, ...]) -> dict[str, Any]:
    """Return what this version of JAX asks for besides; what nobody has tried is refused.

    A primitive takes its arrays by place: an array more, or in another place, would be taken for
    something else without a word.
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
