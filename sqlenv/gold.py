"""Results of gold queries: computed once, kept in memory and on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apsw

from sqlenv.ballots import Ballot
from sqlenv.comparators import Judgement
from sqlenv.config import ExecutorConfig
from sqlenv.database import Identity, fingerprint, identify
from sqlenv.errors import UserError
from sqlenv.types import Result, Table, TimedOut, TooLarge
from sqlenv.wire import decode, encode

Query = tuple[Path, str]

# What can change the result, beside the database and the query.
_LIMITS = {
    *("max_steps", "max_rows", "max_bytes", "max_value_bytes", "max_sql_chars", "text"),
    "reverse_unordered",
}
# Answers that another day, another run or another time zone would not give.
_FLEETING_SQL = re.compile(
    r"""
      \b (random | randomblob | current_(date | time | timestamp)) \b
    | \b (date | time | datetime | julianday | unixepoch) \s* \( \s* \)
    | \b strftime \s* \( \s* (\w+ | '[^']*' | "[^"]*") \s* \)
    | ['"] (now | subsec | subsecond | localtime | utc) ['"]
    """,
    re.IGNORECASE | re.VERBOSE,
)
FLEETING = (TimedOut("wall"), TooLarge("memory"))
"""Results that a machine with less to do might not give."""
_MEMORY_ENTRIES = 20_000


class GoldCache:
    """Results by what is in the database, the query and the limits that matter."""

    def __init__(self, config: ExecutorConfig):
        self._folder = config.cache_dir
        limits = config.model_dump(include=_LIMITS)
        self._context = json.dumps([apsw.sqlite_lib_version(), sorted(limits.items())])
        self._memory: OrderedDict[tuple[Identity, str], Result] = OrderedDict()

    def get(
        self, queries: Sequence[Query], run: Callable[[Sequence[Query]], list[Result]]
    ) -> list[Result]:
        """Look results up in memory, then on disk; run the rest, all at once, and keep them."""
        keys = [(identify(database), sql) for database, sql in queries]
        found = {key: self._recall(key) for key in keys}
        missing = [key for key, result in found.items() if result is None]
        results = run([(Path(identity[0]), sql) for identity, sql in missing]) if missing else []
        for key, result in zip(missing, results, strict=True):
            found[key] = result
            self._store(key, result)
        return [result for key in keys if (result := found[key]) is not None]

    def keep(self, query: Query, result: Result) -> None:
        """Keep a result that was computed elsewhere, if results like it are kept."""
        self._store((identify(query[0]), query[1]), result)

    def _recall(self, key: tuple[Identity, str]) -> Result | None:
        result = self._memory.get(key)
        if result is None and self._folder:
            # A damaged or foreign file is the same as none: it is written again.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                result = _read(self._path(self._folder, key))
                self._remember(key, result)
        return result

    def _store(self, key: tuple[Identity, str], result: Result) -> None:
        if result in FLEETING or _FLEETING_SQL.search(key[1]):
            return
        self._remember(key, result)
        if self._folder:
            try:
                _write(self._path(self._folder, key), result)
            except OSError as error:
                raise UserError(
                    f"{self._folder}: cannot keep gold results here ({error.strerror}); "
                    "set cache_dir to a folder with room that you may write"
                ) from None

    def _remember(self, key: tuple[Identity, str], result: Result) -> None:
        self._memory[key] = result
        if len(self._memory) > _MEMORY_ENTRIES:
            with contextlib.suppress(KeyError):  # another thread was quicker
                self._memory.popitem(last=False)

    def _path(self, folder: Path, key: tuple[Identity, str]) -> Path:
        identity, sql = key
        text = json.dumps([fingerprint(Path(identity[0])), sql, self._context])
        name = hashlib.sha256(text.encode()).hexdigest()
        return folder / name[:2] / f"{name}.json"


def _read(path: Path) -> Result:
    fields = json.loads(path.read_text(), object_hook=lambda blob: bytes.fromhex(blob["hex"]))
    if fields[0] == Table.__name__:
        columns, rows, is_mended = fields[1:]
        return Table(tuple(columns), tuple(map(tuple, rows)), is_mended)
    result = decode(fields)
    if isinstance(result, Judgement | Ballot):
        raise ValueError("not a result")
    return result


def _write(path: Path, result: Result) -> None:
    """Write a file whole or not at all: other processes may read and write the same one."""

    def blob(value: Any) -> dict[str, str]:
        return {"hex": value.hex()}

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        json.dump(encode(result), file, default=blob)
    os.replace(file.name, path)  # noqa: PTH105
