"""What is printed is what was meant: in any width, without colours, when the terminal is gone; how
far a command is, in one line on a terminal, in lines of a log elsewhere.
"""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from rich.console import Console

from launch import cli, tables
from minirl.run import activity, preemption
from sqlenv.types import SqlError, Table
from tests.waiting import wait_until

# Texts of users and models, which are no markup, emoji or pattern for those who print them.
TEXTS = ["no such table: no[/b]", "no[red]x", "[link=x]", ":smile:", "[[", "\\[b]", "SELECT a[1]"]


@pytest.fixture
def printed(monkeypatch):
    """Return what prints to a console like ours, of a width; on a terminal or into a log."""

    def at(width: int, *, name: str = "output", terminal: bool = False) -> io.StringIO:
        ours, file = getattr(cli, name), io.StringIO()
        like = Console(
            file=file, width=width, markup=ours._markup, emoji=ours._emoji, color_system=None,
            force_terminal=terminal,
        )  # fmt: skip
        monkeypatch.setattr(cli, name, like)
        return file

    return at


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_printed_as_they_are(printed, text):
    file = printed(200)
    cli.output.print(f"run: {text}")
    tables.show_table(text, [("", text), (text, "1")])
    cli.output.print(tables.result_view(Table(columns=(text,), rows=((text,),))))
    cli.output.print(tables.result_view(SqlError(text)))
    assert file.getvalue().count(text) == 1 + 3 + 2 + 1
    shown = printed(200, name="console", terminal=True)
    with cli.progress_bar(text) as progress:
        progress(1, 2, text)
    assert text in shown.getvalue()


def test_cells_are_text_and_nothing_a_terminal_would_obey(printed):
    file = printed(80, terminal=True)
    row = (None, 1.5, b"\x00", "\x1b[31mb", "10\xa0km")
    cli.output.print(tables.result_view(Table(("a", "b", "c", "d", "e"), (row,))))
    assert all(shown in file.getvalue() for shown in ("NULL", "1.5", "b'\\x00'", row[4]))
    assert row[3] not in file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 59, 80])
def test_tables_fit_a_terminal_of_any_width(printed, width):
    """Columns that do not fit come below, with the names."""
    file = printed(width)
    numbers = ("20.0 % [16.7, 23.7]", "44.2 % [39.9, 48.6]", "24.2 [20.3, 28.3]")
    rows = [("", "before", "between", "after"), ("accuracy [95 %]", *numbers), ("bird", *"123")]
    tables.show_table("500 questions", rows, sections=(1,))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert all(word in text for word in ("before", "after", "[16.7,", *"123"))
    assert text.count("bird") == text.count("┏━")


@contextmanager
def doing(words: str) -> Generator[None]:
    with patch.object(activity, "status", lambda: words):
        yield


def wait_for(text: str, file: io.StringIO) -> None:
    wait_until(lambda: text in file.getvalue())


def test_a_log_has_a_line_a_tenth_and_what_is_done_when_that_changes(printed, monkeypatch):
    written = printed(80, name="console")
    monkeypatch.setattr(cli, "LINE_S", 0.01)
    with cli.progress_bar("answers") as show:
        show(0, 40, "")
        with doing("prompts 3/8"):
            wait_for("(prompts 3/8)", written)
            time.sleep(0.1)  # some ten looks at the same
        with doing("compiling for 12 s"):
            wait_for("12 s", written)
        for done in range(1, 41):
            show(done, 40, "accuracy 50.0 %")
    time.sleep(0.05)
    lines = written.getvalue().splitlines()
    assert lines[:4] == [
        "answers: 0/40",
        "answers: 0/40 (prompts 3/8)",
        "answers: 0/40 (compiling for 12 s)",
        "answers: 1/40 accuracy 50.0 %",
    ]
    # Nothing was done any more when the tenths came.
    assert lines[4:] == [f"answers: {done}/40 accuracy 50.0 %" for done in range(4, 41, 4)]


def test_a_terminal_has_one_line_with_both(printed):
    file = printed(100, name="console", terminal=True)
    with cli.progress_bar("learning") as show, doing("update: micro-batch 3/8"):
        show(2, 24, "reward 0.25")
        wait_for("update: micro-batch 3/8; reward 0.25", file)
        (line,) = {
            part
            for part in re.split(r"[\r\n]|\x1b\[\S*?[A-Za-z]", file.getvalue())
            if "3/8" in part
        }
        assert line.startswith("learning ")
        assert " 2/24 " in line


def test_a_terminal_without_a_size_is_printed_to():
    code = "from launch import cli; cli.output.print('SELECT 1')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "COLUMNS": "0"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "SELECT 1\n"


# A command that saves when it is stopped, as launch.train does, and tells how it goes meanwhile.
SAVES = """
import sys, time
from pathlib import Path
from launch import cli
from minirl.run import preemption
def main(_):
    with preemption.watched(), cli.progress_bar("learning") as progress:
        Path(sys.argv[1], "begun").touch()
        try:
            while True:
                progress(1, 2, "loss")
                time.sleep(0.05)
                preemption.check()
        except preemption.Preempted:
            cli.console.print("saving")
            print("saving", flush=True)
            Path(sys.argv[1], "saved").touch()
            raise
cli.run(main)
"""


# These tests may run under nohup, whose SIGHUP is ignored by all that it starts.
OWN_TERMINAL = """
import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""


def test_a_closed_terminal_saves(tmp_path):
    terminal, inner = pty.openpty()
    line = [sys.executable, "-c", OWN_TERMINAL + SAVES, str(tmp_path)]
    process = subprocess.Popen(
        line, stdin=inner, stdout=inner, stderr=inner, start_new_session=True
    )
    try:
        os.close(inner)
        wait_until((tmp_path / "begun").exists)
        os.close(terminal)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "saved").exists()


def test_what_nohup_ignores_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with preemption.watched():
            signal.raise_signal(signal.SIGHUP)
            preemption.check()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with preemption.watched():
            signal.raise_signal(signal.SIGHUP)
            assert preemption.noticed() == signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)
