"""Small GGUF files, written from Hugging Face folders as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer

Kind = gguf.GGMLQuantizationType
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PADDING = 7  # rows of the embedding beyond the tokenizer
TEXTS = [
    "SELECT name, count(*) FROM singer WHERE age > 1234567 AND country = 'France' GROUP BY name;",
    "How many singers don't we've got?  I'll count:\r\n\r\n\t12 or 3,456.78 (they're THERE)",
    "CREATE TABLE t (\n    a INTEGER, -- example: [1, 2]\n    PRIMARY KEY (a)\n);   \n  ",
    "Größe, e\u0301té, 日本語テキスト, 한국어, €½, ÀÉ camelCase snake_case HTTPServer __x__ //!",
]
# As the tokenizer.json of a model with the rule begins: what is cut before byte-level merges.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> pre.PreTokenizer:
    return pre.Split(Regex(pattern), behavior="isolated", invert=False)


def byte_level(*, use_regex: bool) -> pre.PreTokenizer:
    return pre.ByteLevel(add_prefix_space=False, use_regex=use_regex)


RULES: dict[str, Callable[[], list[pre.PreTokenizer]]] = {
    "qwen2": lambda: [split(WORDS % ""), byte_level(use_regex=False)],
    "llama-bpe": lambda: [split(WORDS % "{1,3}"), byte_level(use_regex=False)],
    "smollm": lambda: [pre.Digits(individual_digits=True), byte_level(use_regex=True)],
    "gpt-2": lambda: [byte_level(use_regex=True)],
    "deepseek-coder": lambda: [
        *map(split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")),
        pre.Digits(individual_digits=True),
        byte_level(use_regex=False),
    ],
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(rule: str) -> Tokenizer:
    """Train a tokenizer with the rule of a published one; control tokens come last."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.Sequence(RULES[rule]())
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    return tokenizer


def make_folder(
    folder: Path, shapes_of: Callable[[Path], Any], *, rule: str, **config: Any
) -> Path:
    """Write a Hugging Face folder of random weights, of which none is 0 or 1.

    `shapes_of` gives names and shapes of the tensors of a folder's config.json.
    """
    folder.mkdir()
    tokenizer = make_tokenizer(rule)
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = tokenizer.get_vocab_size() + PADDING
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.normal(len(shape) == 1, 0.3, shape).astype(np.float32)
        for name, shape in shapes_of(folder).items()
    }
    save_file(arrays, folder / "model.safetensors")
    return folder


def write_gguf(
    path: Path,
    folder: Path,
    *,
    rule: str,
    kind: Kind = Kind.F32,
    kinds: dict[str, Kind] | None = None,
    raw: dict[str, tuple[np.ndarray, Kind]] | None = None,
    facts: dict[str, Any] | None = None,
) -> Path:
    """Write a folder as a GGUF file.

    Args:
        path: The file.
        folder: Hugging Face folder with weights and a byte-level BPE.
        rule: How its tokenizer cuts texts, by llama.cpp's name.
        kind: Type of matrices; vectors are F32.
        kinds: Other types of some, by their names in the file.
        raw: Tensors to add or replace, as bytes of a type or arrays.
        facts: Further facts; None leaves one out.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    for name, value in (_facts(config, folder, rule) | (facts or {})).items():
        if value is not None:
            _add(writer, name.replace("ARCH", arch), value)
    for name, array in load_file(folder / "model.safetensors").items():
        place = _place(name)
        if raw and place in raw:
            continue
        if arch == "llama" and place.endswith(("attn_q.weight", "attn_k.weight")):
            which = "num_attention_heads" if "attn_q" in place else "num_key_value_heads"
            heads = config[which]
            array = array.reshape(heads, 2, len(array) // heads // 2, -1).swapaxes(1, 2)
            array = array.reshape(len(array) * array.shape[1] * 2, -1)
        own = (kinds or {}).get(place, kind) if array.ndim > 1 else Kind.F32
        writer.add_tensor(place, quantize(np.ascontiguousarray(array), own), raw_dtype=own)
    for place, (array, own) in (raw or {}).items():
        writer.add_tensor(place, array, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rope_freqs(theta: float, size: int, factor: float) -> np.ndarray:
    """Return the divisors that llama.cpp's converter writes for Llama 3.1, by wavelengths."""
    found = []
    for pair in range(size // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / size)
        smooth = (8192 / wavelength - 1) / 3
        partly = 1 / ((1 - smooth) / factor + smooth)
        found.append(1 if wavelength < 2048 else factor if wavelength > 8192 else partly)
    return np.array(found, np.float32)


def _facts(config: dict[str, Any], folder: Path, rule: str) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    spec = json.loads((folder / "tokenizer.json").read_text())
    known = {i: token for token, i in tokenizer.get_vocab().items()}
    tokens = [known.get(i, f"[PAD{i}]") for i in range(config["vocab_size"])]
    added = {token["id"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    return {
        "ARCH.embedding_length": config["hidden_size"],
        "ARCH.feed_forward_length": config["intermediate_size"],
        "ARCH.block_count": config["num_hidden_layers"],
        "ARCH.attention.head_count": config["num_attention_heads"],
        "ARCH.attention.head_count_kv": config["num_key_value_heads"],
        "ARCH.attention.key_length": config.get("head_dim"),
        "ARCH.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "ARCH.rope.freq_base": config["rope_theta"],
        "ARCH.context_length": config["max_position_embeddings"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            added.get(i, 1 if i in known else 5) for i in range(len(tokens))
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    adders = {
        str: writer.add_string, int: writer.add_uint32, float: writer.add_float32,
        list: writer.add_array,
    }  # fmt: skip
    adders[type(value)](name, value)


@cache
def _names() -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 99)


def _place(name: str) -> str:
    """Name a tensor as the package's own table does."""
    found = _names().get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found
