"""Values of a database that a question names, as OmniSQL shows them in its prompts.

OmniSQL (process_dataset.py, build_contents_index.py) indexes all texts of a database with Lucene,
asks it for each run of up to 8 words of the question, and keeps the values of which more than 85 %
stands in the question. Here SQLite's FTS5 takes Lucene's place: both rank by BM25 and stem English,
but scores differ, and a run finds the values that have all of its words, where Lucene also takes
some of them: now and then another value is shown. Letters are compared without case and accents,
and in scripts without blanks each character is a word.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

import apsw

from minirl.exchange import UserError
from sqlenv.cache import DiskCache, content_key
from sqlenv.executor.database import codec_of, connect, fingerprint, open_new, reading, with_memory
from sqlenv.schema.reading import Column, DatabaseSchema, read_schema
from sqlenv.sql.lexer import quoted
from sqlenv.types import Example, ValueMatch

VALUE_CHARACTERS = 40  # longer values are not indexed
WORDS = 8  # words of a run at most
HITS = 10  # values that a run of words finds at most
SHARE = 0.85  # more than this share of a value has to stand in the question, in one piece
MOST = 20  # values of a question at most
SHOWN = 6  # values of a column that are shown at most, sampled ones included
_VERSION = 1  # of the rule that finds values
_OPEN = 64  # indexes that stay open

# Thai to Khmer, Chinese, Japanese, Korean: words are not set apart, or have endings.
_SCRIPTS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_SCRIPTS += "\U00020000-\U0003ffff"
_WORD = re.compile(rf"(?!\W)[{_SCRIPTS}]|[^\W_{_SCRIPTS}]+")
_ACCENTS = re.compile("[\u0300-\u036f]")
# Lucene's own list for English: such words are not searched for.
_STOP_WORDS = frozenset(
    {"a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it"}
    | {"no", "not", "of", "on", "or", "such", "that", "the", "their", "then", "there", "these"}
    | {"they", "this", "to", "was", "will", "with"}
)
_INDEX = """
CREATE VIRTUAL TABLE value USING fts5(
    words, text UNINDEXED, "table" UNINDEXED, "column" UNINDEXED, tokenize = 'porter unicode61'
)
"""
_INSERT = 'INSERT INTO value ("table", "column", text, words) VALUES (?, ?, ?, ?)'
_SEARCH = f"""
SELECT text, "table", "column" FROM value WHERE value MATCH ? ORDER BY rank, rowid LIMIT {HITS}
"""


def build_index(database: Path, index: Path) -> None:
    """Write the index of the texts in a database's tables to a new file.

    Numbers written as text are left out, as are empty and long values.
    """
    connection = open_new(index)
    try:
        # Nothing has to reach the disk: a kill leaves a file that nobody uses.
        connection.execute("PRAGMA journal_mode = off; PRAGMA synchronous = off")
        connection.execute("BEGIN").execute(_INDEX)
        texts = _texts(database)
        connection.executemany(_INSERT, ((*text, " ".join(_words(text[2]))) for text in texts))
        connection.execute("INSERT INTO value(value) VALUES ('optimize')").execute("COMMIT")
    except apsw.CorruptError as error:
        raise UserError(f"{database}: the database file is damaged ({error})") from None
    finally:
        connection.close()


def _texts(database: Path) -> Iterator[ValueMatch]:
    tables = [one for one in read_schema(database, examples=0).tables if one.kind == "TABLE"]
    with reading(database) as connection:
        codec = codec_of(connection)
        for table, column in ((t, c) for t in tables for c in t.columns):
            name = quoted(column.name)
            # As bytes, since they may not be valid text.
            sql = (
                f"SELECT DISTINCT CAST({name} AS BLOB) FROM {quoted(table.name)} NOT INDEXED "
                f"WHERE typeof({name}) = 'text' AND length({name}) BETWEEN 1 AND {VALUE_CHARACTERS}"
            )
            with suppress(apsw.SQLError):  # of a generated column, for one of the rows
                for (value,) in connection.execute(sql):
                    text = value.decode(codec, "ignore") if isinstance(value, bytes) else ""
                    if text and not _is_number(text):
                        yield table.name, column.name, text


def fold(text: str) -> str:
    """Write a text without case and accents; wide letters and others that look alike as one."""
    plain = _ACCENTS.sub("", unicodedata.normalize("NFKD", text))
    return unicodedata.normalize("NFC", plain).casefold()


def _words(text: str) -> list[str]:
    return _WORD.findall(fold(text))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class ValueMatcher:
    """Finds values that questions name. What was found before, and each database's index, is in a
    cache. Thread-safe; only questions about one database wait for one another.
    """

    def __init__(self, disk: DiskCache) -> None:
        self._disk = disk
        self._index = lru_cache(maxsize=_OPEN)(self._open_index)
        self._asking: dict[str, threading.Lock] = {}

    def matches(self, example: Example) -> tuple[ValueMatch, ...]:
        """Find the values that a question and its evidence name, the best first."""
        asked = "\n".join(filter(None, (example.evidence, example.question)))
        contents = fingerprint(example.database)
        key = content_key("values", _VERSION, contents, asked)
        if (known := self._disk.get(key)) is None:
            with self._asking.setdefault(contents, threading.Lock()):
                known = with_memory(
                    lambda: named_values(self._index(example.database, contents), asked)
                )
            self._disk[key] = known
        return tuple((table, column, value) for table, column, value in known)

    def _open_index(self, database: Path, contents: str) -> apsw.Connection:
        key = content_key("value index", _VERSION, contents)
        return connect(self._disk.made_file(key, partial(build_index, database)))


def named_values(index: apsw.Connection, asked: str) -> tuple[ValueMatch, ...]:
    """Find the values of which enough stands in a text: largest share first, then longest."""
    found = list(dict.fromkeys(chain.from_iterable(_runs(index, asked))))
    # Up to 2 MB of pages, which the queries of executors would lack: SQLite's heap is one.
    index.release_memory()
    asked = fold(asked)
    scored = [(share(match[2], asked), len(match[2]), at) for at, match in enumerate(found)]
    kept = sorted((score for score in scored if score[0] > SHARE), reverse=True)
    return tuple(found[at] for _, _, at in kept[:MOST])


def _runs(index: apsw.Connection, asked: str) -> Iterator[list[ValueMatch]]:
    """Yield what each run of words finds, where both runs one word shorter found any."""
    words = _words(asked)
    alive = [True] * (len(words) + 1)
    searched: dict[frozenset[str], list[ValueMatch]] = {}
    for length in range(1, WORDS + 1):
        spans = range(len(words) - length + 1)
        alive = [alive[at] and alive[at + 1] for at in spans]
        for at in spans:
            wanted = frozenset(words[at : at + length]) - _STOP_WORDS
            if not alive[at] or not wanted:
                continue
            if wanted not in searched:
                searched[wanted] = _search(index, wanted)
                yield searched[wanted]
            alive[at] = bool(searched[wanted])
        if not any(alive):
            return


def _search(index: apsw.Connection, words: frozenset[str]) -> list[ValueMatch]:
    query = " ".join(f'"{word}"' for word in sorted(words))
    rows = index.execute(_SEARCH, (query,))
    return [(str(table), str(column), str(text)) for text, table, column in rows]


def share(value: str, asked: str) -> float:
    """Return which share of a value stands in a folded question in one piece.

    0 where it is not over `SHARE`, or where the value has nothing but accents.
    """
    value = fold(value)
    for length in range(len(value), int(SHARE * len(value)), -1):
        pieces = (value[at : at + length] for at in range(len(value) - length + 1))
        if any(piece in asked for piece in pieces):
            return length / len(value)
    return 0.0


def with_matches(schema: DatabaseSchema, matches: Sequence[ValueMatch]) -> DatabaseSchema:
    """Show the value matches as examples of their columns, before the sampled ones."""
    values: dict[tuple[str, str], list[str]] = {}
    for table, column, value in matches:
        values.setdefault((table.lower(), column.lower()), []).append(value)

    def shown(table: str, column: Column) -> Column:
        named = values.get((table.lower(), column.name.lower()))
        if not named or column.span:
            return column
        examples = tuple(dict.fromkeys((*named, *column.examples)))
        return replace(column, examples=examples[:SHOWN])

    return schema.replace_columns(shown)
