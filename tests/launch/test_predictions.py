"""Files of predictions: read in every form and matched with their questions, and written. Question
files by name or path (`--file`), and the databases that belong to them.
"""

import json
import re
from pathlib import Path

import apsw
import pytest

from launch.evaluation.answers import GREEDY
from launch.evaluation.predictions import read_samples, write_official
from launch.evaluation.questions import find, folder_and_file
from tests.vectors import read
from tests.worlds import GOLDS, edit, make_bird, make_spider, read_all, write

from .conftest import mistake
from .report_cases import verdict

CASES = read("predictions")


def test_predictions_in_every_form_are_the_same(spider_root, tmp_path):
    examples = read_all(find("spider-dev", spider_root))
    for name, content in CASES["forms"].items():
        path = tmp_path / name
        path.write_bytes(content.encode())
        found = read_samples(path, examples, GREEDY, asked=examples)
        assert found == [(gold,) for gold in GOLDS], name


@pytest.fixture
def numbered(tmp_path) -> Path:
    """BIRD's questions in Mini-Dev's way: ids of their own, which are not their places."""
    root = make_bird(tmp_path / "bird")
    for number in range(len(GOLDS)):
        edit(root / "dev.json", number, question_id=700 + number)
    return root


# Of records, `fields` with the number of each for #, and by what they are matched.


@pytest.mark.parametrize("case", CASES["matched"], ids=lambda case: case["fields"])
def test_it_is_said_by_what_records_are_matched(numbered, tmp_path, caplog, case):
    examples, path = read_all(find("bird-dev", numbered)), tmp_path / "p.jsonl"
    lines = [
        f'{{{case["fields"].replace("#", str(n))}, "sql": {json.dumps(gold)}}}\n'
        for n, gold in enumerate(GOLDS)
    ]
    # What names its question may be in any order.
    path.write_text("".join(lines[::-1] if case["told"] == "by id" else lines))
    with caplog.at_level("INFO"):
        assert read_samples(path, examples, GREEDY, asked=examples) == [(g,) for g in GOLDS]
    assert case["told"] in caplog.text
    assert ("looks like" in caplog.text) == ("looks like" in case["told"])


def test_an_id_that_two_questions_share_names_none(numbered, tmp_path):
    edit(numbered / "dev.json", 4, question_id=703)
    examples = read_all(find("bird-dev", numbered))
    path = write(tmp_path / "p.jsonl", [{"question_id": 703, "sql": GOLDS[3]}])
    assert "703 is of no question" in mistake(read_samples, path, examples, GREEDY, asked=examples)


@pytest.mark.parametrize("case", CASES["damaged"], ids=lambda case: case["id"])
def test_predictions_that_do_not_fit_are_told_with_their_line(numbered, tmp_path, case):
    examples, path = read_all(find("bird-dev", numbered)), tmp_path / case["file"]
    path.write_bytes(case["content"].encode())
    assert case["message"] in mistake(read_samples, path, examples, GREEDY, asked=examples)


def test_a_file_may_hold_the_questions_of_a_sample_alone(spider_root, tmp_path):
    """As an evaluation with --limit writes them: in their order, or with their ids."""
    examples = read_all(find("spider-dev", spider_root))
    asked = [examples[3], examples[0]]
    lines = {
        "sample.sql": f"{GOLDS[3]}\n{GOLDS[0]}\n",
        "ids.jsonl": "".join(
            json.dumps({"id": one.id, "sql": GOLDS[number]}) + "\n"
            for one, number in zip(asked[::-1], (0, 3), strict=True)
        ),
        "all.sql": CASES["forms"]["blank_end.sql"],
    }
    for name, text in lines.items():
        path = tmp_path / name
        path.write_text(text)
        found = read_samples(path, examples, GREEDY, asked=asked)
        assert found == [(GOLDS[3],), (GOLDS[0],)], name
    path.write_text("SELECT 1\n")
    told = mistake(read_samples, path, examples, GREEDY, asked=asked)
    assert "1 predictions for 5 questions or a sample of 2; give" in told


def test_official_forms_are_a_line_a_question(tmp_path):
    sqls = {
        "SELECT a -- first\nFROM t\t/* all\nof it */ WHERE b = 1": "SELECT a FROM t WHERE b = 1",
        # The evaluators split inside quotes too.
        "SELECT 'a\tb\r\nc'": "SELECT 'a b c'",
        "SELECT '-- kept', \"x\u2028y\"": "SELECT '-- kept', \"x\u2028y\"",
        # A blank line would shift all later ones.
        "": "SELECT",
        "-- nothing\n": "SELECT",
    }
    verdicts = [verdict(n, db_id=f"d{n}", sql=sql) for n, sql in enumerate(sqls)]
    write_official(verdicts, tmp_path)
    text = (tmp_path / "predictions.sql").read_text(encoding="utf-8")
    assert text.split("\n") == [*sqls.values(), ""]
    bird = json.loads((tmp_path / "predictions_bird.json").read_text(encoding="utf-8"))
    expected = {str(n): f"{sql}\t----- bird -----\td{n}" for n, sql in enumerate(sqls.values())}
    assert bird == expected


# Question files.


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of downloads; Spider's questions have a name of their own."""
    spider = make_spider(tmp_path / "downloads" / "spider_data")
    (spider / "dev.json").rename(spider / "dev_visible.json")
    make_bird(tmp_path / "downloads" / "bird_data")
    return tmp_path / "downloads"


INSIDE = "downloads/spider_data/dev_visible.json"


@pytest.mark.parametrize("case", CASES["files"], ids=lambda case: case["id"])
def test_a_file_is_taken_by_name_or_path(root, tmp_path, monkeypatch, case):
    """What lies below the root goes before what lies here; databases are those below the root."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / case["questions"], json.loads((tmp_path / INSIDE).read_text()))
    write(tmp_path / "dev_visible.json", [])
    place = Path(case["place"]) if case["place"] else None
    found, file = folder_and_file(place, case["file"].replace("HERE", str(tmp_path)))
    assert found is not None
    held = apsw.connections()
    examples = read_all(find("spider-dev", tmp_path / found, file))
    assert not {*apsw.connections()} - {*held}  # none stays until the garbage is collected
    assert len(examples) == 5
    assert all(one.database.is_relative_to(root / "spider_data") for one in examples)


@pytest.mark.parametrize("case", CASES["absent"], ids=lambda case: case["id"])
def test_what_is_not_there_is_told_by_its_option(root, tmp_path, case):
    place, file = tmp_path / case["place"], case["file"].replace("HERE", str(tmp_path))
    assert re.search(case["told"], mistake(find, "spider-dev", place, file))


def test_the_option_that_was_given_is_named(root):
    told = mistake(find, "spider-test", root, key="data.root")
    assert told.startswith(f"data.root: spider-test: {root}: no test.json in it")
    told = mistake(find, "spider-test", Path("no"), key="data.root")
    assert re.match(r"data\.root no: .*; set it, or give --data-root FOLDER", told)


def test_a_set_whose_file_has_a_name_of_its_own_is_that_file(root):
    """Mini-Dev lies beside BIRD's dev set."""
    folder = root / "bird_data"
    for name in ("sqlite", "postgresql"):
        (folder / f"mini_dev_{name}.json").write_text((folder / "dev.json").read_text())
    first, *_ = read_all(find("bird-minidev", root))
    assert first.id == "bird/mini_dev_sqlite/0"
    first, *_ = read_all(find("bird-minidev", root, dialect="postgres"))
    assert (first.id, first.dialect) == ("bird/mini_dev_postgresql/0", "postgres")
    assert "no mini_dev_mysql.json in it" in mistake(find, "bird-minidev", root, dialect="mysql")
