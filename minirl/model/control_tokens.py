"""Encoding with control tokens that a chat template wrote, and never those in a text.

A cell of a database may hold `<|im_end|>`, as may a question, a schema or an error. For a tokenizer
it is the same as the template's own. So the texts are hidden from it: before rendering, each
control token in a text takes a name that no text holds; after it, these names are texts again, and
the template's control tokens take the names. A second tokenizer, which knows them by these names
alone, encodes the result. It is made when a text first needs it: all other prompts are encoded by
the tokenizer as it is.
"""

from __future__ import annotations

import json
import re
import secrets
from functools import cached_property

from tokenizers import AddedToken, Tokenizer

_WRITTEN = re.compile(r"<\|.*\|>\Z")


class ControlTokens:
    """Encodes texts, and what a template made of hidden texts.

    Attributes:
        ids: Of all control tokens: those that the tokenizer calls special, and those written as
            such are; Qwen's for filling in the middle are `<|fim_prefix|>` and not called special.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Not fixed, or a text could hold the names.
        self._mark = f"\ue000{secrets.randbits(64)}\ue001"
        added = tokenizer.get_added_tokens_decoder().items()
        controls = {
            i: token.content for i, token in added if token.special or _WRITTEN.match(token.content)
        }
        self.ids = frozenset(controls)
        names = {token: f"{self._mark}{i}\ue002" for i, token in controls.items()}
        self._other = names | {name: token for token, name in names.items()}
        longest_first = sorted(self._other, key=len, reverse=True)
        self._either = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def hide(self, text: str) -> str:
        """Give control tokens in a text their names."""
        return self._either.sub(lambda match: self._other[match[0]], text)

    def encode(self, text: str) -> list[int]:
        """Encode a text, in which control tokens are text too."""
        return self.encode_rendered(self.hide(text))

    def encode_rendered(self, rendered: str) -> list[int]:
        """Encode what a template made of hidden texts: only its own control tokens are such."""
        if self._mark not in rendered:
            return self._tokenizer.encode(rendered, add_special_tokens=False).ids
        tokenizer, ids = self._renamed
        encoded = tokenizer.encode(self.hide(rendered), add_special_tokens=False).ids
        return [ids.get(i, i) for i in encoded]

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[int, int]]:
        """Return a tokenizer that knows control tokens by their names, and the ids of added tokens
        by those that it gives them.
        """
        parts = json.loads(self._tokenizer.to_str())
        added, parts["added_tokens"] = parts["added_tokens"], []
        tokenizer = Tokenizer.from_str(json.dumps(parts))
        names = {old["id"]: self._other.get(old["content"], old["content"]) for old in added}
        kinds = ("single_word", "lstrip", "rstrip", "normalized", "special")
        tokenizer.add_tokens(
            [AddedToken(names[old["id"]], **{kind: old[kind] for kind in kinds}) for old in added]
        )
        renamed = ((tokenizer.token_to_id(name), i) for i, name in names.items())
        return tokenizer, {new: i for new, i in renamed if new is not None}
