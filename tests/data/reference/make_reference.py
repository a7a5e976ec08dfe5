"""Write tiny checkpoints of random weights and what transformers computes with them.

The tests compare our model with these files and need neither torch nor this script. To write
them again, in an environment with torch, transformers and peft:

    python tests/data/reference/make_reference.py

Each folder has config.json and model.safetensors (fp32) from `save_pretrained`, and
reference.npz with `ids_BT` (padded with 0 on the right), `lengths_B` and `logits_BTV` (fp32,
computed without padding; 0 beyond the length). qwen3_lora/ has PEFT's files of an adapter for
qwen3/, from its own `save_pretrained`, and what PEFT computes with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch  # ty: ignore[import-not-found]  (no dependency of ours)
from peft import LoraConfig, get_peft_model  # ty: ignore[import-not-found]
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

HERE = Path(__file__).parent
VOCAB = 384
LENGTHS = (1, 7, 24)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_models() -> dict[str, PreTrainedModel]:
    """Make one model for each layout that a published Qwen checkpoint has."""
    rope_1e4, rope_1e6 = ({"rope_type": "default", "rope_theta": base} for base in (1e4, 1e6))
    qwen2 = Qwen2Config(**SIZES, rope_parameters=rope_1e4, tie_word_embeddings=False)
    qwen2_tied = Qwen2Config(**SIZES, rope_parameters=rope_1e6, tie_word_embeddings=True)
    # 4 heads of 24, although the width is 64: Qwen3 takes head_dim from the config alone.
    qwen3 = Qwen3Config(**SIZES, head_dim=24, rope_parameters=rope_1e6, tie_word_embeddings=True)
    return {
        "qwen2": Qwen2ForCausalLM(qwen2),
        "qwen2_tied": Qwen2ForCausalLM(qwen2_tied),
        "qwen3": Qwen3(qwen3),
    }


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Draw every weight anew, so that none is the 0 or 1 which hides a forgotten term."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            weight.copy_(1 + 0.2 * noise)
        elif name.endswith("bias"):
            weight.copy_(0.3 * noise)
        elif name.endswith("embed_tokens.weight"):
            weight.copy_(0.5 * noise)
        else:
            weight.copy_(1.5 * noise / weight.shape[1] ** 0.5)


@torch.no_grad()
def reference(model: PreTrainedModel, seed: int) -> dict[str, np.ndarray]:
    """Compute the logits of a few sequences, each alone."""
    rng = np.random.default_rng(seed)
    ids_BT = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    logits_BTV = np.zeros((*ids_BT.shape, VOCAB), np.float32)
    for b, length in enumerate(LENGTHS):
        ids_BT[b, :length] = rng.integers(3, VOCAB, length)
        ids = torch.tensor(ids_BT[b : b + 1, :length], dtype=torch.long)
        logits_BTV[b, :length] = model(ids).logits[0].numpy()
    return {"ids_BT": ids_BT, "lengths_B": np.array(LENGTHS, np.int32), "logits_BTV": logits_BTV}


def write_as_version_4(path: Path) -> None:
    """Name the rotary base as transformers 4 did, and as the published Qwen2.5 still do."""
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(config, indent=2) + "\n")


def write_adapter() -> None:
    """Write an adapter for the matrices of qwen3/, none of whose factors is 0."""
    base = Qwen3.from_pretrained(HERE / "qwen3").float().eval()
    names = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=names)).eval()
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    folder = HERE / "qwen3_lora"
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": "qwen3"}
    config["target_modules"] = names  # a set until here
    path.write_text(json.dumps(config, indent=2) + "\n")
    (folder / "adapter_model.safetensors").chmod(0o644)
    np.savez_compressed(folder / "reference.npz", **reference(model, 7))


def main() -> None:
    """Write all folders beside this file."""
    for seed, (name, model) in enumerate(make_models().items()):
        model = model.float().eval()
        randomise(model, seed)
        model.save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
        (HERE / name / "model.safetensors").chmod(0o644)
        if name == "qwen2_tied":
            write_as_version_4(HERE / name / "config.json")
        np.savez_compressed(HERE / name / "reference.npz", **reference(model, seed))
    write_adapter()


if __name__ == "__main__":
    main()
