import pytest

from sqlenv.evaluators.features import clauses_of
from tests.sqlenv.cases import read_cases


@pytest.mark.parametrize(("sql", "clauses"), read_cases("what a query has"))
def test_clauses(sql, clauses):
    assert clauses_of(sql) == clauses
