"""Run queries that nobody has vetted, and get values back.

The way of a query: `guard.refuse_text`, then `Engine.execute` in this process or, through
`WorkerPool`, in another; there `Guard.run` on a connection with every control set.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from sqlenv.config import ExecutorConfig
from sqlenv.evaluators.comparators import Case, Judgement, Runs, check_case
from sqlenv.evaluators.votes import Ballot, VoteBy
from sqlenv.executor.channel import RESULTS
from sqlenv.executor.database import Identity, identify
from sqlenv.executor.engine import Answer, Engine, Execution, Question, Trial
from sqlenv.executor.gold import GoldCache, Query
from sqlenv.executor.guard import refuse_text
from sqlenv.executor.pool import WorkerPool
from sqlenv.types import Result, status_of

_log = logging.getLogger(__name__)


class Executor:
    """Executes SQL on SQLite files, read-only and bounded. Threads may share one; forks may not."""

    def __init__(self, config: ExecutorConfig):
        self.config = config
        self._process = os.getpid()
        self._gold = GoldCache(config)
        self._seen: dict[Path, Identity] = {}
        self._backend = _Threads(config) if config.isolation == "thread" else WorkerPool(config)

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
        return self._run([Execution(database, sql, max_steps)])[0]

    def execute_many(self, queries: Sequence[Query]) -> list[Result]:
        """Run queries on all workers, each distinct one once; results come in their order."""
        return self._run([Execution(database, sql) for database, sql in queries])

    def votes(self, queries: Sequence[Query], by: VoteBy) -> list[str | None]:
        """Run queries as `execute_many` does, and give their votes in the queries' order.

        Rows stay in the workers, however many queries there are; none of one that does not run.
        """
        answers = self._answer([Execution(database, sql, vote_by=by) for database, sql in queries])
        return [answer.vote if isinstance(answer, Ballot) else None for answer in answers]

    def gold(self, database: Path, sql: str) -> Result:
        """Give a gold query's result, computed once for this database, query and set of limits.

        Results of the moment (wall time, memory, a clock that runs, chance) are not kept.
        """
        return self.gold_many([(database, sql)])[0]

    def gold_many(self, queries: Sequence[Query]) -> list[Result]:
        """Give gold results in order; those not computed before run on all workers."""
        self._check_use(database for database, _ in queries)
        return self._gold.get(queries, self.execute_many)

    def keep_gold(self, database: Path, sql: str, result: Result) -> None:
        """Keep what `execute` gave as the result of a gold query."""
        self._gold.keep((database, sql), result)

    def judge(self, cases: Sequence[Case], names: Sequence[str]) -> list[Judgement]:
        """Ask comparators about cases; judgements come in the cases' order."""
        for case in cases:
            check_case(case, names)
        self._check_use(file for case in cases for file in (case.database, *case.suite))
        answers = self._backend.run([Trial(case, tuple(names)) for case in cases])
        return [_judgement(answer, names) for answer in answers]

    def close(self) -> None:
        """End the workers and close the connections."""
        self._backend.close()

    def _run(self, queries: Sequence[Execution]) -> list[Result]:
        return [answer for answer in self._answer(queries) if isinstance(answer, RESULTS)]

    def _answer(self, queries: Sequence[Execution]) -> list[Answer]:
        """Refuse texts that must not reach SQLite, and run the other queries, each once."""
        limit = self.config.max_sql_chars
        refused = {query: refuse_text(query.sql, max_sql_chars=limit) for query in queries}
        accepted = [query for query, refusal in refused.items() if refusal is None]
        self._check_use(query.database for query in accepted)
        found = dict(zip(accepted, self._backend.run(accepted), strict=True))
        return [refused[query] or found[query] for query in queries]

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
    """What `WorkerPool` does, in this process; one question in the thread that asks it."""

    def __init__(self, config: ExecutorConfig):
        self._engine = Engine(config)
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="sqlenv")

    def start(self) -> None:
        pass

    def run(self, questions: Sequence[Question]) -> list[Answer]:
        run = map if len(questions) == 1 else self._threads.map
        return list(run(self._answer, questions))

    def _answer(self, question: Question) -> Answer:
        engine = self._engine
        return engine.answer(question, Runs(engine.ask, stopwatch=engine.seconds))

    def close(self) -> None:
        self._threads.shutdown()
        self._engine.close()


def _judgement(answer: Answer, names: Sequence[str]) -> Judgement:
    """Give a case's judgement, or one of a prediction that took its worker down."""
    if isinstance(answer, Judgement):
        return answer
    status = status_of(answer) if isinstance(answer, RESULTS) else "error"
    return Judgement(dict.fromkeys(names, 0.0), status, "ok", is_late=status == "timeout")
