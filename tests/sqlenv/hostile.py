"""Runs the hostile statements one by one and measures each: in a process of its own, or by import.

python -m tests.sqlenv.hostile FOLDER LIMITS all|endless|sorting prints one JSON object a statement:
how it ended, the seconds it took, by how many bytes the process grew at most. Linux only.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.types import Result, SqlError, Table, TimedOut
from tests.worlds import TOWN, make_file

DATA = Path(__file__).parents[1] / "data"
PROC = Path("/proc/self")


class Case(NamedTuple):
    """A statement, what it tries, and how it may end."""

    what: str
    ends: tuple[str, ...]
    sql: str

    @property
    def is_endless(self) -> bool:
        """Tell whether nothing but time or steps ends it."""
        return any(end.startswith("TimedOut") for end in self.ends)

    def is_among(self, which: str) -> bool:
        """Tell whether it is one of all, of those that sort, or of the other endless ones."""
        sorts = self.what in ("sort", "window")
        return {"all": True, "sorting": sorts, "endless": self.is_endless and not sorts}[which]


class Measured(NamedTuple):
    """How a statement ended.

    Attributes:
        ends: In the words of the data file.
        text: All of the result, without the rows.
        seconds: Wall time, without the time in which the machine ran other programs instead.
        grown_bytes: Highest resident memory, above that before the first statement.
    """

    ends: str
    text: str
    seconds: float
    grown_bytes: int


def read_hostile() -> list[Case]:
    """Read the statements. Their text may be in parts, of which `[text, n]` is a text n times."""
    lines = (DATA / "hostile_sql.jsonl").read_text().splitlines()
    return [_case(**json.loads(line)) for line in lines]


def read_legal() -> list[tuple[str, str]]:
    """Read legal queries, each with its rows as `repr`, which also tells 1 from 1.0."""
    cases = [json.loads(line) for line in (DATA / "legal_sql.jsonl").read_text().splitlines()]
    return [
        (case["sql"], repr(tuple(tuple(map(_value, row)) for row in case["rows"])))
        for case in cases
    ]


def name_end(result: Result) -> str:
    """Say how a statement ended: the kind of result and, where it is a reason of ours, that."""
    reason = () if isinstance(result, Table | SqlError) else (_reason(result),)
    return " ".join((type(result).__name__, *reason))


def digest_folder(folder: Path) -> dict[str, str]:
    """Digest every file in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def measure(cases: list[Case], database: Path, config: ExecutorConfig) -> Iterator[Measured]:
    """Run statements one by one; after each, make sure that nothing that follows was hurt.

    Raises:
        AssertionError: A legal query gives another answer, or a byte changed.
    """
    before = digest_folder(database.parent)
    legal = read_legal()
    with Executor(config) as executor:
        executor.execute(database, "SELECT 1")
        base = read_memory("VmRSS")
        for number, case in enumerate(cases):
            (PROC / "clear_refs").write_text("5")  # forget the highest so far
            with Waiting(threading.get_native_id()) as waiting:
                start_s = time.monotonic()
                result = executor.execute(database, case.sql)
                seconds = time.monotonic() - start_s - waiting.seconds()
            grown = read_memory("VmHWM") - base
            text = name_end(result) if isinstance(result, Table) else str(result)
            yield Measured(name_end(result), text, seconds, grown)
            del result
            sql, rows = legal[number % len(legal)]
            answer = executor.execute(database, sql)
            assert isinstance(answer, Table), (case.sql[:200], sql, answer)
            assert repr(answer.rows) == rows, (case.sql[:200], sql)
            assert digest_folder(database.parent) == before, case.sql[:200]


class Waiting:
    """Tells for how long a thread could have run while the machine ran others."""

    def __init__(self, thread: int):
        self._file = PROC / "task" / str(thread) / "schedstat"

    def __enter__(self) -> Waiting:
        self._first = self._read()
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    def seconds(self) -> float:
        """Count from the start until now."""
        return (self._read() - self._first) / 1e9

    def _read(self) -> int:
        return int(self._file.read_text().split()[1])


def read_memory(name: str) -> int:
    """Read `VmRSS` or `VmHWM` of this process in bytes."""
    lines = (PROC / "status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


def _case(*, what: str, ends: str, sql: str | list[Any]) -> Case:
    parts = [sql] if isinstance(sql, str) else sql
    text = "".join(part if isinstance(part, str) else part[0] * part[1] for part in parts)
    return Case(what, tuple(ends.split("|")), text)


def _value(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


def _reason(result: Any) -> str:
    return result.reason if isinstance(result, TimedOut) else result.what


def main() -> None:
    """Run all statements and print what was measured."""
    folder, limits, which = sys.argv[1:]
    config = ExecutorConfig.model_validate({"workers": 1} | json.loads(limits))
    cases = [case for case in read_hostile() if case.is_among(which)]
    for measured in measure(cases, make_file(Path(folder) / "town.sqlite", TOWN), config):
        sys.stdout.write(json.dumps(measured._asdict()) + "\n")


if __name__ == "__main__":
    main()
