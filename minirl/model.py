"""One decoder for Qwen2, Qwen2.5 and Qwen3; what attention looks at is handed in.

The models differ in three settings: biases on q, k, v (Qwen2, Qwen2.5), RMS norms on q and k
(Qwen3), and whether the output projection is the embedding. All of them come from a Hugging Face
`config.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import BaseModel, ConfigDict, Field, model_validator

from minirl.reading import check, read_json

# (q_BTHE, k_BTKE, v_BTKE, the layer's cache) -> (attended values BTHE, the layer's new cache)
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder, under Hugging Face's names where they exist."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool


_Size = Annotated[int, Field(gt=0, lt=2**31)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Rope(BaseModel):
    """Rotary embedding, as newer files have it."""

    rope_type: Literal["default"] = "default"
    type: Literal["default"] = "default"
    rope_theta: _Positive | None = None


class _HuggingFace(BaseModel):
    """What this decoder does of all that a `config.json` may ask for."""

    model_config = ConfigDict(extra="ignore")

    model_type: Literal["qwen2", "qwen3"]
    hidden_act: Literal["silu"] = "silu"
    use_sliding_window: Literal[False] | None = None
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    rope_theta: _Positive = 10_000.0
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    rms_norm_eps: _Positive = 1e-6
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        heads, kv_heads, width = self.num_attention_heads, self.kv_heads, self.hidden_size
        if heads % kv_heads:
            raise ValueError(f"num_key_value_heads = {kv_heads} does not divide {heads} heads")
        if self.head_dim is None and width % heads:
            raise ValueError(f"num_attention_heads = {heads} does not divide hidden_size = {width}")
        if self.head_size % 2:
            raise ValueError(
                f"head_dim = {self.head_size} is odd; the rotary embedding turns pairs"
            )
        return self

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def theta(self) -> float:
        rope = self.rope_parameters or self.rope_scaling
        return self.rope_theta if rope is None else rope.rope_theta or self.rope_theta


_ADVICE = "set model.path to a Hugging Face folder of Qwen2, Qwen2.5 or Qwen3"


def read_config(folder: Path) -> ModelConfig:
    """Read the shape of a Qwen2, Qwen2.5 or Qwen3 model from its `config.json`.

    Raises:
        UserError: The file is missing or not JSON, or asks for something this decoder does not do.
    """
    path = folder / "config.json"
    return parse_config(read_json(path, dict[str, Any], advice=_ADVICE), where=str(path))


def parse_config(raw: dict[str, Any], *, where: str) -> ModelConfig:
    """Turn the content of a `config.json` into a `ModelConfig`; `where` names it in errors."""
    read = check(_HuggingFace, raw, where=where, advice=_ADVICE)
    return ModelConfig(
        vocab_size=read.vocab_size,
        hidden_size=read.hidden_size,
        intermediate_size=read.intermediate_size,
        num_hidden_layers=read.num_hidden_layers,
        num_attention_heads=read.num_attention_heads,
        num_key_value_heads=read.kv_heads,
        head_dim=read.head_size,
        rope_theta=read.theta,
        rms_norm_eps=read.rms_norm_eps,
        tie_word_embeddings=bool(read.tie_word_embeddings),
        attention_bias=read.model_type == "qwen2" or bool(read.attention_bias),
        qk_norm=read.model_type == "qwen3",
    )


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, "D"], eps: float) -> Array:
    """Divide by the root mean square over the last axis, in fp32, and scale."""
    x32 = x.astype(jnp.float32)
    normal = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normal * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


def rotate(x_BTHE: Array, angles_BTE: Float[Array, "B T e"]) -> Array:
    """Apply rotary position embedding (arXiv:2104.09864) in Hugging Face's half-split layout."""
    cos_BTE = jnp.cos(angles_BTE)[:, :, None, :]
    sin_BTE = jnp.sin(angles_BTE)[:, :, None, :]
    left, right = jnp.split(x_BTHE.astype(jnp.float32), 2, axis=-1)
    turned = (left * cos_BTE - right * sin_BTE, right * cos_BTE + left * sin_BTE)
    return jnp.concatenate(turned, axis=-1).astype(x_BTHE.dtype)


class Block(nnx.Module):
    """One transformer layer: attention and a gated feed-forward, each after a norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, param_dtype: Any) -> None:
        self.config = config
        width, ff, size = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

        def normal(*shape: int, fan_in: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), shape, param_dtype) * fan_in**-0.5)

        def constant(*shape: int, value: float) -> nnx.Param:
            return nnx.Param(jnp.full(shape, value, param_dtype))

        # Residual branches start small, so that depth does not change the scale at the start.
        residual_fan_in = 2 * config.num_hidden_layers
        self.attn_norm = constant(width, value=1.0)
        self.q = normal(width, heads, size, fan_in=width)
        self.k = normal(width, kv_heads, size, fan_in=width)
        self.v = normal(width, kv_heads, size, fan_in=width)
        self.o = normal(heads, size, width, fan_in=heads * size * residual_fan_in)
        if config.attention_bias:
            self.q_bias = constant(heads, size, value=0.0)
            self.k_bias = constant(kv_heads, size, value=0.0)
            self.v_bias = constant(kv_heads, size, value=0.0)
        if config.qk_norm:
            self.q_norm = constant(size, value=1.0)
            self.k_norm = constant(size, value=1.0)
        self.mlp_norm = constant(width, value=1.0)
        self.gate = normal(width, ff, fan_in=width)
        self.up = normal(width, ff, fan_in=width)
        self.down = normal(ff, width, fan_in=ff * residual_fan_in)

    def __call__(
        self, x_BTD: Array, angles_BTE: Array, attend: Attend, cache: Any
    ) -> tuple[Array, Any]:
        """Return the layer's output, BTD, and its new cache."""
        config, dtype = self.config, x_BTD.dtype
        h_BTD = rms_norm(x_BTD, self.attn_norm[...], config.rms_norm_eps)
        q_BTHE = jnp.einsum("btd,dhe->bthe", h_BTD, self.q[...].astype(dtype))
        k_BTKE = jnp.einsum("btd,dke->btke", h_BTD, self.k[...].astype(dtype))
        v_BTKE = jnp.einsum("btd,dke->btke", h_BTD, self.v[...].astype(dtype))
        if config.attention_bias:
            q_BTHE += self.q_bias[...].astype(dtype)[None, None]
            k_BTKE += self.k_bias[...].astype(dtype)[None, None]
            v_BTKE += self.v_bias[...].astype(dtype)[None, None]
        if config.qk_norm:
            q_BTHE = rms_norm(q_BTHE, self.q_norm[...], config.rms_norm_eps)
            k_BTKE = rms_norm(k_BTKE, self.k_norm[...], config.rms_norm_eps)
        q_BTHE, k_BTKE = rotate(q_BTHE, angles_BTE), rotate(k_BTKE, angles_BTE)
        attended_BTHE, cache = attend(q_BTHE, k_BTKE, v_BTKE, cache)
        x_BTD += jnp.einsum("bthe,hed->btd", attended_BTHE, self.o[...].astype(dtype))
        h_BTD = rms_norm(x_BTD, self.mlp_norm[...], config.rms_norm_eps)
        gate_BTF = jnp.einsum("btd,df->btf", h_BTD, self.gate[...].astype(dtype))
        up_BTF = jnp.einsum("btd,df->btf", h_BTD, self.up[...].astype(dtype))
        down = self.down[...].astype(dtype)
        x_BTD += jnp.einsum("btf,fd->btd", jax.nn.silu(gate_BTF) * up_BTF, down)
        return x_BTD, cache


class Decoder(nnx.Module):
    """A Qwen-class language model."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: Any = jnp.float32,
        dtype: Any = jnp.float32,
        remat: bool = False,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.remat = remat
        shape = (config.vocab_size, config.hidden_size)
        # At this scale a token's identity is as loud as what the layers add to it.
        scale = config.hidden_size**-0.5
        self.embed = nnx.Param(jax.random.normal(rngs.params(), shape, param_dtype) * scale)
        self.layers = nnx.List(
            [
                Block(config, rngs=rngs, param_dtype=param_dtype)
                for _ in range(config.num_hidden_layers)
            ]
        )
        self.final_norm = nnx.Param(jnp.ones(config.hidden_size, param_dtype))
        if not config.tie_word_embeddings:
            self.unembed = nnx.Param(jax.random.normal(rngs.params(), shape, param_dtype) * scale)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        attend: Attend,
        caches: Sequence[Any] | None = None,
        *,
        scan: bool = False,
    ) -> tuple[Float[Array, "B T D"], list[Any]]:
        """Return the final hidden states, BTD, and the new cache of every layer.

        Args:
            tokens_BT: Token ids.
            positions_BT: 0-based positions for the rotary embedding.
            attend: What each query may look at; see `minirl.attention`.
            caches: One entry a layer, handed to `attend`; None for no cache.
            scan: Compile one layer and loop over it, in place of compiling each: quicker to
                compile, at the cost of stacking the layers' weights at every call.
        """
        exponent_E = (
            jnp.arange(0, self.config.head_dim, 2, dtype=jnp.float32) / self.config.head_dim
        )
        frequency_E = 1.0 / (self.config.rope_theta**exponent_E)
        angles_BTE = positions_BT.astype(jnp.float32)[..., None] * frequency_E[None, None]
        x_BTD = self.embed[...].astype(self.dtype)[tokens_BT]
        caches = [None] * len(self.layers) if caches is None else caches
        run = self._scan if scan else self._loop
        x_BTD, new_caches = run(x_BTD, angles_BTE, attend, caches)
        return rms_norm(x_BTD, self.final_norm[...], self.config.rms_norm_eps), new_caches

    def _loop(
        self, x_BTD: Array, angles_BTE: Array, attend: Attend, caches: Sequence[Any]
    ) -> tuple[Array, list[Any]]:
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x_BTD, new_cache = layer(x_BTD, angles_BTE, attend, cache)
            new_caches.append(new_cache)
        return x_BTD, new_caches

    def _scan(
        self, x_BTD: Array, angles_BTE: Array, attend: Attend, caches: Sequence[Any]
    ) -> tuple[Array, list[Any]]:
        graph = nnx.graphdef(self.layers[0])
        stacked = jax.tree.map(
            lambda *leaves: jnp.stack(leaves),
            *((nnx.state(layer), cache) for layer, cache in zip(self.layers, caches, strict=True)),
        )

        def body(x_BTD: Array, layer: Any) -> tuple[Array, Any]:
            state, cache = layer
            return nnx.merge(graph, state)(x_BTD, angles_BTE, attend, cache)

        step = jax.checkpoint(body, prevent_cse=False) if self.remat else body
        x_BTD, new_caches = jax.lax.scan(step, x_BTD, stacked)
        layers = range(len(self.layers))
        return x_BTD, [jax.tree.map(lambda leaf, i=i: leaf[i], new_caches) for i in layers]

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Project hidden states onto the vocabulary, in fp32."""
        table = self.embed if self.config.tie_word_embeddings else self.unembed
        logits = jnp.einsum("...d,vd->...v", hidden, table[...].astype(self.dtype))
        return logits.astype(jnp.float32)
