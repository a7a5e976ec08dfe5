"""Attention with shared prefixes is the mask written out, by every kernel, and in bounded memory.

Kernels of accelerators run on the CPU: cuDNN's calls emulated, splash by Pallas' interpreter.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn_kernels
from jax.interpreters import mlir

from minirl.model import attention
from minirl.model import cudnn as gpu
from minirl.model import splash as tpu
from minirl.model.attention import Rows
from minirl.model.kernels import KeySet, blockwise
from minirl.model.sharding import make_mesh
from minirl.plan.compile import compile_program
from minirl.sample import attention as sampler_attention
from minirl.sample import gpu_attention
from minirl.sample.cache import KeyValues
from tests import plain_model

E = 8
HEADS = {"grouped": (4, 2), "all": (2, 2), "one": (3, 1)}


def rows_of(prompts, answers, *, columns, padding=3):
    """Lay tokens out as a flat list, and in rows: for each part the lengths of its prompts, and for
    each prompt those of its answers. The list ends with padding.
    """
    P, C = columns
    parts = [
        (part_prompts, [length for group in part_answers for length in group])
        for part_prompts, part_answers in zip(prompts, answers, strict=True)
    ]
    T = max(sum(own) + sum(others) for own, others in parts) + padding
    token_NP, token_BC = [], []
    cell_XT = np.full((len(parts), T), len(parts[0][0]) * P + len(parts[0][1]) * C)
    for x, (own, others) in enumerate(parts):
        at = cell = 0
        for lengths, size, rows in ((own, P, token_NP), (others, C, token_BC)):
            for length in lengths:
                rows.append([*range(at, at + length), *[T] * (size - length)])
                cell_XT[x, at : at + length] = np.arange(cell, cell + length)
                at, cell = at + length, cell + size
    arrays: Any = map(np.asarray, (token_NP, token_BC, cell_XT))
    return Rows(*arrays)


# Two parts, of two prompts with three answers each; a prompt and some answers are of no token.
ROWS = rows_of(
    [[6, 0], [9, 3]],
    [[[4, 13, 0], [7, 1, 12]], [[13, 2, 5], [0, 0, 3]]],
    columns=(9, 13),
)


def arrays_of(heads, *, rows=ROWS, seed=0, dtype=jnp.float32, size=E):
    """Draw q, k, v of flat lists."""
    H, K = HEADS[heads]
    rng = np.random.default_rng(seed)
    shapes = [(*rows.cell_XT.shape, heads, size) for heads in (H, K, K)]
    return tuple(jnp.asarray(rng.normal(0, 1.5, shape), dtype) for shape in shapes)


def visible(rows):
    """Return which tokens of its list each token may see, XTT."""
    X, T = rows.cell_XT.shape
    seen = np.zeros((X, T + 1, T + 1), bool)
    N, B = len(rows.token_NP), len(rows.token_BC)
    for b, answer in enumerate(rows.token_BC):
        n, x = b * N // B, b * X // B
        for row, prompt in ((rows.token_NP[n], []), (answer, rows.token_NP[n])):
            for place, token in enumerate(row):
                seen[x, token, prompt] = seen[x, token, row[: place + 1]] = True
    return seen[:, :T, :T]


def repeated(q, *arrays):
    return (jnp.repeat(array, q.shape[2] // array.shape[2], axis=2) for array in arrays)


def written_out(rows, q, k, v):
    """Attend in fp32 with heads repeated and one mask over the list."""
    q, k, v = (array.astype(jnp.float32) for array in (q, k, v))
    k, v = repeated(q, k, v)
    scores = jnp.einsum("xthe,xshe->xhts", q, k) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(visible(rows)[:, None], scores, -1e30))
    return jnp.einsum("xhts,xshe->xthe", weights, v)


def attended(rows, q, k, v, *, mesh=None):
    return attention.shared_prefix(Rows(*map(jnp.asarray, rows)), mesh=mesh)(q, k, v, None)[0]


def value_and_gradients(function, rows, arrays):
    """Return the values of tokens that are no padding, and gradients of a sum of those alone."""
    is_true = jnp.asarray(visible(rows).any(axis=2))[:, :, None, None]
    slope = jnp.asarray(np.random.default_rng(1).normal(0, 1, arrays[0].shape), jnp.float32)

    def total(*arrays):
        out = function(rows, *arrays)
        return jnp.sum(out * slope, where=is_true), jnp.where(is_true, out, 0)

    every = tuple(range(len(arrays)))
    gradients, out = jax.jit(jax.grad(total, argnums=every, has_aux=True))(*arrays)
    return (out, *gradients)


def assert_close(ours, theirs, *, tolerance=5e-5):
    plain_model.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


# Several blocks, of heads that are taken together; and all at once.
BLOCKS, WHOLE = 4 * 2 * 5 * 13, 2**29


@pytest.mark.parametrize(
    ("heads", "block_bytes"), [("grouped", BLOCKS), ("one", BLOCKS), ("all", WHOLE)]
)
def test_attention_is_the_mask_written_out(monkeypatch, heads, block_bytes):
    monkeypatch.setattr(attention, "_kernel_of", lambda _: blockwise(block_bytes))
    arrays = arrays_of(heads)
    expected = value_and_gradients(written_out, ROWS, arrays)
    assert_close(value_and_gradients(attended, ROWS, arrays), expected)


def scaled_as_a_set(kernel):
    return lambda q, k, v: kernel.forward(q, KeySet(k, v, jnp.array([k.shape[1]])))[1]


def scaled_in_the_cache(way):
    """Attend as the sampler does: the queries of a head side by side, a token's heads too."""

    def lse(q, k, v):
        cache = KeyValues(*(array.reshape(*array.shape[:2], -1) for array in (k, v)))
        counts = jnp.full((1, 1), k.shape[1])
        return way(q.swapaxes(1, 2), cache, None, counts)[1].swapaxes(1, 2)

    return lse


SCALED = {
    "blockwise": scaled_as_a_set(blockwise(2**20)),
    "splash": scaled_as_a_set(tpu.SPLASH),
    "sampler, room": scaled_in_the_cache(sampler_attention._to_seen),
    "sampler, blocks": scaled_in_the_cache(sampler_attention._to_blocks),
    "sampler, kernel": scaled_in_the_cache(
        lambda q_XKQE, keys, _, count_XT: gpu_attention.attend_to_first(
            q_XKQE, *keys, count_XT[:, 0]
        )
    ),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", SCALED)
def test_scores_are_scaled_in_fp32(name):
    """As cuDNN does. The scale of heads of 128 is no power of two: a query that is scaled in bf16
    is rounded once more, by up to 1/256 of itself.
    """
    rng = np.random.default_rng(0)
    shapes = ((1, 4, 2, 128), (1, 128, 2, 128), (1, 128, 2, 128))
    q, k, v = (jnp.asarray(rng.normal(0, 2, shape), jnp.bfloat16) for shape in shapes)
    wide = [np.asarray(array, np.float64) for array in (q, k)]
    scores = np.einsum("xthe,xlhe->xthl", *wide) / 128**0.5
    exact = np.log(np.exp(scores - scores.max()).sum(axis=-1)) + scores.max()
    np.testing.assert_allclose(SCALED[name](q, k, v), exact, atol=2e-4)


def temporary_bytes(T):
    """Return what the gradient of attention over T tokens holds beside its arguments."""

    def total(q, k, v):
        return attention.attend_to_sets(blockwise(2**20), q, [KeySet(k, v)]).sum()

    shapes = [jax.ShapeDtypeStruct((1, T, heads, E), jnp.float32) for heads in (4, 2, 2)]
    return compile_program(jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes)).temporaries


def test_memory_grows_with_the_length_alone():
    short, long = temporary_bytes(1024), temporary_bytes(4096)
    assert long < 6 * short
    # All scores, once.
    assert long < 4 * 4 * 4096**2 / 8


def cudnn_scores(q, k, bias, *told, scale, mask_type, **settings):
    """Return scores, BHTS, and which keys cuDNN lets a query look at, from all that it is told;
    refuse bias, offsets, pages, windows, dropout.
    """
    lengths, others = told[:2], told[2:]
    assert not any(array.size for array in (bias, *others))
    assert settings.pop("layout") == cudnn_kernels.AttentionLayout.BTNH.value
    assert settings.pop("variadic_args") == (False, False)
    settings.pop("seed")
    assert not any(settings.values())
    mask = jnp.ones((len(q), 1, q.shape[1], k.shape[1]), bool)
    if "CAUSAL" in mask_type.name:
        mask = jnp.tril(mask)
    if "PADDING" in mask_type.name:
        is_query_BT, is_key_BS = (
            jnp.arange(array.shape[1])[None] < length_B[:, None]
            for array, length_B in zip((q, k), lengths, strict=True)
        )
        mask &= is_query_BT[:, None, :, None] & is_key_BS[:, None, None]
    return jnp.einsum("bthe,bshe->bhts", q, *repeated(q, k)) * scale, mask


def emulated_forward(q, k, v, *told, is_training, **settings):
    """Compute what cuDNN's custom call does, in plain XLA with an fp32 log-sum-exp."""
    wide = [array.astype(jnp.float32) for array in (q, k, v)]
    scores, mask = cudnn_scores(*wide[:2], *told, **settings)
    # cuDNN has heads before positions in the log-sum-exp, and it alone.
    lse = jax.nn.logsumexp(scores, axis=-1, where=mask)
    # A query that sees nothing has values of 0.
    p = jnp.where(mask, jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0)[..., None]), 0)
    out = jnp.einsum("bhts,bshe->bthe", p, *repeated(q, wide[2])).astype(q.dtype)
    return [out, lse][: 1 + is_training]


def emulated_backward(q, k, v, *told, **settings):
    """Compute flash attention's gradients from the log-sum-exp that it is handed: those of a sum
    in which queries, keys and values alone vary.
    """
    *told, lse, out, dout = told
    *wide, out, dout = (array.astype(jnp.float32) for array in (q, k, v, out, dout))
    delta = jnp.einsum("bthe,bthe->bht", out, dout)[..., None]

    def total(q, k, v):
        scores, mask = cudnn_scores(q, k, *told, **settings)
        p = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0)
        return jnp.sum(p * (jnp.einsum("bthe,bshe->bhts", dout, *repeated(q, v)) - delta))

    gradients = jax.grad(total, argnums=(0, 1, 2))(*wide)
    return [gradient.astype(q.dtype) for gradient in gradients]


for primitive, emulated in (
    (cudnn_kernels._dot_product_attention_fwd_p, emulated_forward),
    (cudnn_kernels._dot_product_attention_bwd_p, emulated_backward),
):
    mlir.register_lowering(
        primitive, mlir.lower_fun(emulated, multiple_results=True), platform="cpu"
    )


def use(monkeypatch, kernel):
    """Let all devices have this kernel, but for what it does not serve."""
    own = attention._kernel_of
    monkeypatch.setattr(
        attention, "_kernel_of", lambda name: kernel if name == "cpu" else own(name)
    )


@pytest.fixture
def cudnn(monkeypatch):
    """Let the CPU stand for a GPU: cuDNN is there, and its two custom calls are computed by XLA."""
    kernel = gpu.CUDNN._replace(serves=lambda q, _: gpu._serves(q, described("gpu")))
    use(monkeypatch, kernel)


def described(platform, capability="9.0"):
    return SimpleNamespace(platform=platform, compute_capability=capability)


@pytest.fixture
def splash(interpreted, monkeypatch):
    """Let the CPU stand for a TPU."""
    # Small blocks, so that there are several, some of them whole and some cut by the mask.
    monkeypatch.setattr(tpu, "_LARGEST_BLOCK", 128)
    use(monkeypatch, tpu.SPLASH)


def test_a_kernel_is_that_of_the_mesh_if_it_serves_the_type():
    q = arrays_of("grouped", dtype=jnp.bfloat16)[0]
    large = jnp.zeros((1, 1, 1, 256), jnp.bfloat16)

    def chosen(q, *device):
        mesh: Any = SimpleNamespace(devices=np.array([described(*device)]))
        return attention._kernel(q, mesh)

    for platform in ("tpu", "gpu", "cpu"):
        assert chosen(q, platform) is attention._kernel_of(platform)
    # cuDNN takes sixteen bits, and heads of certain sizes, of more than 128 on Hopper alone.
    assert chosen(large, "gpu", "9.0") is attention._kernel_of("gpu")
    larger = jnp.zeros((1, 1, 1, 264), q.dtype)
    for other, *device in (
        *((q, "another"), (q.astype(jnp.float32), "gpu"), (q[..., :6], "gpu")),
        *((large, "gpu", "8.0"), (large, "gpu", "10.0"), (larger, "gpu")),
    ):
        assert chosen(other, *device) is attention._kernel_of("another")


# The second has queries that are scaled in two parts.
@pytest.mark.parametrize(
    ("heads", "dtype", "size", "tolerance"),
    [("all", jnp.float32, E, 1e-4), ("one", jnp.bfloat16, 128, 3e-2)],
)
def test_splash_attention_over_several_blocks(splash, heads, dtype, size, tolerance):
    rows = rows_of([[150]], [[[250, 70]]], columns=(160, 250))
    arrays = arrays_of(heads, rows=rows, seed=3, dtype=dtype, size=size)
    expected = value_and_gradients(written_out, rows, arrays)
    assert_close(value_and_gradients(attended, rows, arrays), expected, tolerance=tolerance)


@pytest.mark.parametrize(
    ("heads", "shape"),
    # On a mesh key/value heads are repeated; heads that the mesh does not divide.
    [("grouped", {"tensor": 4}), ("one", {"fsdp": 2, "tensor": 2})],
)
def test_cudnn_attention_on_a_device_and_on_a_mesh(cudnn, heads, shape):
    arrays = arrays_of(heads, dtype=jnp.float16)
    alone = value_and_gradients(attended, ROWS, arrays)
    assert_close(alone, value_and_gradients(written_out, ROWS, arrays), tolerance=2e-2)
    devices = jax.devices()[: math.prod(shape.values())]
    ours = functools.partial(attended, mesh=make_mesh(shape, devices))
    assert_close(value_and_gradients(ours, ROWS, arrays), alone, tolerance=5e-3)


def test_splash_attention_on_a_mesh_computed_again(splash):
    """What the kernel knows of its mask is constant in every trace, that of a checkpoint too."""
    arrays, mesh = arrays_of("one"), make_mesh({"fsdp": 2, "tensor": 3}, jax.devices()[:6])

    def ours(rows, *arrays):
        return jax.checkpoint(functools.partial(attended, rows, mesh=mesh))(*arrays)

    expected = value_and_gradients(written_out, ROWS, arrays)
    assert_close(value_and_gradients(ours, ROWS, arrays), expected)


def lowered(platform):
    """Return the program of the gradient for a platform that is not here."""

    def gradients(*arrays):
        total = lambda *xs: attended(ROWS, *xs).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(total, argnums=(0, 1, 2))(*arrays)

    traced = jax.jit(gradients).trace(*arrays_of("grouped", dtype=jnp.bfloat16))
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_the_program_for_nvidia_calls_cudnn(cudnn):
    program = lowered("cuda")
    # Prompts to themselves, answers to prompts, and to themselves; forward and backward.
    assert program.count("__cudnn$fmhaSoftmax(") == 3
    assert program.count("__cudnn$fmhaSoftmaxBackward(") == 3
    assert "PADDING" in program
    assert "CAUSAL" in program


def test_the_program_for_tpus_calls_splash(monkeypatch):
    use(monkeypatch, tpu.SPLASH)
    program = lowered("tpu")
    for phase in ("fwd_segmented_residuals", "dq_segmented", "dkv_segmented"):
        assert f"splash_mha_{phase}" in program
