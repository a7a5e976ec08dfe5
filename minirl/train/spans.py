"""From credit for characters of a reply to credit for its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from minirl.types import CreditSpan, Reply, Trajectory

Decode = Callable[[Sequence[int]], str]

# What a decoder writes for bytes that are no character, or not yet one.
_BROKEN = "\ufffd"
# Tokens that another one is decoded with: a character has four bytes at most, hence begins in one
# of the three tokens before the one that ends it; and decoders join neighbours.
_CONTEXT = 4


def span_credit(
    trajectory: Trajectory, spans: Sequence[CreditSpan], decode: Decode
) -> tuple[np.ndarray, np.ndarray]:
    """Give each token of a trajectory the value of the span that it lies in.

    A token lies where its first non-blank character does, or its first character if all are blank
    (EXPO-SQL, section 3.3; the paper leaves the border open). A token without text in the reply,
    as the one that ends it, goes with the reply's last character. Of overlapping spans the later
    one counts.

    Args:
        trajectory: Its turns; only sampled tokens have credit.
        spans: Half-open ranges of characters of the turns' `reply.text`.
        decode: The tokenizer's. The sampled ids are never encoded again: other ids could come out.

    Returns:
        Credit of each id of the flattened trajectory, 0 outside of spans, and whether a span covers
        it.

    Raises:
        ValueError: A span is of no turn, or ends outside of its reply.
    """
    credit: list[np.ndarray] = []
    covered: list[np.ndarray] = []
    _check(trajectory, spans)
    for number, turn in enumerate(trajectory.turns):
        observed = np.zeros(len(turn.observation_ids))
        own = [span for span in spans if span.turn == number]
        values, is_covered = _reply_credit(turn.reply, own, decode)
        credit += [observed, values]
        covered += [observed.astype(bool), is_covered]
    return np.concatenate(credit), np.concatenate(covered)


def _check(trajectory: Trajectory, spans: Sequence[CreditSpan]) -> None:
    for span in spans:
        turns = trajectory.turns
        is_turn = 0 <= span.turn < len(turns)
        if not is_turn or not 0 <= span.start <= span.end <= len(turns[span.turn].reply.text):
            raise ValueError(f"the reward's {span} is not within a reply of {len(turns)} turns")


def _reply_credit(
    reply: Reply, spans: Sequence[CreditSpan], decode: Decode
) -> tuple[np.ndarray, np.ndarray]:
    if not spans or not reply.text:
        return np.zeros(len(reply.ids)), np.zeros(len(reply.ids), bool)
    value_T, is_covered_T = np.zeros(len(reply.text)), np.zeros(len(reply.text), bool)
    for span in spans:
        value_T[span.start : span.end] = span.value
        is_covered_T[span.start : span.end] = True
    places = [place(reply.text, *pair) for pair in character_ranges(reply.ids, decode)]
    return value_T[places], is_covered_T[places]


def place(text: str, start: int, end: int) -> int:
    """Return the character that decides where the token of these characters lies.

    Returns:
        Its first non-blank character, else its first one, else the text's last one.
    """
    own = text[start:end]
    blank = len(own) - len(own.lstrip())
    offset = start + (blank if blank < len(own) else 0)
    return min(offset, len(text) - 1)


def character_ranges(ids: Sequence[int], decode: Decode) -> list[tuple[int, int]]:
    """Return the characters of the decoded ids that each id has a part in.

    Byte-level tokens may hold a part of a character: each of them has that character in its range.

    Returns:
        Half-open ranges over `decode(ids)`; an id without text has an empty one.
    """
    ids = [int(token) for token in ids]
    length = len(decode(ids))
    ranges = _ranges(ids, decode, context=_CONTEXT)
    if ranges and ranges[-1][1] != length:
        # A decoder that looks back further: decode everything before each token.
        ranges = _ranges(ids, decode, context=len(ids))
    return ranges


def _ranges(ids: list[int], decode: Decode, *, context: int) -> list[tuple[int, int]]:
    """Decode each token with so many before it, and tell what it adds to their text."""
    ranges = []
    end = 0
    for number in range(len(ids)):
        first = max(0, number - context)
        before = decode(ids[first:number])
        after = decode(ids[first : number + 1])
        start = end - len(before) + _first_own(before, after)
        end += len(after) - len(before)
        ranges.append((min(start, end), end))
    return ranges


def _first_own(before: str, after: str) -> int:
    """Return where a token begins in a text, from the text without it and with it."""
    if after.startswith(before) and (len(after) > len(before) or not before.endswith(_BROKEN)):
        return len(before)
    # It goes on with a character that others began.
    return max(0, min(len(before), len(after)) - 1)
