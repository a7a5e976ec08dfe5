"""How many operations and bytes a model's programs take, counted from its shape."""

from __future__ import annotations

from dataclasses import dataclass

from minirl.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompts and answers of one length each."""

    prompts: int
    prompt: int
    answers: int
    answer: int

    @property
    def computed(self) -> int:
        """Count the tokens that pass through the layers."""
        return self.prompts * self.prompt + self.answers * self.answer


def matmul_parameters(config: ModelConfig) -> tuple[int, int]:
    """Count the weights that a token is multiplied with: of all layers, and of the logits."""
    heads = config.num_attention_heads + config.num_key_value_heads
    attention = 2 * config.hidden_size * heads * config.head_dim
    feed_forward = 3 * config.hidden_size * config.intermediate_size
    layers = config.num_hidden_layers * (attention + feed_forward)
    return layers, config.vocab_size * config.hidden_size


def forward_flops(config: ModelConfig, tokens: Tokens, *, causal: bool) -> float:
    """Count the operations of the layers in a forward pass.

    Two a weight and token, and in attention four a query, key and element of a head (arXiv:
    2001.08361, section 2.1). An answer attends to its prompt and to itself.

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
