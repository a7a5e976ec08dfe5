"""BIRD's description files, as they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqlenv.data.descriptions import full_descriptions
from sqlenv.schema.reading import described_key

HEAD = "original_column_name,column_name,column_description,data_format,value_description\r\n"
FOLDER = "database_description"
CAFE = HEAD + "Name,full name,the café,text,\r\n"
LINES = HEAD.replace("\r\n", ",,\r\n") + 'Name,,"one\r\ntwo\0",text,"x: ""y""",,\r\nb,bee\r\n'


@pytest.mark.parametrize(
    ("content", "file", "expected"),
    [
        *((CAFE.encode(name), "town.csv", ["the café"]) for name in ("utf-8", "cp1252", "utf-16")),
        (CAFE.encode("utf-8-sig"), "town.csv", ["the café"]),
        # A mark before bytes that are not UTF-8.
        (b"\xef\xbb\xbf" + CAFE.encode("cp1252"), "town.csv", ["the café"]),
        ((HEAD.upper() + " NAME ,,the name,text,\r\n").encode(), "TOWN.CSV", ["the name"]),
        # Cells of several lines, spare cells and zero bytes.
        (LINES.encode(), " Town .csv", ['one two; x: "y"', "bee"]),
    ],
)
def test_files_as_they_come(tmp_path: Path, content: bytes, file: str, expected: list[str]):
    place = tmp_path / (FOLDER if file.islower() else FOLDER.title())
    place.mkdir()
    (place / file).write_bytes(content)
    (place / "._town.csv").write_text(CAFE)  # macOS leaves such
    columns = (("town", "name"), ("town", "b"))
    assert full_descriptions(tmp_path) == dict(zip(columns, expected, strict=False))
    assert described_key("Town", " NAME\n") == columns[0]


def test_a_file_without_the_columns_is_named_and_passed_over(tmp_path: Path, caplog):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "town.csv").write_bytes(b"a;b;c\r\n1;2;3\r\n")
    assert full_descriptions(tmp_path) == {}
    assert "town.csv: line 1 has no column original_column_name, but a;b;c" in caplog.text
