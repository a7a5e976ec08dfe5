"""The lexer: tokens of any text, each with its place and the brackets open around it.

Everything that looks at SQL as text uses it. sqlglot's tokenizer raises on text that SQLite only
reports (a string without an end, say), joins keywords (`GROUP BY` is one token) and drops quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import ascii_uppercase
from typing import Literal, NamedTuple

from sqlenv.cache import cached

TokenKind = Literal["word", "name", "text", "number", "sign"]

MAX_QUERY_CHARS = 100_000
"""Of the longest query that runs."""
MAX_CHARS = 10_000  # longer text has no `tokens`; the benchmarks' gold queries stay below 3,000

# As in SQLite, strings, quoted names and block comments without an end run to that of the text.
_COMMENT = r"--[^\n]*|/\*.*?(?:\*/|\Z)"
_DIGITS = r"\d+(?:_\d+)*"
_TOKEN = re.compile(
    rf"""
    \s*(?:(?:{_COMMENT})\s*)*
    (?: (?P<word> [^\W\d]\w* )
      | (?P<number> 0[xX][0-9a-fA-F]+(?:_[0-9a-fA-F]+)*
        | (?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})? )
      | (?P<text> '[^']*(?:''[^']*)*(?:'|\Z) )
      | (?P<name> "[^"]*(?:""[^"]*)*(?:"|\Z) | `[^`]*(?:``[^`]*)*(?:`|\Z) | \[[^\[\]]*\] )
      | (?P<sign> <=|>=|<>|!=|==|\|\||. )
      | \Z
    )
    """,
    re.VERBOSE | re.DOTALL,
)


_SMALL = {ord(letter): letter.lower() for letter in ascii_uppercase}


class Token(NamedTuple):
    """One token: [start, end) in characters, and the number of brackets open around it.

    `text` is in lower case and without quotes, except for strings.
    """

    kind: TokenKind
    text: str
    start: int
    end: int
    depth: int

    def is_word(self, *words: str) -> bool:
        """Tell one of some keywords; quoted names are none."""
        return self.text in words and self.kind == "word"

    def is_name(self, name: str) -> bool:
        """Tell a name, in quotes or not."""
        return self.text == name and self.kind in ("word", "name")

    def is_sign(self, sign: str) -> bool:
        """Tell an operator or a bracket."""
        return self.text == sign and self.kind == "sign"


@cached(maxsize=2048)
def tokenize(sql: str) -> tuple[Token, ...]:
    """Split any text into tokens; blanks and comments are left out.

    Returns:
        Tokens in order. A closing bracket without an opening one leaves the depth at 0.
    """
    return tuple(scan(sql))


def scan(sql: str) -> Iterator[Token]:
    """Yield the tokens of any text one by one; see `tokenize`."""
    depth = 0
    for match in _TOKEN.finditer(sql):
        kind = match.lastgroup
        if kind is None:  # blanks at the end
            continue
        start, end = match.span(kind)
        text = sql[start:end]
        if kind != "text":
            text = (unquote(text) if kind == "name" else text).lower()
        is_sign = kind == "sign"
        depth -= is_sign and text == ")" and depth > 0
        yield Token(kind, text, start, end, depth)  # ty: ignore[invalid-argument-type]
        depth += is_sign and text == "("


def quoted(name: str) -> str:
    """Quote a name as SQL does."""
    return '"' + name.replace('"', '""') + '"'


def unquote(name: str) -> str:
    """Take the quotes off a name."""
    if name[:1] == "[":
        return name[1:].removesuffix("]")
    quote = name[:1]
    return name[1:].removesuffix(quote).replace(quote * 2, quote)


def tokens(sql: str) -> tuple[str, ...]:
    """Split a query into the texts of its tokens (Progress-SQL's lexical alignment).

    Lower-cased except inside `'` and `"`, quotes included; trailing semicolons dropped. Nothing
    of text beyond `MAX_CHARS`.
    """
    if len(sql) > MAX_CHARS:
        return ()
    found = list(tokenize(sql))
    while found and found[-1].is_sign(";"):
        found.pop()
    raw = (sql[token.start : token.end] for token in found)
    return tuple(text if text[0] in "'\"" else text.lower() for text in raw)


def strip_comments(sql: str) -> str:
    """Replace every comment, and other blanks, by as many spaces; quoted text is left alone."""
    parts, at = [], 0
    for token in tokenize(sql):
        parts += [" " * (token.start - at), sql[token.start : token.end]]
        at = token.end
    return "".join(parts).ljust(len(sql))


def one_line(sql: str, *, in_small: bool = False) -> str:
    """Write a query on one line: comments and whitespace outside of quotes become one space.

    `in_small` also writes letters outside of quotes small, of which SQLite does not tell the cases
    apart: those of ASCII.
    """
    parts, at = [], 0
    for token in tokenize(sql):
        text = sql[token.start : token.end]
        is_folded = in_small and token.kind not in ("text", "name")
        parts += [" " * (token.start > at), text.translate(_SMALL) if is_folded else text]
        at = token.end
    return "".join(parts).strip()
