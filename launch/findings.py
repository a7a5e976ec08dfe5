"""What was found of questions, kept on disk: no question is looked at twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import apsw

from sqlenv.data.issues import Checked
from sqlenv.errors import UserError
from sqlenv.executor.database import identify, open_new
from sqlenv.types import Example

Ask = Callable[[Sequence[Example]], Iterable[tuple[int, Checked]]]


class Findings:
    """A SQLite file of findings by what they depend on. One process at a time.

    Args:
        path: The file.
        settings: Everything that decides a finding beside the question and its database.

    Raises:
        UserError: The file is damaged.
    """

    def __init__(self, path: Path, settings: Any) -> None:
        self._path = path
        self._settings = json.dumps(settings, sort_keys=True)
        self._connection = open_new(path)
        self.new = 0
        with self._readable():
            # A kill of this process leaves the file whole; only a power failure might not.
            self._connection.execute("PRAGMA synchronous = off; PRAGMA journal_mode = wal")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS finding (key BLOB PRIMARY KEY, value TEXT) "
                "WITHOUT ROWID"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._connection.close()

    def look(self, examples: Sequence[Example], ask: Ask) -> list[Checked]:
        """Look questions up, and ask for those that are not there, all at once.

        Args:
            examples: Questions.
            ask: Finds out; answers in any order with the places of the questions, and each answer
                is kept as it comes.
        """
        keys = [self._key(example) for example in examples]
        with self._readable():
            known = [self._get(key) for key in keys]
        missing = [place for place, text in enumerate(known) if text is None]
        found = [
            None if text is None else _read(example, text)
            for example, text in zip(examples, known, strict=True)
        ]
        for number, answer in ask([examples[place] for place in missing]) if missing else ():
            place = missing[number]
            found[place] = answer
            self.new += 1
            if answer.is_final:
                self._connection.execute(
                    "INSERT OR REPLACE INTO finding VALUES (?, ?)", (keys[place], _write(answer))
                )
        return [one for one in found if one is not None]

    def _get(self, key: bytes) -> str | None:
        row = self._connection.execute("SELECT value FROM finding WHERE key = ?", (key,)).get
        return None if row is None else str(row)

    def _key(self, example: Example) -> bytes:
        e = example
        told = [*identify(e.database), e.gold_sql, e.dialect, e.question, e.evidence]
        text = json.dumps([*told, self._settings])
        return hashlib.sha256(text.encode()).digest()[:16]

    @contextmanager
    def _readable(self) -> Generator[None]:
        try:
            yield
        except (apsw.NotADBError, apsw.CorruptError) as error:
            raise UserError(f"{self._path}: is damaged ({error}); delete it to go on") from None


def _write(checked: Checked) -> str:
    c = checked
    return json.dumps([c.issues, c.note, c.rows, c.prompt_tokens, c.example.value_matches])


def _read(example: Example, text: str) -> Checked:
    flaws, note, rows, prompt_tokens, hints = json.loads(text)
    asked = replace(example, value_matches=tuple(map(tuple, hints)))
    return Checked(asked, tuple(flaws), note, "", rows, prompt_tokens)
