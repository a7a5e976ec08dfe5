"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from minirl.run.files import appearing, whole_file


def interrupted_folder(path: Path) -> None:
    with appearing(path) as new:
        (new / "config.json").write_text("half")
        raise KeyboardInterrupt


def interrupted(path: Path) -> None:
    with whole_file(path) as file:
        file.write("two")
        assert path.read_text() == "one"
        raise KeyboardInterrupt


def test_the_old_file_stays_until_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    path = tmp_path / "new" / "result.json"
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def told_fsync(handle: int) -> None:
        order.append(f"sync {Path(f'/proc/self/fd/{handle}').readlink().name}")
        fsync(handle)

    def told_replace(one: Path, other: Path) -> Path:
        order.append(f"replace {other.name}")
        return replace(one, other)

    monkeypatch.setattr(os, "fsync", told_fsync)
    monkeypatch.setattr(Path, "replace", told_replace)
    with whole_file(path) as file:
        file.write("one")
    assert order == ["sync .result.json.part", "replace result.json", "sync new"]
    with pytest.raises(KeyboardInterrupt):
        interrupted(path)
    assert path.read_text() == "one"
    assert [found.name for found in path.parent.iterdir()] == ["result.json"]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with whole_file(tmp_path / "link") as file:
        file.write("text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    with whole_file(tmp_path / "pipe") as file:
        file.write("text")
    reader.join()
    assert read == ["text"]
    assert (tmp_path / "pipe").is_fifo()


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (Path("/dev/full"), tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r".") as caught, whole_file(path) as file:
            file.write("text")
        assert str(caught.value.filename).startswith(str(path.parent))


def test_a_folder_appears_when_its_files_are_on_the_disk(tmp_path, monkeypatch):
    synced: list[str] = []
    monkeypatch.setattr("minirl.run.files.sync", lambda path: synced.append(path.name))
    with appearing(tmp_path / "model") as new:
        (new / "config.json").write_text("{}")
        assert not synced
    assert synced == ["config.json", new.name, tmp_path.name]
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    with pytest.raises(KeyboardInterrupt):
        interrupted_folder(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
