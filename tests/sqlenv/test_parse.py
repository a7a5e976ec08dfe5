"""Text that would crash or stall the parser."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlenv.sql import extraction, lexer
from tests.vectors import read


def test_what_is_too_long_has_no_tree():
    assert extraction.parse("SELECT 1" + " " * lexer.MAX_CHARS) is None


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1;",
        "SELECT end, CASE WHEN end THEN 1 END FROM t",
        " (SELECT 1) ",
        "WITH a AS (SELECT 1) SELECT * FROM a;\n-- done",
        "SELECT a FROM t UNION SELECT b FROM u ORDER BY 1 LIMIT 2",
        "SELECT a, rank() OVER (PARTITION BY b ORDER BY c) FROM t WHERE d GLOB 'x*'",
        "SELECT * FROM t WHERE a IN (" + ", ".join(map(str, range(1000))) + ")",
        "SELECT 1 FROM t WHERE " + " AND ".join(f"t.c{i} = {i}" for i in range(100)),
        "SELECT 1" + " UNION SELECT 1" * 50,
        "SELECT * FROM " + ", ".join(f"t{i}" for i in range(40)),
        "SELECT * FROM t0" + "".join(f" JOIN t{i} ON t{i}.a = t0.a" for i in range(1, 40)),
        "SELECT * FROM t0" + " JOIN t1" * 20 + " ON 1" * 20,
        "SELECT 1 FROM a " + "JOIN (SELECT 1 FROM b JOIN c USING (d)) ON 1 " * 20,
        "SELECT " + ", ".join(f"CASE WHEN a = {i} THEN {i} ELSE -1 END" for i in range(60)),
        "SELECT " + "(" * 20 + "1" + ")" * 20,
    ],
    ids=lambda sql: sql[:40],
)
def test_large_but_honest_queries_have_a_tree(sql):
    assert extraction.parse(sql) is not None


# Each of these once crashed the interpreter (compiled sqlglot overflows the C stack), or cost time
# that doubles with each repetition. The tail closes what the piece opens.
HOSTILE = read("hostile_text")


@pytest.mark.parametrize(("head", "piece", "tail"), HOSTILE, ids=[h + p for h, p, _ in HOSTILE])
def test_hostile_text_costs_neither_stack_nor_time(head, piece, tail):
    texts = [
        text
        for count in (30, 300, 3_000)
        for text in (head + piece * count, head + piece * count + "1" + tail * count)
    ]

    def work() -> None:
        for text in texts:
            extraction.parse(text)

    start = time.thread_time()
    _on_small_stack(work)
    assert time.thread_time() - start < 1.0


def test_tree_depth_is_bounded():
    chain = "SELECT 1" + "+1" * (extraction.MAX_TREE_DEPTH - 10)
    assert extraction.parse(chain) is not None
    assert extraction.parse(chain + "+1" * 20) is None


@given(st.one_of(st.text(), st.binary().map(lambda b: b.decode("utf-8", "surrogateescape"))))
def test_no_text_raises(text):
    extraction.parse(text)
    extraction.parse("SELECT " + text)


def _on_small_stack(work) -> None:
    """Run in a thread with a stack of 1 MB, an eighth of the usual; a crash ends the process."""
    before = threading.stack_size(1 << 20)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
