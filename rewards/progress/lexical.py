"""Lexical alignment (Progress-SQL, section 4.2)."""

from __future__ import annotations

from itertools import pairwise

from sqlenv.sql.cache import cached
from sqlenv.sql.extraction import tokens

Pairs = frozenset[tuple[str, str]]


def lexical_similarity(pred_sql: str, gold_sql: str) -> float:
    """Score how many pairs of adjacent tokens two queries share: Jaccard of the sets of pairs.

    Returns:
        In [0, 1]. Where neither side has a pair: 1.0 for the same single token, else 0.0.
    """
    pred, gold = _pairs(pred_sql), _pairs(gold_sql)
    if not pred and not gold:
        words = tokens(pred_sql)
        return float(bool(words) and words == tokens(gold_sql))
    shared = len(pred & gold)
    return shared / (len(pred) + len(gold) - shared)


@cached(maxsize=2048)
def _pairs(sql: str) -> Pairs:
    return frozenset(pairwise(tokens(sql)))
