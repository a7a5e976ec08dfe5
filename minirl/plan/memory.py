"""What a model costs, counted from its shape: parameters, bytes of a device, operations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import yaml
from flax import nnx
from jax.sharding import Mesh

from minirl.config import LoraConfig, ModelSource, Remat
from minirl.errors import UserError
from minirl.model.config import ModelConfig, parse_config
from minirl.model.decoder import Decoder
from minirl.model.lora import add_adapters, split
from minirl.model.sharding import placed


def published_shape(name: str) -> ModelConfig:
    """Return the shape of a published model by its name, for example qwen2.5-coder-7b.

    Raises:
        UserError: The name is not in the table.
    """
    shapes = yaml.safe_load((Path(__file__).parent / "shapes.yaml").read_text())
    key = name.lower().removeprefix("qwen/").removesuffix("-instruct")
    if key not in shapes:
        raise UserError(
            f"{name}: no such model among the published shapes ({', '.join(shapes)}); "
            "for another one set model.path to a folder with its config.json"
        )
    return parse_config(shapes[key], where=key)


def abstract_model(
    config: ModelConfig, source: ModelSource, mesh: Mesh | None, *, lora: LoraConfig | None = None
) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Return a model without weights, and the shapes and places of its weights.

    Args:
        config: Its shape.
        source: The type of the computation, and what is computed again.
        mesh: From `make_mesh`; None for a single device.
        lora: Adapters that it has.

    Returns:
        Its structure; the weights that are trained; and the rest (`lora.split`).
    """
    dtype = jnp.dtype(source.dtype)

    def make(key: jax.Array) -> Decoder:
        # As they are read: weights that stay as they are need no more than the computation's type.
        kept = jnp.float32 if lora is None else dtype
        model = Decoder(
            config, key=key, dtype=dtype, param_dtype=kept, remat=source.remat, mesh=mesh
        )
        if lora is not None:
            add_adapters(model, lora, seed=0)
        return model

    graph, trained, frozen = split(nnx.eval_shape(make, jax.random.key(0)))
    return graph, placed(trained, mesh), placed(frozen, mesh)


def abstract_opt_state(
    optimizer: optax.GradientTransformation, params: nnx.State, mesh: Mesh | None
) -> Any:
    """Return the shapes and places of an optimizer's state."""
    return placed(jax.eval_shape(optimizer.init, params), mesh)


def device_bytes(tree: Any) -> float:
    """Return the bytes of a tree of placed shapes, or of arrays, that lie on each device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape)
        * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def count_parameters(params: Any) -> int:
    """Count the numbers of a tree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@dataclass(frozen=True, slots=True)
class Tokens:
    """How many tokens a program computes, on all devices together.

    Attributes:
        prompts: Prompts computed.
        prompt: Tokens of each.
        answers: Rows of answers computed, each after its prompt.
        answer: Tokens of each.
    """

    prompts: int
    prompt: int
    answers: int
    answer: int

    @property
    def computed(self) -> int:
        """Count the tokens that pass through the layers."""
        return self.prompts * self.prompt + self.answers * self.answer


def activation_bytes(
    config: ModelConfig, tokens: Tokens, *, remat: Remat, itemsize: int, tensor: int, logits: float
) -> float:
    """Estimate what the gradient of a micro-batch takes on a device beside weights and gradient.

    What the backward pass finds of every layer (with remat=full its input alone), what it holds of
    the one at work, the logits of a chunk with their slopes, and the tables of the vocabulary: one
    in the type of the computation, and the gradients of lookups and projection in fp32. Attention
    is taken to be computed in blocks. A compiler fuses and reorders: an estimate, within a factor
    of 2 of what XLA for CPUs, TPUs and H100 plans.

    Args:
        config: The model's shape.
        tokens: Of one device, padding included.
        remat: What is computed again.
        itemsize: Bytes of a number of the computation.
        tensor: Devices that share heads, inner width and vocabulary.
        logits: Bytes of a chunk's logits.
    """
    D, F = config.hidden_size, config.intermediate_size / tensor
    H = config.num_attention_heads * config.head_dim / tensor
    K = config.num_key_value_heads * config.head_dim / tensor
    products = H + 2 * K + D + 2 * F
    kept = {"full": D, "dots": D + products, "none": 4 * D + 2 * products + F}[remat]
    at_work = (2 * D + 2 * products + F) * itemsize + 4 * 2 * D
    layers = tokens.computed * (config.num_hidden_layers * kept * itemsize + at_work)
    table = config.vocab_size * D / tensor * (itemsize + 2 * 4)
    return layers + table + 3 * logits


def matmul_parameters(config: ModelConfig) -> tuple[int, int]:
    """Count the weights that every token is multiplied with: those of all layers; of the logits."""
    heads = config.num_attention_heads + config.num_key_value_heads
    attention = 2 * config.hidden_size * heads * config.head_dim
    feed_forward = 3 * config.hidden_size * config.intermediate_size
    layers = config.num_hidden_layers * (attention + feed_forward)
    return layers, config.vocab_size * config.hidden_size


def forward_flops(config: ModelConfig, tokens: Tokens, *, causal: bool) -> float:
    """Count the operations of the layers in a forward pass.

    Two a weight and token, and in attention four a query, key and element of a head (arXiv:
    2001.08361, section 2.1). An answer looks at its prompt and at itself.

    Args:
        config: The model's shape.
        tokens: What is computed.
        causal: Count only the keys before a query, as kernels compute them, and not all.
    """
    layers, _ = matmul_parameters(config)
    width = config.num_attention_heads * config.head_dim
    own = 0.5 if causal else 1.0
    pairs = tokens.prompts * tokens.prompt**2 * own
    pairs += tokens.answers * tokens.answer * (tokens.prompt + own * tokens.answer)
    return 2 * layers * tokens.computed + 4 * config.num_hidden_layers * width * pairs


def update_flops(config: ModelConfig, tokens: Tokens, *, remat: str, causal: bool) -> float:
    """Count the operations of a gradient: forward, twice as many back, and what is repeated.

    Args:
        config: The model's shape.
        tokens: What is computed.
        remat: `model.remat`; `full` computes the layers once more, `dots` their attention.
        causal: See `forward_flops`.
    """
    layers, logits = matmul_parameters(config)
    forward = forward_flops(config, tokens, causal=causal)
    attention = forward - 2 * layers * tokens.computed
    # What a layer ends with is not needed to go back through it.
    last = 2 * config.num_hidden_layers * config.intermediate_size * config.hidden_size
    again = {"none": 0.0, "dots": attention, "full": forward - last * tokens.computed}[remat]
    # Logits are computed in chunks, and again in the backward pass.
    projected = 2 * logits * tokens.answers * tokens.answer
    return 3 * forward + again + 4 * projected


def model_flops(config: ModelConfig, tokens: Tokens) -> float:
    """Count what MFU counts: 6 operations a weight and token, attention and repetition left out.

    The embedding is a look-up; the logits count where they are computed (arXiv:2204.02311,
    appendix B).
    """
    layers, logits = matmul_parameters(config)
    return 6 * (layers * tokens.computed + logits * tokens.answers * tokens.answer)


def decode_bytes(
    config: ModelConfig, *, slots: int, prompts: float, prompt: float, answer: float, item: int
) -> float:
    """Return the bytes of keys and values that a decode step reads, on all devices together.

    Args:
        config: The model's shape.
        slots: Rows that are decoded.
        prompts: Prompts kept, each read once for all rows that share it.
        prompt: Mean length of a prompt.
        answer: Mean length of what is sampled so far.
        item: Bytes of a number.
    """
    a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * item
    return a_token * (prompts * prompt + slots * answer)
