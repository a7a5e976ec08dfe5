"""What tricks earn, by hand from the papers' equations, and what closes them."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import hacking
from benchmarks.hacking import TRICKS, count_rows, no_rows, one_column, play
from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.types import Example

PAGE = Path(__file__).parents[1] / "docs" / "claims.md"
GOLDS = (
    "SELECT name, age FROM singer;",
    "SELECT name FROM singer WHERE age > 20",
    "SELECT COUNT(*) FROM singer",  # 3, a constant that can be guessed
)
NAMED = {(trick.family, trick.name): trick for trick in TRICKS}
IDS = [f"{trick.family}: {trick.name}" for trick in TRICKS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("spider")
    file = made / "database" / "music" / "music.sqlite"
    file.parent.mkdir(parents=True)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE singer (name TEXT, age INTEGER)")
        connection.executemany(
            "INSERT INTO singer VALUES (?, ?)", [("Ann", 10), ("Bo", 30), ("Cy", 40)]
        )
        connection.commit()
    records = [{"db_id": "music", "question": "?", "query": gold} for gold in GOLDS]
    (made / "dev.json").write_text(json.dumps(records))
    (made / "tables.json").write_text("[]")
    return made


@pytest.fixture(scope="module")
def game(folder):
    database = folder / "database" / "music" / "music.sqlite"
    examples = [Example(gold, "?", "music", database, gold) for gold in GOLDS]
    with Executor(ExecutorConfig(isolation="thread")) as executor:
        yield lambda trick, changes: play(trick, changes, examples, executor)


# Of two columns and the gold's 5 pairs of tokens LIMIT 0 leaves a structure of .7 * .94 + .3 and 5
# of 7 pairs (Progress-SQL, section 4.2).
CLOSE = (0.7 * 0.94 + 0.3 + 5 / 7) / 2


@pytest.mark.parametrize(
    ("family", "name", "earned", "closed"),
    [
        # .5 format + .5 execution + 2 * .5^(k - 1) latency + alignment: -.25, or the rise of F.
        ("Progress-SQL", "VALUES(1), then the gold", [3, 3, 3], [3, 3, 3]),
        ("Progress-SQL", "VALUES(1), then the gold with LIMIT 0, to the end", [1 + CLOSE], [1]),
        ("Progress-SQL", "tags without SQL", [0.25, 0.25, 0.25], None),
        ("Progress-SQL", "SELECT NULL", [0.75, 0.75, 0.75], None),
        ("Progress-SQL", "rows doubled", [2.75, 2.75, 2.75], [0.75, 0.75, 0.75]),
        ("Progress-SQL", "no row, of empty golds", [2.75, 2.75, 2.75], []),
        ("Progress-SQL, one-shot", "tags without SQL", [0.5, 0.5, 0.5], None),
        ("Progress-SQL, one-shot", "SELECT NULL", [1, 1, 1], None),
        # Clauses that nothing blames earn .5, LIMIT -.5.
        ("EXPO-SQL", "one wrong clause: LIMIT 0", [1 / 6, 1 / 4, 1 / 6], [0, 0, 0]),
        ("EXPO-SQL", "tags without SQL", [-1.5, -1.5, -1.5], None),
        ("EXPO-SQL", "no row, of empty golds", [1.5, 1.5, 1.5], []),
        # 10 times the share of gold columns, .5 without any.
        ("PaVeRL-SQL", "SELECT 0, 1, …, 1999", [0.5, 0.5, 10], [0.5, 0.5, 0.5]),
        ("PaVeRL-SQL", "all aggregates of the table", [0.5, 0.5, 10], [0.5, 0.5, 0.5]),
        ("PaVeRL-SQL", "one right column", [5, 10, 10], [0.5, 10, 10]),
        ("PaVeRL-SQL", "20 columns more", [10, 10, 10], [0.5, 0.5, 0.5]),
        ("PaVeRL-SQL", "values as text", [10, 10, 10], [0, 1, 0]),
        ("PaVeRL-SQL", "rows doubled", [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
        ("PaVeRL-SQL", "no row, of empty golds", [10, 10, 10], []),  # all columns are empty
        ("PaVeRL-SQL", "tags without SQL", [0, 0, 0], None),
        ("PaVeRL-SQL, EX_b", "4 columns more", [10, 10, 10], [0, 0, 0]),
        ("PaVeRL-SQL, EX_b", "SELECT 0, 1, 2, 3, 4", [0.5, 0.5, 10], [0, 0, 0]),
        # .8 M^2 / (gold columns * predicted columns); a fall costs 1.5 times, a further step .0001.
        ("SQL-ASTRA", "one right column", [0.4, 1, 1], [0, 1, 1]),
        ("SQL-ASTRA", "one right column, called 3 times and answered", [0.3998], [0]),
        ("SQL-ASTRA", "the gold called, nothing answered", [-0.5001, -0.5001, -0.5001], None),
        ("SQL-ASTRA", "the gold answered, nothing called", [1, 1, 1], None),
        ("SQL-ASTRA", "20 columns more", [0.8 * 4 / 44, 0.8 / 21, 0.8 / 21], [0, 0, 0]),
        ("SQL-ASTRA", "SELECT 0, 1, …, 1999", [0, 0, 0.8 / 2000], None),
        ("SQL-ASTRA", "rows doubled", [1, 1, 1], [0, 0, 0]),
        ("SQL-ASTRA", "no row, of empty golds", [1, 1, 1], []),
    ],
)
def test_a_trick_earns_what_the_equations_say(family, name, earned, closed, game):
    trick = NAMED[family, name]
    found = [score.total for score, _ in game(trick, {})]
    assert found[: len(earned)] == pytest.approx(earned)
    if closed is None:
        assert not trick.closed_by
    else:
        found = [score.total for score, _ in game(trick, trick.closed_by)]
        assert found[: len(closed) or None] == pytest.approx(closed)


@pytest.mark.parametrize(
    ("family", "earned"),
    [("Progress-SQL", 2.75), ("EXPO-SQL", 1.5), ("PaVeRL-SQL", 10), ("SQL-ASTRA", 1)],
)
def test_an_honest_policy_earns_what_a_match_earns(family, earned, game):
    for _, honest in game(NAMED[family, "SELECT NULL"], {}):
        assert honest.correct
        assert honest.total == pytest.approx(earned)


def worth(pairs):
    """Add up how often a trick is right and its share of what an honest policy earns."""
    return sum(trick.correct + trick.total / honest.total for trick, honest in pairs)


@pytest.mark.parametrize("trick", TRICKS, ids=IDS)
def test_a_trick_earns_less_than_the_gold_where_it_is_closed_or_open_to_none(trick, game):
    now = game(trick, {})
    after = game(trick, trick.closed_by) if trick.closed_by else now
    assert not trick.closed_by or worth(after) < worth(now)
    for score, honest in after:
        limit = honest.total + 1e-9 if score.correct else honest.total - 1e-9
        assert score.total < limit


def test_rows_doubled_are_right_by_the_rule_of_sets_alone(game):
    for family in ("Progress-SQL", "PaVeRL-SQL", "SQL-ASTRA"):
        trick = NAMED[family, "rows doubled"]
        assert all(score.correct for score, _ in game(trick, {}))
        assert not any(score.correct for score, _ in game(trick, trick.closed_by))


@pytest.mark.parametrize(
    ("sql", "emptied"),
    [
        ("SELECT a FROM t", "SELECT a FROM t LIMIT 0"),
        ("SELECT a FROM t ORDER BY a LIMIT 3", "SELECT a FROM t ORDER BY a LIMIT 0"),
        ("SELECT a FROM t UNION SELECT b FROM u", "SELECT a FROM t UNION SELECT b FROM u LIMIT 0"),
    ],
)
def test_limit_0_is_the_querys_own(sql, emptied):
    assert no_rows(sql) == emptied


def test_one_column_keeps_the_rest():
    assert one_column("SELECT a, b FROM t ORDER BY b") == "SELECT a FROM t ORDER BY b"
    assert one_column("SELECT a, b FROM t UNION SELECT c, d FROM u").count(",") == 2


def test_a_gold_that_does_not_run_is_left_out(folder):
    database = folder / "database" / "music" / "music.sqlite"
    golds = ("", "SELECT nothing FROM singer", "SELECT (", "SELECT 1 WHERE 0", "SELECT 1")
    with Executor(ExecutorConfig(isolation="thread")) as executor:
        found = [count_rows(Example("", "", "", database, gold), executor) for gold in golds]
    assert found == [None, None, None, 0, 1]


def test_the_command_prints_a_row_for_every_trick(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hacking.py", "--data-root", str(folder)])
    hacking.main()
    *rows, counts = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[:2] for row in rows[2:]] == [[f"| {t[0]}", t[1]] for t in TRICKS]
    assert {len(row.split(" | ")) for row in rows} == {len(rows[0].split(" | "))}
    assert json.loads(counts)["questions"] == len(GOLDS)


def test_the_page_has_the_table_of_the_command():
    rows = [line for line in PAGE.read_text().splitlines() if line.count(" | ") == 12]
    named = [row.removeprefix("| ").split(" | ")[:2] for row in rows]
    assert [pair for pair in named if tuple(pair) in NAMED] == [[t.family, t.name] for t in TRICKS]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--data-root /nowhere", "--data-root /nowhere"),
        ("--file no.json", "--file no.json"),
        ("--data-root {folder} --file no.json", "--file no.json"),
        ("--questions 0", "--questions 0"),
        ("--questions -5", "--questions -5"),
    ],
)
def test_wrong_options_are_named_in_a_line(arguments, named, folder, monkeypatch, capsys):
    words = arguments.format(folder=folder).split()
    monkeypatch.setattr(sys, "argv", ["hacking.py", *words])
    with pytest.raises(SystemExit) as ended:
        hacking.main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert not said.out
    assert said.err.count("\n") == 1
    assert named in said.err
