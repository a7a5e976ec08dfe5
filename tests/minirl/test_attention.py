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

from minirl.config import BatchingConfig
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
from minirl.train.batching import MicroBatches
from tests.plain_model import assert_close

from . import toy

E = 8
HEADS = {"grouped": (4, 2), "all": (2, 2), "one": (3, 1)}


def rows_of(lengths, *, parts=1, columns=(8, 8)):
    """Return where the tokens of groups stand: of each the length of its prompt, and those of its
    answers; rows have a multiple of so many columns.
    """
    sizes = BatchingConfig(
        micro_batch_tokens=1000, prompt_multiple=columns[0], answer_multiple=columns[1]
    )
    groups = toy.make_groups((prompt, [[one] for one in answers]) for prompt, answers in lengths)
    settings: Any = {"aggregation": "token_mean", "sizes": sizes, "pad_id": 0, "parts": parts}
    (batch,) = MicroBatches(groups, **settings)
    return batch.rows


# Two parts, of two prompts with three answers each; of a prompt nothing is shared, and where there
# are fewer answers rows are of no token.
SHORT = rows_of([(7, (4, 13, 1)), (1, (7, 1, 12)), (10, (13, 2, 5)), (4, (3,))], parts=2)
# Several blocks of 128, some of them whole and some cut by the mask.
LONG = rows_of([(151, (250, 70))], columns=(160, 250))


def arrays_of(heads, *, rows=SHORT, dtype=jnp.float32, size=E):
    """Draw q, k, v of flat lists."""
    H, K = HEADS[heads]
    rng = np.random.default_rng(0)
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


def described(platform, capability="9.0"):
    return SimpleNamespace(platform=platform, compute_capability=capability)


KERNELS = {
    # Several blocks, of heads that are taken together; and all at once.
    "blocks": blockwise(4 * 2 * 5 * 16),
    "whole": blockwise(2**29),
    # The CPU stands for a TPU; or for a GPU, whose two custom calls are computed by XLA.
    "splash": tpu.SPLASH,
    "cudnn": gpu.CUDNN._replace(serves=lambda q, _: gpu._serves(q, described("gpu"))),
}


@pytest.fixture
def use(monkeypatch):
    """Return what lets all devices have a kernel, but for what it does not serve."""
    own = attention._kernel_of
    monkeypatch.setattr(tpu, "_LARGEST_BLOCK", 128)

    def patch(name):
        found = KERNELS[name]
        monkeypatch.setattr(attention, "_kernel_of", lambda x: found if x == "cpu" else own(x))

    return patch


# Of heads of 128 in bf16 splash has queries that are scaled in two parts. On a mesh key/value heads
# are repeated, or are not divided.
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("kernel", "heads", "rows", "dtype", "size", "shape", "tolerance"),
    [
        ("blocks", "grouped", SHORT, jnp.float32, E, None, 5e-5),
        ("blocks", "one", SHORT, jnp.float32, E, None, 5e-5),
        ("whole", "all", SHORT, jnp.float32, E, None, 5e-5),
        ("splash", "all", LONG, jnp.float32, E, None, 1e-4),
        ("splash", "one", LONG, jnp.bfloat16, 128, None, 3e-2),
        ("splash", "one", SHORT, jnp.float32, E, {"fsdp": 2, "tensor": 3}, 5e-5),
        ("cudnn", "grouped", SHORT, jnp.float16, E, None, 2e-2),
        ("cudnn", "grouped", SHORT, jnp.float16, E, {"tensor": 4}, 2e-2),
        ("cudnn", "one", SHORT, jnp.float16, E, {"fsdp": 2, "tensor": 2}, 2e-2),
    ],
)
def test_attention_is_the_mask_written_out(use, kernel, heads, rows, dtype, size, shape, tolerance):
    """Also computed again: what splash knows of its mask is constant in every trace."""
    use(kernel)
    mesh = shape and make_mesh(shape, jax.devices()[: math.prod(shape.values())])

    def ours(rows, *arrays):
        return jax.checkpoint(functools.partial(attended, rows, mesh=mesh))(*arrays)

    arrays = arrays_of(heads, rows=rows, dtype=dtype, size=size)
    found, expected = (value_and_gradients(way, rows, arrays) for way in (ours, written_out))
    assert_close(found, expected, rtol=tolerance, atol=tolerance)


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


SPLASH = [f"splash_mha_{part}_segmented" for part in ("fwd", "dq", "dkv")]
CUDNN = {"__cudnn$fmhaSoftmax(": 3, "__cudnn$fmhaSoftmaxBackward(": 3, "PADDING": 2, "CAUSAL": 4}


# Prompts to themselves, answers to prompts, and to themselves; forward and backward.
@pytest.mark.parametrize(
    ("kernel", "platform", "calls"),
    [("cudnn", "cuda", CUDNN), ("splash", "tpu", dict.fromkeys(SPLASH, 3))],
)
def test_the_program_for_a_platform_calls_its_kernel(use, kernel, platform, calls):
    use(kernel)

    def gradients(*arrays):
        total = lambda *xs: attended(SHORT, *xs).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(total, argnums=(0, 1, 2))(*arrays)

    traced = jax.jit(gradients).trace(*arrays_of("grouped", dtype=jnp.bfloat16))
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert {call: program.count(call) for call in calls} == calls
