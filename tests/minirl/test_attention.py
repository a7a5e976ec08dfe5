"""Every path of attention against the plain one, and that one against a mask written out."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn_kernels
from jax.interpreters import mlir

from minirl import attention, blocks, flash
from minirl.attention import Segments
from minirl.batching import TokenRow, micro_batches
from minirl.config import BatchingConfig
from minirl.sharding import make_mesh
from minirl.update import token_logprobs

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


@pytest.fixture(autouse=True)
def plain_version(monkeypatch):
    """Compute attention on the CPU plainly, unless another fixture says how."""
    monkeypatch.delitem(attention._KERNELS, "cpu")


@pytest.fixture
def in_blocks(monkeypatch):
    """Compute it in blocks, so small that there are several, and heads that are taken together."""
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 4 * 2 * 5 * C)
    monkeypatch.setitem(attention._KERNELS, "cpu", blocks.blocks())


@pytest.fixture
def cudnn(monkeypatch):
    """Let the CPU stand for a GPU: cuDNN is there, and its two custom calls are computed by XLA."""
    monkeypatch.setattr(cudnn_kernels, "check_cudnn_version", lambda: 91000)
    monkeypatch.setitem(attention._KERNELS, "cpu", flash.cudnn())
    return attention._KERNELS["cpu"]


for primitive, emulated in (
    (cudnn_kernels._dot_product_attention_fwd_p, emulated_forward),
    (cudnn_kernels._dot_product_attention_bwd_p, emulated_backward),
):
    mlir.register_lowering(
        primitive, mlir.lower_fun(emulated, multiple_results=True), platform="cpu"
    )


@pytest.fixture
def splash(monkeypatch):
    """Let the CPU stand for a TPU: Pallas' interpreter runs its kernels."""
    # Small blocks, so that there are several, some of them whole and some cut by the mask.
    monkeypatch.setattr(flash, "_LARGEST_BLOCK", 128)
    monkeypatch.setitem(attention._KERNELS, "cpu", flash.splash(interpret=True))
    flash._splash_kernel.cache_clear()
    yield attention._KERNELS["cpu"]
    flash._splash_kernel.cache_clear()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_attention_is_the_mask_written_out(layout, heads):
    segments, arrays = LAYOUTS[layout], arrays_of(heads)
    expected = value_and_gradients(written_out, segments, arrays)
    for packed in {layout == "packed", True}:
        plain = functools.partial(attended, packed=packed)
        assert_close(value_and_gradients(plain, segments, arrays), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_attention_in_chunks(layout, monkeypatch):
    plain = functools.partial(attended, packed=layout == "packed")
    segments, arrays = LAYOUTS[layout], arrays_of("grouped")
    expected = value_and_gradients(plain, segments, arrays)
    # Four queries at a time; thirteen are no multiple of it.
    monkeypatch.setattr(attention, "SCORES_BYTES", 4 * 4 * N * G * 4 * (P + C))
    assert_close(value_and_gradients(plain, segments, arrays), expected)


def test_plain_causal_attention(monkeypatch):
    q, k, v, *_ = arrays_of("grouped")
    own_BC = jnp.asarray(PACKED.own_BC)
    no_prefix = segments_of(np.zeros((N, P), int), np.zeros((N * G, C), int), PACKED.own_BC)

    def causal(_segments, *arrays):
        return attention.causal(own_BC)(*arrays, None)[0]

    def written(_segments, *arrays):
        prefixes = [jnp.zeros((N, P, 2, E))] * 2
        return written_out(no_prefix, *arrays, *prefixes)

    expected = value_and_gradients(written, PACKED, (q, k, v))
    assert_close(value_and_gradients(causal, PACKED, (q, k, v)), expected)
    monkeypatch.setattr(attention, "SCORES_BYTES", 4 * 4 * N * G * 4 * C)
    assert_close(value_and_gradients(causal, PACKED, (q, k, v)), expected)


def test_causal_attention_without_numbers_is_one_piece_a_row():
    q, k, v, *_ = arrays_of("grouped")
    ones = attention.causal(jnp.ones((N * G, C), int))(q, k, v, None)[0]
    assert_close([attention.causal()(q, k, v, None)[0]], [ones])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_in_blocks(in_blocks, layout, heads):
    segments, arrays = LAYOUTS[layout], arrays_of(heads)
    ours = functools.partial(attended, packed=layout == "packed")
    expected = value_and_gradients(written_out, segments, arrays)
    assert_close(value_and_gradients(ours, segments, arrays), expected)


def test_attention_in_blocks_to_the_own_row_alone(in_blocks, monkeypatch):
    q, k, v, *_ = arrays_of("grouped")

    def causal(_segments, *arrays):
        return attention.causal(jnp.asarray(PACKED.own_BC))(*arrays, None)[0]

    ours = value_and_gradients(causal, PACKED, (q, k, v))
    monkeypatch.delitem(attention._KERNELS, "cpu")
    assert_close(ours, value_and_gradients(causal, PACKED, (q, k, v)))


def test_attention_in_blocks_on_a_mesh(in_blocks):
    arrays = arrays_of("grouped")
    plain = value_and_gradients(written_out, PACKED, arrays)
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    ours = functools.partial(attended, packed=True, mesh=mesh)
    assert_close(value_and_gradients(ours, PACKED, arrays), plain)


@pytest.mark.parametrize(("layout", "heads"), [("unpacked", "one"), ("packed", "grouped")], ids=str)
def test_splash_attention(splash, layout, heads):
    segments, arrays = LAYOUTS[layout], arrays_of(heads)
    plain = value_and_gradients(written_out, segments, arrays)
    ours = functools.partial(attended, packed=layout == "packed")
    assert_close(value_and_gradients(ours, segments, arrays), plain)


def test_splash_attention_over_several_blocks(splash):
    rng = np.random.default_rng(3)
    segments = segments_of(
        [numbers(90, 60, size=160)],
        [numbers(130, 100, size=250), numbers(1, 200, size=250)],
        [numbers(70, 60, 100, size=250), numbers(1, 150, 50, size=250)],
    )
    shapes = [(2, 250, 2, E), *[(2, 250, 1, E)] * 2, *[(1, 160, 1, E)] * 2]
    arrays = [jnp.asarray(rng.normal(0, 1.5, shape), jnp.float32) for shape in shapes]
    ours = value_and_gradients(functools.partial(attended, packed=True), segments, arrays)
    splash_kernel = attention._KERNELS.pop("cpu")
    plain = value_and_gradients(functools.partial(attended, packed=True), segments, arrays)
    attention._KERNELS["cpu"] = splash_kernel
    assert_close(ours, plain, tolerance=1e-4)


def test_splash_attention_to_the_own_row_alone(splash):
    q, k, v, *_ = arrays_of("grouped")
    own_BC = jnp.asarray(PACKED.own_BC)

    def causal(_segments, *arrays):
        return attention.causal(own_BC)(*arrays, None)[0]

    ours = value_and_gradients(causal, PACKED, (q, k, v))
    attention._KERNELS.pop("cpu")
    plain = value_and_gradients(causal, PACKED, (q, k, v))
    attention._KERNELS["cpu"] = splash
    assert_close(ours, plain)


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
    "rows": {"fsdp": 2},
    "rows and heads": {"fsdp": 2, "tensor": 2},
    "repeated key/value heads": {"tensor": 4},
    "rows kept whole": {"data": 2, "fsdp": 2},
}


@pytest.mark.parametrize("shape", MESHES)
def test_kernels_on_a_mesh(cudnn, shape):
    arrays = arrays_of("grouped", dtype=jnp.float16)
    ours = functools.partial(attended, packed=False)
    expected = value_and_gradients(ours, UNPACKED, arrays)
    devices = jax.devices()[: math.prod(MESHES[shape].values())]
    ours = functools.partial(ours, mesh=make_mesh(MESHES[shape], devices))
    assert_close(value_and_gradients(ours, UNPACKED, arrays), expected, tolerance=5e-3)


def test_heads_that_the_mesh_does_not_divide(cudnn):
    arrays = arrays_of("one", dtype=jnp.float16)
    ours = functools.partial(attended, packed=False)
    expected = value_and_gradients(ours, UNPACKED, arrays)
    ours = functools.partial(ours, mesh=make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4]))
    assert_close(value_and_gradients(ours, UNPACKED, arrays), expected, tolerance=5e-3)


def test_splash_attention_on_a_mesh(splash):
    arrays = arrays_of("one")
    plain = value_and_gradients(written_out, PACKED, arrays)
    mesh = make_mesh({"fsdp": 2, "tensor": 3}, jax.devices()[:6])
    ours = functools.partial(attended, packed=True, mesh=mesh)
    assert_close(value_and_gradients(ours, PACKED, arrays), plain)


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


def test_the_mesh_names_the_platform():
    q = arrays_of("grouped", dtype=jnp.bfloat16)[0]
    for platform, kernel in attention._KERNELS.items():
        described: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
        assert attention._kernel(q, described, packed=False) is kernel
    assert attention._kernel(q, None, packed=False) is None


def temporary_bytes(T):
    """Return what the gradient of plain attention over T tokens holds beside its arguments."""

    def total(q, k, v):
        return attention.causal()(q, k, v, None)[0].sum()

    shapes = [jax.ShapeDtypeStruct((1, T, heads, E), jnp.float32) for heads in (4, 2, 2)]
    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_memory_of_plain_attention_grows_with_the_length_alone(monkeypatch):
    monkeypatch.setattr(attention, "SCORES_BYTES", 2**20)
    short, long = temporary_bytes(1024), temporary_bytes(4096)
    assert long < 6 * short
    # All scores, once.
    assert long < 4 * 4 * 4096**2 / 8


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
