"""What must not be paid for twice: verdicts in a file."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from exchange import UserError
from minirl.run.files import keep_lines, naming


class Progress:
    """What was found so far of several lists, in a file of JSON lines that is gone when the block
    ends well; one that was begun with other settings is refused.
    """

    def __init__(self, path: Path, settings: object) -> None:
        self._path, self._settings = path, settings
        self._found: defaultdict[str, list[Any]] = defaultdict(list)
        lines = keep_lines(path, list, advice="delete it to begin anew") if path.exists() else []
        if lines and lines[0] != [settings]:
            raise UserError(
                f"{path}: was begun with other settings; repeat these, or delete it to begin anew"
            )
        for name, piece in lines[1:]:
            self._found[name] += piece

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is None:
            self._path.unlink(missing_ok=True)

    def found(self, name: str) -> list[Any]:
        """Return a list as far as it goes."""
        return list(self._found[name])

    def add(self, name: str, piece: list[Any]) -> None:
        """Keep the next piece of a list."""
        with naming(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                begin = [] if file.tell() else [[self._settings]]
                file.writelines(json.dumps(line) + "\n" for line in (*begin, [name, piece]))
