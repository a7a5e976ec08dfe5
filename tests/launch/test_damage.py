"""Whatever is wrong with data, databases or predictions ends a command with one line that names
it, status 2, and nothing written.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import eval as evaluating
from launch import score
from tests.worlds import GOLDS, edit, make_spider, write

from .conftest import judging

DATABASE = Path("database", "pets", "pets.sqlite")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A Spider folder with right predictions."""
    return write(make_spider(tmp_path / "spider_data") / "p.sql", GOLDS).parent


def arguments(root: Path) -> list[str]:
    """Give the arguments of a command that reads the folder."""
    return judging(root / "p.sql", root, "--json", str(root.parent / "out" / "o.json"))


def link(path: Path) -> Path:
    """Put a link in place of a file; give the file's new place."""
    store = path.parents[2] / "store" / f"{path.stem}.db"
    store.parent.mkdir(exist_ok=True)
    path.replace(store)
    path.symlink_to(store)
    return store


def beside(path: Path, ending: str, content: bytes = b"\x37\x7f\x06\x82") -> None:
    path.with_name(path.name + ending).write_bytes(content)


# What breaks the folder, and what the line has to name. Whatever else may be wrong with a database
# or a question file: tests/sqlenv/test_executor.py and test_damage.py.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "journal behind a link": (
        lambda r: beside(link(r / DATABASE), "-journal"), "pets.db-journal: "
    ),
    "cut database": (lambda r: os.truncate(r / DATABASE, 4096), "pets.sqlite: "),
    "no databases": (lambda r: shutil.rmtree(r / "database"), "database"),
    "another suite": (lambda r: shutil.rmtree(r / "test_suite_database" / "pets"), "pets"),
    "no root": (shutil.rmtree, "spider_data"),
    "UTF-16": (lambda r: (r / "dev.json").write_bytes("[{}]".encode("utf-16")), "dev.json: "),
    "blank gold": (lambda r: edit(r / "dev.json", 2, query=" "), "dev/2"),
    "prediction of another": (
        lambda r: write(r / "p.sql", [*GOLDS[:3], f"{GOLDS[3]}\tpets", GOLDS[4]]), "p.sql:4: "
    ),
    "Latin-1": (lambda r: (r / "p.sql").write_bytes(b"SELECT '\xc4'\n"), "p.sql: "),
    "no predictions": (lambda r: (r / "p.sql").unlink(), "p.sql: "),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_line_names_what_is_damaged(root, ended, name):
    do, named = DAMAGES[name]
    do(root)
    status, out, err = ended(evaluating.main, *arguments(root))
    line = err.splitlines()[-1]
    assert (status, out, "Traceback" in err) == (2, "", False), err
    assert line.startswith("error: ")
    assert named in line
    assert not (root.parent / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda r: beside(r / DATABASE, "-wal", b""),
        lambda r: beside(r / DATABASE, "-journal", bytes(512)),
        lambda r: link(r / DATABASE),
    ],
    ids=["empty log", "journal whose writer is done", "link"],
)
def test_what_official_programs_read_is_judged(root, ended, change):
    change(root)
    words = [*arguments(root), "--comparators", "bird_ex"]
    assert ended(evaluating.main, *words)[0] == 0
    sheet = json.loads((root.parent / "out" / "o.json").read_text())
    assert sheet["measures"]["bird_ex"]["mean"] == 1


def test_a_folder_whose_name_is_not_utf8(tmp_path, command):
    """Also to a standard output that takes text alone, which is that of a process."""
    folder = tmp_path / os.fsdecode(b"n\xe4\xff") / "spider_data"
    root = write(make_spider(folder) / "p.sql", GOLDS).parent
    done = command("launch.eval", *arguments(root), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sheet = json.loads((root.parent / "out" / "o.json").read_text())
    assert sheet["measures"]["spider_ts"]["mean"] == 1


def test_a_full_disk_names_the_file(root, ended):
    """/dev/full is always full."""
    status, _, err = ended(evaluating.main, *arguments(root)[:-1], "/dev/full")
    assert (status, "/dev/full" in err) == (2, True)


@pytest.mark.parametrize(
    "text",
    ["SELECT name FROM pet WHERE age = 1" + " OR age = 1" * 200_000, "[" * 2_000_000],
    ids=["conditions", "names"],
)
def test_a_text_of_megabytes_is_refused_before_anything_reads_it(root, ended, text):
    """Reading it took 3 to 19 s a query, of which the limits of a query say nothing."""
    pair = ["--db", str(root / DATABASE), "--gold", GOLDS[0], "--pred", text]
    status, out, _ = ended(score.main, *pair, "--timeout-s", "1")
    record = json.loads(out)
    assert (status, record["status"]) == (0, "too_large")
    assert record["seconds"] < 1
    path = write(root / "p.jsonl", [{"pred": sql} for sql in [text, *GOLDS[1:]]])
    words = ["--predictions", str(path), *arguments(root)[2:], "--timeout-s", "1"]
    assert ended(evaluating.main, *words)[0] == 0
    sheet = json.loads((root.parent / "out" / "o.json").read_text())
    assert [one["scores"]["spider_ex"] for one in sheet["questions"]] == [0, 1, 1, 1, 1]
    assert (sheet["questions"][0]["status"], sheet["late"]) == ("too_large", [])
