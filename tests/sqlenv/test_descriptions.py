"""BIRD's description files, as they come."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from sqlenv.data.descriptions import full_descriptions

HEAD = "original_column_name,column_name,column_description,data_format,value_description\r\n"


def describe(folder: Path, content: bytes, name: str = "town.csv", inner: str = "") -> dict:
    place = folder / (inner or "database_description")
    place.mkdir()
    (place / name).write_bytes(content)
    return full_descriptions(folder)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16"])
def test_every_encoding(tmp_path: Path, encoding: str):
    content = (HEAD + "Name,full name,the café,text,\r\n").encode(encoding)
    assert describe(tmp_path, content) == {("town", "name"): "the café"}


def test_a_mark_before_bytes_that_are_not_utf8(tmp_path: Path):
    content = b"\xef\xbb\xbf" + (HEAD + "Name,,caf\u00e9,text,\r\n").encode("cp1252")
    assert describe(tmp_path, content) == {("town", "name"): "café"}


@pytest.mark.parametrize(
    ("name", "inner"),
    [("TOWN.CSV", "Database_Description"), (" Town .csv", "database_description")],
)
def test_names_that_differ_in_case_or_are_padded(tmp_path: Path, name: str, inner: str):
    content = (HEAD.upper() + " NAME ,,the name,text,\r\n").encode()
    assert describe(tmp_path, content, name, inner) == {("town", "name"): "the name"}


def test_cells_of_several_lines_spare_cells_and_zero_bytes(tmp_path: Path):
    content = HEAD.replace("\r\n", ",,\r\n") + 'a,,"one\r\ntwo\0",text,"x: ""y""",,\r\nb,bee\r\n'
    assert describe(tmp_path, content.encode()) == {
        ("town", "a"): 'one two; x: "y"',
        ("town", "b"): "bee",
    }


def test_a_file_without_the_columns_is_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        assert describe(tmp_path, b"a;b;c\r\n1;2;3\r\n") == {}
    assert "town.csv: line 1 has no column original_column_name, but a;b;c" in caplog.text
