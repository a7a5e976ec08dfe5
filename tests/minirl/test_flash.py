"""Kernels of accelerators on the CPU: cuDNN's calls emulated, splash by Pallas' interpreter."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn_kernels
from jax.interpreters import mlir

from minirl import attention, flash
from minirl.batching import TokenRow, micro_batches
from minirl.config import BatchingConfig
from minirl.sharding import make_mesh
from minirl.update import token_logprobs

from .attention_cases import (
    HEADS,
    LAYOUTS,
    PACKED,
    UNPACKED,
    E,
    arrays_of,
    assert_close,
    assert_same_on_a_mesh,
    attended,
    numbers,
    own_row_alone,
    segments_of,
    value_and_gradients,
    written_out,
)

pytestmark = pytest.mark.usefixtures("plain_attention")


def backward_written_out(q, k, v, mask, out, lse, dout):
    """Write out the backward pass of flash attention, from the log-sum-exp that it is handed."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(array, repeats, axis=2) for array in (k, v))
    scores = jnp.einsum("bthe,bshe->bhts", q, k) / math.sqrt(q.shape[-1])
    p = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0)
    delta = jnp.einsum("bthe,bthe->bht", out, dout)[..., None]
    ds = p * (jnp.einsum("bthe,bshe->bhts", dout, v) - delta) / math.sqrt(q.shape[-1])
    dk, dv = jnp.einsum("bhts,bthe->bshe", ds, q), jnp.einsum("bhts,bthe->bshe", p, dout)

    def together(array):
        return array.reshape(*array.shape[:2], -1, repeats, array.shape[-1]).sum(axis=3)

    return jnp.einsum("bhts,bshe->bthe", ds, k), together(dk), together(dv)


def emulated_forward(q, k, v, _bias, _q_seqlen, kv_seqlen, *_rest, mask_type, is_training, **_):
    """Compute what cuDNN's custom call does: `jax.nn` in plain XLA, with an fp32 log-sum-exp."""
    wide = [array.astype(jnp.float32) for array in (q, k, v)]
    is_causal = mask_type == cudnn_kernels.MaskType.CAUSAL
    lengths = {} if is_causal else {"key_value_seq_lengths": kv_seqlen}
    out, lse = jax.nn.dot_product_attention(
        *wide, is_causal=is_causal, implementation="xla", return_residual=True, **lengths
    )
    # cuDNN has heads before positions in the log-sum-exp, and it alone.
    return [out.astype(q.dtype), lse.swapaxes(1, 2)][: 1 + is_training]


def emulated_backward(q, k, v, _bias, _q, kv_seqlen, *rest, mask_type, **_):
    *_, lse, out, dout = rest
    T, S = q.shape[1], k.shape[1]
    if mask_type == cudnn_kernels.MaskType.CAUSAL:
        mask = jnp.tril(jnp.ones((T, S), bool))[None, None]
    else:
        mask = (jnp.arange(S)[None] < kv_seqlen[:, None])[:, None, None]
    wide = [array.astype(jnp.float32) for array in (q, k, v, out, dout)]
    gradients = backward_written_out(*wide[:3], mask, wide[3], lse, wide[4])
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
    monkeypatch.setitem(attention._KERNELS, "cpu", flash.cudnn())
    return attention._KERNELS["cpu"]


@pytest.fixture
def splash(monkeypatch):
    """Let the CPU stand for a TPU: Pallas' interpreter runs its kernels."""
    # Small blocks, so that there are several, some of them whole and some cut by the mask.
    monkeypatch.setattr(flash, "_LARGEST_BLOCK", 128)
    monkeypatch.setitem(attention._KERNELS, "cpu", flash.splash(interpret=True))
    flash._splash_kernel.cache_clear()
    yield attention._KERNELS["cpu"]
    flash._splash_kernel.cache_clear()


@pytest.mark.parametrize(("layout", "heads"), [("unpacked", "one"), ("packed", "grouped")], ids=str)
def test_splash_attention(splash, layout, heads):
    segments, arrays = LAYOUTS[layout], arrays_of(heads)
    plain = value_and_gradients(written_out, segments, arrays)
    ours = functools.partial(attended, packed=layout == "packed")
    assert_close(value_and_gradients(ours, segments, arrays), plain)


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


def test_splash_attention_to_the_own_row_alone(splash, monkeypatch):
    arrays = arrays_of("grouped")[:3]
    ours = value_and_gradients(own_row_alone, PACKED, arrays)
    monkeypatch.delitem(attention._KERNELS, "cpu")
    assert_close(ours, value_and_gradients(own_row_alone, PACKED, arrays))


@pytest.mark.parametrize("heads", HEADS)
def test_cudnn_attention(cudnn, heads):
    arrays = arrays_of(heads, dtype=jnp.float16)
    wide = [array.astype(jnp.float32) for array in arrays]
    plain = value_and_gradients(written_out, UNPACKED, wide)
    ours = value_and_gradients(functools.partial(attended, packed=False), UNPACKED, arrays)
    assert_close(ours, plain, tolerance=2e-2)


def test_cudnn_attention_to_the_own_row_alone(cudnn):
    q, k, v, *_ = arrays_of("grouped", dtype=jnp.float16)

    def causal(_segments, *arrays):
        return attention.causal()(*arrays, None)[0]

    ours = value_and_gradients(causal, UNPACKED, (q, k, v))
    wide = [array.astype(jnp.float32) for array in (q, k, v)]
    assert_close(ours, value_and_gradients(causal, UNPACKED, wide), tolerance=2e-2)


def test_cudnn_serves_sixteen_bits_and_nothing_packed(cudnn):
    q = arrays_of("grouped")[0]
    assert attention._kernel(q.astype(jnp.bfloat16), None, packed=False) is cudnn
    assert attention._kernel(q, None, packed=False) is None
    assert attention._kernel(q.astype(jnp.bfloat16), None, packed=True) is None
    assert attention._kernel(q[..., :6].astype(jnp.bfloat16), None, packed=False) is None


MESHES = {
    "rows": ("grouped", {"fsdp": 2}),
    "rows and heads": ("grouped", {"fsdp": 2, "tensor": 2}),
    "repeated key/value heads": ("grouped", {"tensor": 4}),
    "rows kept whole": ("grouped", {"data": 2, "fsdp": 2}),
    "heads that the mesh does not divide": ("one", {"fsdp": 2, "tensor": 2}),
}


@pytest.mark.parametrize(("heads", "shape"), MESHES.values(), ids=[*MESHES])
def test_cudnn_attention_on_a_mesh(cudnn, heads, shape):
    arrays = arrays_of(heads, dtype=jnp.float16)
    ours = functools.partial(attended, packed=False)
    expected = value_and_gradients(ours, UNPACKED, arrays)
    devices = jax.devices()[: math.prod(shape.values())]
    ours = functools.partial(ours, mesh=make_mesh(shape, devices))
    assert_close(value_and_gradients(ours, UNPACKED, arrays), expected, tolerance=5e-3)


def test_splash_attention_on_a_mesh(splash):
    assert_same_on_a_mesh({"fsdp": 2, "tensor": 3}, "one")


def lowered(platform, *, packed):
    """Return the program of the gradient for a platform that is not here."""

    def gradients(*arrays):
        total = lambda *xs: attended(UNPACKED, *xs, packed=packed).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(total, argnums=(0, 1, 2, 3, 4))(*arrays)

    traced = jax.jit(gradients).trace(*arrays_of("grouped", dtype=jnp.bfloat16))
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_the_program_for_nvidia_calls_cudnn(cudnn):
    program = lowered("cuda", packed=False)
    # The prefix and the own row, forward and backward.
    assert program.count("__cudnn$fmhaSoftmax(") == 2
    assert program.count("__cudnn$fmhaSoftmaxBackward(") == 2
    assert "PADDING" in program
    assert "CAUSAL" in program


def test_the_program_for_tpus_calls_splash(monkeypatch):
    monkeypatch.setitem(attention._KERNELS, "cpu", flash.splash())
    program = lowered("tpu", packed=True)
    for phase in ("fwd_segmented_residuals", "dq_segmented", "dkv_segmented"):
        assert f"splash_mha_{phase}" in program


def test_a_packed_update_by_splash_on_a_mesh(toy, monkeypatch):
    rng = np.random.default_rng(5)
    groups = []
    for prompt in (5, 9):
        ids = [rng.integers(4, 60, prompt + answer) for answer in (3, 7)]
        ids = [np.concatenate([ids[0][:prompt], row[prompt:]]) for row in ids]
        is_action = [np.arange(len(row)) >= prompt for row in ids]
        groups.append(
            [
                TokenRow(row, mask, np.where(mask, -4.0, 0.0), float(rng.normal()), prompt)
                for row, mask in zip(ids, is_action, strict=True)
            ]
        )
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    sizes = BatchingConfig(groups_per_batch=2, pack=True, prompt_multiple=16, answer_multiple=16)
    (batch,) = micro_batches(groups, aggregation="token_mean", sizes=sizes, pad_id=0)

    def gradient(mesh):
        graph, params = nnx.split(toy.model())
        model = nnx.merge(graph, params)
        model.mesh, model.layers.mesh, model.remat = mesh, mesh, "full"
        graph, params = nnx.split(model)

        def loss(params):
            logp_BC, _ = token_logprobs(nnx.merge(graph, params), batch, temperature=0.8)
            return -jnp.sum(logp_BC * batch.weight_BC)

        return jax.tree.leaves(jax.jit(jax.grad(loss))(params))

    plain = gradient(None)
    monkeypatch.setitem(attention._KERNELS, "cpu", flash.splash(interpret=True))
    assert_close(gradient(mesh), plain)
