"""Text to token ids and back, and the chat template, from a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

# transformers says at import that it misses PyTorch, which nothing here needs.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from jinja2 import TemplateError
from pydantic import BaseModel, BeforeValidator, NonNegativeInt
from transformers import PreTrainedTokenizerFast

from minirl.errors import UserError
from minirl.run.files import read_json
from minirl.types import Message

# Stands for a reply, to find out what the template puts after one. One word, so that templates
# which strip replies leave it whole; no template or environment writes it.
_REPLY = "minirl-reply-sentinel"
_BEFORE = ({"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY})


class ChatTokenizer:
    """A fast tokenizer with a chat template.

    Attributes:
        stop_ids: Tokens that end a reply, those of `generation_config.json` first.
        pad_id: Padding token.
        vocab_size: Number of tokens; the model's embedding may have more rows.
    """

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer of a Hugging Face model folder.

        Raises:
            UserError: The folder, its tokenizer or its chat template is missing or broken.
        """
        self._chat = _read(folder)
        self._backend = self._chat.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size: int = len(self._chat)
        self.stop_ids = _stop_ids(folder, self._chat.eos_token_id)
        pad_id = self._chat.pad_token_id
        self.pad_id: int = self.stop_ids[0] if pad_id is None else pad_id

    def encode(self, text: str) -> list[int]:
        """Encode a text without special tokens around it."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids, control tokens included; bytes that are not UTF-8 become U+FFFD.

        Ids beyond `vocab_size` add nothing.
        """
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Encode the first observation, up to where the reply begins."""
        return self.encode(self._render(_plain(messages)))

    def encode_next(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """Encode what follows a reply: the end of its turn and the next observation.

        Args:
            messages: The next observation.
            closed: True when the reply ends with a stop token, which is then not repeated.
        """
        rendered = self._render([*_BEFORE, *_plain(messages)])
        ids = self.encode(rendered.partition(_REPLY)[2])
        return ids[1:] if closed and ids[0] in self.stop_ids else ids

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self._chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _read(folder: Path) -> Any:
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder}: no tokenizer.json; set model.path to a Hugging Face model folder with it"
        )
    try:
        # Not AutoTokenizer: for Qwen it puts its own rules in the place of tokenizer.json's.
        chat = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    # The tokenizers library raises bare `Exception` for a file that it cannot parse.
    except Exception as error:  # noqa: BLE001
        raise UserError(
            f"{folder}: the tokenizer cannot be read ({_one_line(error)}); "
            "copy tokenizer.json and tokenizer_config.json there again"
        ) from None
    _check_template(chat, folder)
    return chat


def _check_template(chat: Any, folder: Path) -> None:
    try:
        rendered = chat.apply_chat_template([*_BEFORE, _BEFORE[0]], tokenize=False)
    # What transformers raises where there is no template is a ValueError.
    except (TemplateError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder}: no chat template that can be rendered ({_one_line(error)}); add one to "
            "tokenizer_config.json as chat_template"
        ) from None
    if _REPLY not in rendered:
        raise UserError(f"{folder}: the chat template leaves out the replies; use another")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [] if value is None else [value]


class _Generation(BaseModel):
    """The stop tokens of `generation_config.json`."""

    eos_token_id: Annotated[list[NonNegativeInt], BeforeValidator(_listed)] = []


def _stop_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    listed: list[int] = []
    if path.exists():
        advice = "copy the tokenizer's files there again"
        listed = read_json(path, _Generation, advice=advice).eos_token_id
    unique = tuple(dict.fromkeys(i for i in [*listed, eos_id] if i is not None))
    if not unique:
        raise UserError(f"{path}: no eos_token_id here nor in the tokenizer; replies cannot end")
    return unique
