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
        found: list[Checked | None] = [None for _ in examples]
        for place, (example, text) in enumerate(zip(examples, known, strict=True)):
            if text is not None:
                issues, note, rows, prompt_tokens, matches = json.loads(text)
                asked = replace(example, value_matches=tuple(map(tuple, matches)))
                found[place] = Checked(asked, tuple(issues), note, "", rows, prompt_tokens)
        missing = [place for place, checked in enumerate(found) if checked is None]
        for number, answer in ask([examples[place] for place in missing]) if missing else ():
            place = missing[number]
            found[place] = answer
            if answer.is_final:
                one, matches = answer, answer.example.value_matches
                kept = [one.issues, one.note, one.rows, one.prompt_tokens, matches]
                self._cache.set(keys[place], json.dumps(kept))
        return [one for one in found if one is not None]

    def _key(self, e: Example) -> bytes:
        parts = [*identify(e.database), e.gold_sql, e.dialect, e.question, e.evidence]
        text = json.dumps([*parts, self._settings])
        return hashlib.sha256(text.encode()).digest()[:16]
