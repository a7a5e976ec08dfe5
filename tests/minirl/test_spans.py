"""Credit of characters reaches the tokens that were sampled, wherever their borders are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.exchange import CreditSpan
from minirl.train.advantages import character_ranges, first_character, span_credit
from minirl.types import Reply, Trajectory, Turn

from .byte_bpe import train_tokenizer

CASES = json.loads((Path(__file__).parents[1] / "data" / "credit.json").read_text())["spans"]
TEXTS = ["SELECT name FROM singer WHERE city = 'Zürich' AND name LIKE '%東京%'"] * 3


class Pieces:
    """A tokenizer whose ids are the places of given pieces of text."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)


class Bytes:
    """A byte-level tokenizer: ids 0 to 255 are bytes, 256 and 257 pairs, 258 says nothing."""

    table = (*(bytes([i]) for i in range(256)), b"\xe2\x82", "é'".encode(), b"")

    def decode(self, ids):
        return b"".join(self.table[i] for i in ids).decode(errors="replace")


def reply(ids, text, *, finish="stop"):
    return Reply(tuple(ids), (0.0,) * len(ids), text, finish, (0,) * len(ids))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_tokens_lie_where_their_first_character_does(case):
    pieces = case["pieces"]
    text = "".join(pieces).removesuffix("<end>")
    turn = Turn((90, 91), reply(range(len(pieces)), text))
    spans = [CreditSpan(0, *span) for span in case["spans"]]
    credit, covered = span_credit(Trajectory((turn,), None, "done"), spans, Pieces(pieces).decode)
    assert credit.tolist() == [0, 0, *case["credit"]]
    assert covered.tolist() == [False, False, *(value != 0 for value in case["credit"])]


def test_each_turn_has_its_own_spans():
    turns = (Turn((9,), reply((0, 1), "ab")), Turn((9, 9), reply((1, 0), "ba")))
    spans = [CreditSpan(1, 0, 2, -0.5), CreditSpan(0, 1, 2, 1.0)]
    credit, covered = span_credit(Trajectory(turns, None, "done"), spans, Pieces(["a", "b"]).decode)
    assert credit.tolist() == [0, 0, 1, 0, 0, -0.5, -0.5]
    assert covered.tolist() == [False, False, True, False, False, True, True]


def test_a_turn_without_text_has_no_credit():
    turns = (Turn((9,), reply((0,), "")), Turn((9,), reply((1,), "b", finish="length")))
    tokens = Pieces(["<end>", "b"])
    credit, covered = span_credit(
        Trajectory(turns, None, "done"), [CreditSpan(1, 0, 1, 2.0)], tokens.decode
    )
    assert (credit.tolist(), covered.tolist()) == ([0, 0, 0, 2], [False, False, False, True])


@pytest.mark.parametrize(
    "span", [CreditSpan(1, 0, 1, 1.0), CreditSpan(0, 0, 3, 1.0), CreditSpan(0, 2, 1, 1.0)]
)
def test_a_span_outside_of_the_replies_is_a_mistake_of_ours(span):
    turn = Turn((9,), reply((0,), "ab"))
    with pytest.raises(ValueError, match="not within"):
        span_credit(Trajectory((turn,), None, "done"), [span], Pieces(["ab"]).decode)


def test_characters_split_over_tokens_belong_to_all_of_them():
    euro, smile = "€".encode(), "😀".encode()
    ids = [*b"a", *euro, *smile, *b"b", 256, 0xAC, 257, 258]
    assert Bytes().decode(ids) == "a€😀b€é'"
    assert character_ranges(ids, Bytes().decode) == [
        (0, 1), *[(1, 2)] * 3, *[(2, 3)] * 4, (3, 4), (4, 5), (4, 5), (5, 7), (7, 7)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    tokenizer = train_tokenizer(TEXTS, vocab_size=320)

    class Tiny:
        encode = staticmethod(lambda text: tokenizer.encode(text).ids)
        decode = staticmethod(lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
        size = tokenizer.get_vocab_size()

    return Tiny


@given(st.lists(st.integers(0, 319)))
def test_ranges_of_a_byte_level_bpe_cover_any_ids(tiny, ids):
    # The decoder joins a quote and the word after it, across tokens.
    check_cover([i % tiny.size for i in ids], tiny)


def check_cover(ids, tokenizer):
    text, ranges = tokenizer.decode(ids), character_ranges(ids, tokenizer.decode)
    assert len(ranges) == len(ids)
    ends = [0, *(end for _, end in ranges)]
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    for (start, end), before in zip(ranges, ends, strict=False):
        # It begins where the others end, or with the character that they left unfinished.
        assert max(before - 1, 0) <= start <= before
        assert start <= end
    assert {c for start, end in ranges for c in range(start, end)} == set(range(len(text)))


def test_place_of_blanks():
    ranges = (("a  b", 1, 3), ("a  b", 1, 4), ("ab", 2, 2), ("ab", 0, 0), ("ab", 5, 9))
    assert [first_character(*one) for one in ranges] == [1, 3, 1, 0, 1]
