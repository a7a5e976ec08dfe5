"""Vectors, databases, and one executor for each file of tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from rewards.adapters import scoring
from rewards.expo.clauses import Clause
from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.types import Example, Result
from tests.worlds import make_file

EXAMPLE = Example("1", "?", "db", Path("db.sqlite"), "SELECT a, b FROM t")


class Golds(Executor):
    """Knows one gold result, that of `EXAMPLE`, and runs nothing."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def gold(self, database: Path, sql: str) -> Result:
        assert (database, sql) == (EXAMPLE.database, EXAMPLE.gold_sql)
        return self.result


def labelled(sql: str, clauses: Sequence[Clause], labels: Sequence[str]) -> set[int]:
    """Number the clauses whose text starts with one of some labels, each of which must be there."""
    texts = [clause.text(sql) for clause in clauses]
    for label in labels:
        assert any(text.startswith(label) for text in texts), label
    return {n for n, text in enumerate(texts) if text.startswith(tuple(labels))}


def interpreter_of(library: str) -> str:
    """Find a Python that has a trainer's library, or skip.

    They need other versions than ours and one another's, so each may have an environment of its
    own: MINIRL_TRL_PYTHON and so on name its interpreter.
    """
    name = f"MINIRL_{library.upper()}_PYTHON"
    if not os.environ.get(name) and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed here: set {name} to a Python that has it")
    return os.environ.get(name) or sys.executable


@pytest.fixture(scope="module")
def executor():
    with Executor(ExecutorConfig()) as executor:
        yield executor


@pytest.fixture(scope="module")
def make_database(tmp_path_factory) -> Callable[[Iterable[str]], Path]:
    def make(statements: Iterable[str]) -> Path:
        return make_file(tmp_path_factory.mktemp("databases") / "a.sqlite", ";".join(statements))

    return make


@pytest.fixture(autouse=True, scope="module")
def scorers_end():
    """An executor's heap limit is the process's: none may stay for the tests of other modules."""
    yield
    scoring._scorer.cache_clear()
    gc.collect()
