"""The reader of replies: what is reasoning, what calls a tool, and where the SQL is.

A reply says what follows its last `</think>`, also where it was the prompt that opened the
reasoning: a `</think>` without a `<think>` before it tells so. What follows a `<think>` at the
start of a line that nothing closes is reasoning that was cut off. So are the marks of other models,
such as `[THINK]`. Of what is said, calls of a tool
are left out, and then the SQL is

- with `sql_tag` in the last complete `<sql>…</sql>`,
- with `fence` in the last complete fence (backticks or tildes) marked as SQL, or else in the last
  unmarked one that holds a query,
- with `any` in the tag, else in the fence, else it is all that is said, if that is one query, or
  all after a last mark that nothing closes, as where a server stops at the closing one; a mark that
  closes what the prompt opened ends it.

Of several blocks those that begin as a query come first, for prose may name the tags. A block in a
block is taken apart. Marks inside comments and strings of SQL are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile, islice
from typing import Any, NamedTuple

from sqlenv.sql.lexer import scan
from sqlenv.types import Answer, Form, Wrapping

_FORMS: Mapping[Wrapping, tuple[Form, ...]] = {
    "sql_tag": ("sql_tag",),
    "fence": ("fence",),
    "any": ("sql_tag", "fence", "bare"),
}
_ASKED: Mapping[Form, tuple[str, str]] = {
    "sql_tag": ("<sql>", "</sql>"),
    "fence": ("```sql", "```"),
}
"""The marks as prompts ask for them: a reply with others is read, and has not that form."""

_FLAGS = re.DOTALL | re.IGNORECASE
# Of Qwen and DeepSeek, Claude, Seed; Magistral; Kimi; and as GPT-OSS marks what it says.
_THOUGHT = "(?:seed:)?(?:think|thinking|thought)"
_CLOSED_THOUGHT = re.compile(
    rf"</{_THOUGHT}>|\[/THINK\]|◁/think▷|<\|channel\|>final<\|message\|>", _FLAGS
)
_OPEN_THOUGHT = re.compile(
    rf"(?:\A|\n)[ \t]*(?:<{_THOUGHT}>|\[THINK\]|◁think▷|<\|channel\|>analysis)", _FLAGS
)
_OPEN_CALL = re.compile(r"<tool_call>(?=\s*(?:\{|\Z))", _FLAGS)
# Unlike in SQL, a string ends on its line: an apostrophe too many may not hide the end of a block.
_QUOTED = r"""--[^\n]*|/\*.*?(?:\*/|\Z)|'[^'\n]*'|"[^"\n]*\""""
_WORD = r"[\w+#.-]"
_SQL = r"(?:[a-z-]*sql|sqlite3?|postgres|duckdb|mariadb)"
_IS_SQL = re.compile(_SQL, _FLAGS)
_IS_UNMARKED = re.compile("(?:select|with|values)?", _FLAGS)
"""What follows the marks of a fence without a language: nothing on the line, or the query."""
_MARK = "(?:`{3,}+|~{3,}+)"
_IN_SQL = rf"[ \t]*+{_SQL}(?!{_WORD})"
_OPENS = re.compile(rf"<sql>|(?<![`~]){_MARK}{_IN_SQL}|\A\s*+{_MARK}(?:{_IN_SQL})?", _FLAGS)
_END_OF_TURN = r"<[|\uff5c][^<>\s]{1,40}[|\uff5c]>|</s>|<end_of_turn>"
_CLOSES = re.compile(rf"{_QUOTED}|(?P<close></sql>|{_MARK}|{_END_OF_TURN})", _FLAGS)
_QUOTED_CODE = re.compile(r"(`{1,2}+)(?P<inside>[^`].*?[^`])\1\Z", _FLAGS)
_BLANKS = "".join(filter(str.isspace, map(chr, range(0x3001)))) + "\u200b\u200c\u200d\u2060\ufeff"
"""What is blank, and what nobody sees, such as a byte order mark."""
_FEW = 100  # tokens that are looked at; SQLite takes fewer brackets in one another
_BEGINNING = re.compile(
    r"select \S|values \(|with (recursive )?\S+ (as (not )?(materialized )?)?\("
)


class _Marks(NamedTuple):
    """What opens a block, and what is met inside of one: `open` begins it anew, `close` ends it.

    Of SQL, the first pattern passes over comments and strings. Where that leaves a block without an
    end, for SQL may be broken, the second one takes marks as they come.
    """

    opening: re.Pattern[str]
    inside: tuple[re.Pattern[str], ...]


_Pair = tuple[re.Match[str], re.Match[str]]


class _Block(NamedTuple):
    """A complete block: its marks begin and end at `outer` and `stop`, its text at the others."""

    form: Form
    outer: int
    start: int
    end: int
    stop: int


def _marks(opening: str, *inside: str) -> _Marks:
    compiled = (re.compile(pattern, _FLAGS) for pattern in inside)
    return _Marks(re.compile(opening, _FLAGS), tuple(compiled))


def _tag(name: str) -> str:
    return f"(?P<open><{name}>)|(?P<close></{name}>)"


_CALL = _marks("<tool_call>", _tag("tool_call"))
_SQL_FENCE = rf"(?P<open>{_MARK}[ \t]*(?P<language>{_SQL})(?!{_WORD}))"
_MARKS: Mapping[Form, _Marks] = {
    "sql_tag": _marks("<sql>", rf"{_QUOTED}|{_tag('sql')}", _tag("sql")),
    "fence": _marks(
        rf"{_MARK}[ \t]*(?P<language>{_WORD}*)",
        rf"{_QUOTED}|{_SQL_FENCE}|(?P<close>{_MARK})",
        rf"{_SQL_FENCE}|(?P<close>{_MARK}(?=[ \t\r]*(?:\n|\Z)))",
    ),
}


def reply_text(content: Any, reasoning: Any = None) -> str:
    """Return what a model wrote from the content of a chat message: a text, or a list of parts, of
    which some may be thoughts; and from its reasoning, where that stands apart.

    While nothing follows a thought, it has not ended.
    """
    parts = content if isinstance(content, list | tuple) else [content]
    every = [one for one in parts if isinstance(one, Mapping)]
    told = [[next(filter(None, map(one.get, keys)), None) for keys in _KEYS] for one in every]
    thoughts = [_plain(one) for one in (reasoning, *(thought for thought, _ in told))]
    text = "".join(one for one in parts if isinstance(one, str))
    text += "".join(_plain(one) for _, one in told)
    thought = "\n".join(one for one in thoughts if one.strip())
    if not thought:
        return text
    return f"<think>\n{thought}" + f"\n</think>\n\n{text}" * bool(text.strip())


_KEYS = ("thinking", "reasoning"), ("text", "content")
"""Under which a part has a thought, and a text."""


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else reply_text(value) if value else ""


def answer_of(reply: str, wrapping: Wrapping) -> Answer:
    """Read a reply, in linear time; no text raises."""
    said_from, said_to = _said(reply)
    text, call, call_ends = _without_calls(reply[said_from:said_to])
    answer = Answer(reply, said_from=said_from, said_to=said_to, call=call, call_ends=call_ends)
    block = _find(text, wrapping)
    if block is None:
        return answer
    start, end = _inner(text, block)
    in_form = (
        said_to == len(reply)
        and _is_one_thought(reply[:said_from])
        and _is_as_asked(text, block)
        and (start, end) == _trimmed(text, block.start, block.end)
    )
    if start == end:
        return replace(answer, in_form=in_form)
    return replace(
        answer,
        sql=answer.said[start:end],
        start=said_from + start,
        end=said_from + end,
        form=block.form,
        in_form=in_form,
    )


def block_of(reply: str, tag: str) -> str:
    """Return what stands in the last complete `<tag>…</tag>` that a reply says; "" without one."""
    said = reply[slice(*_said(reply))]
    pairs = _pairs(said, _marks(f"<{tag}>", _tag(tag)))
    texts = [said[opening.end() : closing.start()] for opening, closing in pairs]
    return texts[-1] if texts else ""


def wrapped(sql: str, wrapping: Wrapping) -> str:
    """Write a query as the prompts ask for it; `any` is written in the tag."""
    opening, closing = _ASKED[_FORMS[wrapping][0]]
    return f"{opening}\n{sql}\n{closing}"


def begins_query(text: str) -> bool:
    """Tell whether a text begins as a query does, after comments and brackets.

    That is with SELECT, `WITH name AS (` or `VALUES (`.
    """
    few = islice(scan(text), _FEW)
    tokens = dropwhile(lambda token: token.is_sign("("), few)
    first = (one.text if one.kind in ("word", "sign") else one.kind for one in islice(tokens, 7))
    return _BEGINNING.match(" ".join(first)) is not None


def is_one_query(text: str) -> bool:
    """Tell whether a text begins as a query, with nothing but semicolons after the first one."""
    after = dropwhile(lambda token: not token.is_sign(";"), scan(text))
    return begins_query(text) and all(token.is_sign(";") for token in after)


def _said(reply: str) -> tuple[int, int]:
    """Find what a reply says apart from its reasoning."""
    start = max((match.end() for match in _CLOSED_THOUGHT.finditer(reply)), default=0)
    cut_off = _OPEN_THOUGHT.search(reply[start:])
    return start, start + cut_off.start() if cut_off else len(reply)


def _is_one_thought(text: str) -> bool:
    """Tell whether a text is one block of reasoning, opened in it or by the prompt before it."""
    is_opened_first = text.lstrip().startswith("<think>")
    counts = text.count("<think>"), text.count("</think>")
    return text.endswith("</think>") and counts == (int(is_opened_first), 1)


def _is_as_asked(text: str, block: _Block) -> bool:
    """Tell whether a text is a block with the marks that prompts ask for, and blanks."""
    if block.form == "bare":
        return False
    opening, closing = _ASKED[block.form]
    return (
        (block.outer, block.stop) == _trimmed(text, 0, len(text))
        and text[block.outer : block.start] == opening
        and text[block.end : block.stop] == closing
    )


def _without_calls(said: str) -> tuple[str, str | None, bool]:
    """Blank out the calls of a tool, whose queries are no answer.

    Returns what is left, and of the first call what stands in it and whether it ends.
    """
    pairs = list(_pairs(said, _CALL))
    spans = [(opening.start(), closing.end()) for opening, closing in pairs]
    cut_off = _OPEN_CALL.search(said, spans[-1][1] if spans else 0)
    call = cut_off and said[cut_off.end() :]
    if pairs:
        opening, closing = pairs[0]
        call = said[opening.end() : closing.start()]
    if cut_off:
        spans.append((cut_off.start(), len(said)))
    parts, at = [], 0
    for start, stop in spans:
        parts += [said[at:start], " " * (stop - start)]
        at = stop
    return "".join([*parts, said[at:]]), call, bool(pairs) or not cut_off


def _find(text: str, wrapping: Wrapping) -> _Block | None:
    """Find the block that answers: of each form the last one, and of these the first one that
    begins as a query.
    """
    found = [block for form in _FORMS[wrapping] if (block := _best(text, _blocks(text, form)))]
    return _best(text, found[::-1])


def _best(text: str, blocks: Sequence[_Block]) -> _Block | None:
    """Return the last block that begins as a query, else the last one."""
    queries = (one for one in reversed(blocks) if begins_query(text[one.start : one.end]))
    return next(queries, blocks[-1] if blocks else None)


def _blocks(text: str, form: Form) -> list[_Block]:
    if form == "bare":
        opened = [one.end() for one in _OPENS.finditer(text)][-1:]
        spans = (_unquoted(text, *_until_closed(text, start)) for start in (0, *opened))
        found = ((start, end) for start, end in spans if is_one_query(text[start:end]))
        return [_Block("bare", start, start, end, end) for start, end in islice(found, 1)]
    pairs = _pairs(text, _MARKS[form])
    if form == "fence":
        return _fences(text, pairs)
    return [_Block(form, one.start(), one.end(), *closing.span()) for one, closing in pairs]


def _until_closed(text: str, start: int) -> tuple[int, int]:
    """Find what follows a place, up to a mark that closes a block."""
    closed = (one.start() for one in _CLOSES.finditer(text, start) if one["close"])
    return _trimmed(text, start, next(closed, len(text)))


def _fences(text: str, pairs: Iterator[_Pair]) -> list[_Block]:
    """List the fences that are SQL: unmarked ones that hold a query, and then those marked."""
    marked, unmarked = [], []
    for opening, closing in pairs:
        if _IS_SQL.fullmatch(opening["language"]):
            marked.append(_Block("fence", opening.start(), opening.end(), *closing.span()))
        elif _IS_UNMARKED.fullmatch(opening["language"]):
            start = opening.start("language")
            if begins_query(text[start : closing.start()]):
                unmarked.append(_Block("fence", opening.start(), start, *closing.span()))
    return unmarked + marked


def _pairs(text: str, marks: _Marks) -> Iterator[_Pair]:
    """Yield the marks around complete blocks; of several that open one, the last before its end."""
    at = 0
    for met in marks.inside:
        while opening := marks.opening.search(text, at):
            closing = None
            for one in met.finditer(text, opening.end()):
                opening = one if one["open"] else opening
                if one["close"]:
                    closing = one
                    break
            if closing is None:
                at = opening.start()
                break
            yield opening, closing
            at = closing.end()


def _inner(text: str, block: _Block) -> tuple[int, int]:
    """Find the query of a block: its text, or that of a block of the other form in it, which ends
    with the block around it if nothing else ends it.
    """
    start, end = _text_of(text, block)
    if block.form == "bare" or begins_query(text[start:end]):
        return start, end
    other: Form = "fence" if block.form == "sql_tag" else "sql_tag"
    inner = _best(text[start:end], _blocks(text[start:end], other))
    if inner is not None:
        return _text_of(text, _Block(other, *(start + place for place in inner[1:])))
    opening = _MARKS[other].opening.match(text, start, end)
    return _trimmed(text, opening.end(), end) if opening else (start, end)


def _text_of(text: str, block: _Block) -> tuple[int, int]:
    """Find the text of a block without blanks, backticks around it, and what else stands on the
    line of a fence's mark, if a query begins on the next line.
    """
    start, end = _unquoted(text, *_trimmed(text, block.start, block.end))
    line_end = text.find("\n", block.start, end) if block.form == "fence" else -1
    is_said = start < line_end and not begins_query(text[start:end])
    if is_said and begins_query(text[line_end:end]):
        return _trimmed(text, line_end, end)
    return start, end


def _unquoted(text: str, start: int, end: int) -> tuple[int, int]:
    quoted = _QUOTED_CODE.match(text, start, end)
    if quoted is None or not begins_query(quoted["inside"]):
        return start, end
    return _trimmed(text, *quoted.span("inside"))


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    start = end - len(text[start:end].lstrip(_BLANKS))
    return start, start + len(text[start:end].rstrip(_BLANKS))
