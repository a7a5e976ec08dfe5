"""Votes: what is kept of a result where samples are only compared with one another, and which of
them answers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Literal

from sqlenv.executor import Executor
from sqlenv.executor.database import DatabaseQuery
from sqlenv.types import Result, Row, Table, Value

VoteBy = Literal["set", "table"]
"""What makes two results one vote. `set`: equal sets of rows (OmniSQL, evaluate_bird.py).
`table`: equal printed tables, so that names and order of columns, order and repetition of rows
matter (PaVeRL-SQL, evaluate_paverl.py)."""
VOTE_TIMEOUT_S = 10.0
"""OmniSQL gives a sample 10 seconds to return its vote."""
ERROR_SQL = "Error SQL"
"""What OmniSQL writes in Spider's files where there is no query that runs."""
_RANDOM_SEED = 42  # OmniSQL's seed of the choice where no sample of a BIRD question runs


def ballot(result: Result, by: VoteBy = "set") -> str | None:
    """Give a result's vote, a digest: equal results, and only these, have equal votes.

    None where the query did not run, or a cell's text is no UTF-8; an empty result is a vote.
    """
    if not isinstance(result, Table) or result.is_mended:
        return None
    digest = hashlib.sha256()
    if by == "table":
        for row in (result.columns, *result.rows):
            digest.update(_line(row))
    else:
        # Equal values are written alike: 1.0 is 1, as in Python's sets. Rows by their digests:
        # written out, a set of them would take what the result takes.
        plain = (tuple([_integral(value) for value in row]) for row in result.rows)
        for one in sorted({hashlib.sha256(_line(row)).digest() for row in plain}):
            digest.update(one)
    return digest.hexdigest()[:32]


def votes(executor: Executor, queries: Sequence[DatabaseQuery], by: VoteBy) -> list[str | None]:
    """Run queries on all workers and give their votes in order; no rows are kept."""
    return executor.map(lambda query: ballot(executor.execute(*query), by), queries)


def choose(
    samples: Sequence[Sequence[str]], ballots: Sequence[Sequence[str | None]], *, spider: bool
) -> list[str]:
    """Choose the query with the commonest vote for each question of a data set, as OmniSQL does.

    Ties go to the vote seen first. Where none of a question's samples runs, that of Spider and its
    variants is `Error SQL`, and all others' are drawn by one generator, question after question.
    """
    draw = Random(_RANDOM_SEED)
    chosen = []
    for queries, own in zip(samples, ballots, strict=True):
        counts = Counter(vote for vote in own if vote is not None)  # in the order of first sight
        if counts:
            chosen.append(queries[own.index(counts.most_common(1)[0][0])])
        else:
            chosen.append(ERROR_SQL if spider else draw.choice(queries))
    return chosen


def _line(row: Row) -> bytes:
    return repr(row).encode("utf-8", "surrogatepass") + b"\n"


def _integral(value: Value) -> Value:
    return int(value) if isinstance(value, float) and value.is_integer() else value
