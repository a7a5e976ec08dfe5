"""Queries spelled as a schema writes its names, for a model to learn from."""

from __future__ import annotations

from itertools import pairwise

import apsw

from sqlenv.schema.reading import DatabaseSchema
from sqlenv.sql.lexer import Token, quoted, tokenize, unquote

# What names a table follows one of these.
_BEFORE_TABLES = ("from", "join", "update", "into")
_KEYWORDS = frozenset(map(str.lower, apsw.keywords)) - {"as", "end"}


def spelled(sql: str, schema: DatabaseSchema) -> str:
    """Write a SQLite query on one line, with one blank where there were several, names as the
    schema has them, and strings in single quotes. Its result is the same.

    SQLite takes a word in double quotes that names nothing for a string.
    """
    found = tokenize(sql)
    while found and found[-1].is_sign(";"):
        found = found[:-1]
    mentioned = {token.text for token in found if token.kind in ("word", "name")}
    tables = {table.name.lower(): table.name for table in schema.tables}
    columns = {
        column.name.lower(): column.name
        for table in schema.tables
        if table.name.lower() in mentioned
        for column in table.columns
    }
    tables_first, columns_first = columns | tables, tables | columns
    # After another operand, or a table, a name is an alias.
    operators = _KEYWORDS - columns.keys()
    aliases = {
        after.text
        for token, after in pairwise(found)
        if token.is_sign(")") or not (token.kind == "sign" or token.is_word(*operators))
    }
    parts, end = list[str](), 0
    nothing = Token("sign", "", 0, 0, 0)
    for before, token, after in zip((nothing, *found), found, (*found[1:], nothing), strict=False):
        text = sql[token.start : token.end]
        parts.append(" " * (0 < end < token.start))
        end = token.end
        is_name = token.kind == "name" or (token.kind == "word" and not after.is_sign("("))
        is_table = before.is_word(*_BEFORE_TABLES) or after.is_sign(".")
        name = (tables_first if is_table else columns_first).get(token.text)
        if is_name and name is not None:
            if text[0] != '"':  # it may be a text all the same
                text = quoted(name) if text[0] in "`[" else name  # which may need quotes
        elif text[0] == '"' and token.text not in aliases and not (is_table or before.is_sign(".")):
            text = "'" + unquote(text).replace("'", "''") + "'"
        parts.append(text)
    return "".join(parts)
