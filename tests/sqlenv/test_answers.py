"""The reader of replies: cases as data, properties of any text, time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlenv.sql.answers import answer_of, block_of, is_one_query, wrapped
from sqlenv.types import Answer, Wrapping
from tests.vectors import read

REAL = Path(__file__).parents[3] / "shared/data/replies/qwen2.5-coder-0.5b.jsonl"
CASES = read("answers")["cases"]
WRAPPINGS: tuple[Wrapping, ...] = get_args(Wrapping)
MARKS = (
    *("<think>", "</think>", "<sql>", "</sql>", "<tool_call>", "</tool_call>", "```sql", "```"),
    *("````", "```python", "SELECT 1", ";", "--", "/*", "*/", "'", '"', "(", "{", " ", "\n"),
    "\r\n",
)
replies = st.one_of(
    st.text(),
    st.binary().map(lambda data: data.decode("utf-8", "surrogateescape")),
    st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=3)), max_size=12).map("".join),
)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_reply_is_read(case: dict[str, Any], wrapping: Wrapping) -> None:
    answer = answer_of(case["reply"], wrapping)
    assert answer.sql == case[wrapping]
    assert answer.found is bool(case[wrapping])
    assert answer.in_form is (wrapping in case.get("asked", ()))
    assert answer.reasoning == case.get("reasoning", answer.reasoning)
    assert answer.call == case.get("call")
    check(answer)


@given(replies, st.sampled_from(WRAPPINGS))
def test_any_text_is_read(reply: str, wrapping: Wrapping) -> None:
    check(answer_of(reply, wrapping))


def check(answer: Answer) -> None:
    """Check what holds of every reply."""
    assert answer.sql == answer.reply[answer.start : answer.end] == answer.sql.strip()
    assert 0 <= answer.said_from <= answer.said_to <= len(answer.reply)
    assert len(answer.reasoning) + len(answer.said) == len(answer.reply)
    assert (answer.form is not None) is answer.found is (answer.place >= 0)
    if answer.found:
        assert answer.said_from <= answer.start < answer.end <= answer.said_to


@given(st.sampled_from(WRAPPINGS), st.sampled_from(["", "<think>a</think>", "b</think> "]))
def test_what_is_written_is_read(wrapping: Wrapping, reasoning: str) -> None:
    sql = "SELECT '```' -- </sql>\nFROM boat"
    answer = answer_of(reasoning + wrapped(sql, wrapping), wrapping)
    assert answer.sql == sql
    assert answer.in_form is bool(reasoning)


PIECES = (
    *("`", "```", "```sql", "```sql\n", "``` ", "<sql>", "</sql>", "<sql></sql>", "<sql>/*</sql>"),
    *("<think>", "\n<think>", "</think>", "<tool_call>", "<tool_call>{", "</tool_call>", "/*"),
    *("--", "'", '"', "(", "[", ";", "\n", " ", "```sql/* ```\n", "```sql\n(", "<sql>(("),
    "SELECT ';' ",
)


@pytest.mark.parametrize("start", ["", "SELECT ';' ", "```sql\n", "<sql>"])
@pytest.mark.parametrize("piece", PIECES)
def test_hostile_replies_take_linear_time(piece: str, start: str) -> None:
    """In square time a tenth of this would take minutes; it takes about 0.1 s."""
    reply = start + piece * (200_000 // len(piece)) + "*/</sql>\n```\n"
    before = time.thread_time()
    answer_of(reply, "any")
    block_of(reply, "scores")
    assert time.thread_time() - before < 2.0


def test_a_query_of_a_call_stands_where_json_spells_it_alike() -> None:
    call = '<tool_call>{"query": "SELECT 1"}</tool_call>'
    answer = answer_of(f"<think>SELECT 1</think>{call}", "fence")
    assert answer.with_sql("SELECT 1").place == answer.reply.rindex("SELECT 1")
    assert answer.with_sql("SELECT\n1").place == -1
    assert answer.with_sql("").place == -1


def test_a_call_that_is_cut_off_is_told() -> None:
    whole = '<tool_call>{"query": "SELECT 1"}</tool_call>'
    assert answer_of(whole, "any").call_ends
    assert not answer_of(whole.removesuffix("</tool_call>"), "any").call_ends


def test_blocks_of_other_tags() -> None:
    assert block_of("<think><a>1</a></think> <a>2</a> <a>3</a> <a>", "a") == "3"
    assert block_of("<think><a>1</a></think>", "a") == ""


@pytest.mark.skipif(not REAL.exists(), reason=f"no {REAL}")
def test_real_replies() -> None:
    """Of 108 replies of a real model 96 are a bare query, 9 have a fence, 3 were cut off."""
    found = [json.loads(line)["reply"] for line in REAL.read_text(encoding="utf-8").splitlines()]
    forms = [answer_of(reply, "any").form for reply in found]
    assert [forms.count(form) for form in ("bare", "fence", None)] == [96, 9, 3]
    assert all(is_one_query(answer_of(reply, "any").sql) for reply in found[3:])
