"""Results, cases and judgements as plain tuples, which `channel.py` and `json` can write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlenv.evaluators.comparators import Case, Judgement
from sqlenv.evaluators.spider2 import Reference
from sqlenv.evaluators.votes import Ballot
from sqlenv.types import Denied, Result, SqlError, Table, TimedOut, TooLarge

Encoded = tuple[Any, ...]

Answer = Result | Judgement | Ballot

_KINDS = {
    kind.__name__: kind for kind in (Table, SqlError, TimedOut, TooLarge, Denied, Judgement, Ballot)
}
_FIELDS = {name: [field.name for field in fields(kind)] for name, kind in _KINDS.items()}


def encode(result: Answer) -> Encoded:
    """Write an answer as the name of its kind and its fields."""
    kind = type(result).__name__
    return (kind, *[getattr(result, name) for name in _FIELDS[kind]])


def decode(encoded: Encoded) -> Answer:
    """Read what `encode` wrote."""
    name, *values = encoded
    return _KINDS[name](*values)


def encode_case(case: Case, names: Sequence[str]) -> Encoded:
    """Write a case, and the comparators to ask about it; paths become absolute."""
    database, *suite = [os.path.abspath(path) for path in (case.database, *case.suite)]  # noqa: PTH100
    reference = case.reference and (case.reference.golds, case.reference.ignore_order)
    return (database, case.predicted, case.gold, suite, reference, list(names))


def decode_case(encoded: Encoded) -> tuple[Case, list[str]]:
    """Read what `encode_case` wrote."""
    database, predicted, gold, suite, reference, names = encoded
    files = tuple([_path(name) for name in suite])
    golds = reference and Reference(*reference)
    return Case(predicted, gold, _path(database), files, golds), names


_path = lru_cache(maxsize=4096)(Path)  # whose hash, and its text, each path keeps
