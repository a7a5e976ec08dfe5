"""Attention with shared prefixes is the mask written out, by every kernel, and in bounded memory.

Kernels of accelerators run on the CPU: cuDNN's calls emulated, splash by Pallas' interpreter.
"""

from __future__ import annotations

import functools
import inspect
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn_kernels
from jax.interpreters import mlir

from minirl.errors import UserError
from minirl.model import attention
from minirl.model import cudnn as gpu
from minirl.model import splash as tpu
from minirl.model.attention import Segments
from minirl.model.kernels import MASKED, blockwise, join, partial_attention
from minirl.model.sharding import make_mesh

N, G, P, C, E = 2, 3, 9, 13, 8
HEADS = {"grouped": (4, 2), "all": (2, 2), "one": (3, 1)}


def numbers(*lengths, size):
    """Write 1, 2, ... as often as told, then padding."""
    row = [n for n, length in enumerate(lengths, 1) for _ in range(length)]
    return row + [0] * (size - len(row))


def segments_of(prefix, group, own):
    arrays: Any = map(np.asarray, (prefix, group, own))
    return Segments(*arrays)


# One group a unit; the second prefix is a filler's, of no token at all.
UNPACKED = segments_of(
    [numbers(6, size=P), numbers(size=P)],
    np.ones((N * G, C), int),
    np.ones((N * G, C), int),
)
# Two groups in the first unit, and one in the second; rows of up to three trajectories.
PACKED = segments_of(
    [numbers(3, 5, size=P), numbers(7, size=P)],
    np.array(
        [
            [1] * 4 + [1] * 3 + [2] * 5 + [0],
            [2] * 6 + [1] * 4 + [0] * 3,
            [2] * 13,
            [1] * 13,
            [1] * 10 + [0] * 3,
            [0] * 13,
        ]
    ),
    np.array(
        [
            numbers(4, 3, 5, size=C),
            numbers(6, 4, size=C),
            numbers(13, size=C),
            numbers(1, 12, size=C),
            numbers(10, size=C),
            numbers(size=C),
        ]
    ),
)
LAYOUTS = {"unpacked": UNPACKED, "packed": PACKED}


def arrays_of(heads, *, seed=0, dtype=jnp.float32):
    """Draw q, k, v of answers, and k, v of prefixes."""
    H, K = HEADS[heads]
    rng = np.random.default_rng(seed)
    shapes = [(N * G, C, H, E), *[(N * G, C, K, E)] * 2, *[(N, P, K, E)] * 2]
    return tuple(jnp.asarray(rng.normal(0, 1.5, shape), dtype) for shape in shapes)


def visible(segments):
    """Return which of the prefix's and own keys each query may see, BC(P + C)."""
    prefix_BP = np.repeat(segments.prefix_NP, G, axis=0)
    group, own = segments.group_BC[:, :, None], segments.own_BC[:, :, None]
    to_prefix = (group == prefix_BP[:, None]) & (prefix_BP[:, None] != 0)
    to_own = (own == segments.own_BC[:, None]) & np.tril(np.ones((C, C), bool))
    return np.concatenate([to_prefix, to_own], axis=2)


def written_out(segments, q, k, v, k_prefix, v_prefix):
    """Attend with prefixes copied into every row, heads repeated, and one mask."""
    repeats = q.shape[2] // k.shape[2]
    joined = [
        jnp.repeat(jnp.concatenate([jnp.repeat(prefix, G, axis=0), own], axis=1), repeats, axis=2)
        for prefix, own in ((k_prefix, k), (v_prefix, v))
    ]
    scores = jnp.einsum("bthe,bshe->bhts", q, joined[0]) / math.sqrt(E)
    mask = jnp.asarray(visible(segments))[:, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return jnp.einsum("bhts,bshe->bthe", weights, joined[1])


def attended(segments, q, k, v, k_prefix, v_prefix, *, packed, mesh=None):
    attend = attention.shared_prefix(
        Segments(*map(jnp.asarray, segments)), packed=packed, mesh=mesh
    )
    return attend(q, k, v, (k_prefix, v_prefix))[0]


def value_and_gradients(function, segments, arrays):
    """Return the values of tokens that are no padding, and gradients of a sum of those alone."""
    is_true = jnp.asarray(segments.own_BC != 0)[:, :, None, None]
    slope = jnp.asarray(np.random.default_rng(1).normal(0, 1, arrays[0].shape), jnp.float32)

    def total(*arrays):
        out = function(segments, *arrays)
        return jnp.sum(out * slope, where=is_true), jnp.where(is_true, out, 0)

    every = tuple(range(len(arrays)))
    gradients, out = jax.jit(jax.grad(total, argnums=every, has_aux=True))(*arrays)
    return (out, *gradients)


def assert_close(ours, theirs, *, tolerance=2e-5):
    for one, other in zip(ours, theirs, strict=True):
        assert np.isfinite(np.asarray(one, np.float32)).all()
        np.testing.assert_allclose(
            np.asarray(one, np.float32),
            np.asarray(other, np.float32),
            atol=tolerance,
            rtol=tolerance,
        )


# Several blocks, of heads that are taken together; and all at once.
BLOCKS, WHOLE = 4 * 2 * 5 * C, 2**29


@pytest.mark.parametrize(
    ("layout", "heads", "block_bytes"),
    [("unpacked", "grouped", BLOCKS), ("packed", "one", BLOCKS), ("packed", "all", WHOLE)],
)
def test_attention_is_the_mask_written_out(monkeypatch, layout, heads, block_bytes):
    monkeypatch.setitem(attention._KERNELS, "cpu", blockwise(block_bytes))
    segments, arrays = LAYOUTS[layout], arrays_of(heads)
    expected = value_and_gradients(written_out, segments, arrays)
    ours = functools.partial(attended, packed=layout == "packed")
    assert_close(value_and_gradients(ours, segments, arrays), expected)


def test_parts_are_joined_to_attention_over_all_keys():
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.normal(0, 3, (2, 5, 12)), jnp.float32)
    scores = scores.at[0].add(300).at[1, 2, :4].set(MASKED)
    values = jnp.asarray(rng.normal(0, 1, (2, 12, 3)), jnp.float32)
    whole = partial_attention(scores, values)
    expected = jnp.matmul(jax.nn.softmax(scores), values)
    lse = jax.nn.logsumexp(scores, axis=-1)
    assert_close((whole.out, whole.lse), (expected, lse), tolerance=1e-5)
    cuts = (1, 4, 9)
    pieces = zip(jnp.split(scores, cuts, axis=2), jnp.split(values, cuts, axis=1), strict=True)
    parts = [partial_attention(*piece) for piece in pieces]
    joined = join(parts)
    assert_close((joined.out, joined.lse), (expected, lse), tolerance=1e-5)


def temporary_bytes(T):
    """Return what the gradient of attention over T tokens holds beside its arguments."""

    def total(q, k, v):
        return attention.causal()(q, k, v, None)[0].sum()

    shapes = [jax.ShapeDtypeStruct((1, T, heads, E), jnp.float32) for heads in (4, 2, 2)]
    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_memory_grows_with_the_length_alone(monkeypatch):
    monkeypatch.setitem(attention._KERNELS, "cpu", blockwise(2**20))
    short, long = temporary_bytes(1024), temporary_bytes(4096)
    assert long < 6 * short
    # All scores, once.
    assert long < 4 * 4 * 4096**2 / 8


def backward_written_out(q, k, v, mask, bias, scale, out, lse, dout):
    """Write out the backward pass of flash attention, from the log-sum-exp that it is handed."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(array, repeats, axis=2) for array in (k, v))
    scores = jnp.einsum("bthe,bshe->bhts", q, k) * scale + bias
    p = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0)
    delta = jnp.einsum("bthe,bthe->bht", out, dout)[..., None]
    ds = p * (jnp.einsum("bthe,bshe->bhts", dout, v) - delta) * scale
    dk, dv = jnp.einsum("bhts,bthe->bshe", ds, q), jnp.einsum("bhts,bthe->bshe", p, dout)

    def together(array):
        return array.reshape(*array.shape[:2], -1, repeats, array.shape[-1]).sum(axis=3)

    return jnp.einsum("bhts,bshe->bthe", ds, k), together(dk), together(dv)


def cudnn_sees(q, k, q_seqlen, kv_seqlen, mask_type):
    """Say which keys cuDNN lets a query look at, BHTS, from all that it is told."""
    T, S = q.shape[1], k.shape[1]
    mask = jnp.ones((q.shape[0], T, S), bool)
    if "CAUSAL" in mask_type.name:
        mask = jnp.tril(mask)
    if "PADDING" in mask_type.name:
        is_query_BT = jnp.arange(T)[None] < q_seqlen[:, None]
        is_key_BS = jnp.arange(S)[None] < kv_seqlen[:, None]
        mask &= is_query_BT[:, :, None] & is_key_BS[:, None]
    return mask[:, None]


def bias_of(bias, *none, **settings):
    """Return what is added to scores; refuse offsets, pages, windows, dropout."""
    assert not any(array.size for array in none)
    assert settings.pop("layout") == cudnn_kernels.AttentionLayout.BTNH.value
    assert settings.pop("variadic_args")[0] == (bias.size > 0)
    settings.pop("seed")
    assert not any(settings.values())
    return bias.astype(jnp.float32) if bias.size else jnp.zeros((1, 1, 1, 1))


def emulated_forward(q, k, v, bias, *told, scale, mask_type, is_training, **settings):
    """Compute what cuDNN's custom call does, in plain XLA with an fp32 log-sum-exp."""
    lengths, others = told[:2], told[2:]
    bias = bias_of(bias, *others, **settings)
    mask = cudnn_sees(q, k, *lengths, mask_type)
    wide = [array.astype(jnp.float32) for array in (q, k, v)]
    repeats = q.shape[2] // k.shape[2]
    k_wide, v_wide = (jnp.repeat(array, repeats, axis=2) for array in wide[1:])
    scores = jnp.einsum("bthe,bshe->bhts", wide[0], k_wide) * scale + bias
    scores = jnp.where(mask, scores, -jnp.inf)
    # cuDNN has heads before positions in the log-sum-exp, and it alone.
    lse = jax.nn.logsumexp(scores, axis=-1)
    # A query that sees nothing has values of 0.
    p = jnp.where(mask, jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0)[..., None]), 0)
    out = jnp.einsum("bhts,bshe->bthe", p, v_wide).astype(q.dtype)
    return [out, lse][: 1 + is_training]


def emulated_backward(q, k, v, bias, *told, scale, mask_type, **settings):
    *lengths_and_others, lse, out, dout = told
    lengths, others = lengths_and_others[:2], lengths_and_others[2:]
    bias = bias_of(bias, *others, **settings)
    mask = cudnn_sees(q, k, *lengths, mask_type)
    wide = [array.astype(jnp.float32) for array in (q, k, v, out, dout)]
    gradients = backward_written_out(*wide[:3], mask, bias, scale, wide[3], lse, wide[4])
    return [gradient.astype(q.dtype) for gradient in gradients]


for primitive, emulated in (
    (cudnn_kernels._dot_product_attention_fwd_p, emulated_forward),
    (cudnn_kernels._dot_product_attention_bwd_p, emulated_backward),
):
    mlir.register_lowering(
        primitive, mlir.lower_fun(emulated, multiple_results=True), platform="cpu"
    )


@pytest.fixture
def cudnn(monkeypatch):
    """Let the CPU stand for a GPU: cuDNN is there, and its two custom calls are computed by XLA."""
    monkeypatch.setattr(cudnn_kernels, "check_cudnn_version", lambda: 91000)
    monkeypatch.setitem(attention._KERNELS, "cpu", gpu.cudnn(packed=False))
    monkeypatch.setitem(attention._PACKED_KERNELS, "cpu", gpu.cudnn(packed=True))
    return attention._KERNELS["cpu"]


@pytest.fixture
def splash(monkeypatch):
    """Let the CPU stand for a TPU: Pallas' interpreter runs its kernels."""
    # Small blocks, so that there are several, some of them whole and some cut by the mask.
    monkeypatch.setattr(tpu, "_LARGEST_BLOCK", 128)
    monkeypatch.setitem(attention._KERNELS, "cpu", tpu.splash(interpret=True))
    tpu._kernel.cache_clear()
    yield attention._KERNELS["cpu"]
    tpu._kernel.cache_clear()


def test_a_kernel_is_that_of_the_mesh_if_it_serves_the_type(cudnn):
    q = arrays_of("grouped", dtype=jnp.bfloat16)[0]

    def chosen(platform, q):
        described: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
        return attention._kernel(q, described, packed=False)

    for platform, kernel in attention._KERNELS.items():
        assert chosen(platform, q) is kernel
    # cuDNN takes sixteen bits, and heads of certain sizes.
    for platform, other in (("another", q), ("gpu", q.astype(jnp.float32)), ("gpu", q[..., :6])):
        assert chosen(platform, other) is attention._FALLBACK


def test_splash_attention_over_several_blocks(splash, monkeypatch):
    rng = np.random.default_rng(3)
    segments = segments_of(
        [numbers(90, 60, size=160)],
        [numbers(130, 100, size=250)],
        [numbers(70, 60, 100, size=250)],
    )
    shapes = [(1, 250, 2, E), *[(1, 250, 1, E)] * 2, *[(1, 160, 1, E)] * 2]
    arrays = [jnp.asarray(rng.normal(0, 1.5, shape), jnp.float32) for shape in shapes]
    ours = value_and_gradients(functools.partial(attended, packed=True), segments, arrays)
    monkeypatch.delitem(attention._KERNELS, "cpu")
    plain = value_and_gradients(functools.partial(attended, packed=True), segments, arrays)
    assert_close(ours, plain, tolerance=1e-4)


@pytest.mark.parametrize(
    ("layout", "heads"), [("unpacked", "grouped"), ("packed", "one"), ("packed", "all")]
)
def test_cudnn_attention(cudnn, layout, heads):
    arrays = arrays_of(heads, dtype=jnp.float16)
    wide = [array.astype(jnp.float32) for array in arrays]
    plain = value_and_gradients(written_out, LAYOUTS[layout], wide)
    ours = functools.partial(attended, packed=layout == "packed")
    found = value_and_gradients(ours, LAYOUTS[layout], arrays)
    assert_close(found, plain, tolerance=2e-2)


@pytest.mark.parametrize("change", ["an array more", "another order"])
def test_arguments_of_cudnns_gradient_that_nobody_tried(cudnn, monkeypatch, change):
    names = [*inspect.signature(gpu._BACKWARD_ARGUMENTS).parameters]
    names[4:6] = ["sink", *names[4:6]] if change == "an array more" else [names[5], names[4]]
    rule = lambda: None  # noqa: E731
    kinds = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
    monkeypatch.setattr(rule, "__signature__", inspect.Signature(kinds), raising=False)
    monkeypatch.setattr(gpu, "_BACKWARD_ARGUMENTS", rule)
    with pytest.raises(UserError, match=r"^jax \d.*install jax>=0\.10,<0\.13"):
        lowered("cuda", packed=False)


@pytest.mark.parametrize(
    ("heads", "shape"),
    # Key/value heads are repeated; heads that the mesh does not divide.
    [("grouped", {"tensor": 4}), ("one", {"fsdp": 2, "tensor": 2})],
)
def test_cudnn_attention_on_a_mesh(cudnn, heads, shape):
    arrays = arrays_of(heads, dtype=jnp.float16)
    ours = functools.partial(attended, packed=False)
    expected = value_and_gradients(ours, UNPACKED, arrays)
    devices = jax.devices()[: math.prod(shape.values())]
    ours = functools.partial(ours, mesh=make_mesh(shape, devices))
    assert_close(value_and_gradients(ours, UNPACKED, arrays), expected, tolerance=5e-3)


def test_splash_attention_on_a_mesh_computed_again(splash):
    """What the kernel knows of its mask is constant in every trace, that of a checkpoint too."""
    arrays, mesh = arrays_of("one"), make_mesh({"fsdp": 2, "tensor": 3}, jax.devices()[:6])

    def ours(segments, *arrays):
        again = jax.checkpoint(functools.partial(attended, segments, packed=True, mesh=mesh))
        return again(*arrays)

    expected = value_and_gradients(written_out, PACKED, arrays)
    assert_close(value_and_gradients(ours, PACKED, arrays), expected)


def lowered(platform, *, packed):
    """Return the program of the gradient for a platform that is not here."""

    def gradients(*arrays):
        total = lambda *xs: attended(UNPACKED, *xs, packed=packed).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(total, argnums=(0, 1, 2, 3, 4))(*arrays)

    traced = jax.jit(gradients).trace(*arrays_of("grouped", dtype=jnp.bfloat16))
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("packed", [False, True])
def test_the_program_for_nvidia_calls_cudnn(cudnn, packed):
    program = lowered("cuda", packed=packed)
    name = "__cudnn$fmhaScaleBiasSoftmax" if packed else "__cudnn$fmhaSoftmax"
    # The prefix and the own row, forward and backward.
    assert program.count(f"{name}(") == 2
    assert program.count(f"{name}Backward(") == 2
    assert ("PADDING" in program) == (not packed)
    assert "CAUSAL" in program


def test_the_program_for_tpus_calls_splash(monkeypatch):
    monkeypatch.setitem(attention._KERNELS, "cpu", tpu.splash())
    program = lowered("tpu", packed=True)
    for phase in ("fwd_segmented_residuals", "dq_segmented", "dkv_segmented"):
        assert f"splash_mha_{phase}" in program
