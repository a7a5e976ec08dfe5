"""What the official evaluators do to the text of a query before they run it."""

from __future__ import annotations

import re
from itertools import dropwhile
from typing import Literal

from sqlenv.cache import cached
from sqlenv.sql.lexer import MAX_QUERY_CHARS, one_line, tokenize

_BLANK = " \t\n\f\r"  # what SQLite and Python's sqlite3 module take for white space
_ODD_BLANK = re.compile(r"[^\S \t\n\f\r]")  # white space to others, and a sign to them
# As sqlparse splits text, of which Spider's program drops tokens. A backslash before a quote keeps
# a string open where a later quote can end it.
_WORDS = re.compile(
    r"""(?P<kept> (?:--|\#[ ])[^\r\n]* | /\*.*?(?:\*/|\Z)
        | '(?:''|\\'|[^'])*' | "(?:""|\\"|[^"])*" | `(?:``|[^`])*` | \xb4(?:\xb4\xb4|[^\xb4])*\xb4
        | (?<![\w\])])\[[^\]\[]+\] | [$:?\\@#]\w+ )
    | (?<![\w$#])distinct(?![\w$#]) | (?P<end> ; ).*""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)


@cached(maxsize=8192)  # asked for each database of a test suite
def count_statements(sql: str) -> Literal["none", "one", "several"]:
    """Count the statements of a text as Python's sqlite3 module does.

    It runs a text of none, which gives no rows, and refuses whatever but comments stands behind the
    first one's semicolon, if only another semicolon.
    """
    if len(sql) > MAX_QUERY_CHARS:
        return "one"
    if ";" not in sql and sql.strip(_BLANK) and not sql.lstrip(_BLANK).startswith(("-", "/")):
        return "one"
    is_end = [token.is_sign(";") for token in tokenize(_ODD_BLANK.sub("?", sql))]
    statement = list(dropwhile(bool, is_end))
    if True in statement[:-1]:
        return "several"
    return "one" if statement else "none"


@cached(maxsize=8192)
def as_spider_runs(sql: str) -> str:
    """Write a query as Spider's program runs it (taoyds/test-suite-sql-eval, exec_eval.py).

    `> =` and its like are joined; every DISTINCT is deleted, and with it whatever stands behind the
    first statement; the current year is 2020.
    """
    for operator in (">", "<", "!"):
        sql = sql.replace(f"{operator} =", f"{operator}=")
    if "distinct" in sql.lower() or ";" in sql:
        sql = _WORDS.sub(lambda found: found["kept"] or found["end"] or "", sql)
    return _CURRENT_YEAR.sub("2020", sql)


@cached(maxsize=8192)
def same_query(sql: str) -> str:
    """Write a query on one line, so that those which differ in letter case, white space, comments
    or semicolons at the end alone become equal.

    Quoted text stays as it is. Results of equal ones are equal but for the names of columns.
    """
    if len(sql) > MAX_QUERY_CHARS or _ODD_BLANK.search(sql):
        return sql
    return one_line(sql, in_small=True).rstrip("; ")
