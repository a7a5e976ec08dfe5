"""What a query may use: all of it is listed here, and everything else is forbidden.

A list of what is dangerous would miss what the next version of SQLite brings. `median` and
`percentile`, which APSW brings, are not on it: the SQLite of no official program has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any

import apsw

from sqlenv.executor.functions import CLOCK_FUNCTIONS
from sqlenv.sql.lexer import quoted

_PRAGMAS = frozenset(
    {"table_info", "table_xinfo", "table_list"}
    | {"foreign_key_list", "index_list", "index_info", "index_xinfo"}
)
_TABLE_FUNCTIONS = frozenset({"json_each", "json_tree", "jsonb_each", "jsonb_tree"})
_SCHEMA_TABLES = frozenset(
    {"sqlite_schema", "sqlite_master", "sqlite_temp_schema", "sqlite_temp_master"}
)
_ANY_TABLE = _TABLE_FUNCTIONS | _SCHEMA_TABLES | {f"pragma_{name}" for name in _PRAGMAS}
# By the text of the statement: a file may have other columns that contradict it. SQLite writes the
# words in front of the name itself, whatever the user wrote.
_OWN_TABLES = """
SELECT CAST(name AS BLOB), sql LIKE 'create table %' OR sql LIKE 'create view %'
FROM sqlite_schema
WHERE sql NOT LIKE 'create index %' AND sql NOT LIKE 'create unique index %'
    AND sql NOT LIKE 'create trigger %'
"""
CHANCE = frozenset({"random", "randomblob"})  # functions whose value cannot be foreseen
SCANS = frozenset({"glob", "instr", "like", "ltrim", "replace", "rtrim", "trim"})
"""Functions of which one call may take milliseconds: they look for one text at each place of
another, or trim in Python, character by character.
"""
SQUARES = frozenset({"json_patch", "json_pretty", "jsonb_patch"})
"""Functions that compare each member of an object with each of another, or indent every level."""
_NAMES = """
abs changes char coalesce concat concat_ws format glob hex if ifnull iif instr last_insert_rowid
length like likelihood likely lower ltrim max min nullif octet_length printf quote replace round
rtrim sign soundex sqlite_version substr substring subtype total_changes trim typeof
unicode unistr unistr_quote unlikely upper zeroblob

avg count group_concat string_agg sum total
cume_dist dense_rank first_value lag last_value lead nth_value ntile percent_rank rank
row_number

acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10 log2
mod pi pow power radians sin sinh sqrt tan tanh trunc

-> ->> json json_array json_array_insert json_array_length json_error_position json_extract
json_group_array json_group_object json_insert json_object json_quote json_remove json_replace
json_set json_type json_valid jsonb jsonb_array jsonb_array_insert jsonb_extract
jsonb_group_array jsonb_group_object jsonb_insert jsonb_object jsonb_remove jsonb_replace
jsonb_set

match regexp
"""
_FUNCTIONS = frozenset(_NAMES.split()) | CHANCE | CLOCK_FUNCTIONS | SQUARES


def listed() -> list[str]:
    """List all names that a query may use; they are part of the key of cached gold results, so that
    a release with other names runs the queries again.
    """
    return sorted({*_PRAGMAS, *_ANY_TABLE, *_FUNCTIONS})


def forbidden(action: int, first: str | None, second: str | None) -> str:
    """Name what a statement may not do; empty where it may. Whatever is not listed is forbidden."""
    if action in (apsw.SQLITE_SELECT, apsw.SQLITE_RECURSIVE):
        return ""
    if action == apsw.SQLITE_READ:
        # The connection has looked for it among the database's own tables.
        table = str(first).lower()
        if table in _ANY_TABLE:
            return ""
        # If no column of a table is read, SQLite reports the name as written, usually a CTE's.
        return "" if second == "" and not _is_built_in(table) else f"table {table}"
    if action == apsw.SQLITE_FUNCTION:
        function = str(second).lower()
        return "" if function in _FUNCTIONS else f"function {function}"
    if action == apsw.SQLITE_PRAGMA and str(first).lower() in _PRAGMAS:
        return ""
    if first in ("sqlite_master", "sqlite_temp_master"):
        return "schema change"
    return str(apsw.mapping_authorizer_function.get(action, action)).removeprefix("SQLITE_")


def _is_built_in(table: str) -> bool:
    """Ask SQLite whether every database has such a table; some are made when they are named."""
    with closing(apsw.Connection(":memory:")) as connection:
        try:
            connection.execute(f"SELECT 1 FROM {quoted(table)}")
        except apsw.Error as error:
            return "no such table" not in str(error)
    return True


def read_tables(connection: apsw.Connection, codec: str) -> dict[str, bool]:
    """Map a database's own tables and views, in small letters, to whether queries may read them: a
    virtual table runs code of its own.
    """
    rows: Iterable[tuple[Any, Any]] = connection.execute(_OWN_TABLES)
    return {(name or b"").decode(codec, "replace").lower(): bool(is_open) for name, is_open in rows}
