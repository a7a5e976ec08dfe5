"""One prompt as a model is shown it, for `--show-prompt`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launch import cli
from sqlenv.types import Example, Observation

if TYPE_CHECKING:
    from minirl.model.tokenizer import ChatTokenizer

_CHARACTERS = 4  # of a token, about


def show_prompt(
    example: Example,
    prompt: Observation,
    tokenizer: ChatTokenizer | None,
    *,
    limit: int | None = None,
) -> None:
    """Print a prompt and how many tokens it has; without a tokenizer its messages, and about how
    many.
    """
    if tokenizer is None:
        text = "\n".join(f"[{message.role}]\n{message.content}" for message in prompt)
        count = sum(len(message.content) for message in prompt) // _CHARACTERS
        size = f"about {count:,} tokens; the model's own tokenizer is not here"
    else:
        ids = tokenizer.encode_chat(prompt)
        text, size = tokenizer.decode(ids), f"{len(ids):,} tokens"
        if limit is not None:
            size += f" of {limit:,}" if len(ids) <= limit else f": too long, {limit:,} are allowed"
    cli.output.out(text)
    cli.output.print(f"Question {example.id}: {size}", soft_wrap=True, markup=False)
