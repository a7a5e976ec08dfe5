"""Data sets and corrections that are not as their layout says (`tests/data/damaged_sets.json`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minirl.exchange import UserError
from sqlenv.executor import Executor
from tests.vectors import read
from tests.worlds import TABLES, bird, load_one, make_database, spider, write

RECORDS = {"spider": spider(), "bird": bird(), "tables": TABLES}


def lay(path: Path, content: Any) -> None:
    """Write a file: a text as it is, records that may be `like` another one; or make a database."""
    if content == "band":
        make_database(path.parent, content)
    else:
        write(path, [whole(one) for one in content] if isinstance(content, list) else content)


def whole(record: Any) -> Any:
    if not isinstance(record, dict) or "like" not in record:
        return record
    return RECORDS[record["like"]] | {name: one for name, one in record.items() if name != "like"}


@pytest.mark.parametrize("case", read("damaged_sets"), ids=lambda case: case["why"])
def test_damage_is_told_in_a_line(case: dict[str, Any], tmp_path: Path, runner: Executor) -> None:
    for name, content in {"database/band": "band", **case["files"]}.items():
        lay(tmp_path / name, content)
    source: dict[str, Any] = {"split": "dev", **case.get("source", {})}
    if "corrections" in source:
        source["corrections"] = str(tmp_path / source["corrections"])
    if "file" in source:
        del source["split"]
    with pytest.raises(UserError) as caught:
        load_one(tmp_path / source.pop("path", ""), executor=runner, **source)
    said = str(caught.value)
    assert "\n" not in said
    for words in case["says"]:
        assert words.replace("{}", str(tmp_path)) in said
