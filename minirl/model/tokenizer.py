"""Text to token ids and back, and the chat template, from a Hugging Face folder."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

# transformers says at import that it misses PyTorch, which nothing here needs.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from jinja2 import TemplateError
from pydantic import BaseModel, BeforeValidator, NonNegativeInt
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from minirl.exchange import ROLES, Message, UserError, broken
from minirl.model.config import text_keys
from minirl.run.files import check, read_json

# Stands for a reply, to find out what the template puts after one. One word, so that templates
# which strip replies leave it whole; no template or environment writes it.
_REPLY = "minirl-reply-sentinel"
_BEFORE = ({"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY})
_TAG = re.compile(r"</?\w+>\Z")
# The function by which templates ask for today's date, and what may be asked for.
_TODAY = "strftime_now"
_DATE_PARTS = (*"aAbBcCdDeFfGhHIjmMprRSTuUVwWxXyYzZ", "-d", "-m", "-H", "-I", "-M", "%")
# What a template writes around messages falls apart into lines and what is in brackets; roles are
# pieces with a word and a sign, such as `[INST]` and `### Response:`.
_PIECES = re.compile(r"\n|(?<=[>\]])(?![>\]])|(?<![<\[])(?=[<\[])")
_ROLE = re.compile(r"(?=.*\w)(?=.*[^\w\s]).+")
# Once for each folder, however often it is read.
_warn = cache(logging.getLogger(__name__).warning)


class ChatTokenizer:
    """A fast tokenizer with a chat template.

    Attributes:
        stop_ids: Tokens that end a reply: those of `generation_config.json`, then those of the
            tokenizer and of `config.json`.
        pad_id: Padding token.
    """

    def __init__(
        self,
        folder: Path,
        *,
        arguments: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> None:
        """Read the tokenizer of a Hugging Face model folder.

        Args:
            folder: With `tokenizer.json` and a chat template.
            arguments: Of the chat template.
            now: The date that a template shows which asks for today's; None for today.

        Raises:
            UserError: The folder, its tokenizer or its chat template is missing or broken, knows no
                such arguments, or the tokenizer is that of a model with more tokens.
        """
        self._folder, self._arguments = folder, dict(arguments or {})
        self._chat = _read(folder)
        # Of several templates the one that is rendered.
        template = self._chat.get_chat_template()
        # A template ignores arguments that it does not name.
        unknown = [name for name in self._arguments if not re.search(rf"\b{name}\b", template)]
        if unknown:
            raise UserError(
                f"prompt.template: the chat template of {folder} names no {', '.join(unknown)}; "
                "check the spelling, or leave it out"
            )
        self._chat.chat_template = template if now is None else dated(template, now)
        self._backend = self._chat.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        controls = control_tokens(self._backend, template)
        _check_rows(folder, max(self._chat.get_vocab().values()))
        self.stop_ids = _stop_ids(folder, self._chat.eos_token_id)
        self._has_system = self._takes_system()
        # Where one begins, also inside of another.
        marks = "|".join(map(re.escape, [*controls.values(), *self._roles()]))
        self._marks = re.compile(f"(?={marks or '(?!)'})(?s:.)")
        self._put_end_of_turn_first(controls)
        pad_id = self._chat.pad_token_id
        self.pad_id: int = self.stop_ids[0] if pad_id is None else pad_id

    def encode(self, text: str) -> list[int]:
        """Encode a text: without special tokens around it, and with those in it broken."""
        return self._encode(broken(text, self._marks))

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids, control tokens included; bytes that are not UTF-8 become U+FFFD.

        Ids of no token, for which an embedding may have rows, add nothing.
        """
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Encode the first observation, up to where the reply begins."""
        return self._encode(self._render(self._plain(messages)))

    def encode_next(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """Encode what follows a reply: the end of its turn and the next observation.

        Args:
            messages: The next observation.
            closed: True when the reply ends with a stop token, which is then not repeated.
        """
        rendered = self._render([*_BEFORE, *self._plain(messages)])
        ids = self._encode(rendered.partition(_REPLY)[2])
        end = next((at for at, i in enumerate(ids) if i in self.stop_ids), len(ids))
        # Templates may have blanks between a reply and its end.
        is_again = closed and end < len(ids) and not self.decode(ids[:end]).strip()
        return ids[end + 1 :] if is_again else ids

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return self._chat.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._arguments
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise UserError(
                f"{self._folder}: the chat template takes no messages of {roles} "
                f"({_one_line(error)}); use another template, or another env.kind"
            ) from None

    def _takes_system(self) -> bool:
        """Tell whether the template shows what a system message says."""
        try:
            return _REPLY in self._render([{"role": "system", "content": _REPLY}, _BEFORE[0]])
        except UserError:
            return False

    def _roles(self) -> list[str]:
        """List what the template writes around messages in plain text."""
        roles = ["system"] * self._has_system + ["user", "assistant", "user"]
        written = self._render([{"role": role, "content": _REPLY} for role in roles])
        pieces = map(str.strip, _PIECES.split(written.replace(_REPLY, "\n")))
        return [one for one in pieces if _ROLE.fullmatch(one) and not _TAG.match(one)]

    def _plain(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        """Break marks of turns, such as a cell of a database may hold; without a system role, what
        it says begins the first message.
        """
        marks = self._marks
        plain = [{"role": one.role, "content": broken(one.content, marks)} for one in messages]
        if self._has_system or len(plain) < 2 or plain[0]["role"] != "system":
            return plain
        system, first, *rest = plain
        return [first | {"content": f"{system['content']}\n\n{first['content']}"}, *rest]

    def _encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _put_end_of_turn_first(self, controls: Collection[int]) -> None:
        """Let demonstrations end as the template ends a turn, whatever other stop tokens there are;
        warn where that is none.
        """
        after = self._render([*_BEFORE, _BEFORE[0]]).partition(_REPLY)[2]
        first = next((i for i in self._encode(after) if i in controls), None)
        if first in self.stop_ids:
            self.stop_ids = tuple(dict.fromkeys([first, *self.stop_ids]))
        else:
            end = "no control token"
            if first is not None:
                end = f"{self.decode([first])} ({first}), which is no stop token"
            _warn(
                f"{self._folder}: the chat template ends a turn with {end}, so that replies run "
                "on; see that its end is in eos_token_id of generation_config.json"
            )


def dated(template: str, now: datetime) -> str:
    """Give a chat template a date in the place of today's."""
    parts = "".join(f"|replace('%{part}', {now.strftime('%' + part)!r})" for part in _DATE_PARTS)
    # A line of its own, which Jinja leaves out.
    macro = f"{{% macro {_TODAY}(format) %}}{{{{ format{parts} }}}}{{% endmacro %}}\n"
    return macro + template if _TODAY in template else template


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


class _Facts(BaseModel):
    """What `generation_config.json` and the decoder's keys of `config.json` say of tokens."""

    eos_token_id: Annotated[list[NonNegativeInt], BeforeValidator(_listed)] = []
    vocab_size: int | None = None


def _facts(path: Path) -> _Facts:
    advice = "copy it there again"
    raw = read_json(path, dict[str, Any], advice=advice) if path.exists() else {}
    return check(_Facts, text_keys(raw), where=str(path), advice=advice)


def _check_rows(folder: Path, largest: int) -> None:
    rows = _facts(folder / "config.json").vocab_size
    if rows is not None and largest >= rows:
        raise UserError(
            f"{folder}: the tokenizer has ids up to {largest}, and config.json an embedding of "
            f"{rows} rows; copy both from one model"
        )


def _stop_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    stated, more = _facts(path).eos_token_id, _facts(folder / "config.json").eos_token_id
    unique = tuple(dict.fromkeys(i for i in [*stated, eos_id, *more] if i is not None))
    if not unique:
        raise UserError(
            f"{path}: no eos_token_id here, in config.json nor in the tokenizer; replies cannot end"
        )
    return unique


def control_tokens(tokenizer: Tokenizer, template: str) -> dict[int, str]:
    """Return the tokens that mark turns and texts, by id: those that a tokenizer calls special, and
    of its other added ones those that are written as such (`ROLES`), as `<|fim_prefix|>` is, or
    known to the chat template. Tags like `<think>`, which prompts name, are none.
    """
    added = tokenizer.get_added_tokens_decoder()
    return {
        i: token.content
        for i, token in added.items()
        if token.special
        or ROLES.match(token.content)
        or (token.content in template and not _TAG.match(token.content) and token.content.strip())
    }
