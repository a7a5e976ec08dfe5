"""Write tiny checkpoints of random weights and what transformers computes with them.

The tests compare our model with these files and need neither torch nor this script. To write
them again, in an environment with torch, transformers and peft:

    python tests/data/reference/make_reference.py

Each folder has config.json and model.safetensors (fp32) from `save_pretrained`, and
reference.npz with `ids_BT` (padded with 0 on the right), `lengths_B` and `logits_BTV` (fp32,
computed without padding; 0 beyond the length). qwen3_lora/ has PEFT's files of an adapter for
qwen3/, from its own `save_pretrained`, and what PEFT computes with it.

qwen35/ is Qwen3.5 as published, with a vision tower and a tensor of multi-token prediction;
qwen35_text/ the decoder alone, in bfloat16 but for what the published files have in float32. Their
reference.npz has one row of ids, `ids_T`, and for each length n of `LONG`, of its first n ids, the
last logits, `logits_n`, and of each weight the gradient of the mean loss of the next id, as its
norm and its products with a few random directions (`gradient_n`, by name in `names`).

    python tests/data/reference/make_reference.py check <folder>

fails unless a folder that `minirl` wrote of qwen35/ has its logits and the types of its files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # ty: ignore[import-not-found]  (no dependency of ours)
from peft import LoraConfig, get_peft_model  # ty: ignore[import-not-found]
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
)
from transformers import Qwen3_5Config as VisionConfig
from transformers import Qwen3_5ForConditionalGeneration as Vision
from transformers import Qwen3_5TextConfig as TextConfig
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


LONG = (1, 63, 64, 65, 130, 1000)
DIRECTIONS, LAST = 4, 70
HYBRID: dict[str, Any] = SIZES | {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 8,
    "num_heads": 2,
    "intermediate_size": 8,
    "out_hidden_size": 32,
    "patch_size": 2,
    "num_position_embeddings": 4,
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
    is_hybrid = "Qwen3_5" in type(model).__name__
    # In deeper models of louder weights, rounding would grow to more than what is compared.
    scale = 0.5 if is_hybrid else 1.5
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            weight.copy_(0.2 * noise + (0 if is_hybrid and "linear_attn" not in name else 1))
        elif name.endswith("A_log"):
            weight.copy_(noise - 1)
        elif name.endswith("bias"):
            weight.copy_(0.3 * noise)
        elif name.endswith("embed_tokens.weight"):
            weight.copy_(0.5 * noise)
        else:
            weight.copy_(scale * noise / weight[0].numel() ** 0.5)


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


def write_hybrids() -> None:
    """Write qwen35/ and qwen35_text/."""
    tied: dict[str, Any] = {"tie_word_embeddings": True}
    untied: dict[str, Any] = {"tie_word_embeddings": False}
    layers: dict[str, Any] = {"num_hidden_layers": 4}
    text = HYBRID | tied | {"num_hidden_layers": 8}
    vision = Vision(VisionConfig(text_config=text, vision_config=VISION, **tied)).float().eval()
    randomise(vision, 35)
    folder = HERE / "qwen35"
    vision.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.norm.weight"] = torch.ones(32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = TextConfig(**HYBRID | untied | layers)
    model = AutoModelForCausalLM.from_config(config).float()
    randomise(model, 36)
    full = {n: w.clone() for n, w in model.state_dict().items() if is_kept_full(n)}
    model.bfloat16().save_pretrained(HERE / "qwen35_text")
    path = HERE / "qwen35_text" / "model.safetensors"
    save_file(load_file(path) | full, path, {"format": "pt"})
    for seed, name in enumerate(("qwen35", "qwen35_text")):
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
        (HERE / name / "model.safetensors").chmod(0o644)
        np.savez_compressed(HERE / name / "reference.npz", **long_reference(HERE / name, seed))


def is_kept_full(name: str) -> bool:
    """Tell whether the published files have a tensor in float32."""
    return name.endswith(("A_log", "linear_attn.norm.weight"))


def long_reference(folder: Path, seed: int) -> dict[str, Any]:
    """Compute logits and gradients of rows of several lengths."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids_T = np.random.default_rng(seed).integers(3, 96, max(LONG) + 1).astype(np.int32)
    found: dict[str, Any] = {"ids_T": ids_T}
    found["names"] = np.array([name for name, _ in model.named_parameters()])
    for length in LONG:
        ids = torch.tensor(ids_T, dtype=torch.long)
        logits_TV = model(ids[None, :length]).logits[0]
        found[f"logits_{length}"] = logits_TV[-LAST:].detach().numpy()
        model.zero_grad()
        torch.nn.functional.cross_entropy(logits_TV, ids[1 : length + 1]).backward()
        rows = [projections(weight.grad.numpy()) for weight in model.parameters()]
        found[f"gradient_{length}"] = np.array(rows)
    return found


def projections(array: np.ndarray) -> list[float]:
    """Return the norm of an array and its products with random directions."""
    flat = array.astype(np.float64).ravel()
    directions = np.random.default_rng(flat.size).standard_normal((DIRECTIONS, flat.size))
    return [float(np.linalg.norm(flat)), *(directions @ flat).tolist()]


@torch.no_grad()
def check(folder: Path) -> None:
    """Compare logits with qwen35/, and look at the types."""
    ids = torch.tensor(np.load(HERE / "qwen35" / "reference.npz")["ids_T"][None], dtype=torch.long)
    models = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)
        for f in (folder, HERE / "qwen35")
    )
    ours, theirs = (model.eval()(ids).logits for model in models)
    kinds = {name: weight.dtype for name, weight in load_file(folder / "model.safetensors").items()}
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    assert {kind for name, kind in kinds.items() if is_kept_full(name)} == {torch.float32}


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
    write_hybrids()


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        check(Path(sys.argv[2]))
    else:
        main()
