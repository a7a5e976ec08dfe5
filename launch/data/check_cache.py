"""A cache on disk of what was found of questions: no gold query is checked twice."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from diskcache import Cache

from sqlenv.data.issues import Checked
from sqlenv.errors import UserError
from sqlenv.executor.database import identify
from sqlenv.types import Example

Ask = Callable[[Sequence[Example]], Iterable[tuple[int, Checked]]]


class CheckCache:
    """Checks by what they depend on: the question, its database's version and the settings."""

    def __init__(self, folder: Path, settings: Any) -> None:
        self._settings = json.dumps(settings, sort_keys=True)
        self.new = 0
        try:
            # Nothing is evicted. A kill leaves the file whole; only a power failure might not.
            self._cache = Cache(
                str(folder), eviction_policy="none", cull_limit=0, sqlite_synchronous=0
            )
        except sqlite3.DatabaseError as error:
            raise UserError(f"{folder}: is damaged ({error}); delete it to go on") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._cache.close()

    def look_up(self, examples: Sequence[Example], ask: Ask) -> list[Checked]:
        """Look questions up, and ask for those that are not there, all at once.

        Answers may come in any order, with the places of the questions; each is kept as it comes.
        """
        keys = [self._key(example) for example in examples]
        known = [self._cache.get(key) for key in keys]
        found = [
            None if text is None else _read(example, text)
            for example, text in zip(examples, known, strict=True)
        ]
        missing = [place for place, checked in enumerate(found) if checked is None]
        for number, answer in ask([examples[place] for place in missing]) if missing else ():
            place = missing[number]
            found[place] = answer
            self.new += 1
            if answer.is_final:
                self._cache.set(keys[place], _write(answer))
        return [one for one in found if one is not None]

    def _key(self, e: Example) -> bytes:
        parts = [*identify(e.database), e.gold_sql, e.dialect, e.question, e.evidence]
        text = json.dumps([*parts, self._settings])
        return hashlib.sha256(text.encode()).digest()[:16]


def _write(c: Checked) -> str:
    return json.dumps([c.issues, c.note, c.rows, c.prompt_tokens, c.example.value_matches])


def _read(example: Example, text: str) -> Checked:
    issues, note, rows, prompt_tokens, matches = json.loads(text)
    asked = replace(example, value_matches=tuple(map(tuple, matches)))
    return Checked(asked, tuple(issues), note, "", rows, prompt_tokens)
