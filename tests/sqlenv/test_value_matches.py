"""Values that questions name: found with FTS5, shown as OmniSQL shows them."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from sqlenv.errors import UserError
from sqlenv.schema.reading import read_schema
from sqlenv.schema.rendering import render_schema
from sqlenv.schema.values import MOST, SHOWN, ValueIndex, best, build_index, share, with_matches
from sqlenv.types import Example

TOWNS = """
CREATE TABLE town (id INTEGER PRIMARY KEY, Name TEXT, note TEXT, code);
INSERT INTO town VALUES
  (1, 'New York', 'the big one', '12'), (2, 'Oslo', 'to be', x'4f736c6f'),
  (3, 'New Delhi', 'x' || printf('%.*c', 60, 'y'), '3.5e2'), (4, 'Bern', '', 7),
  (5, 'O''Fallon "West"', CAST(x'4d616cff6d' AS TEXT), NULL);
"""


@pytest.fixture
def towns(tmp_path: Path) -> Path:
    path = tmp_path / "town ?.sqlite"
    connection = apsw.Connection(str(path))
    connection.execute(TOWNS)
    connection.close()
    return path


@pytest.fixture
def index(towns: Path, tmp_path: Path) -> ValueIndex:
    assert build_index(towns, read_schema(towns), tmp_path / "i.sqlite") == 8
    return ValueIndex(tmp_path / "i.sqlite")


def ask(index: ValueIndex, question: str, evidence: str = "") -> list[tuple[str, str, str]]:
    return list(index.matches(Example("1", question, "db", Path("db"), "", evidence)))


def test_a_value_in_the_question_is_found_with_its_column(index: ValueIndex):
    assert ask(index, "Who lives in new york?") == [("town", "Name", "New York")]


def test_evidence_counts_too_and_longer_values_come_first(index: ValueIndex):
    found = ask(index, "And Oslo?", "the capital is New Delhi")
    assert [value for *_, value in found] == ["New Delhi", "Oslo"]


def test_half_a_value_is_not_enough(index: ValueIndex):
    assert ask(index, "What is new in Delhi?") == []


def test_words_that_say_nothing_find_nothing(index: ValueIndex):
    # "to be" stands in the question, but is never searched for, as in Lucene.
    assert ask(index, "What is there to be seen?") == []


def test_inflected_words_are_found(index: ValueIndex):
    assert [value for *_, value in ask(index, "the big ones")] == ["the big one"]


@pytest.mark.parametrize(
    "question", ['O\'Fallon "West"?', '"', "'", "AND OR NOT NEAR * ^", "", "\0"]
)
def test_no_question_breaks_the_search(index: ValueIndex, question: str):
    found = [value for *_, value in ask(index, question)]
    assert found == (['O\'Fallon "West"'] if "West" in question else [])


def test_numbers_blobs_long_and_empty_values_are_not_indexed(index: ValueIndex):
    for word in ("12", "Oslo"):
        assert all(column == "Name" for _, column, _ in ask(index, word))


def test_text_that_is_not_utf8_loses_its_bad_bytes(index: ValueIndex):
    assert ask(index, "Malm") == [("town", "note", "Malm")]


def test_at_most_ten_values_a_run_of_words(tmp_path: Path):
    path = tmp_path / "many.sqlite"
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE t (v TEXT)")
    connection.executemany("INSERT INTO t VALUES (?)", [(f"red {'i' * n}",) for n in range(1, 40)])
    connection.close()
    build_index(path, read_schema(path), tmp_path / "i.sqlite")
    with ValueIndex(tmp_path / "i.sqlite") as index:
        asked = "red " + "i" * 40
        assert len(ask(index, asked)) == 10


def test_the_same_file_gives_the_same_hints(towns: Path, tmp_path: Path, index: ValueIndex):
    build_index(towns, read_schema(towns), tmp_path / "other.sqlite")
    with ValueIndex(tmp_path / "other.sqlite") as other:
        for question in ("Oslo New York Bern New Delhi", "the big one in Bern"):
            assert ask(index, question) == ask(other, question)


def test_a_damaged_database_is_told(towns: Path, tmp_path: Path):
    schema = read_schema(towns)
    content = bytearray(towns.read_bytes())
    content[4096:8192] = bytes(4096)
    towns.write_bytes(content)
    with pytest.raises(UserError, match=r"the database file is damaged"):
        build_index(towns, schema, tmp_path / "i.sqlite")
    assert not (tmp_path / "i.sqlite").exists()


@pytest.mark.parametrize(
    ("value", "asked", "expected"),
    [
        ("Oslo", "in oslo", 1),
        ("abcdefgh", "x abcdefg y", 7 / 8),  # .875
        ("abcdefg", "x abcdef y", 6 / 7),  # .857
        ("abcdef", "x abcde y", 0),  # .833
        ("abcdefghijklmnopqrst", "abcdefghijklmnopq", 0),  # .85 is not over .85
        ("x", "", 0),
    ],
)
def test_the_share_of_a_value_in_a_question(value: str, asked: str, expected: float):
    assert share(value, asked) == pytest.approx(expected)


def test_the_best_are_kept_the_last_found_first():
    found = [("t", "c", f"v{number:02}") for number in range(30)]
    kept = best(found, " ".join(value for *_, value in found))
    assert len(kept) == MOST
    assert kept[0] == ("t", "c", "v29")


def test_hints_stand_before_sampled_values_and_never_push_a_span(towns: Path):
    schema = read_schema(towns)
    hints = [("TOWN", "name", "Bern"), ("town", "Name", "Oslo"), ("gone", "x", "y")]
    text = render_schema(with_matches(schema, hints))
    assert "Name TEXT, -- example: ['Bern', 'Oslo', 'New York']\n" in text
    many = [("town", "name", f"v{number}") for number in range(9)]
    (table,) = with_matches(schema, many).tables
    assert table.columns[1].examples == tuple(f"v{number}" for number in range(SHOWN))
    assert with_matches(schema, ()) == schema
