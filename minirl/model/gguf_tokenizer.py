"""The tokenizer of a GGUF file as Hugging Face's files: byte-level BPE from tokens and merges.

A GGUF file names how a text is split before merging (`tokenizer.ggml.pre`), and llama.cpp has the
rule of each name; `_SPLITS` has those of models of the supported shapes, as their tokenizer.json
writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre

from exchange import UserError

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
