"""GGUF files, llama.cpp's format, as the files of a Hugging Face folder.

The package `gguf` reads the file, has the names of tensors, and takes quantised weights back to
float32. What is left is the order of rows: for Llama's shape the converter of llama.cpp changes the
pairs that the rotary embedding turns from halves of a head to neighbours.

The tokenizer is byte-level BPE from the file's tokens and merges. The file names how a text is
split before merging (`tokenizer.ggml.pre`), and llama.cpp has the rule of each name; `_SPLITS` has
those of models of the supported shapes, as their tokenizer.json writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, get_tensor_name_map
from gguf.quants import dequantize
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre

from minirl.exchange import UserError
from minirl.model.config import parse_config
from minirl.model.decoder import rotary_frequencies

_ARCHITECTURES = ("qwen2", "qwen3", "llama")
_EMBEDDING, _OUTPUT, _STRETCH = "token_embd.weight", "output.weight", "rope_freqs.weight"
# The part of a file's names after the architecture -> the key of config.json.
_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
}
# Rows that are compared to tell whether two matrices are one, quantised twice.
_ROWS = 2048
# Kinds of tokens in `tokenizer.ggml.token_type`. Unused ones only fill rows of the embedding.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
# What else a file has to say. Without a chat template a model cannot be asked.
_NEEDED = (
    *("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"),
    "tokenizer.chat_template",
)
# Control tokens that end a reply in one or another chat template, as llama.cpp takes them.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|EOT|>", "</s>")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file: its facts and its tensors by name, which are read when they are asked for."""

    path: Path
    field: Mapping[str, Any]
    tensors: Mapping[str, gguf.ReaderTensor]

    @property
    def architecture(self) -> str:
        """Return the name of the shape."""
        return self.field["general.architecture"]

    def get(self, key: str) -> Any:
        """Return a fact under the architecture's name; None where there is none."""
        return self.field.get(f"{self.architecture}.{key}")


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file and check that it holds a model of a supported shape.

    Raises:
        UserError: It is none, is cut short, is one of several parts, or holds another model or
            weights that the package `gguf` cannot read.
    """
    if not path.is_file():
        raise UserError(f"--gguf {path}: there is no such file")
    try:
        reader = gguf.GGUFReader(path)
        field = {name: value.contents() for name, value in reader.fields.items()}
    # The package parses without checks: what a broken file raises is left to NumPy and Python.
    except (ValueError, IndexError, KeyError, TypeError, OSError, OverflowError) as error:
        words = " ".join(str(error).split())[:100]
        raise UserError(f"{path}: cut short or not a GGUF file ({words}); copy it again") from None
    if field.get("split.count", 1) > 1:
        raise UserError(
            f"{path}: is one of {field['split.count']} parts; join them first "
            "(llama-gguf-split --merge)"
        )
    if field.get("general.architecture") not in _ARCHITECTURES:
        raise UserError(
            f"{path}: holds a model of architecture {field.get('general.architecture')}; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    _check_kinds(path, reader.tensors)
    return GgufFile(path, field, {tensor.name: tensor for tensor in reader.tensors})


def _check_kinds(path: Path, tensors: list[gguf.ReaderTensor]) -> None:
    for kind, tensor in {tensor.tensor_type: tensor for tensor in tensors}.items():
        try:
            dequantize(tensor.data[:1], kind)
        except NotImplementedError:
            raise UserError(
                f"{path}: tensor {tensor.name} is {kind.name}, which the package gguf cannot read; "
                "take a file in Q8_0, a K-quantisation, F16, BF16 or F32"
            ) from None


def describe(source: GgufFile, folder: Path) -> None:
    """Write all files of a Hugging Face folder but the weights.

    Raises:
        UserError: The shape or the tokenizer is one that is not supported.
    """
    config = _config(source)
    tokenizer, settings = make_tokenizer(source.field, where=str(source.path))
    ends = stop_ids(source.field)
    numbers = {"eos_token_id": ends[0] if ends else None}
    for ours, theirs in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        numbers[ours] = source.field.get(f"tokenizer.ggml.{theirs}_token_id")
    files = {
        "config": config | numbers,
        "generation_config": numbers | {"eos_token_id": ends},
        "tokenizer_config": settings,
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))


def read_tensors(
    source: GgufFile, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Check all tensors, and yield them in float32 under Hugging Face's names, one by one.

    Raises:
        UserError: The file holds other tensors than these, or of other shapes.
    """
    table = get_tensor_name_map(MODEL_ARCH[source.architecture.upper()], source.get("block_count"))
    names = {name: table.get_name(name, (".weight", ".bias")) or name for name in shapes}
    missing = [theirs for theirs in names.values() if theirs not in source.tensors]
    extra = sorted(set(source.tensors) - set(names.values()) - {_OUTPUT, _STRETCH})
    for wrong, what in ((missing, "is missing"), (extra, "is not of such a model")):
        if wrong:
            raise UserError(
                f"{source.path}: tensor {wrong[0]} {what}; only plain models of the architecture "
                f"{source.architecture} are supported"
            )
    for name, theirs in names.items():
        shape = tuple(map(int, reversed(source.tensors[theirs].shape)))
        if shape != shapes[name]:
            raise UserError(
                f"{source.path}: tensor {theirs} has shape {shape}, the file's facts say "
                f"{shapes[name]}; copy it again"
            )
    if "lm_head.weight" not in names and _OUTPUT in source.tensors:
        # Of one matrix that is there twice the finer one.
        finer = max(_EMBEDDING, _OUTPUT, key=lambda name: source.tensors[name].n_bytes)
        names["model.embed_tokens.weight"] = finer
    return ((name, _read(source, theirs)) for name, theirs in names.items())


def _read(source: GgufFile, name: str) -> np.ndarray:
    tensor = source.tensors[name]
    w = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    part = name.split(".")[-2]
    if source.architecture != "llama" or part not in ("attn_q", "attn_k"):
        return w
    heads = source.get("attention.head_count")
    if part == "attn_k":
        heads = source.get("attention.head_count_kv") or heads
    pairs = w.reshape(heads, w.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(w.shape)


def _config(source: GgufFile) -> dict[str, Any]:
    """Return the content of `config.json`."""
    kind, eps = source.architecture, source.get("attention.layer_norm_rms_epsilon")
    given = {key: source.get(name) for name, key in _KEYS.items()}
    config: dict[str, Any] = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "hidden_act": "silu",
        **{key: value for key, value in given.items() if value is not None},
        "rope_theta": source.get("rope.freq_base") or 10_000.0,
        # Written as fp32: 9.99999997e-07 is meant as 1e-06.
        "rms_norm_eps": float(str(np.float32(eps))),
        "tie_word_embeddings": _is_tied(source),
    }
    if _EMBEDDING in source.tensors:
        config["vocab_size"] = int(source.tensors[_EMBEDDING].shape[1])
    stretch = source.get("rope.scaling.type")
    if stretch not in (None, "none"):
        config["rope_scaling"] = {
            "rope_type": stretch, "factor": source.get("rope.scaling.factor")
        }  # fmt: skip
    if _STRETCH in source.tensors:
        config["rope_scaling"] = _llama3(source, config)
    parse_config(config, where=str(source.path))
    return config


def _is_tied(source: GgufFile) -> bool:
    """Tell whether the output projection is the embedding, left out or quantised once more."""
    if _OUTPUT not in source.tensors:
        return True
    embedding, output = (
        dequantize(tensor.data[:_ROWS], tensor.tensor_type).astype(np.float32).ravel()
        for tensor in (source.tensors[_EMBEDDING], source.tensors[_OUTPUT])
    )
    # Two quantisations of one matrix differ by a tenth; two matrices have little in common.
    return bool(embedding @ output > 0.9 * np.linalg.norm(embedding) * np.linalg.norm(output))


def _llama3(source: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Find the settings of Llama 3.1's rotary embedding, of which a file has the divisors alone."""
    divisors = _read(source, _STRETCH)
    stretch = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, stretched = (
        np.asarray(rotary_frequencies(parse_config({**config, **more}, where=str(source.path))))
        for more in ({}, {"rope_scaling": stretch})
    )
    if plain.shape != divisors.shape or not np.allclose(plain / stretched, divisors, rtol=1e-3):
        raise UserError(
            f"{source.path}: {_STRETCH} stretches the rotary embedding otherwise than Llama 3.1 "
            "to 3.3 do; export a Hugging Face folder of the same model in its place"
        )
    return stretch


@dataclass(frozen=True, slots=True)
class _Split:
    """How a text is cut: at each match of the patterns, one after the other.

    Attributes:
        patterns: Regular expressions.
        as_gpt2: Then by GPT-2's rule, which the byte-level step has built in.
        whole_words: A piece that is a token is not merged from its characters.
    """

    patterns: tuple[str, ...]
    normalizer: normalizers.Normalizer | None = None
    as_gpt2: bool = False
    whole_words: bool = False


def _words(digits: str) -> str:
    """Return the rule of GPT-4 and its followers, with a pattern of digits."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LETTERS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}+{_SMALL}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _Split((_words(r"\p{N}{1,3}"),), whole_words=True)
_SPLITS: dict[str, _Split] = {
    "qwen2": _Split((_words(r"\p{N}"),), normalizers.NFC()),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smollm": _Split((r"\p{N}",), as_gpt2=True),
    "gpt-2": _Split((), as_gpt2=True),
    "deepseek-coder": _Split(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
    ),
    "tekken": _Split((_CASED,), whole_words=True),
}


def make_tokenizer(field: Mapping[str, Any], *, where: str) -> tuple[Tokenizer, dict[str, Any]]:
    """Make the tokenizer of a GGUF file, and the settings that belong in `tokenizer_config.json`.

    Raises:
        UserError: It is no byte-level BPE, cuts texts by a rule that is not known here, or has no
            chat template.
    """
    kind, rule = field.get("tokenizer.ggml.model"), field.get("tokenizer.ggml.pre", "")
    if kind != "gpt2" or rule not in _SPLITS:
        raise UserError(
            f"{where}: has a tokenizer of kind {kind} {rule}".rstrip()
            + f"; supported is gpt2 with one of {', '.join(_SPLITS)}: export a Hugging Face folder "
            "of the same model in its place"
        )
    if missing := [key for key in _NEEDED if not field.get(key)]:
        raise UserError(
            f"{where}: has no {missing[0]}; take another file, or a Hugging Face folder, of the "
            "same model"
        )
    split = _SPLITS[rule]
    tokens, kinds = field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"]
    # Added tokens too, which so keep their ids.
    vocab = {t: i for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    pairs = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=split.whole_words))
    if split.normalizer is not None:
        tokenizer.normalizer = split.normalizer
    cuts = [pre.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=split.as_gpt2)
    tokenizer.pre_tokenizer = pre.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            is_control = kind == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=is_control, normalized=False)])
    return tokenizer, _settings(field, tokens)


def stop_ids(field: Mapping[str, Any]) -> list[int]:
    """Return the ids of a GGUF file that end a reply: its own first, then those known by name."""
    tokens, kinds = field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"]
    stated = [field.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = [i for i, token in enumerate(tokens) if token in _ENDS and kinds[i] == _CONTROL]
    return [i for i in dict.fromkeys([*stated, *known]) if i is not None]


def _settings(field: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        number = field.get(f"tokenizer.ggml.{theirs}_token_id")
        if number is not None:
            settings[f"{ours}_token"] = tokens[number]
    settings["chat_template"] = field["tokenizer.chat_template"]
    return settings | {"clean_up_tokenization_spaces": False}
