"""What a command says of how far it is: one line on a terminal, lines of a log elsewhere."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from rich.console import Console

from launch import cli
from minirl.run import activity
from tests.waiting import wait_until


@contextmanager
def doing(words: str) -> Generator[None]:
    with patch.object(activity, "status", lambda: words):
        yield


@pytest.fixture
def written(monkeypatch) -> io.StringIO:
    """Return what a log takes; its lines are 10 ms apart at least."""
    file = io.StringIO()
    monkeypatch.setattr(cli, "console", Console(file=file, width=80))
    monkeypatch.setattr(cli, "LINE_S", 0.01)
    return file


def wait_for(text: str, file: io.StringIO) -> None:
    wait_until(lambda: text in file.getvalue())


def test_a_log_has_a_line_a_tenth_and_what_is_done_when_that_changes(written):
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


def test_a_terminal_has_one_line_with_both(monkeypatch):
    file = io.StringIO()
    screen = Console(file=file, width=100, force_terminal=True, color_system=None)
    monkeypatch.setattr(cli, "console", screen)
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


def test_a_wait_is_shown_on_a_terminal_and_wiped_out(monkeypatch, written):
    with cli.waiting("writing a query"):
        pass
    assert written.getvalue() == ""  # a log
    file = io.StringIO()
    screen = Console(file=file, width=100, force_terminal=True, color_system=None)
    monkeypatch.setattr(cli, "console", screen)
    with cli.waiting("writing a query"), doing("prompts 0/1"):
        wait_for("prompts 0/1", file)
    assert file.getvalue().endswith("\x1b[2K")  # the line is empty again
