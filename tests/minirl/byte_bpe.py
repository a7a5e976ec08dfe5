"""A byte-level tokenizer in the manner of Qwen's, whose decoder joins a quote and what follows."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("' ", "'")])
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=CONTROL,
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
