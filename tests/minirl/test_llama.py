"""Llama's shape: the decoder computes what a few lines of NumPy in float64 do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from minirl.exchange import UserError
from minirl.model import huggingface
from minirl.model.config import parse_config, read_config
from tests.plain_model import logits

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 80,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
# As Llama 3.1 to 3.3, with a context so short that of 4 pairs one is kept, one divided in part.
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CASES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True, "rope_theta": 100_000.0},
    "untied": {"num_key_value_heads": None},
    "wider heads": {"head_dim": 12, "rope_theta": 500_000.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 100_000.0},
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3 of transformers 5": {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 10_000.0, **LLAMA3}
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 10},
    "a window of all positions": {"model_type": "mistral", "sliding_window": 2048},
}


def write_folder(folder: Path, **changes: Any) -> dict[str, np.ndarray]:
    """Write a model of random weights, of which none is 0 or 1; return them in float64."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | changes))
    shapes = huggingface.tensor_shapes(huggingface.shapes_of(folder))
    rng = np.random.default_rng(0)
    drawn = {
        name: (rng.normal(0, 1.5 / shape[-1] ** 0.5, shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(drawn, folder / "model.safetensors")
    return {name: array.astype(np.float64) for name, array in drawn.items()}


def frequencies(config: dict[str, Any], size: int) -> list[float]:
    """As the code of Llama 3 has it, by wavelengths."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta", 10_000.0)
    kind = rope.get("rope_type") or rope.get("type")
    found = []
    for pair in range(size // 2):
        frequency = theta ** (-2 * pair / size)
        if kind == "linear":
            frequency /= rope["factor"]
        if kind == "llama3":
            wavelength = 2 * np.pi / frequency
            original = rope["original_max_position_embeddings"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wavelength > original / low:
                frequency /= rope["factor"]
            elif wavelength > original / high:
                smooth = (original / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
        found.append(frequency)
    return found


def reference(
    weights: dict[str, np.ndarray], config: dict[str, Any], ids: np.ndarray
) -> np.ndarray:
    """Return the logits of one sequence, head by head and position by position."""
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"] or heads
    size = config.get("head_dim") or config["hidden_size"] // heads
    turn = np.exp(1j * np.outer(np.arange(len(ids)), frequencies(config, size)))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = (x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]
        return x / np.sqrt(scale) * weights[f"{name}.weight"]

    def rotated(x: np.ndarray) -> np.ndarray:
        turned = (x[:, : size // 2] + 1j * x[:, size // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        own = f"model.layers.{layer}."
        h = norm(x, f"{own}input_layernorm")
        q, k, v = (h @ weights[f"{own}self_attn.{name}_proj.weight"].T for name in "qkv")
        parts = []
        for head in range(heads):
            mine = slice(head * size, (head + 1) * size)
            group = head // (heads // kv_heads)
            theirs = slice(group * size, (group + 1) * size)
            scores = rotated(q[:, mine]) @ rotated(k[:, theirs]).T / size**0.5
            scores = np.where(np.tri(len(ids)), scores, -np.inf)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            parts.append(scores / scores.sum(-1, keepdims=True) @ v[:, theirs])
        x = x + np.concatenate(parts, -1) @ weights[f"{own}self_attn.o_proj.weight"].T
        h = norm(x, f"{own}post_attention_layernorm")
        gate, up = (h @ weights[f"{own}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{own}mlp.down_proj.weight"].T
    output = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ output.T


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_logits_are_those_of_an_independent_float64(tmp_path, changes):
    weights = write_folder(tmp_path / "model", **changes)
    ids = np.random.default_rng(1).integers(0, 80, 150)
    model = huggingface.load(tmp_path / "model")
    found = np.asarray(logits(model, ids[None])[0])
    expected = reference(weights, SHAPE | changes, ids)
    assert np.ptp(expected) > 5
    assert np.abs(found - expected).max() < 1e-4
    if "rope_scaling" in changes:  # which is seen in the numbers
        other = reference(weights, SHAPE | changes | {"rope_scaling": None}, ids)
        assert np.abs(found - other).max() > 0.1


def test_a_folder_is_written_as_it_was_read(tmp_path):
    write_folder(tmp_path / "model", **CASES["llama3"])
    model = huggingface.load(tmp_path / "model")
    huggingface.save(model, tmp_path / "new", source=tmp_path / "model")
    assert read_config(tmp_path / "new") == read_config(tmp_path / "model")
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias = true"),
        ({"mlp_bias": True}, "mlp_bias should be False"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type should be"),
        ({"model_type": "mistral", "sliding_window": 1024}, "sliding_window = 1024 is shorter"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window = 4096"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised (quantization_config: fp8)"),
    ],
    ids=str,
)
def test_what_would_be_computed_otherwise_is_refused(changes, message):
    with pytest.raises(UserError) as caught:
        parse_config(SHAPE | changes, where="config.json")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
