"""Small databases on which queries that mean something else give other results."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from sqlenv.cache import DiskCache
from sqlenv.config import ExecutorConfig, SingleTurnConfig
from sqlenv.envs.single_turn import SingleTurn, first_refuting
from sqlenv.evaluators.comparators import Case
from sqlenv.executor import Executor
from sqlenv.types import Example, ExecutionMatch, Table
from sqlenv.witness.draw import draw_witnesses, ties_broken
from sqlenv.witness.focus import focus_of
from sqlenv.witness.refutation import judge_on_witnesses, rows_on
from sqlenv.witness.source import read_source
from sqlenv.witness.store import WitnessStore
from sqlenv.witness.variants import make_variant
from tests.vectors import read
from tests.worlds import make_file

WITNESSES = read("witnesses")
ODD = WITNESSES["odd"] | {
    "many columns": (
        f"CREATE TABLE t ({', '.join(f'c{n} INT' for n in range(300))}); "
        "INSERT INTO t (c0, c1) VALUES (1, 2), (2, 3), (3, 4)",
        "SELECT c1 FROM t WHERE c0 > 1",
    )
}
SHOP = """
CREATE TABLE owner (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT);
INSERT INTO owner VALUES (1, 'Ann', 'Oslo'), (2, 'Bob', 'Rome'), (3, 'Cy', 'Oslo'), (4, 'Di', NULL);
CREATE TABLE pet (
  id INTEGER PRIMARY KEY, kind TEXT, age INTEGER CHECK (age >= 0),
  owner INTEGER NOT NULL REFERENCES owner
);
INSERT INTO pet VALUES (1, 'cat', 3, 1), (2, 'dog', 1, 2), (3, 'dog', 2, 2), (4, 'fish', 1, 3);
CREATE TABLE member (owner INTEGER REFERENCES owner, club TEXT);
INSERT INTO member VALUES (1, 'chess'), (2, 'golf'), (3, 'chess');
CREATE VIEW old AS SELECT * FROM pet WHERE age > 1;
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return make_file(tmp_path / "shop.sqlite", SHOP)


def opened(contents: bytes) -> apsw.Connection:
    connection = apsw.Connection(":memory:")
    connection.deserialize("main", contents)
    return connection


@pytest.mark.parametrize("seed", range(20))
def test_a_variant_keeps_what_the_database_promises(shop: Path, seed: int) -> None:
    gold = "SELECT name FROM owner JOIN pet ON pet.owner = owner.id WHERE kind = 'cat' AND age > 1"
    source = read_source(shop)
    focus = focus_of(gold, source)
    assert focus is not None
    variant = make_variant(source, focus, seed=seed)
    assert list(variant.execute("PRAGMA foreign_key_check")) == []
    assert list(variant.execute("PRAGMA integrity_check")) == [("ok",)]
    kinds = {str(kind) for (kind,) in variant.execute("SELECT kind FROM pet")}
    assert kinds <= {"cat", "dog", "fish"}  # a word so short may be a code: none gets longer
    assert list(variant.execute("SELECT * FROM old EXCEPT SELECT * FROM pet")) == []
    assert next(variant.execute("SELECT date('now')")) == ("2025-01-01",)  # today as tomorrow
    again = make_variant(source, focus, seed=seed)
    assert again.serialize("main") == variant.serialize("main")


@pytest.mark.parametrize("seed", range(20))
def test_a_row_that_no_owner_has_is_not_in_a_variant(shop: Path, seed: int) -> None:
    """A LEFT JOIN gives such rows: of NULL alone."""
    source = read_source(shop)
    focus = focus_of("SELECT name FROM owner LEFT JOIN pet ON owner = owner.id", source)
    assert focus is not None
    variant = make_variant(source, focus, seed=seed)
    assert next(variant.execute("SELECT count(*) FROM pet WHERE kind IS NULL OR age IS NULL")) == (
        0,
    )


@pytest.mark.parametrize(
    ("gold", "lucky"),
    WITNESSES["luck"],
)
def test_a_query_that_is_right_by_luck_is_refuted(shop: Path, gold: str, lucky: str) -> None:
    with apsw.Connection(str(shop)) as real:
        assert set(real.execute(gold)) == set(real.execute(lucky))
    found = draw_witnesses(gold, shop)
    assert 0 < len(found) <= 8
    results = [
        (set(witness.execute(gold)), set(witness.execute(lucky))) for witness in map(opened, found)
    ]
    assert any(wanted != predicted for wanted, predicted in results)


@pytest.mark.parametrize(
    ("script", "gold", "same"),
    WITNESSES["same"],
)
def test_a_query_that_means_the_same_is_not_refuted(
    tmp_path: Path, script: str, gold: str, same: str
) -> None:
    """Ties (where the oldest pet has a twin, the gold itself is undecided), constants of another
    form than the column's values, rows that name refused ones, rows that never repeat.
    """
    database = make_file(tmp_path / "it.sqlite", script or SHOP)
    found = draw_witnesses(gold, database)
    assert found
    for witness in map(opened, found):
        assert set(witness.execute(gold)) == set(witness.execute(same))


def test_rows_that_tie_at_a_limit_decide_nothing(tmp_path: Path) -> None:
    """A maximum gives them all, the same row twice too, which bags tell from once."""
    rows = ", ".join(f"({number}, {number % 3}, {number % 2})" for number in range(1, 13))
    script = f"CREATE TABLE t (id INTEGER PRIMARY KEY, age INT, n INT); INSERT INTO t VALUES {rows}"
    database = make_file(tmp_path / "it.sqlite", script)
    found = draw_witnesses("SELECT n FROM t ORDER BY age, id % 4 LIMIT 1", database, mode="bag")
    same = "SELECT n FROM t WHERE (age, id % 4) = (SELECT age, id % 4 FROM t ORDER BY 1, 2 LIMIT 1)"
    assert found
    for witness in map(opened, found):
        assert len(list(witness.execute(same))) == 1


def test_an_empty_table_gets_rows(tmp_path: Path) -> None:
    script = "CREATE TABLE t (id INTEGER PRIMARY KEY, name VARCHAR(9), n REAL, born DATE, b BLOB)"
    database = make_file(tmp_path / "it.sqlite", script)
    golds = ("SELECT name FROM t WHERE n > 3", "SELECT id FROM t WHERE name = 'Ann'")
    for gold, lucky in zip(golds, ("SELECT name FROM t", golds[0]), strict=True):
        witnesses = [opened(one) for one in draw_witnesses(gold, database)]
        assert any({*one.execute(gold)} != {*one.execute(lucky)} for one in witnesses)


@pytest.mark.parametrize("name", ODD)
def test_odd_databases_have_witnesses(tmp_path: Path, name: str) -> None:
    script, gold = ODD[name]
    database = make_file(tmp_path / "odd.sqlite", script or SHOP)
    found = draw_witnesses(gold, database)
    assert found


@pytest.mark.parametrize(
    ("script", "gold", "reason"),
    WITNESSES["none"],
)
def test_what_has_no_witness_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, script: str, gold: str, reason: str
) -> None:
    database = make_file(tmp_path / "odd.sqlite", script or SHOP)
    with caplog.at_level(logging.INFO):
        assert draw_witnesses(gold, database) == ()
    assert reason in caplog.text


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[DiskCache]:
    with closing(DiskCache(tmp_path / "cache")) as found:
        yield found


def test_witnesses_are_kept_by_what_is_in_the_database(shop: Path, cache: DiskCache) -> None:
    gold = "SELECT COUNT(*) FROM pet WHERE age > 1"
    first = WitnessStore(cache, match="set", count=2).of(shop, gold)
    assert len(first) == 2
    again = WitnessStore(cache, match="set", count=2).of(shop, gold)
    assert again == first  # the same files, so that nothing was made anew
    more = WitnessStore(cache, match="set", count=3).of(shop, gold)
    make_file(shop, "INSERT INTO pet VALUES (9, 'fish', 8, 1)")
    changed = WitnessStore(cache, match="set", count=2).of(shop, gold)
    for other in (more, changed):
        assert set(other).isdisjoint(first)


def test_two_makers_at_a_time_leave_each_other_their_files(cache: DiskCache) -> None:
    found = []

    def make(file: Path) -> None:
        found.append(cache.made_file("one", lambda first: first.write_bytes(b"first")))
        file.write_bytes(b"second")

    assert [cache.made_file("one", make)] == found
    assert found[0].read_bytes() == b"first"


def test_a_witness_whose_file_is_gone_is_made_again(shop: Path, cache: DiskCache) -> None:
    store = WitnessStore(cache, match="set", count=2)
    contents = [file.read_bytes() for file in store.of(shop, SUM)]
    store.of(shop, SUM)[0].unlink()
    assert [file.read_bytes() for file in store.of(shop, SUM)] == contents


def test_a_query_that_has_all_memory_for_a_moment_costs_no_witness(tmp_path: Path) -> None:
    """SQLite's memory is the process's: neither the schema nor the witnesses are given up."""
    wanted = draw_witnesses("SELECT name FROM owner", make_file(tmp_path / "a.sqlite", SHOP))
    database = make_file(tmp_path / "b.sqlite", SHOP)
    with closing(apsw.Connection(":memory:")) as hungry:
        hungry.execute("CREATE TABLE t AS SELECT zeroblob(1000000)")
        before = apsw.hard_heap_limit(apsw.memory_used() + 10_000)
        timer = threading.Timer(0.3, apsw.hard_heap_limit, [before])
        timer.start()
        try:
            assert draw_witnesses("SELECT name FROM owner", database) == wanted
        finally:
            timer.join()


def test_what_lacks_memory_is_made_when_it_is_asked_for_again(
    shop: Path, cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starve(*_: object, **__: object) -> tuple[bytes, ...]:
        raise apsw.NoMemError("out of memory")

    store = WitnessStore(cache, match="set", count=2)
    with monkeypatch.context() as patch:
        patch.setattr("sqlenv.witness.store.draw_witnesses", starve)
        assert store.of(shop, SUM) == ()
    assert len(store.of(shop, SUM)) == 2


def test_witnesses_of_photos_are_small(tmp_path: Path) -> None:
    script = (
        "CREATE TABLE photo (id INTEGER PRIMARY KEY, name TEXT, body BLOB); WITH r(n) AS (SELECT 1 "
        "UNION ALL SELECT n + 1 FROM r LIMIT 40) "
        "INSERT INTO photo SELECT n, 'p' || n, randomblob(100000) FROM r"
    )
    database = make_file(tmp_path / "photos.sqlite", script)
    found = draw_witnesses("SELECT name FROM photo WHERE body IS NOT NULL AND id > 3", database)
    assert len(found) == 8
    assert max(map(len, found)) < 200_000


def test_witnesses_of_spiders_rule_know_no_distinct(shop: Path, cache: DiskCache) -> None:
    """Its program takes them out of both queries."""
    store = WitnessStore(cache, match="spider_ex", count=2)
    one, other = (store.of(shop, f"SELECT {word} kind FROM pet") for word in ("", "DISTINCT"))
    assert one == other


Ask = Callable[..., tuple[bool, bool]]


@pytest.fixture
def ask(shop: Path, cache: DiskCache) -> Iterator[Ask]:
    with Executor(ExecutorConfig()) as executor:

        def asked(gold: str, witnesses: int, sql: str, rule: str = "") -> tuple[bool, bool]:
            environment = SingleTurn(
                SingleTurnConfig(wrapping="any", witnesses=witnesses),
                executor=executor,
                first_prompt=lambda _: (),
                witnesses=WitnessStore(cache, match="set", count=witnesses) if witnesses else None,
            )
            example = Example("1", "how many?", "shop", shop, gold, grading_method=rule)
            episode, _ = environment.step(environment.reset(example)[0], sql)
            attempt = episode.attempts[-1]
            return attempt.correct, attempt.refuted is not None

        yield asked


SUM, LUCKY = "SELECT SUM(age) FROM pet WHERE kind = 'cat'", "SELECT age FROM pet WHERE kind = 'cat'"


def test_an_answer_that_is_right_by_luck_is_not_right(ask: Ask) -> None:
    assert ask(SUM, 0, LUCKY) == (True, False)
    assert ask(SUM, 4, LUCKY) == (False, True)
    assert ask(SUM, 4, SUM) == (True, False)
    assert ask(SUM, 4, "SELECT 1") == (False, False)


def test_a_rule_that_counts_rows_is_asked_on_the_questions_database_alone(ask: Ask) -> None:
    """Any three of four owners are right; a witness may have two."""
    gold = "SELECT name FROM owner"
    assert ask(gold, 4, f"{gold} LIMIT 3", "subset,=,3") == (True, False)
    assert ask(gold, 4, f"{gold} LIMIT 2", "subset,=,3") == (False, False)


@pytest.mark.parametrize("rule", ["set", "spider_ex"])
def test_last_bits_refute_nothing(tmp_path: Path, cache: DiskCache, rule: ExecutionMatch) -> None:
    """On the database all give the same to the bit; one divides each number before it adds."""
    prices = "(1.5), (10.25), (7.1), (0.1), (0.2), (0.3)"
    script = f"CREATE TABLE t (r REAL); INSERT INTO t VALUES {prices}"
    database = make_file(tmp_path / "it.sqlite", script)
    queries = "SELECT SUM(r) / 3 FROM t", "SELECT SUM(r / 3.0) FROM t", "SELECT 19.45 / 3"
    cases = [Case(query, queries[0], database) for query in queries]
    with Executor(ExecutorConfig()) as executor:
        store, config = WitnessStore(cache, match=rule), SingleTurnConfig(match=rule)
        scores = judge_on_witnesses(cases, rule, executor, store)
        example, files = (
            Example("1", "?", "t", database, queries[0]),
            store.of(database, queries[0]),
        )
        refuted = [first_refuting(example, query, files, executor, config) for query in queries]
    assert scores == [1, 1, 0]
    assert [found is None for found in refuted] == [True, True, False]


def test_a_refutation_shows_the_rows_and_both_results(shop: Path, cache: DiskCache) -> None:
    example = Example("1", "how old are cats together?", "shop", shop, SUM)
    files = WitnessStore(cache, match="set").of(shop, SUM)
    with Executor(ExecutorConfig()) as executor:
        against = first_refuting(example, LUCKY, files, executor, SingleTurnConfig())
        assert against is not None
        assert against.database == files[against.number - 1]
        tables, gold = rows_on(against.database, example, LUCKY, executor.execute)
    pets, predicted = tables["pet"], against.result
    assert isinstance(pets, Table)
    assert isinstance(gold, Table)
    assert isinstance(predicted, Table)
    ages = [row[2] for row in pets.rows if row[1] == "cat" and isinstance(row[2], int)]
    assert gold.rows == ((sum(ages) if ages else None,),)
    assert {row[0] for row in predicted.rows} - {None} == {*ages}
    assert {*gold.rows} != {*predicted.rows}


def test_ties_are_broken_by_the_querys_own_columns():
    assert ties_broken("SELECT a FROM orders") == ties_broken("SELECT a FRO t ORDER BY a") == ()
    upwards, downwards = ties_broken("SELECT a, CAST(b AS DATE) FROM t ORDER BY c LIMIT 1;")
    # To SQLite a date is a number: sqlglot would write DATE(b), which is another value.
    assert upwards == "SELECT a, CAST(b AS NUMERIC) FROM t ORDER BY c, 1 ASC, 2 ASC LIMIT 1"
    assert downwards == "SELECT a, CAST(b AS NUMERIC) FROM t ORDER BY c, 1 DESC, 2 DESC LIMIT 1"
