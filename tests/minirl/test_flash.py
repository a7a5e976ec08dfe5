"""Kernels of accelerators on the CPU: cuDNN's calls emulated, splash by Pallas' interpreter."""

from __future__ import annotations

import functools
import inspect
import math

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
from minirl.model.kernels import KeySet
from minirl.model.sharding import make_mesh

from .attention_cases import (
    LAYOUTS,
    PACKED,
    UNPACKED,
    C,
    E,
    G,
    N,
    arrays_of,
    assert_close,
    attended,
    numbers,
    segments_of,
    value_and_gradients,
    written_out,
)

pytestmark = pytest.mark.usefixtures("other_device")


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


def test_splash_attention(splash):
    arrays = arrays_of("one")
    plain = value_and_gradients(written_out, UNPACKED, arrays)
    ours = functools.partial(attended, packed=False)
    assert_close(value_and_gradients(ours, UNPACKED, arrays), plain)


def test_splash_attention_over_several_blocks(splash, monkeypatch):
    rng = np.random.default_rng(3)
    segments = segments_of(
        [numbers(90, 60, size=160)],
        [numbers(130, 100, size=250), numbers(1, 200, size=250)],
        [numbers(70, 60, 100, size=250), numbers(1, 150, 50, size=250)],
    )
    shapes = [(2, 250, 2, E), *[(2, 250, 1, E)] * 2, *[(1, 160, 1, E)] * 2]
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


def test_cudnn_leaves_padding_out(cudnn):
    """Padded keys, and an odd number of them."""
    q, k, v, *_ = arrays_of("grouped", dtype=jnp.float16)
    ones = np.ones((N * G, C), int)
    number = np.array([numbers(length, size=C) for length in (13, 5, 1, 12, 2, 7)])
    keys = KeySet(k, v, jnp.asarray(number), jnp.asarray(ones))
    slope = jnp.asarray(np.random.default_rng(1).normal(0, 1, q.shape), jnp.float32)

    def with_gradients(attend, *arrays):
        total = lambda *xs: jnp.sum(attend(*xs).astype(jnp.float32) * slope)  # noqa: E731
        return attend(*arrays), *jax.grad(total, argnums=(0, 1, 2))(*arrays)

    def ours(q, k, v):
        sets = [keys._replace(k_XLKE=k, v_XLKE=v)]
        return attention.attend_to_sets(cudnn, q, sets, causal=[False])

    def plain(q, k, v):
        k, v = (jnp.repeat(array, 2, axis=2) for array in (k, v))
        scores = jnp.einsum("bthe,bshe->bhts", q, k) / math.sqrt(E)
        p = jax.nn.softmax(scores, where=jnp.asarray(number != 0)[:, None, None])
        return jnp.einsum("bhts,bshe->bthe", p, v)

    wide = [array.astype(jnp.float32) for array in (q, k, v)]
    found = with_gradients(ours, q, k, v)
    assert_close(found, with_gradients(plain, *wide), tolerance=2e-2)


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


@pytest.mark.parametrize("packed", [False, True])
def test_cudnn_serves_sixteen_bits(cudnn, packed):
    q = arrays_of("grouped", dtype=jnp.bfloat16)[0]
    assert attention._kernel(q, None, packed=packed) is not attention._FALLBACK
    for other in (q.astype(jnp.float32), q[..., :6]):
        assert attention._kernel(other, None, packed=packed) is attention._FALLBACK


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
