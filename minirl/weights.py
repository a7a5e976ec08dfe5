"""Model weights in Hugging Face's safetensors layout, in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from minirl.model import Decoder, ModelConfig


def init(config: ModelConfig, seed: int, *, param_dtype: Any = jnp.float32) -> Decoder:
    return nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(seed), param_dtype=param_dtype))()


_BLOCK = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


def save(model: Decoder, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    out = {
        "model.embed_tokens.weight": model.embed[...],
        "model.norm.weight": model.final_norm[...],
    }
    if not model.config.tie_word_embeddings:
        out["lm_head.weight"] = model.unembed[...]
    for i, layer in enumerate(model.layers):
        for ours, theirs in _BLOCK.items():
            if not hasattr(layer, ours):
                continue
            x = np.asarray(getattr(layer, ours)[...])
            if ours.endswith("bias"):
                x = x.reshape(-1)
            if ours in ("q", "k", "v"):
                x = x.reshape(x.shape[0], -1).T
            if ours == "o":
                x = x.reshape(-1, x.shape[-1]).T
            if ours in ("gate", "up", "down"):
                x = x.T
            out[f"model.layers.{i}.{theirs}"] = np.ascontiguousarray(x)
    save_file(
        {k: np.ascontiguousarray(v) for k, v in out.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
