"""What tricks earn, by hand from the papers' equations, and which settings close them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import tricks
from benchmarks.tricks import COLUMNS, TRICKS, play, read_questions
from tests.worlds import make_file, spider, write

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
GOLDS = (
    "SELECT name, age FROM singer;",
    "SELECT name FROM singer WHERE age > 20 LIMIT 9",
    "SELECT COUNT(*) FROM singer",  # 3, a constant that can be guessed
    "SELECT name FROM singer WHERE 0",  # no rows: left out
    "SELECT nothing FROM singer",  # does not run: left out
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("spider")
    singers = "INSERT INTO singer VALUES ('Ann', 10), ('Bo', 30), ('Cy', 40)"
    script = f"CREATE TABLE singer (name TEXT, age INTEGER); {singers}"
    make_file(made / "database" / "music" / "music.sqlite", script)
    return write(made / "dev.json", [spider(gold, "music") for gold in GOLDS]).parent


PROGRESS, EXPO, PAVERL, ASTRA = "Progress-SQL", "EXPO-SQL", "PaVeRL-SQL", "SQL-ASTRA"
BINARY, NONE, ONE = "the same, `payoff=binary`", "0 and 1, `match=bag`", "0 and 1"


@pytest.mark.parametrize(
    ("trick", "column", "earned"),
    [
        # .5 format + .5 execution + 2 * .5^(k - 1) latency + alignment: -.25, or the rise of F.
        ("the gold", PROGRESS, [2.75, 2.75, 2.75]),
        ("a wrong query, then the gold", PROGRESS, [3, 3, 3]),
        ("the gold", "the same, `align_k1=zero`", [3, 3, 3]),
        ("no query", PROGRESS, [0.25, 0.25, 0.25]),
        ("`SELECT NULL`", PROGRESS, [0.75, 0.75, 0.75]),
        ("its rows twice", PROGRESS, [2.75, 2.75, 2.75]),
        # Clauses that nothing blames earn .5, LIMIT -.5: of SELECT, FROM, WHERE and LIMIT.
        ("the gold", EXPO, [1.5, 1.5, 1.5]),
        ("the gold with LIMIT 0", EXPO, [1 / 6, 1 / 4, 1 / 6]),
        ("the gold with LIMIT 0", "the same, `gap_scale=0`", [0, 0, 0]),
        ("no query", EXPO, [-1.5, -1.5, -1.5]),
        # 10 times the share of gold columns, .5 without any.
        ("the gold", PAVERL, [10, 10, 10]),
        ("`SELECT 0, 1, …, 1999`", PAVERL, [0.5, 0.5, 10]),
        ("`SELECT 0, 1, …, 1999`", BINARY, [0.5, 0.5, 0.5]),
        ("its first column alone", PAVERL, [5, 10, 10]),
        ("20 columns more", PAVERL, [10, 10, 10]),
        ("20 columns more", BINARY, [0.5, 0.5, 0.5]),
        ("4 columns more", BINARY, [10, 10, 10]),
        ("its values as text", PAVERL, [10, 10, 10]),
        ("its values as text", ONE, [0, 1, 0]),
        ("its rows twice", PAVERL, [0.5, 0.5, 0.5]),
        # .8 M^2 / (gold columns * predicted columns).
        ("the gold", ASTRA, [1, 1, 1]),
        ("its first column alone", ASTRA, [0.4, 1, 1]),
        ("20 columns more", ASTRA, [0.8 * 4 / 44, 0.8 / 21, 0.8 / 21]),
        ("its rows twice", ASTRA, [1, 1, 1]),
        ("its rows twice", ONE, [1, 1, 1]),
        ("its rows twice", NONE, [0, 0, 0]),
    ],
)
def test_a_trick_earns_what_the_equations_say(trick, column, earned, folder):
    found = play(trick, column, read_questions(folder, "dev"))
    assert [one.total for one in found] == pytest.approx(earned)


def test_the_command_prints_the_table_of_the_page(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tricks.py", "--data-root", str(folder)])
    tricks.main()
    *rows, counts = capsys.readouterr().out.splitlines()
    assert json.loads(counts) == {"questions": 3}
    page = [line.split(" | ")[0] for line in PAGE.read_text("utf-8").splitlines()]
    assert [row.split(" | ")[0] for row in rows[2:]] == [f"| {trick}" for trick in TRICKS]
    for row in (rows[0], *rows[2:]):
        assert row.split(" | ")[0] in page
        assert row.count(" | ") == len(COLUMNS) + 1
