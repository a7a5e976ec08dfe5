"""Queries spelled as a schema writes its names, for a model to learn from."""

from __future__ import annotations

from itertools import pairwise

from sqlenv.schema.reading import DatabaseSchema
from sqlenv.sql.lexer import Token, quoted, tokenize, unquote

# What names a table follows one of these.
_BEFORE_TABLES = ("from", "join", "update", "into")


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
    aliases = {after.text for token, after in pairwise(found) if token.is_word("as")}
    parts, end = list[str](), 0
    nothing = Token("sign", "", 0, 0, 0)
    for before, token, after in zip((nothing, *found), found, (*found[1:], nothing), strict=False):
        text = sql[token.start : token.end]
        parts.append(" " * (0 < end < token.start))
        end = token.end
        is_column = token.text in columns
        is_called = token.kind == "word" and after.is_sign("(")
        is_table = before.is_word(*_BEFORE_TABLES) or after.is_sign(".")
        if token.kind not in ("word", "name") or is_called:
            parts.append(text)
        elif token.text in tables and (not is_column or is_table):
            parts.append(_written(text, tables[token.text]))
        elif is_column:
            parts.append(_written(text, columns[token.text]))
        elif text[0] == '"' and token.text not in aliases:
            parts.append("'" + unquote(text).replace("'", "''") + "'")
        else:
            parts.append(text)
    return "".join(parts)


def _written(text: str, name: str) -> str:
    """Keep the quotes that a name may need."""
    return name if text[0] not in '"`[' else quoted(name)
