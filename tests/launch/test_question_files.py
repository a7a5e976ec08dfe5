"""`--file`: another question file, by name or path, and the databases that belong to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from exchange import UserError
from launch.evaluation.questions import find, folder_and_file, own_set, rule_of
from sqlenv.config import AnswerConfig

from .small_sets import make_bird, make_spider


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of downloads; Spider's questions have a name of their own."""
    spider = make_spider(tmp_path / "downloads" / "spider_data")
    (spider / "dev.json").rename(spider / "dev_visible.json")
    make_bird(tmp_path / "downloads" / "bird_data")
    return tmp_path / "downloads"


def check(root: Path, file: str, data: str = "spider-dev") -> None:
    """Five questions are found, and databases that are there."""
    _, examples = find(data, root, file)
    assert len(examples) == 5
    assert all(example.database.is_file() for example in examples)


def test_an_absolute_path_is_taken(root, tmp_path):
    inside = root / "spider_data" / "dev_visible.json"
    check(root / "spider_data", str(inside))
    check(root, str(inside))
    # Outside of the root too: the databases are those below the root.
    outside = tmp_path / "mine.json"
    outside.write_text(inside.read_text())
    check(root / "spider_data", str(outside))
    check(root, str(outside))


def test_a_path_from_here_is_taken(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed = "downloads/spider_data/dev_visible.json"
    check(root, typed)
    check(root / "spider_data", typed)
    (tmp_path / "mine.json").write_text((tmp_path / typed).read_text())
    check(root, "mine.json")
    found, file = folder_and_file(None, typed)
    assert found is not None
    check(found, file)
    # What lies below the root goes first.
    (tmp_path / "dev_visible.json").write_text("[]")
    check(root, "dev_visible.json")


def test_what_is_not_there_is_told_by_its_option(root, tmp_path):
    for option, place, file in (
        ("--file", root, "none.json"),
        ("--file", *folder_and_file(None, str(tmp_path / "none.json"))),
        ("--data-root", tmp_path / "none", ""),
    ):
        with pytest.raises(UserError, match=rf"^{option} \S*none\S*: "):
            find("spider-dev", place or root, file)


def test_the_folder_with_databases_goes_before_one_without(root):
    here = root / "spider_data" / "dev_visible.json"
    (root / "a_copy").mkdir()
    (root / "a_copy" / "dev_visible.json").write_text(here.read_text())
    _, (first, *_) = find("spider-dev", root, "dev_visible.json")
    assert first.database.is_relative_to(root / "spider_data")


def test_databases_may_lie_in_another_folder_than_the_questions(root):
    here = root / "spider_data" / "dev_visible.json"
    (root / "questions").mkdir()
    here.rename(root / "questions" / "mine.json")
    check(root, "mine.json")
    check(root, "questions/mine.json")


def test_a_set_of_another_name_is_told_with_the_option_that_names_it(root):
    with pytest.raises(UserError) as caught:
        find("spider-dev", root / "spider_data")
    assert "\n" not in str(caught.value)
    assert "--file" in str(caught.value)


def test_a_file_that_holds_no_questions_does_not_stand_for_its_folder(root):
    predictions = root / "spider_data" / "model.sql"
    predictions.write_text("SELECT 1\n")
    with pytest.raises(UserError, match=r"^--data-root \S*model\.sql: is a file, and not one of "):
        folder_and_file(predictions, "")


def test_the_option_that_was_given_is_named(root):
    for key in ("--data-root", "data.root"):
        with pytest.raises(UserError, match=rf"^{key}: spider-test: {root}: no test\.json in it"):
            find("spider-test", root, key=key)


def test_nobody_is_told_to_put_databases_into_the_folder_of_another_data_set(root):
    with pytest.raises(UserError, match=r"^--file \S*: spider-dev: .* records are of bird "):
        find("spider-dev", root, str(root / "bird_data" / "dev.json"))


def test_a_set_whose_file_has_a_name_of_its_own_is_that_file(root):
    """Mini-Dev lies beside BIRD's dev set."""
    folder = root / "bird_data"
    (folder / "mini_dev_sqlite.json").write_text((folder / "dev.json").read_text())
    _, (first, *_) = find("bird-minidev", root)
    assert first.id == "bird/mini_dev_sqlite/0"


def test_a_job_with_witnesses_is_judged_on_them_first_and_by_its_rule_alone():
    """An official rule keeps its name for itself."""
    asks = AnswerConfig(match="spider_ex", witnesses=2)
    found = own_set("test", (), asks)
    assert found.measures == ("witness", "spider_ex")
    assert rule_of(found.measures) == "spider_ex"
    assert found.witnesses == 2
    assert own_set("test", (), AnswerConfig(match="spider_ex")).measures == ("spider_ex",)
