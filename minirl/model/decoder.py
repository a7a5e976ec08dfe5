"""The decoder of Qwen2, Qwen2.5, Qwen3, Llama and Mistral; attention is passed in.

The models differ in biases on q, k, v (Qwen2, Qwen2.5), RMS norms on q and k (Qwen3), how the
rotary embedding is stretched (Llama), and whether the output projection is the embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from minirl.config import LoraConfig, Remat
from minirl.model.config import ModelConfig
from minirl.model.sharding import constrain, platform_of

# (q_BTHE, k_BTKE, v_BTKE, the layer's cache) -> (attended values BTHE, the layer's new cache)
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]

# What `jax.checkpoint` may keep of a layer, by the name of the setting; "none" is no checkpoint.
_KEPT: dict[Remat, Any] = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}

# Products of at most so many rows are up to three times as quick on a CPU with the matrix on the
# left: Eigen packs the right side again and again.
_FEW_ROWS = 128

# Logical axes of activations.
_ROWS = ("batch", "position", "model")
_HEADS = ("batch", "position", "heads", "head_size")
_KV_HEADS = ("batch", "position", "kv_heads", "head_size")
_FF = ("batch", "position", "ff")
_LOW_RANK = ("batch", "position", "rank")


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


def rotary_frequencies(config: ModelConfig) -> Float[Array, "e"]:
    """Return the angle of a position for each pair of a head, highest first, as `Rope` says."""
    size, rope = config.head_dim, config.rope
    exponent_E = jnp.arange(0, size, 2, dtype=jnp.float32) / size
    frequency_E = 1.0 / (config.rope_theta**exponent_E)
    if rope.rope_type == "default":
        return frequency_E
    kept_E: Any = 0.0
    if rope.rope_type == "llama3":
        turns_E = rope.original_max_position_embeddings * frequency_E / (2 * jnp.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        kept_E = jnp.clip((turns_E - low) / (high - low), 0.0, 1.0)
    return frequency_E * (kept_E + (1.0 - kept_E) / rope.factor)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(
    table_VD: Float[Array, "V D"], tokens_BT: Int[Array, "B T"], dtype: Any
) -> Float[Array, "B T D"]:
    """Return rows of a table in a type; the table's gradient is summed over tokens in fp32."""
    return table_VD.astype(dtype)[tokens_BT]


def _look_up_forward(table_VD: Array, tokens_BT: Array, dtype: Any) -> tuple[Array, Any]:
    return look_up(table_VD, tokens_BT, dtype), (tokens_BT, table_VD[:, :0])


def _look_up_backward(dtype: Any, known: Any, gradient_BTD: Array) -> tuple[Array, None]:
    del dtype
    tokens_BT, empty_V0 = known
    shape = (len(empty_V0), gradient_BTD.shape[-1])
    total_VD = jnp.zeros(shape).at[tokens_BT].add(gradient_BTD.astype(jnp.float32))
    return total_VD.astype(empty_V0.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def linear(
    x: Float[Array, "... I"],
    weight_OI: Float[Array, "O I"],
    *,
    mesh: Mesh | None,
    sum_type: Any = None,
) -> Float[Array, "... O"]:
    """Multiply by a matrix in the type of x, or sum in a wider one.

    As one product of two matrices: a gradient that sums over rows and positions at once would be
    of transposed copies.
    """
    x_XI, weight_OI = x.reshape(-1, x.shape[-1]), weight_OI.astype(x.dtype)
    product = functools.partial(jnp.matmul, preferred_element_type=sum_type)
    if 1 < len(x_XI) <= _FEW_ROWS and platform_of(mesh) == "cpu":
        # XLA would else turn the product round again.
        y = jax.lax.optimization_barrier(product(weight_OI, x_XI.T)).T
    else:
        y = product(x_XI, weight_OI.T)
    return y.reshape(*x.shape[:-1], -1)


class Block(nnx.Module):
    """One transformer layer: attention and a gated feed-forward, each after a norm."""

    def __init__(self, config: ModelConfig, *, key: Array, param_dtype: Any) -> None:
        self.config = config
        self.lora: LoraConfig | None = None
        width, ff, size = config.hidden_size, config.intermediate_size, config.head_dim
        heads_size = config.num_attention_heads * size
        kv_size = config.num_key_value_heads * size
        rngs = nnx.Rngs(key)

        def normal(outputs: int, inputs: int, *, fan_in: int) -> nnx.Param:
            # Drawn as [in, out]: a seed's model does not depend on how its matrices lie.
            drawn = jax.random.normal(rngs.params(), (inputs, outputs), param_dtype).T
            return nnx.Param(drawn * fan_in**-0.5)

        def constant(size: int, *, value: float) -> nnx.Param:
            return nnx.Param(jnp.full(size, value, param_dtype))

        # Residual branches start small, so that depth does not change the scale at the start.
        residual_fan_in = 2 * config.num_hidden_layers
        self.attn_norm = constant(width, value=1.0)
        self.q = normal(heads_size, width, fan_in=width)
        self.k = normal(kv_size, width, fan_in=width)
        self.v = normal(kv_size, width, fan_in=width)
        self.o = normal(width, heads_size, fan_in=heads_size * residual_fan_in)
        if config.attention_bias:
            self.q_bias = constant(heads_size, value=0.0)
            self.k_bias = constant(kv_size, value=0.0)
            self.v_bias = constant(kv_size, value=0.0)
        if config.qk_norm:
            self.q_norm = constant(size, value=1.0)
            self.k_norm = constant(size, value=1.0)
        self.mlp_norm = constant(width, value=1.0)
        self.gate = normal(ff, width, fan_in=width)
        self.up = normal(ff, width, fan_in=width)
        self.down = normal(width, ff, fan_in=ff * residual_fan_in)

    def __call__(
        self, x_BTD: Array, angles_BTE: Array, attend: Attend, cache: Any, mesh: Mesh | None
    ) -> tuple[Array, Any]:
        """Return the layer's output, BTD, and its new cache."""
        config = self.config
        h_BTD = rms_norm(x_BTD, self.attn_norm[...], config.rms_norm_eps)
        q_BTHE = self._heads("q", h_BTD, mesh)
        k_BTKE = self._heads("k", h_BTD, mesh)
        v_BTKE = self._heads("v", h_BTD, mesh)
        if config.qk_norm:
            q_BTHE = rms_norm(q_BTHE, self.q_norm[...], config.rms_norm_eps)
            k_BTKE = rms_norm(k_BTKE, self.k_norm[...], config.rms_norm_eps)
        q_BTHE, k_BTKE = rotate(q_BTHE, angles_BTE), rotate(k_BTKE, angles_BTE)
        q_BTHE = constrain(q_BTHE, _HEADS, mesh)
        k_BTKE = constrain(k_BTKE, _KV_HEADS, mesh)
        v_BTKE = constrain(v_BTKE, _KV_HEADS, mesh)
        attended_BTHE, cache = attend(q_BTHE, k_BTKE, v_BTKE, cache)
        attended_BTHE = constrain(attended_BTHE, _HEADS, mesh)
        x_BTD += self._linear("o", attended_BTHE.reshape(*x_BTD.shape[:2], -1), mesh)
        x_BTD = constrain(x_BTD, _ROWS, mesh)
        h_BTD = rms_norm(x_BTD, self.mlp_norm[...], config.rms_norm_eps)
        gate_BTF, up_BTF = (self._linear(name, h_BTD, mesh) for name in ("gate", "up"))
        inner_BTF = constrain(jax.nn.silu(gate_BTF) * up_BTF, _FF, mesh)
        x_BTD += self._linear("down", inner_BTF, mesh)
        return constrain(x_BTD, _ROWS, mesh), cache

    def _heads(self, name: str, h_BTD: Array, mesh: Mesh | None) -> Array:
        """Project onto the heads of queries, keys or values."""
        flat = self._linear(name, h_BTD, mesh)
        if self.config.attention_bias:
            flat += getattr(self, f"{name}_bias")[...].astype(flat.dtype)[None, None]
        return flat.reshape(*flat.shape[:2], -1, self.config.head_dim)

    def _linear(self, name: str, x: Array, mesh: Mesh | None) -> Array:
        """Multiply by a matrix W, or by W + scale B A with an adapter (`minirl.model.lora`)."""
        multiply = functools.partial(linear, mesh=mesh)
        y = multiply(x, getattr(self, name)[...])
        if self.lora is None or name not in self.lora.targets:
            return y
        a_RI, b_OR = (getattr(self, f"{name}_{end}")[...] for end in "ab")
        low_BTR = constrain(multiply(x, a_RI), _LOW_RANK, mesh)
        return y + self.lora.scale * multiply(low_BTR, b_OR)


# (layer, carry, the layer's cache) -> (new carry, its new cache), as in `jax.lax.scan`
_Body = Callable[[Block, Any, Any], tuple[Any, Any]]


class Decoder(nnx.Module):
    """A language model of Qwen's and Llama's kind.

    The parameters of all layers are stacked, the layer first: one layer is compiled whatever the
    depth, and there are as many arrays as a layer has. `unstacked` takes them apart.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        key: Array,
        param_dtype: Any = jnp.float32,
        dtype: Any = jnp.float32,
        remat: Remat = "none",
        mesh: Mesh | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.mesh = mesh
        self.remat = remat
        shape = (config.vocab_size, config.hidden_size)
        keys = jax.random.split(key, 1 + config.num_hidden_layers)
        rngs = nnx.Rngs(keys[0])
        # At this scale a token's identity is as loud as what the layers add to it.
        scale = config.hidden_size**-0.5

        def layer(key: Array) -> Block:
            return Block(config, key=key, param_dtype=param_dtype)

        self.embed = nnx.Param(jax.random.normal(rngs.params(), shape, param_dtype) * scale)
        self.layers: Any = jax.vmap(layer)(keys[1:])
        self.final_norm = nnx.Param(jnp.ones(config.hidden_size, param_dtype))
        if not config.tie_word_embeddings:
            self.unembed = nnx.Param(jax.random.normal(rngs.params(), shape, param_dtype) * scale)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        attend: Attend,
        caches: Any = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Return the final hidden states, BTD, and the new caches.

        Args:
            tokens_BT: Token ids.
            positions_BT: 0-based positions for the rotary embedding.
            attend: Attention, from `minirl.model.attention`.
            caches: Passed to `attend`: the layers' entries, stacked as the layers are; None for no
                cache. New caches have the same form.
        """
        angles_BTE = self._angles(positions_BT)

        def body(layer: Block, x_BTD: Array, cache: Any) -> tuple[Array, Any]:
            return layer(x_BTD, angles_BTE, attend, cache, self.mesh)

        x_BTD, new_caches = self._run_layers(body, self._embed(tokens_BT), caches)
        return self._final_norm(x_BTD), new_caches

    def _angles(self, positions_BT: Array) -> Array:
        frequency_E = rotary_frequencies(self.config)
        return positions_BT.astype(jnp.float32)[..., None] * frequency_E[None, None]

    def _embed(self, tokens_BT: Array) -> Array:
        return constrain(look_up(self.embed[...], tokens_BT, self.dtype), _ROWS, self.mesh)

    def _final_norm(self, x_BTD: Array) -> Array:
        return rms_norm(x_BTD, self.final_norm[...], self.config.rms_norm_eps)

    def _run_layers(self, body: _Body, carry: Any, caches: Any) -> tuple[Any, Any]:
        if isinstance(self.layers, nnx.List):
            new_caches = []
            for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
                carry, new_cache = body(layer, carry, cache)
                new_caches.append(new_cache)
            return carry, new_caches

        def step(carry: Any, layer: tuple[Block, Any]) -> tuple[Any, Any]:
            return body(layer[0], carry, layer[1])

        kept: Callable[..., Any] = step
        if self.remat != "none":
            kept = jax.checkpoint(step, prevent_cse=False, policy=_KEPT[self.remat])
        return jax.lax.scan(kept, carry, (self.layers, caches))

    @property
    def output_table(self) -> Float[Array, "V D"]:
        """Return what projects hidden states onto the vocabulary."""
        return (self.embed if self.config.tie_word_embeddings else self.unembed)[...]

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Project hidden states onto the vocabulary, in fp32."""
        return linear(hidden, self.output_table, mesh=self.mesh, sum_type=jnp.float32)


def unstacked(model: Decoder) -> Decoder:
    """Return the same model with a list of layers, each with parameters of its own.

    For sampling, whose steps read every weight once, a layer cut out of the stack would be read and
    written once more; a few small layers are quicker without a loop. Nothing is computed again.
    """
    leaves, tree = jax.tree.flatten(model.layers)
    depth = model.config.num_hidden_layers
    # Not by index: the gradient of a split is one concatenation.
    parts = [jax.lax.split(leaf, (1,) * depth) for leaf in leaves]
    layers = ([part.squeeze(0) for part in layer] for layer in zip(*parts, strict=True))
    apart = nnx.clone(model)
    apart.layers = nnx.List([jax.tree.unflatten(tree, layer) for layer in layers])
    return apart
