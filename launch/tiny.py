"""A tiny model and a tokenizer trained on the texts of a task.

The model must learn, within minutes, to copy words from the schema and the question into SQL, which
is easy only if a word is the same token in both:

- A space belongs to the word after it (` name`), and a space is put before a word at the start
  of a text or line and after `.` and `(`. So `name`, `t1.name` and `avg(name)` share the token
  ` name`. SQL means the same with these spaces, except inside a string literal such as `'a.b'`.
- So is the first word of a string literal: ` 'Bob'` becomes ` ' Bob'`, and decoding drops the space
  after every quote (`'Bob' AND` comes back as `'Bob'AND`, which SQL reads the same).
- A word may contain underscores: a frequent `band_id` is one token.
- Digits are split one by one, as Qwen does, so that no number is a word of its own.
- Other characters are tokens of their own, but for the comparison operators, so that a closing
  bracket before a comma is the token it is elsewhere. So is every newline.
- Merges go on until the vocabulary is full, so that all frequent words are single tokens.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer

from launch.config import TinyConfig
from launch.data.prompts import MARKS
from minirl.exchange import UserError
from minirl.model import huggingface
from minirl.model.config import LAYER_TYPES, PERIOD, ModelConfig, parse_config

_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_BYTES = 256
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 32_768,
    "chat_template": """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
}
_LETTER = r"[\p{L}_]"
_WORDS = "|".join(
    [
        r" ?[\p{L}_]+",
        r" ?\p{N}",
        r" ?(?:[<>!=]=|<>|\|\|)",
        r" ?[^\s\p{L}\p{N}_]",
        r"[^\S\n]+(?!\S)",
        r"\s",
    ]
)


def make_tiny(
    folder: Path,
    texts: Iterable[str],
    shape: TinyConfig,
    seed: int,
    *,
    marks: Sequence[str] = MARKS,
) -> None:
    """Write a Hugging Face folder with a fresh tiny model and a tokenizer trained on `texts`.

    The same arguments give the same bytes on the same machine.

    Args:
        folder: Created, or replaced if it holds nothing but a model.
        texts: Prompts, questions and SQL of the task.
        shape: Sizes of the model.
        seed: Seed of the weights.
        marks: Texts that are one token each, but no control tokens.

    Raises:
        UserError: A shape that no model has, or other files in `folder`.
    """
    least = _BYTES + len(_CONTROL_TOKENS) + len(marks)
    if shape.vocab_size < least:
        raise UserError(
            f"model.tiny.vocab_size: {shape.vocab_size} is too small; write {least} or more"
        )
    tokenizer = train_tokenizer(texts, vocab_size=shape.vocab_size, marks=marks)
    stop_ids = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    config = _shape_keys(shape) | {
        "max_position_embeddings": 32_768,
        "bos_token_id": stop_ids[1],
        "eos_token_id": stop_ids[0],
    }
    model = huggingface.init(tiny_shape(shape), seed)
    with tempfile.TemporaryDirectory() as parts:
        source = Path(parts)
        tokenizer.save(str(source / "tokenizer.json"))
        for name, content in (
            ("config", config),
            ("tokenizer_config", _TOKENIZER_CONFIG),
            ("generation_config", {"eos_token_id": stop_ids}),
        ):
            (source / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
        huggingface.save(model, folder, source=source)


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, marks: Sequence[str] = MARKS
) -> Tokenizer:
    """Train the byte-level BPE that the module describes.

    Returns:
        At most `vocab_size` tokens; fewer when the texts have no more pairs to merge.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = norm.Sequence(
        [
            # A space before every text, removed where no word follows.
            norm.Prepend(" "),
            norm.Replace(Regex(rf"\A (?!{_LETTER})"), ""),
            *[
                norm.Replace(Regex(rf"{re.escape(mark)}(?={_LETTER})"), f"{mark} ")
                for mark in (".", "(", "\n")
            ],
            # A quote after a blank opens a string; decoding removes the space.
            norm.Replace(Regex(rf"(?<=[ (=])'(?={_LETTER})"), "' "),
        ]
    )
    split = pre.Split(Regex(_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre.Sequence(
        [split, pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("' ", "'")])
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(marks),
        special_tokens=list(_CONTROL_TOKENS),
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return tokenizer


def tiny_shape(shape: TinyConfig) -> ModelConfig:
    """Return the shape of the model that `make_tiny` would make."""
    return parse_config(_shape_keys(shape), where="model.tiny")


def _shape_keys(shape: TinyConfig) -> dict[str, Any]:
    keys = {
        "model_type": "qwen2",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
    }
    if shape.kind == "qwen2":
        return keys
    # All heads together are twice as wide as the model, as in the models of this kind.
    size = 2 * shape.hidden_size // shape.heads
    return keys | {
        "model_type": "qwen3_5_text",
        "head_dim": size,
        "linear_num_key_heads": shape.heads,
        "linear_num_value_heads": shape.heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        # Read by SGLang and by transformers, which fill in what is left out in different ways.
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta}
        | {"partial_rotary_factor": 0.25},
        "layer_types": LAYER_TYPES * (shape.layers // PERIOD),
    }
