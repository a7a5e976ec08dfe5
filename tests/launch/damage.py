"""Damaged inputs as a table: what is broken, which commands read it, what their one line names."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .small_sets import GOLDS, make_spider

EVAL, SCORE, PAIRS = "launch.eval", "launch.score --predictions", "launch.score --file"
DATABASE = Path("database", "pets", "pets.sqlite")
SHOP = Path("database", "shop", "shop.sqlite")


@dataclass(frozen=True)
class Damage:
    """What is done to a whole Spider folder with predictions and pairs in it.

    Attributes:
        do: Breaks something in the folder.
        words: What the line has to have, with `{root}` for the folder.
        commands: Those that read what is broken.
    """

    do: Callable[[Path], object]
    words: tuple[str, ...]
    commands: tuple[str, ...] = (EVAL, SCORE, PAIRS)


def make_inputs(root: Path) -> Path:
    """Make a Spider folder with a database of several pages, right predictions and pairs."""
    make_spider(root)
    connection = sqlite3.connect(root / DATABASE)
    connection.execute("CREATE TABLE more (text TEXT)")
    connection.executemany("INSERT INTO more VALUES (?)", [(f"{n:02}" * 500,) for n in range(50)])
    connection.commit()
    connection.close()
    (root / "p.sql").write_text("".join(f"{gold}\n" for gold in GOLDS))
    where = [root / DATABASE] * 3 + [root / SHOP] * 2
    pairs = [
        {"id": number, "db": str(path), "gold": gold, "pred": gold}
        for number, (path, gold) in enumerate(zip(where, GOLDS, strict=True))
    ]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return root


def arguments(command: str, root: Path) -> list[str]:
    """Give the arguments of a command that reads the folder."""
    data = ["--predictions", str(root / "p.sql"), "--data-root", str(root)]
    return {
        EVAL: [*data, "--data", "spider-dev", "--json", str(root.parent / "out" / "o.json")],
        SCORE: [*data, "--data", "dev.json", "--json"],
        PAIRS: ["--file", str(root / "pairs.jsonl"), "--json"],
    }[command]


def link(path: Path) -> Path:
    """Put a link in place of a file; give the file's new place."""
    store = path.parents[2] / "store" / f"{path.stem}.db"
    store.parent.mkdir(exist_ok=True)
    path.replace(store)
    path.symlink_to(store)
    return store


def beside(path: Path, ending: str, content: bytes = b"\x37\x7f\x06\x82") -> None:
    path.with_name(path.name + ending).write_bytes(content)


def overwrite(path: Path, start: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new))


def encode(path: Path, encoding: str, questions: str = "Wer heißt Äpfel?") -> None:
    text = json.dumps(json.loads(path.read_text()), ensure_ascii=False)
    path.write_bytes(text.replace("Who is there?", questions).encode(encoding))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


DEEP = 20_000
DAMAGES: dict[str, Damage] = {
    # Databases.
    "a log beside the database": Damage(
        lambda r: beside(r / DATABASE, "-wal"), ("pets.sqlite-wal: unfinished writes",)
    ),
    "a log behind a link": Damage(
        lambda r: beside(link(r / DATABASE), "-wal"), ("pets.db-wal: unfinished writes",)
    ),
    "a journal behind a link": Damage(
        lambda r: beside(link(r / DATABASE), "-journal"), ("pets.db-journal: unfinished writes",)
    ),
    "a log behind a link, beside the link": Damage(
        lambda r: (link(r / DATABASE), beside(r / DATABASE, "-wal")),
        ("pets.sqlite-wal: unfinished writes",),
    ),
    "a database cut in half": Damage(
        lambda r: os.truncate(r / DATABASE, (r / DATABASE).stat().st_size // 2),
        ("{root}/database/pets/pets.sqlite: ", "corrupt"),
    ),
    "pages of zeros": Damage(
        lambda r: overwrite(r / DATABASE, 4096, bytes(4 * 4096)),
        ("{root}/database/pets/pets.sqlite: ", "corrupt"),
    ),
    "pages of noise": Damage(
        lambda r: overwrite(r / DATABASE, 8192, b"\xa5" * 8192),
        ("{root}/database/pets/pets.sqlite: ", "corrupt"),
    ),
    "an empty database": Damage(
        lambda r: (r / SHOP).write_bytes(b""), ("shop.sqlite: the database file is empty",)
    ),
    "a page of HTML": Damage(
        lambda r: (r / SHOP).write_bytes(b"<html>"), ("shop.sqlite: not a SQLite database",)
    ),
    "a folder in the place of a database": Damage(
        lambda r: ((r / SHOP).unlink(), (r / SHOP).mkdir()), ("{root}/database/shop/shop.sqlite",)
    ),
    "a link to nothing": Damage(
        lambda r: link(r / SHOP).unlink(), ("{root}/database/shop/shop.sqlite",)
    ),
    # Question files.
    "questions cut off": Damage(
        lambda r: os.truncate(r / "dev.json", 300), ("dev.json: broken JSON",), (EVAL, SCORE)
    ),
    "questions in Latin-1": Damage(
        lambda r: encode(r / "dev.json", "latin-1"), ("dev.json: ", "UTF-8"), (EVAL, SCORE)
    ),
    "questions in UTF-16": Damage(
        lambda r: encode(r / "dev.json", "utf-16"), ("dev.json: ", "UTF-16"), (EVAL, SCORE)
    ),
    "questions in UTF-16, unmarked": Damage(
        lambda r: encode(r / "dev.json", "utf-16-le"), ("dev.json: ", "UTF-16"), (EVAL, SCORE)
    ),
    "lists without end": Damage(
        lambda r: (r / "dev.json").write_text("[" * DEEP),
        ("dev.json: ", "broken JSON"),
        (EVAL, SCORE),
    ),
    "objects within objects": Damage(
        lambda r: (r / "dev.json").write_text('[{"a":' + '{"b": ' * DEEP + "1" + "}" * DEEP),
        ("dev.json: ", "broken JSON"),
        (EVAL, SCORE),
    ),
    "a blank gold query": Damage(
        lambda r: replace(r / "dev.json", GOLDS[2], " "),
        ("no gold query", "spider/dev/2"),
        (EVAL, SCORE),
    ),
    # Predictions.
    "predictions for another database": Damage(
        lambda r: replace(r / "p.sql", GOLDS[3], f"{GOLDS[3]}\tpets"),
        ("{root}/p.sql:4: is for database pets", "spider/dev/3"),
        (EVAL, SCORE),
    ),
    "pairs nested deep": Damage(
        lambda r: (r / "pairs.jsonl").write_text("[" * DEEP + "\n"),
        ("pairs.jsonl:1: not a JSON object",),
        (PAIRS,),
    ),
    "pairs in Latin-1": Damage(
        lambda r: (r / "pairs.jsonl").write_bytes('{"id": "Ä"}\n'.encode("latin-1")),
        ("pairs.jsonl: ", "UTF-8"),
        (PAIRS,),
    ),
    "pairs with a blank gold": Damage(
        lambda r: replace(r / "pairs.jsonl", GOLDS[2], " "),
        ("pairs.jsonl:3: the gold query is empty",),
        (PAIRS,),
    ),
}
"""By what is broken."""
