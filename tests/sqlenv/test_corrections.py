"""Golds that are corrected, and golds that are made wrong."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from minirl.exchange import UserError
from sqlenv.config import SingleTurnConfig
from sqlenv.data.corrections import read_corrections
from sqlenv.data.corruptions import corrupt
from sqlenv.envs.single_turn import judge_reply
from tests.worlds import bird, load_one, make_set, write

ASKED = [
    bird(question_id=7, question="Which names?", SQL="SELECT name FROM band"),
    bird(question_id=9, question="How many?", SQL="SELECT count(*) FROM band"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_set(tmp_path / "dev.json", tmp_path / "dev_databases", ASKED).parent


def lay(folder: Path, *records: dict[str, Any], runner=None, pin: str = "") -> Any:
    write(folder / "fixed.json", list(records))
    corrections = f"{folder / 'fixed.json'}{pin}"
    return load_one(folder, "bird", runner, split="dev", corrections=corrections)


def test_published_forms_are_read(folder):
    """BIRD-Verified's (null where unchanged), Arcwise-Plat's, and the proposals' for Spider."""
    same = {"original_question": None, "original_evidence": None, "original_SQL": None}
    verified = {
        **same, "question_id": "7", "db_id": "band", "question": "Name 1 of them.", "evidence": "E",
        "SQL": "SELECT name FROM band WHERE id > 0", "grading_method": "subset,=,1",
        "original_question": "Which names?", "original_SQL": "select name\nfrom band;",
    }  # fmt: skip
    proposal = {
        "id": 9, "db_id": "band", "change_type": "x", "corrected_query": "SELECT 2",
        "original_query": "SELECT count(*) FROM band", "alternatives": None,
    }  # fmt: skip
    first, second = lay(folder, verified, proposal).examples
    assert (first.question, first.grading_method) == ("Name 1 of them.", "subset,=,1")
    assert first.gold_sql == "SELECT name FROM band WHERE id > 0"
    assert (second.question, second.gold_sql, second.evidence) == ("How many?", "SELECT 2", "E")
    arcwise = {
        "question_id": 9,
        "db_id": "band",
        "question": "?",
        "evidence": "",
        "SQL": "SELECT 3",
    }
    # What has no gold query of its own is asked too.
    write(folder / "dev.json", [ASKED[0], {**ASKED[1], "SQL": None}])
    first, second = lay(folder, arcwise).examples
    assert first.gold_sql == ASKED[0]["SQL"]
    assert (second.question, second.gold_sql, second.evidence) == ("?", "SELECT 3", "")


GOOD: dict[str, Any] = {"question_id": 9, "db_id": "band", "gold_sql": "SELECT 3"}


def test_a_file_is_pinned_by_its_hash(folder):
    own = hashlib.sha256(write(folder / "fixed.json", [GOOD]).read_bytes()).hexdigest()
    assert lay(folder, GOOD, pin=f"@{own[:8]}").examples[1].gold_sql == "SELECT 3"
    with pytest.raises(UserError, match=f"another copy, its sha256 is {own[:12]} and not abcdef0"):
        lay(folder, GOOD, pin="@abcdef0")
    with pytest.raises(UserError, match=r"@ab: no such file"):
        lay(folder, GOOD, pin="@ab")


def test_training_pays_for_every_gold_and_by_the_questions_own_rule(folder, runner):
    fixed = [
        {**GOOD, "alternatives": ["SELECT count(DISTINCT id) + 1 FROM band"]},
        {"question_id": 7, "db_id": "band", "SQL": "SELECT 'x' UNION SELECT 'y'",
         "grading_method": "subset,=,1"},
    ]  # fmt: skip
    first, second = lay(folder, *fixed, runner=runner).examples
    bits = lay(folder, {**GOOD, "alternatives": ["SELECT 0.3"]}, runner=runner).examples[1]
    config = SingleTurnConfig(match="bag_ordered")

    def is_right(example: Any, sql: str) -> bool:
        return judge_reply(example, f"<sql>{sql}</sql>", runner, config).correct

    # Numbers are as close to any of the golds as to the first.
    assert is_right(bits, "SELECT 0.1 + 0.2")
    assert [is_right(second, sql) for sql in ("SELECT 3", "SELECT 2", "SELECT 1")] == [1, 1, 0]
    rows = ("SELECT 'y'", "SELECT 'x'", "SELECT 'x' UNION SELECT 'y'", "SELECT 'z'")
    assert [is_right(first, sql) for sql in rows] == [1, 1, 0, 0]


def test_published_files_are_read(shared: Path):
    folder = shared / "data" / "corrected"
    counts = {"bird-verified-train": 2064, "bird-verified-val": 398, "arcwise_plat_full": 33}
    counts |= {"arcwise_plat_sql": 33, "spider_corrections": 148}
    for name, count in counts.items():
        assert len(read_corrections(f"{folder / name}.json").by_id) == count
    corrections = str(folder / "arcwise_plat_full.json")
    plain = load_one(shared / "data" / "bird_dev", "bird", split="dev")
    data = load_one(shared / "data" / "bird_dev", "bird", split="dev", corrections=corrections)
    pairs = list(zip(plain.examples, data.examples, strict=True))
    assert sum(old.gold_sql != new.gold_sql for old, new in pairs) == 9
    assert sum(old.question != new.question for old, new in pairs) == 4
    # The records that are corrected can be a question file of their own.
    file = str(folder / "bird-verified-train.json")
    alone: dict[str, Any] = {"file": file, "split": "train"}
    more = {"drop_missing_database": True}
    with pytest.raises(UserError, match=r"no question is left.*2,064 missing database"):
        load_one(shared / "data" / "bird_dev", "bird", data=more, **alone)


# The mistakes of a weak annotator: one part confused or forgotten, the rest left alone.

DATA = Path(__file__).parents[1] / "data"
CASES = dict(json.loads((DATA / "corruptions.json").read_text()))


@pytest.mark.parametrize(("sql", "wrong"), CASES.items())
def test_one_part_is_wrong(sql, wrong):
    found = corrupt(sql)
    assert found is not None
    assert found.replace(" ASC", "") == wrong


NO_MISTAKE = ("", "DROP TABLE t", "SELECT FROM", "(" * 5000, "SELECT * FROM t", "SELECT 1")


@pytest.mark.parametrize("sql", NO_MISTAKE)
def test_what_does_not_parse_or_has_nothing_to_get_wrong_has_no_mistake(sql):
    assert corrupt(sql) is None


def test_a_mistake_runs():
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript("CREATE TABLE t (a, b, c, d); CREATE TABLE u (b, d);")
        for sql in CASES:
            wrong = corrupt(sql)
            assert wrong is not None
            db.execute(wrong)
