"""Run queries that nobody has vetted, and get values back.

The way of a query: `Engine.execute` in this process or, through `Processes`, in another; there
`Guard.run` on a connection with every control set.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from threading import get_ident
from typing import Self, TypeVar

from sqlenv.cache import DiskCache
from sqlenv.config import ExecutorConfig
from sqlenv.evaluators.comparators import Case, CaseVerdict, check_case
from sqlenv.evaluators.votes import VoteBy
from sqlenv.executor.database import Identity, identify
from sqlenv.executor.engine import NAG_S, DatabaseQuery, Engine
from sqlenv.executor.gold import GoldCache
from sqlenv.executor.processes import Processes
from sqlenv.sql.lexer import MAX_QUERY_CHARS
from sqlenv.types import Result, TimedOut

_log = logging.getLogger(__name__)
# What a query may take before it counts as slow: some 20 to 50 ms.
_QUICK_STEPS = 5_000_000
# Queries that are asked for together: enough to hide the cost of that, few enough to keep all
# workers busy to the end.
_MOST_TOGETHER = 16
A = TypeVar("A")
T = TypeVar("T")


class Executor:
    """Executes SQL on SQLite files, read-only and bounded. Threads may share one; forks may not.

    All single queries have few steps at first, and those that need more run again: of slow ones
    there is one less at a time than there are workers. Gold results outlive it where it is given a
    cache on disk.
    """

    def __init__(self, config: ExecutorConfig, disk: DiskCache | None = None):
        self.config = config
        self._process = os.getpid()
        self._gold = GoldCache(config, disk)
        self._seen: dict[Path, Identity] = {}
        self._slow = threading.Semaphore(config.workers - 1) if config.workers > 1 else None
        self._backend = Engine(config) if config.isolation == "thread" else Processes(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Start worker processes now, so that they are there when the first query comes."""
        if isinstance(self._backend, Processes):
            self._backend.start()

    def execute(self, database: Path, sql: str, *, max_steps: int | None = None) -> Result:
        """Run one query of any text; a budget of steps may take the place of the settings'.

        Returns:
            The table, or why there is none.

        Raises:
            UserError: The database cannot be used; see `check_database`.
        """
        ((database, sql),) = self._checked([(database, sql)])
        steps = max_steps or self.config.max_steps
        if self._slow is None or steps <= _QUICK_STEPS:
            return self._backend.run(Engine.execute, database, sql, steps)
        result = self._backend.run(Engine.execute, database, sql, _QUICK_STEPS)
        if result != TimedOut("steps"):
            return result
        with self._slow:
            return self._backend.run(Engine.execute, database, sql, steps)

    def execute_many(self, queries: Sequence[DatabaseQuery]) -> list[Result]:
        """Run queries on all workers, each distinct one once; results come in their order."""
        distinct = list(dict.fromkeys(queries))
        results = self._run_many(Engine.execute_many, self._checked(distinct))
        found = dict(zip(distinct, results, strict=True))
        return [found[query] for query in queries]

    def votes(self, queries: Sequence[DatabaseQuery], by: VoteBy) -> list[str | None]:
        """Run queries as `execute_many` does, and give their votes in the queries' order.

        Rows stay where they were read, however many queries there are; none of one that does not
        run.
        """
        votes = self._run_many(Engine.votes, self._checked(queries), by)
        return [vote if isinstance(vote, str) else None for vote in votes]

    def gold(self, database: Path, sql: str) -> Result:
        """Give a gold query's result, computed once for this database, query and set of limits.

        Results of the moment (wall time, memory, a clock that runs, chance) are not kept.
        """
        return self.gold_many([(database, sql)])[0]

    def gold_many(self, queries: Sequence[DatabaseQuery]) -> list[Result]:
        """Give gold results in order; those not computed before run on all workers."""
        self._check_use(database for database, _ in queries)
        return self._gold.get(queries, self.execute_many)

    def judge(self, cases: Sequence[Case], names: Sequence[str]) -> list[CaseVerdict]:
        """Ask comparators about cases; judgements come in the cases' order."""
        for case in cases:
            check_case(case, names)
        self._check_use(file for case in cases for file in (case.database, *case.suite))
        judged = self._run_many(Engine.judge, cases, tuple(names))
        return [_verdict(one, names) for one in judged]

    def close(self) -> None:
        """End the workers and close the connections."""
        self._backend.close()

    def _run_many(
        self, method: Callable[..., list[T]], asked: Sequence[A], *rest: object
    ) -> list[T | Result]:
        """Call a method of `Engine` with parts of what is asked, on all workers."""
        workers = self.config.workers
        threads: set[int] = set()
        is_over = threading.Event()

        def run(part: Sequence[A]) -> list[T | Result]:
            answers = self._backend.run(method, part, *rest)
            if isinstance(answers, list):
                return list(answers)
            if is_over.is_set():
                raise CancelledError
            # The worker died, and of several it does not say whose fault that is.
            return [answers] if len(part) == 1 else [one for each in part for one in run([each])]

        if len(asked) <= 1:
            return run(asked)
        length = min(-(-len(asked) // (4 * workers)), _MOST_TOGETHER)
        parts = [asked[at : at + length] for at in range(0, len(asked), length)]
        with ThreadPoolExecutor(workers, initializer=lambda: threads.add(get_ident())) as pool:
            futures = [pool.submit(run, part) for part in parts]
            try:
                return [answer for future in futures for answer in future.result()]
            except BaseException:
                is_over.set()
                pool.shutdown(wait=False, cancel_futures=True)
                while not all(future.done() for future in futures):
                    self._backend.cancel(threads)
                    time.sleep(NAG_S)
                raise

    def _checked(self, queries: Sequence[DatabaseQuery]) -> list[DatabaseQuery]:
        self._check_use(database for database, _ in queries)
        # More of a text is not needed to refuse it, and a worker has no room for any.
        longest = MAX_QUERY_CHARS + 1
        return [(database, sql[:longest]) for database, sql in queries]

    def _check_use(self, databases: Iterable[Path]) -> None:
        """Name files that were written to since they were last looked at; they are read anew."""
        if os.getpid() != self._process:
            raise RuntimeError("an Executor does not survive a fork: make one in the new process")
        for database in set(databases):
            identity = identify(database)
            if self._seen.get(database, identity) != identity:
                _log.warning(
                    "%s: the database changed while it was in use; results before and after "
                    "cannot be compared",
                    database,
                )
            self._seen[database] = identity


def _verdict(answer: CaseVerdict | Result, names: Sequence[str]) -> CaseVerdict:
    """Give a case's judgement, or one of a prediction that took its worker down."""
    if isinstance(answer, CaseVerdict):
        return answer
    is_late = answer.status == "timeout"
    return CaseVerdict(dict.fromkeys(names, 0.0), answer.status, "ok", is_late)
