"""Small databases on which queries that mean something else give other results."""

import json
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from sqlenv.config import ExecutorConfig, SingleTurnConfig
from sqlenv.envs.single_turn import SingleTurn
from sqlenv.executor import Executor
from sqlenv.types import Example
from sqlenv.witness.distillation import distil
from sqlenv.witness.focus import focus_of
from sqlenv.witness.neighbours import neighbours
from sqlenv.witness.source import read_source
from sqlenv.witness.store import WitnessStore
from sqlenv.witness.variants import make_variant

from .conftest import make_file

CASES = json.loads((Path(__file__).parents[1] / "data/neighbours.json").read_text())
COLUMNS = {name: tuple(columns) for name, columns in CASES["columns"].items()}
SHOP = """
CREATE TABLE owner (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT);
INSERT INTO owner VALUES (1, 'Ann', 'Oslo'), (2, 'Bob', 'Rome'), (3, 'Cy', 'Oslo'), (4, 'Di', NULL);
CREATE TABLE pet (
  id INTEGER PRIMARY KEY, kind TEXT, age INTEGER CHECK (age >= 0),
  owner INTEGER NOT NULL REFERENCES owner
);
INSERT INTO pet VALUES (1, 'cat', 3, 1), (2, 'dog', 1, 2), (3, 'dog', 2, 2), (4, 'fish', 1, 3);
CREATE VIEW old AS SELECT * FROM pet WHERE age > 1;
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return make_file(tmp_path / "shop.sqlite", SHOP)


def opened(contents: bytes) -> apsw.Connection:
    connection = apsw.Connection(":memory:")
    connection.deserialize("main", contents)
    return connection


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["why"])
def test_a_query_that_is_wrong_in_one_place_is_a_neighbour(case: dict[str, str]) -> None:
    found = [one.sql for one in neighbours(case["gold"], COLUMNS)]
    assert case["has"] in found
    assert len(found) == len(set(found))


def test_what_cannot_be_parsed_has_no_neighbours() -> None:
    assert neighbours("SELEC 1", COLUMNS) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_variant_keeps_what_the_database_promises(shop: Path, seed: int) -> None:
    gold = "SELECT name FROM owner JOIN pet ON pet.owner = owner.id WHERE kind = 'cat' AND age > 1"
    source = read_source(shop)
    focus = focus_of(gold, source, shop)
    assert focus is not None
    variant = make_variant(source, focus, seed=seed)
    assert list(variant.execute("PRAGMA foreign_key_check")) == []
    assert list(variant.execute("PRAGMA integrity_check")) == [("ok",)]
    names = [name for (name,) in variant.execute("SELECT name FROM owner")]
    assert len(names) == len(set(names))  # no two owners share one here
    assert {kind for (kind,) in variant.execute("SELECT kind FROM pet")} <= {"cat", "dog", "fish"}
    assert list(variant.execute("SELECT * FROM old EXCEPT SELECT * FROM pet")) == []
    again = make_variant(source, focus, seed=seed)
    assert again.serialize("main") == variant.serialize("main")


def test_uniqueness_that_nothing_declares_may_be_broken(shop: Path) -> None:
    gold = "SELECT id FROM owner WHERE name = 'Ann'"
    source = read_source(shop)
    focus = focus_of(gold, source, shop)
    assert focus is not None
    variants = [make_variant(source, focus, seed=s, breaks_uniqueness=True) for s in range(20)]
    query = "SELECT count(name) - count(DISTINCT name) FROM owner"
    assert any(next(variant.execute(query))[0] for variant in variants)


@pytest.mark.parametrize(
    ("gold", "lucky"),
    [
        ("SELECT SUM(age) FROM pet WHERE kind = 'cat'", "SELECT age FROM pet WHERE kind = 'cat'"),
        ("SELECT MAX(age) FROM pet WHERE kind = 'cat'", "SELECT age FROM pet WHERE kind = 'cat'"),
        ("SELECT COUNT(*) FROM owner", "SELECT COUNT(*) FROM pet"),
        ("SELECT COUNT(*) FROM owner", "SELECT 4"),
        ("SELECT COUNT(*) FROM pet WHERE age > 1", "SELECT COUNT(*) FROM pet WHERE kind = 'dog'"),
        (
            "SELECT name FROM owner JOIN pet ON pet.owner = owner.id WHERE kind = 'cat'",
            "SELECT name FROM owner WHERE id = 1",
        ),
        (
            "SELECT name FROM owner WHERE id NOT IN (SELECT owner FROM pet)",
            "SELECT name FROM owner WHERE city IS NULL",
        ),
    ],
)
def test_a_query_that_is_right_by_luck_is_refuted(shop: Path, gold: str, lucky: str) -> None:
    with apsw.Connection(str(shop)) as real:
        assert set(real.execute(gold)) == set(real.execute(lucky))
    found = distil(gold, shop)
    assert 0 < len(found.contents) <= 4
    results = [
        (set(witness.execute(gold)), set(witness.execute(lucky)))
        for witness in map(opened, found.contents)
    ]
    assert any(wanted != predicted for wanted, predicted in results)


@pytest.mark.parametrize(
    ("gold", "same"),
    [
        (
            "SELECT name FROM owner WHERE id NOT IN (SELECT owner FROM pet)",
            "SELECT name FROM owner LEFT JOIN pet ON owner.id = pet.owner WHERE pet.id IS NULL",
        ),
        ("SELECT COUNT(*) FROM owner", "SELECT COUNT(name) FROM owner"),
        (
            "SELECT kind FROM pet JOIN owner ON pet.owner = owner.id",
            "SELECT kind FROM pet",
        ),
        (
            "SELECT name FROM owner ORDER BY id LIMIT 1",
            "SELECT name FROM owner WHERE id = (SELECT min(id) FROM owner)",
        ),
        (
            "SELECT kind FROM pet ORDER BY age DESC LIMIT 1",
            "SELECT kind FROM pet WHERE age = (SELECT max(age) FROM pet)",
        ),
    ],
)
def test_a_query_that_means_the_same_is_not_refuted(shop: Path, gold: str, same: str) -> None:
    """The last: where the oldest pet has a twin, the gold itself is undecided."""
    for witness in map(opened, distil(gold, shop).contents):
        assert set(witness.execute(gold)) == set(witness.execute(same))


ODD: dict[str, tuple[str, str]] = {
    "composite keys": (
        "CREATE TABLE a (x INT, y INT, z TEXT, PRIMARY KEY (y, x)); "
        "CREATE TABLE b (y INT, x INT, FOREIGN KEY (y, x) REFERENCES a (y, x)); "
        "INSERT INTO a VALUES (1, 1, 'p'), (1, 2, 'q'), (2, 1, 'r'); "
        "INSERT INTO b VALUES (1, 1), (2, 1), (1, 1)",
        "SELECT z FROM a JOIN b ON a.x = b.x AND a.y = b.y",
    ),
    "a table that names itself": (
        "CREATE TABLE p (id INTEGER PRIMARY KEY, boss INTEGER REFERENCES p (id), n TEXT); "
        "INSERT INTO p VALUES (1, NULL, 'a'), (2, 1, 'b'), (3, 1, 'c'), (4, 2, 'd')",
        "SELECT c.n FROM p AS c JOIN p AS b ON c.boss = b.id WHERE b.n = 'a'",
    ),
    "one row": (
        "CREATE TABLE t (id INTEGER PRIMARY KEY, n INT); INSERT INTO t VALUES (1, 5)",
        "SELECT n FROM t WHERE id = 1",
    ),
    "many columns": (
        f"CREATE TABLE t ({', '.join(f'c{n} INT' for n in range(300))}); "
        "INSERT INTO t (c0, c1) VALUES (1, 2), (2, 3), (3, 4)",
        "SELECT c1 FROM t WHERE c0 > 1",
    ),
    "dates as text": (
        "CREATE TABLE t (d TEXT, n INT); "
        "INSERT INTO t VALUES ('2024-01-05', 1), ('2024-02-05', 2), ('2025-01-01', 3)",
        "SELECT SUM(n) FROM t WHERE strftime('%Y', d) = '2024'",
    ),
    "blobs": (
        "CREATE TABLE t (b BLOB, n INT); INSERT INTO t VALUES (x'01', 1), (x'02', 2), (x'01', 3)",
        "SELECT COUNT(DISTINCT b) FROM t",
    ),
    "UTF-16": (
        "PRAGMA encoding = 'UTF-16le'; CREATE TABLE t (n TEXT, k INT); "
        "INSERT INTO t VALUES ('Å', 1), ('Ø', 2), ('Å', 3)",
        "SELECT COUNT(*) FROM t WHERE n = 'Å'",
    ),
    "WITHOUT ROWID and STRICT": (
        "CREATE TABLE t (k TEXT PRIMARY KEY, n INTEGER) WITHOUT ROWID, STRICT; "
        "INSERT INTO t VALUES ('a', 1), ('b', 2), ('c', 2)",
        "SELECT k FROM t WHERE n = 2",
    ),
    "generated columns": (
        "CREATE TABLE t (a INT, b INT AS (a * 2)); INSERT INTO t (a) VALUES (1), (2), (3), (3)",
        "SELECT MAX(b) FROM t",
    ),
    "a trigger": (
        "CREATE TABLE t (n INT); INSERT INTO t VALUES (1), (2), (2); "
        "CREATE TRIGGER no BEFORE INSERT ON t BEGIN SELECT raise(ABORT, 'no'); END",
        "SELECT COUNT(DISTINCT n) FROM t",
    ),
    "a virtual table beside": (
        "CREATE VIRTUAL TABLE w USING fts5(body); INSERT INTO w VALUES ('x'); "
        "CREATE TABLE t (n INT); INSERT INTO t VALUES (1), (2), (2)",
        "SELECT COUNT(*) FROM t WHERE n = 2",
    ),
    "a window": (
        "CREATE TABLE t (g TEXT, n INT); INSERT INTO t VALUES ('a', 1), ('a', 2), ('b', 3)",
        "SELECT g, SUM(n) OVER (PARTITION BY g) FROM t",
    ),
    "recursion": (
        "CREATE TABLE e (a INT, b INT); INSERT INTO e VALUES (1, 2), (2, 3), (5, 6)",
        "WITH RECURSIVE r(x) AS (SELECT 1 UNION SELECT b FROM e JOIN r ON a = x) "
        "SELECT COUNT(*) FROM r",
    ),
    "JSON": (
        "CREATE TABLE t (j TEXT); "
        """INSERT INTO t VALUES ('{"a": 1}'), ('{"a": 2}'), ('{"a": 2}')""",
        "SELECT COUNT(*) FROM t WHERE json_extract(j, '$.a') = 2",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_databases_have_witnesses(tmp_path: Path, name: str) -> None:
    script, gold = ODD[name]
    database = make_file(tmp_path / "odd.sqlite", script)
    found = distil(gold, database)
    assert found.contents, found.reason
    assert found.neighbours == 0 or len(found.untold) < found.neighbours


@pytest.mark.parametrize(
    ("script", "gold", "reason"),
    [
        (SHOP, "SELECT nonsense FROM pet", "fails or is undecided"),
        (SHOP, "SELECT CASE", "cannot be parsed"),
        ("CREATE VIRTUAL TABLE w USING fts5(body)", "SELECT body FROM w", "fails or is undecided"),
        (
            "CREATE TABLE t (n TEXT); INSERT INTO t VALUES (CAST(x'ff' AS TEXT))",
            "SELECT n FROM t",
            "cannot make a variant",
        ),
    ],
)
def test_what_has_no_witness_says_why(tmp_path: Path, script: str, gold: str, reason: str) -> None:
    database = make_file(tmp_path / "odd.sqlite", script)
    found = distil(gold, database)
    assert (found.contents, reason in found.reason) == ((), True)


def test_witnesses_are_kept_by_what_is_in_the_database(tmp_path: Path, shop: Path) -> None:
    gold = "SELECT COUNT(*) FROM pet WHERE age > 1"
    folder = tmp_path / "cache"
    first = WitnessStore(folder).of(shop, gold, match="set", count=2)
    assert len(first.files) == 2
    assert 0 < first.told <= first.neighbours
    stamps = [file.stat().st_mtime_ns for file in first.files]
    again = WitnessStore(folder).of(shop, gold, match="set", count=2)
    assert again == first
    assert [file.stat().st_mtime_ns for file in again.files] == stamps
    make_file(shop, "INSERT INTO pet VALUES (9, 'fish', 8, 1)")
    changed = WitnessStore(folder).of(shop, gold, match="set", count=2)
    assert set(changed.files).isdisjoint(first.files)


def ask(shop: Path, gold: str, *, witnesses: int) -> Callable[[str], tuple[bool, bool]]:
    config = SingleTurnConfig(wrapping="any", witnesses=witnesses)
    example = Example("1", "how many?", "shop", shop, gold)

    def judged(sql: str) -> tuple[bool, bool]:
        with Executor(ExecutorConfig(isolation="thread")) as executor:
            environment = SingleTurn(
                config,
                executor=executor,
                first_prompt=lambda _: (),
                witnesses=WitnessStore(shop.parent / "witnesses"),
            )
            episode, _ = environment.step(environment.reset(example)[0], sql)
        attempt = episode.attempts[-1]
        return attempt.correct, attempt.refuted

    return judged


def test_an_answer_that_is_right_by_luck_is_not_right(shop: Path) -> None:
    gold = "SELECT SUM(age) FROM pet WHERE kind = 'cat'"
    lucky = "SELECT age FROM pet WHERE kind = 'cat'"
    assert ask(shop, gold, witnesses=0)(lucky) == (True, False)
    assert ask(shop, gold, witnesses=4)(lucky) == (False, True)
    assert ask(shop, gold, witnesses=4)(gold) == (True, False)
    assert ask(shop, gold, witnesses=4)("SELECT 1") == (False, False)
