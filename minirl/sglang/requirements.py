"""What a server has to be, before it is used."""

from __future__ import annotations

from dataclasses import dataclass

from minirl.errors import UserError
from minirl.sglang.client import Facts

TESTED = "0.5.23"
"""The version of SGLang that this was written for."""
_OLDEST = (0, 5)
# Ids of the probe that are a prompt: its last token is fed with the answer.
PROBE_PROMPT = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a server has to be.

    Attributes:
        architectures: Of its model; one of them.
        vocab_size: Rows of the embedding.
        context: Least room for a prompt and its reply together, in tokens.
        probe_ids: Tokens that it is compared with the learner by.
        tolerance: Largest mean difference of their log-probabilities.
    """

    architectures: tuple[str, ...]
    vocab_size: int
    context: int
    probe_ids: tuple[int, ...]
    tolerance: float


def check_facts(facts: Facts, wanted: Wanted, url: str, *, one_group: bool) -> None:
    """Refuse a server that cannot serve this model.

    Args:
        facts: What it says of itself.
        wanted: What it has to be.
        url: Where it is.
        one_group: Whether weights reach only the ranks of one tensor-parallel group.

    Raises:
        UserError: It cannot.
    """
    found = ", ".join(facts.architectures)
    own = ", ".join(wanted.architectures)
    is_other = not set(facts.architectures) & set(wanted.architectures)
    version = tuple(int(part) for part in facts.version.split(".")[:2] if part.isdigit())
    flaws = {
        f"has no {', '.join(facts.missing)}; SGLang {TESTED} has": bool(facts.missing),
        f"is SGLang {facts.version}; use {TESTED}": version < _OLDEST,
        "serves no model that writes": not facts.is_generation,
        f"serves a {found}, and the learner's model is a {own}": bool(found) and is_other,
        f"serves a vocabulary of {facts.vocab_size} tokens, and the learner's model has "
        f"{wanted.vocab_size}": facts.vocab_size not in (None, wanted.vocab_size),
        f"takes {facts.context} tokens, and episodes have up to {wanted.context}; start it "
        "with a larger --context-length, or a larger cache (--max-total-tokens, "
        "--mem-fraction-static)": facts.context < wanted.context,
        "has ranks besides those of --tp-size, which only rollout.sglang.push=disk reaches": (
            one_group and facts.groups > 1
        ),
    }
    for words, is_so in flaws.items():
        if is_so:
            raise UserError(f"rollout.sglang: {url} {words}")
