"""Run queries that nobody has vetted, and get values back.

The way of a query: `guard.refuse_text`, then `Engine.execute` in this process or, through
`WorkerPool`, in another; there `Guard.run` on a connection with every control set.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Semaphore
from typing import Self

from sqlenv.config import ExecutorConfig
from sqlenv.evaluators.comparators import Case, Judgement, Runs, check_case, judge
from sqlenv.evaluators.votes import Ballot, VoteBy, ballot
from sqlenv.executor.channel import encode_case
from sqlenv.executor.database import Identity, check_database, identify
from sqlenv.executor.engine import Engine
from sqlenv.executor.gold import GoldCache, Query
from sqlenv.executor.guard import refuse_text
from sqlenv.executor.pool import WorkerPool
from sqlenv.executor.worker import Question
from sqlenv.types import Result, TimedOut, TooLarge, status_of

__all__ = ["Executor", "check_database"]

_log = logging.getLogger(__name__)

# What a query may take before it counts as slow: some 20 to 50 ms.
_QUICK_STEPS = 5_000_000
_JUDGED_CHARS = 1_000_000
"""Longer predictions are wrong unread: ten times what is run of a text that nobody cuts."""


class Executor:
    """Executes SQL on SQLite files, read-only and bounded. Threads may share one; forks may not."""

    def __init__(self, config: ExecutorConfig):
        self.config = config
        self._process = os.getpid()
        self._gold = GoldCache(config)
        self._seen: dict[Path, Identity] = {}
        self._backend = _Threads(config) if config.isolation == "thread" else _Processes(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Start worker processes now, so that they are there when the first query comes."""
        self._backend.start()

    def execute(self, database: Path, sql: str, *, max_steps: int | None = None) -> Result:
        """Run one query of any text; a budget of steps may take the place of the settings'.

        Returns:
            The table, or why there is none.

        Raises:
            UserError: The database cannot be used; see `check_database`.
        """
        refused = refuse_text(sql, max_sql_chars=self.config.max_sql_chars)
        if refused is not None:
            return refused
        self._check_use([database])
        return self._backend.execute(database, sql, max_steps)

    def execute_many(self, queries: Sequence[Query]) -> list[Result]:
        """Run queries on all workers, each distinct one once; results come in their order."""
        results, accepted = self._accept(queries)
        results.update(zip(accepted, self._backend.execute_many(accepted), strict=True))
        return [results[query] for query in queries]

    def votes(self, queries: Sequence[Query], by: VoteBy) -> list[str | None]:
        """Run queries as `execute_many` does, and give their votes in the queries' order.

        Rows stay in the workers, however many queries there are; none of one that does not run.
        """
        _, accepted = self._accept(queries)
        found = dict(zip(accepted, self._backend.votes(accepted, by), strict=True))
        return [found.get(query) for query in queries]

    def gold(self, database: Path, sql: str) -> Result:
        """Give a gold query's result, computed once for this database, query and set of limits.

        Results that depend on the moment (wall time, memory, the date, chance) are not kept.
        """
        return self.gold_many([(database, sql)])[0]

    def gold_many(self, queries: Sequence[Query]) -> list[Result]:
        """Give gold results in order; those not computed before run on all workers."""
        self._check_use(database for database, _ in queries)
        return self._gold.get(queries, self.execute_many)

    def judge(self, cases: Sequence[Case], names: Sequence[str]) -> list[Judgement]:
        """Ask comparators about cases; judgements come in the cases' order."""
        for case in cases:
            check_case(case, names)
        self._check_use(file for case in cases for file in (case.database, *case.suite))
        # What official programs do to a text takes seconds where it has megabytes.
        short = [len(case.predicted) <= _JUDGED_CHARS for case in cases]
        asked = [
            case if is_short else replace(case, predicted="")
            for case, is_short in zip(cases, short, strict=True)
        ]
        refused = {"scores": dict.fromkeys(names, 0.0), "predicted": status_of(TooLarge("sql"))}
        return [
            judged if is_short else replace(judged, **refused)
            for judged, is_short in zip(self._backend.judge(asked, names), short, strict=True)
        ]

    def keep_gold(self, database: Path, sql: str, result: Result) -> None:
        """Keep what `execute` gave as the result of a gold query."""
        self._gold.keep((database, sql), result)

    def close(self) -> None:
        """End the workers and close the connections."""
        self._backend.close()

    def _accept(self, queries: Sequence[Query]) -> tuple[dict[Query, Result], list[Query]]:
        """Refuse texts that must not reach SQLite; list the other queries, each once."""
        limit = self.config.max_sql_chars
        found = {query: refuse_text(query[1], max_sql_chars=limit) for query in queries}
        refused = {query: result for query, result in found.items() if result is not None}
        accepted = [query for query in found if query not in refused]
        self._check_use(database for database, _ in accepted)
        return refused, accepted

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


class _Threads:
    def __init__(self, config: ExecutorConfig):
        self._engine = Engine(config)
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="sqlenv")
        self.execute = self._engine.execute

    def start(self) -> None:
        pass

    def execute_many(self, queries: Sequence[Query]) -> list[Result]:
        return list(self._threads.map(lambda query: self.execute(*query), queries))

    def votes(self, queries: Sequence[Query], by: VoteBy) -> list[str | None]:
        return list(self._threads.map(lambda query: ballot(self.execute(*query), by), queries))

    def judge(self, cases: Sequence[Case], names: Sequence[str]) -> list[Judgement]:
        def look(case: Case) -> Judgement:
            runs = Runs(self._engine.ask, stopwatch=self._engine.seconds)
            return judge(case, names, runs)

        return list(self._threads.map(look, cases))

    def close(self) -> None:
        self._threads.shutdown()
        self._engine.close()


class _Processes:
    """Queries in worker processes, of which slow ones leave one to the others.

    All single queries have few steps at first; those that need more run again.
    """

    def __init__(self, config: ExecutorConfig):
        self._pool = WorkerPool(config)
        self._max_steps = config.max_steps
        self._slow = Semaphore(config.workers - 1) if config.workers > 1 else None
        self.start = self._pool.start

    def execute(self, database: Path, sql: str, max_steps: int | None) -> Result:
        path = _absolute(database)
        limit = max_steps or self._max_steps
        if self._slow is None or limit <= _QUICK_STEPS:
            return self._run([(path, sql, limit)])[0]
        result = self._run([(path, sql, _QUICK_STEPS)])[0]
        if result == TimedOut("steps"):
            with self._slow:
                result = self._run([(path, sql, limit)])[0]
        return result

    def execute_many(self, queries: Sequence[Query]) -> list[Result]:
        return self._run([(_absolute(path), sql, None) for path, sql in queries])

    def votes(self, queries: Sequence[Query], by: VoteBy) -> list[str | None]:
        answers = self._pool.run([(_absolute(path), sql, None, by) for path, sql in queries])
        return [answer.vote if isinstance(answer, Ballot) else None for answer in answers]

    def judge(self, cases: Sequence[Case], names: Sequence[str]) -> list[Judgement]:
        answers = self._pool.run([encode_case(case, names) for case in cases])
        return [
            answer if isinstance(answer, Judgement) else _failed(answer, names)
            for answer in answers
            if not isinstance(answer, Ballot)
        ]

    def _run(self, questions: Sequence[Question]) -> list[Result]:
        answers = self._pool.run(questions)
        return [answer for answer in answers if not isinstance(answer, Judgement | Ballot)]

    def close(self) -> None:
        self._pool.close()


def _absolute(path: Path) -> str:
    """Workers keep the folder that they were started in."""
    return os.path.abspath(path)  # noqa: PTH100


def _failed(answer: Result, names: Sequence[str]) -> Judgement:
    """Judge a prediction that took its worker down."""
    status = status_of(answer)
    return Judgement(dict.fromkeys(names, 0.0), status, "ok", is_late=status == "timeout")
