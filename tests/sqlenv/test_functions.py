"""Functions in place of SQLite's own: the same answers, in a time with the length."""

from __future__ import annotations

import time

import apsw
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sqlenv.executor.functions import add_functions, trim, unhex

NAMES = ("trim", "ltrim", "rtrim", "unhex")
PLAIN, OURS = apsw.Connection(":memory:"), apsw.Connection(":memory:")
add_functions(OURS)

TEXTS = st.text("0123456789abcdefABCDEFxg- é🦆\0", max_size=12)
VALUES = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS
ASCII = st.text("0aF-", max_size=6).map(str.encode)


@given(st.sampled_from(NAMES), VALUES | ASCII, VALUES | ASCII)
@example("unhex", "AB-cd-", "-")
@example("unhex", "A-B", "-")
@example("rtrim", "ab", "a\0b")
def test_answers_are_those_of_sqlite(name, first, second):
    sql = f"SELECT {name}(?, ?), typeof({name}(?, ?))"
    bindings = (first, second, first, second)
    assert OURS.execute(sql, bindings).get == PLAIN.execute(sql, bindings).get


@pytest.mark.parametrize("letter", ["x", "é", "🦆"])
def test_no_pair_of_texts_takes_long(letter):
    text, many = letter * 300_000, "".join(map(chr, range(0x100, 0xD800))) * 7 + letter
    start_s = time.thread_time()
    assert trim(text, many) == ""
    assert unhex(text, many) == b""
    assert time.thread_time() - start_s < 2
