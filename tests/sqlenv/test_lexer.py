"""The lexer: tokens with places, comments, one line."""

from __future__ import annotations

import gc
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlenv.sql.lexer import one_line, strip_comments, tokenize, tokens

PIECES = [*"'\"`[];()a \né", "--", "/*", "*/", "1.5e3", "||"]
ANY_SQL = st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join))


@pytest.mark.parametrize(
    "sql",
    ["SELECT '-- no  comment'", 'SELECT "/* a */"', "SELECT 'it''s -- x'", "SELECT `--a`, [/*b*/]"],
)
def test_quoted_text_is_no_comment(sql):
    assert strip_comments(sql) == sql
    assert one_line(sql) == sql


def test_unterminated_comment_runs_to_the_end():
    assert one_line("SELECT 1 /* and so on") == "SELECT 1"


def test_tokens():
    assert tokens("SELECT T.\"Na me\", 'It''s', 1.5e3 FROM [A b]<=`C`||x!=.5 ;; ") == (
        *("select", "t", ".", '"Na me"', ",", "'It''s'", ",", "1.5e3", "from", "[a b]"),
        *("<=", "`c`", "||", "x", "!=", ".5"),
    )
    assert tokens("a<>b==c>=d 0x1F 'open End") == (
        *("a", "<>", "b", "==", "c", ">=", "d", "0x1f", "'open End"),
    )
    assert tokens('`a``B` "c""D" [e``f] --') == ("`a``b`", '"c""D"', "[e``f]")
    assert tokens("") == tokens(" ; ") == ()


@given(ANY_SQL)
def test_tokens_and_what_is_between_them_are_the_text(sql):
    found = tokenize(sql)
    assert all(a.end <= b.start for a, b in pairwise(found))
    assert all(token.start < token.end and token.depth >= 0 for token in found)
    gaps = zip([0, *(t.end for t in found)], [*(t.start for t in found), len(sql)], strict=True)
    assert not "".join(strip_comments(sql[a:b]) for a, b in gaps).strip()
    spaced = [(sql[t.start : t.end].strip(), t.depth) for t in found]
    for text in (strip_comments(sql), one_line(sql)):
        again = [(text[t.start : t.end].strip(), t.depth) for t in tokenize(text)]
        assert again == spaced


@pytest.fixture(scope="module")
def nothing_old():
    """Else Python looks through all that tests before these hold, whenever it collects garbage."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_old")
@pytest.mark.parametrize(
    "piece", [" ", "\n", "--", "/*", "/**/ ", "'", '"', "`a", "[", "(", ")", "1"]
)
def test_any_text_is_read_in_linear_time(piece):
    start = time.thread_time()
    for text in (piece * 100_000, "SELECT 1" + piece * 100_000):
        tokenize(text)
        one_line(text)
    assert time.thread_time() - start < 2.0
