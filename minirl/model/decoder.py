"""The decoder of Qwen2, Qwen2.5, Qwen3, Qwen3.5, Llama and Mistral; attention is passed in.

The models differ in biases on q, k, v (Qwen2, Qwen2.5), RMS norms on q and k (Qwen3), how the
rotary embedding is stretched (Llama), whether the output projection is the embedding, and whether
three of four layers are linear attention (Qwen3.5: `minirl.model.config.HybridConfig`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from minirl.config import LoraConfig, Remat
from minirl.model.config import PERIOD, ModelConfig
from minirl.model.linear_attention import Inputs, Kernels, Recur
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


def norm_scale(config: ModelConfig, weight: nnx.Param) -> Array:
    """Return what a norm multiplies by; 1 + weight, in fp32, in a hybrid."""
    return 1.0 + weight[...].astype(jnp.float32) if config.hybrid else weight[...]


def rotate(x_BTHE: Array, angles_BTE: Float[Array, "B T e"]) -> Array:
    """Apply rotary position embedding (arXiv:2104.09864) in Hugging Face's half-split layout, to
    the first 2 e numbers of a head.
    """
    cos_BTE = jnp.cos(angles_BTE)[:, :, None, :]
    sin_BTE = jnp.sin(angles_BTE)[:, :, None, :]
    size = 2 * angles_BTE.shape[-1]
    left, right = jnp.split(x_BTHE[..., :size].astype(jnp.float32), 2, axis=-1)
    turned = (left * cos_BTE - right * sin_BTE, right * cos_BTE + left * sin_BTE)
    rest = (x_BTHE[..., size:].astype(jnp.float32),) if size < x_BTHE.shape[-1] else ()
    return jnp.concatenate([*turned, *rest], axis=-1).astype(x_BTHE.dtype)


def rotary_frequencies(config: ModelConfig) -> Float[Array, "e"]:
    """Return the angle of a position for each pair of a head, highest first, as `Rope` says."""
    size, rope = config.rotary_size, config.rope
    exponent_E = jnp.arange(0, size, 2, dtype=jnp.float32) / size
    frequency_E = 1.0 / ((rope.rope_theta or config.rope_theta) ** exponent_E)
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


class Mixing(NamedTuple):
    """How the tokens of a layer look at others: the angles of their positions and attention, or a
    recurrence in linear attention (None where no layer has it).
    """

    angles_BTE: Array
    attend: Attend
    recur: Recur | None


class _Draw:
    """Draws the weights of a layer, one after the other."""

    def __init__(self, config: ModelConfig, key: Array, param_dtype: Any) -> None:
        self._rngs, self._dtype = nnx.Rngs(key), param_dtype
        # Residual branches start small, so that depth does not change the scale at the start.
        self.residual_fan_in = 2 * config.num_hidden_layers
        self._norm = 0.0 if config.hybrid else 1.0

    def normal(self, outputs: int, inputs: int, *, fan_in: int) -> nnx.Param:
        # Drawn as [in, out]: a seed's model does not depend on how its matrices lie.
        drawn = jax.random.normal(self._rngs.params(), (inputs, outputs), self._dtype).T
        return nnx.Param(drawn * fan_in**-0.5)

    def constant(self, size: int, *, value: float) -> nnx.Param:
        return nnx.Param(jnp.full(size, value, self._dtype))

    def norm(self, size: int) -> nnx.Param:
        """Return a norm's weights at which it only divides (`Layer._normal`)."""
        return self.constant(size, value=self._norm)

    def made(self, function: Callable[[Array], Array], dtype: Any = None) -> nnx.Param:
        """Return what a function makes of a key, in a type; None for that of most weights."""
        return nnx.Param(function(self._rngs.params()).astype(dtype or self._dtype))


class Layer(nnx.Module):
    """One layer, abstract: what mixes tokens (`_mix`), then a gated feed-forward, each after a
    norm.
    """

    def __init__(self, config: ModelConfig, draw: _Draw) -> None:
        self.config = config
        self.lora: LoraConfig | None = None
        width, ff = config.hidden_size, config.intermediate_size
        self.attn_norm = draw.norm(width)
        self._draw_mix(draw)
        self.mlp_norm = draw.norm(width)
        self.gate = draw.normal(ff, width, fan_in=width)
        self.up = draw.normal(ff, width, fan_in=width)
        self.down = draw.normal(width, ff, fan_in=ff * draw.residual_fan_in)

    def _draw_mix(self, draw: _Draw) -> None:
        raise NotImplementedError

    def _mix(self, h_BTD: Array, mixing: Mixing, cache: Any, mesh: Mesh | None) -> tuple[Any, Any]:
        """Return what tokens gather from others, BTD, and the layer's new cache."""
        raise NotImplementedError

    def __call__(
        self, x_BTD: Array, mixing: Mixing, cache: Any, mesh: Mesh | None
    ) -> tuple[Array, Any]:
        """Return the layer's output, BTD, and its new cache."""
        mixed_BTD, cache = self._mix(self._normal("attn_norm", x_BTD), mixing, cache, mesh)
        x_BTD = constrain(x_BTD + mixed_BTD, _ROWS, mesh)
        h_BTD = self._normal("mlp_norm", x_BTD)
        gate_BTF, up_BTF = (self._linear(name, h_BTD, mesh) for name in ("gate", "up"))
        inner_BTF = constrain(jax.nn.silu(gate_BTF) * up_BTF, _FF, mesh)
        x_BTD += self._linear("down", inner_BTF, mesh)
        return constrain(x_BTD, _ROWS, mesh), cache

    def _normal(self, name: str, x: Array) -> Array:
        return rms_norm(x, norm_scale(self.config, getattr(self, name)), self.config.rms_norm_eps)

    def _linear(self, name: str, x: Array, mesh: Mesh | None) -> Array:
        """Multiply by a matrix W, or by W + scale B A with an adapter (`minirl.model.lora`)."""
        multiply = functools.partial(linear, mesh=mesh)
        y = multiply(x, getattr(self, name)[...])
        if self.lora is None or name not in self.lora.targets:
            return y
        a_RI, b_OR = (getattr(self, f"{name}_{end}")[...] for end in "ab")
        low_BTR = constrain(multiply(x, a_RI), _LOW_RANK, mesh)
        return y + self.lora.scale * multiply(low_BTR, b_OR)


class Block(Layer):
    """A layer with attention."""

    def _draw_mix(self, draw: _Draw) -> None:
        config = self.config
        width, size = config.hidden_size, config.head_dim
        heads_size = config.num_attention_heads * size
        kv_size = config.num_key_value_heads * size
        # A query and its gate, head by head.
        queries_size = 2 * heads_size if config.hybrid else heads_size
        self.q = draw.normal(queries_size, width, fan_in=width)
        self.k = draw.normal(kv_size, width, fan_in=width)
        self.v = draw.normal(kv_size, width, fan_in=width)
        self.o = draw.normal(width, heads_size, fan_in=heads_size * draw.residual_fan_in)
        if config.qkv_bias:
            self.q_bias = draw.constant(heads_size, value=0.0)
            self.k_bias = draw.constant(kv_size, value=0.0)
            self.v_bias = draw.constant(kv_size, value=0.0)
        if config.qk_norm:
            self.q_norm, self.k_norm = draw.norm(size), draw.norm(size)

    def _mix(self, h_BTD: Array, mixing: Mixing, cache: Any, mesh: Mesh | None) -> tuple[Any, Any]:
        config, gate_BTHE = self.config, None
        q_BTHE = self._heads("q", h_BTD, mesh)
        k_BTKE = self._heads("k", h_BTD, mesh)
        v_BTKE = self._heads("v", h_BTD, mesh)
        if config.hybrid:
            q_BTHE, gate_BTHE = q_BTHE[:, :, ::2], q_BTHE[:, :, 1::2]
        if config.qk_norm:
            q_BTHE, k_BTKE = self._normal("q_norm", q_BTHE), self._normal("k_norm", k_BTKE)
        q_BTHE, k_BTKE = (rotate(x, mixing.angles_BTE) for x in (q_BTHE, k_BTKE))
        q_BTHE = constrain(q_BTHE, _HEADS, mesh)
        k_BTKE = constrain(k_BTKE, _KV_HEADS, mesh)
        v_BTKE = constrain(v_BTKE, _KV_HEADS, mesh)
        attended_BTHE, cache = mixing.attend(q_BTHE, k_BTKE, v_BTKE, cache)
        attended_BTHE = constrain(attended_BTHE, _HEADS, mesh)
        if gate_BTHE is not None:
            attended_BTHE *= jax.nn.sigmoid(gate_BTHE)
        return self._linear("o", attended_BTHE.reshape(*h_BTD.shape[:2], -1), mesh), cache

    def _heads(self, name: str, h_BTD: Array, mesh: Mesh | None) -> Array:
        """Project onto the heads of queries, keys or values."""
        flat = self._linear(name, h_BTD, mesh)
        if self.config.qkv_bias:
            flat += getattr(self, f"{name}_bias")[...].astype(flat.dtype)[None, None]
        return flat.reshape(*flat.shape[:2], -1, self.config.head_dim)


def _inverse_softplus(x: Array) -> Array:
    return x + jnp.log(-jnp.expm1(-x))


class LinearBlock(Layer):
    """A layer with linear attention (`minirl.model.linear_attention`)."""

    def _draw_mix(self, draw: _Draw) -> None:
        shape = self.config.hybrid
        assert shape is not None
        width, heads = self.config.hidden_size, shape.linear_num_value_heads
        values_size = heads * shape.linear_value_head_dim
        mixed_size = 2 * shape.linear_num_key_heads * shape.linear_key_head_dim + values_size
        taps = shape.linear_conv_kernel_dim
        self.in_qkv = draw.normal(mixed_size, width, fan_in=width)
        self.in_z = draw.normal(values_size, width, fan_in=width)
        self.in_b = draw.normal(heads, width, fan_in=width)
        self.in_a = draw.normal(heads, width, fan_in=width)
        conv = draw.normal(mixed_size, taps, fan_in=taps)
        self.conv = nnx.Param(conv[...][:, None])  # as the files have it
        # As the code of Gated DeltaNet (arXiv:2412.06464) draws them: memories that lose between
        # 1e-5 and 0.8 of what they hold, a token. With biases of 1, as transformers draws them,
        # most would lose all of it.
        uniform = functools.partial(jax.random.uniform, shape=(heads,))
        self.a_log = draw.made(
            lambda key: jnp.log(uniform(key, minval=0.01, maxval=16.0)), jnp.float32
        )
        self.dt_bias = draw.made(lambda key: _inverse_softplus(0.001 * 100.0 ** uniform(key)))
        self.out_norm = draw.made(lambda _: jnp.ones(shape.linear_value_head_dim), jnp.float32)
        fan_in = values_size * draw.residual_fan_in
        self.out = draw.normal(width, values_size, fan_in=fan_in)

    def _mix(self, h_BTD: Array, mixing: Mixing, cache: Any, mesh: Mesh | None) -> tuple[Any, Any]:
        assert mixing.recur is not None
        qkv_BTX, z_BTX, b_BTH, a_BTH = (
            self._linear(f"in_{name}", h_BTD, mesh) for name in ("qkv", "z", "b", "a")
        )
        a_log, dt_bias = (getattr(self, n)[...].astype(jnp.float32) for n in ("a_log", "dt_bias"))
        decayed_BTH = jax.nn.softplus(a_BTH.astype(jnp.float32) + dt_bias[None, None])
        g_BTH = -jnp.exp(a_log)[None, None] * decayed_BTH
        beta_BTH = jax.nn.sigmoid(b_BTH.astype(jnp.float32))
        inputs = Inputs(*self._parts(qkv_BTX, axis=2), g_BTH, beta_BTH)
        taps = self.conv[...].astype(h_BTD.dtype)[:, 0]
        o_BTHU, cache = mixing.recur(inputs, Kernels(*self._parts(taps, axis=0)), cache)
        normal = rms_norm(o_BTHU, self.out_norm[...], self.config.rms_norm_eps)
        gate_BTHU = jax.nn.silu(z_BTX.astype(jnp.float32)).reshape(o_BTHU.shape)
        gated_BTX = (normal * gate_BTHU).astype(h_BTD.dtype).reshape(z_BTX.shape)
        return self._linear("out", gated_BTX, mesh), cache

    def _parts(self, array: Array, *, axis: int) -> list[Array]:
        """Take queries, keys and values apart, an axis of each into heads and their size."""
        shape = self.config.hybrid
        assert shape is not None
        keys = (shape.linear_num_key_heads, shape.linear_key_head_dim)
        sizes = (keys, keys, (shape.linear_num_value_heads, shape.linear_value_head_dim))
        ends = [keys[0] * keys[1], 2 * keys[0] * keys[1]]
        before, after = array.shape[:axis], array.shape[axis + 1 :]
        parts = jnp.split(array, ends, axis=axis)
        return [x.reshape(*before, *of, *after) for x, of in zip(parts, sizes, strict=True)]


class Period(nnx.Module):
    """The layers of a hybrid from one with attention to the next: several linear ones, stacked, and
    it.
    """

    def __init__(self, linear: LinearBlock, full: Block) -> None:
        self.linear, self.full = linear, full

    @property
    def lora(self) -> LoraConfig | None:
        """Return what adapters both kinds have."""
        return self.full.lora


# (layer, carry, the layer's cache) -> (new carry, its new cache), as in `jax.lax.scan`
_Body = Callable[[Layer, Any, Any], tuple[Any, Any]]


class Decoder(nnx.Module):
    """A language model of Qwen's and Llama's kind.

    The parameters of all layers are stacked, the layer first: one layer is compiled whatever the
    depth, and there are as many arrays as a layer has. `unstacked` takes them apart. Of a hybrid
    whole periods are stacked.
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

        def block(key: Array) -> Block:
            return Block(config, _Draw(config, key, param_dtype))

        def linear_block(key: Array) -> LinearBlock:
            return LinearBlock(config, _Draw(config, key, param_dtype))

        def period(keys: Array) -> Period:
            return Period(jax.vmap(linear_block)(keys[:-1]), block(keys[-1]))

        self.embed = nnx.Param(jax.random.normal(rngs.params(), shape, param_dtype) * scale)
        of_layers = keys[1:].reshape(-1, PERIOD) if config.hybrid else keys[1:]
        self.layers: Any = jax.vmap(period if config.hybrid else block)(of_layers)
        self.final_norm = _Draw(config, keys[0], param_dtype).norm(config.hidden_size)
        if not config.tie_word_embeddings:
            self.unembed = nnx.Param(jax.random.normal(rngs.params(), shape, param_dtype) * scale)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        attend: Attend,
        caches: Any = None,
        *,
        recur: Recur | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Return the final hidden states, BTD, and the new caches.

        Args:
            tokens_BT: Token ids.
            positions_BT: 0-based positions for the rotary embedding.
            attend: Attention, from `minirl.model.attention`.
            caches: Passed to `attend` or `recur`: an entry for each layer of an `unstacked` model;
                None for no cache. New caches have the same form.
            recur: The recurrence of linear attention, from there too.
        """
        frequency_E = rotary_frequencies(self.config)
        angles_BTE = positions_BT.astype(jnp.float32)[..., None] * frequency_E[None, None]
        mixing = Mixing(angles_BTE, attend, recur)

        def body(layer: Layer, x_BTD: Array, cache: Any) -> tuple[Array, Any]:
            return layer(x_BTD, mixing, cache, self.mesh)

        x_BTD = constrain(look_up(self.embed[...], tokens_BT, self.dtype), _ROWS, self.mesh)
        x_BTD, new_caches = self._run_layers(body, x_BTD, caches)
        scale_D = norm_scale(self.config, self.final_norm)
        return rms_norm(x_BTD, scale_D, self.config.rms_norm_eps), new_caches

    def _run_layers(self, body: _Body, carry: Any, caches: Any) -> tuple[Any, Any]:
        if isinstance(self.layers, nnx.List):
            # Traced once, whatever the depth.
            body, new_caches = jax.jit(body), []
            for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
                carry, new_cache = body(layer, carry, cache)
                new_caches.append(new_cache)
            return carry, new_caches

        def step(carry: Any, layer: tuple[Layer, Any]) -> tuple[Any, Any]:
            return body(layer[0], carry, layer[1])

        kept: Callable[..., Any] = step
        if self.remat != "none":
            kept = jax.checkpoint(step, prevent_cse=False, policy=_KEPT[self.remat])

        def step_of_period(carry: Any, period: tuple[Period, None]) -> tuple[Any, None]:
            carry, _ = jax.lax.scan(kept, carry, (period[0].linear, None))
            return kept(carry, (period[0].full, None))

        is_hybrid = self.config.hybrid is not None
        return jax.lax.scan(step_of_period if is_hybrid else kept, carry, (self.layers, caches))

    @property
    def output_table(self) -> Float[Array, "V D"]:
        """Return what projects hidden states onto the vocabulary."""
        return (self.embed if self.config.tie_word_embeddings else self.unembed)[...]

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Project hidden states onto the vocabulary, in fp32."""
        return linear(hidden, self.output_table, mesh=self.mesh, sum_type=jnp.float32)


def unstacked(model: Decoder) -> Decoder:
    """Return the same model with a list of layers, each with parameters of its own; a few small
    layers are quicker without a loop. Nothing is computed again.
    """
    periods = _each(model.layers, model.config.full_layers)
    return with_layers(model, [layer for period in periods for layer in layers_of(period)])


def with_layers(model: Decoder, layers: Sequence[Layer]) -> Decoder:
    """Return the same model with a list of layers."""
    apart = nnx.clone(model)
    apart.layers = nnx.List(layers)
    return apart


def layers_of(period: Any) -> list[Layer]:
    """List the layers of a hybrid's period, or the one of another model."""
    if isinstance(period, Period):
        return [*_each(period.linear, PERIOD - 1), period.full]
    return [period]


def _each(stack: Any, depth: int) -> list[Any]:
    leaves, tree = jax.tree.flatten(stack)
    # Not by index: the gradient of a split is one concatenation.
    parts = [jax.lax.split(leaf, (1,) * depth) for leaf in leaves]
    layers = ([part.squeeze(0) for part in layer] for layer in zip(*parts, strict=True))
    return [jax.tree.unflatten(tree, layer) for layer in layers]
