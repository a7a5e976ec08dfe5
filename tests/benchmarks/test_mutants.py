"""Queries that are wrong in one place."""

import pytest

from benchmarks._mutants import neighbours
from tests.vectors import read

CASES = read("neighbours")
COLUMNS = {name: tuple(columns) for name, columns in CASES["columns"].items()}


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["why"])
def test_a_query_that_is_wrong_in_one_place_is_a_neighbour(case: dict[str, str]) -> None:
    found = neighbours(case["gold"], COLUMNS)
    assert case["has"] in found
    assert len(found) == len(set(found))


def test_what_cannot_be_parsed_has_no_neighbours() -> None:
    assert neighbours("SELEC 1", COLUMNS) == []
