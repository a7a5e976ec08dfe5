"""`--file`: another question file, by name or path, and the databases that belong to it."""

import json
from pathlib import Path

import pytest

from launch.evaluation.questions import find, folder_and_file
from minirl.exchange import UserError
from tests.worlds import write

from .small_sets import make_bird, make_spider


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of downloads; Spider's questions have a name of their own."""
    spider = make_spider(tmp_path / "downloads" / "spider_data")
    (spider / "dev.json").rename(spider / "dev_visible.json")
    make_bird(tmp_path / "downloads" / "bird_data")
    return tmp_path / "downloads"


INSIDE = "downloads/spider_data/dev_visible.json"


@pytest.mark.parametrize(
    ("questions", "place", "file"),
    [
        # An absolute path, or one from here, of a file below the root or outside of it.
        (INSIDE, "downloads/spider_data", f"HERE/{INSIDE}"),
        (INSIDE, "downloads", f"HERE/{INSIDE}"),
        (INSIDE, "downloads/spider_data", INSIDE),
        (INSIDE, "downloads", INSIDE),
        (INSIDE, "", INSIDE),
        ("mine.json", "downloads/spider_data", "HERE/mine.json"),
        ("mine.json", "downloads", "HERE/mine.json"),
        ("mine.json", "downloads", "mine.json"),
        # A name below the root, in the folder of the databases or in another one.
        ("downloads/a_copy/dev_visible.json", "downloads", "dev_visible.json"),
        ("downloads/questions/mine.json", "downloads", "mine.json"),
        ("downloads/questions/mine.json", "downloads", "questions/mine.json"),
    ],
)
def test_a_file_is_taken_by_name_or_path(root, tmp_path, monkeypatch, questions, place, file):
    """What lies below the root goes before what lies here; databases are those below the root."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / questions, json.loads((tmp_path / INSIDE).read_text()))
    write(tmp_path / "dev_visible.json", [])
    found, file = folder_and_file(
        Path(place) if place else None, file.replace("HERE", str(tmp_path))
    )
    assert found is not None
    _, examples = find("spider-dev", tmp_path / found, file)
    assert len(examples) == 5
    assert all(one.database.is_relative_to(root / "spider_data") for one in examples)


@pytest.mark.parametrize(
    ("name", "place", "file", "words"),
    [
        ("spider-dev", "downloads", "none.json", r"^--file none\.json: "),
        ("spider-dev", "downloads", "HERE/none.json", r"^--file \S*/none\.json: "),
        ("spider-dev", "none", "", r"^--data-root \S*none: "),
        ("spider-dev", "downloads/spider_data", "", r"^--data-root: .*; .*--file NAME$"),
        # Nobody is told to put databases into the folder of another data set.
        (
            *("spider-dev", "downloads", "HERE/downloads/bird_data/dev.json"),
            r"^--file \S*: spider-dev: .* records are of bird ",
        ),
    ],
)
def test_what_is_not_there_is_told_by_its_option(root, tmp_path, name, place, file, words):
    with pytest.raises(UserError, match=words):
        find(name, tmp_path / place, file.replace("HERE", str(tmp_path)))


def test_the_option_that_was_given_is_named(root):
    with pytest.raises(UserError, match=rf"^data\.root: spider-test: {root}: no test\.json in it"):
        find("spider-test", root, key="data.root")
    with pytest.raises(UserError, match=r"^data\.root no: .*; set it, or give --data-root FOLDER"):
        find("spider-test", Path("no"), key="data.root")


def test_a_set_whose_file_has_a_name_of_its_own_is_that_file(root):
    """Mini-Dev lies beside BIRD's dev set."""
    folder = root / "bird_data"
    for name in ("sqlite", "postgresql"):
        (folder / f"mini_dev_{name}.json").write_text((folder / "dev.json").read_text())
    _, (first, *_) = find("bird-minidev", root)
    assert first.id == "bird/mini_dev_sqlite/0"
    _, (first, *_) = find("bird-minidev", root, dialect="postgres")
    assert (first.id, first.dialect) == ("bird/mini_dev_postgresql/0", "postgres")
    with pytest.raises(UserError, match=r"no mini_dev_mysql\.json in it"):
        find("bird-minidev", root, dialect="mysql")
