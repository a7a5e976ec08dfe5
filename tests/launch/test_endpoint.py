"""Answers over HTTP, whatever comes back, and the files that keep them."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

import minirl.errors
from launch import endpoint
from launch.config import VerbalConfig
from launch.endpoint import Endpoint
from launch.journal import Answer, Cost, Journal, Request
from launch.run_folder import claimed
from launch.verbal_job import Choices
from sqlenv.errors import UserError
from sqlenv.types import Message

from .chat_server import Chat, Failure, serve

JSON = {"content-type": "application/json"}


def ask(chat: Chat, text: str = "?", timeout_s: float = 20.0) -> list[Answer]:
    """Ask a server once, with one repetition."""
    answers: list[Answer] = []
    one = Endpoint(chat.url, "m", VerbalConfig(retries=1, timeout_s=timeout_s, parallel=1))
    try:
        asked = Request("generate", (Message("user", text),), 0, ())
        one.answer([asked], lambda _, answer: answers.append(answer))
    finally:
        one.close()
    return answers


def says(content: str, usage: str = '{"prompt_tokens": 2, "completion_tokens": 3}') -> Failure:
    """Make a completion out of JSON."""
    text = f'{{"choices": [{{"message": {{"content": {content}}}}}], "usage": {usage}}}'
    return Failure(200, text, JSON)


NO_COMPLETIONS = (
    *("[]", "[1]", "null", "1", '"x"', "{}", "", "{", "[" * 200_000, '{"a":' * 100_000),
    *(
        f'{{"choices": {choices}}}'
        for choices in ("null", "[]", "[null]", '{"a": 1}', '"abc"', "5", '[{"message": null}]')
    ),
)


@pytest.mark.parametrize("text", NO_COMPLETIONS, ids=lambda text: text[:24])
def test_what_is_no_completion_is_asked_for_again(monkeypatch, text):
    monkeypatch.setattr(endpoint, "_FIRST_PAUSE_S", 0.001)
    bad = Failure(200, text, JSON)
    with serve(Chat(lambda body, earlier: says('"fine"') if earlier else bad)) as chat:
        assert ask(chat) == [Answer("fine", 2, 3)]
    with (
        serve(Chat(lambda body, earlier: bad)) as chat,
        pytest.raises(UserError, match="still failing after 2 tries"),
    ):
        ask(chat)


@pytest.mark.parametrize(
    "usage", ["null", "7", "{}", '{"prompt_tokens": 1e999}', '{"prompt_tokens": "x"}',
              '{"prompt_tokens": NaN}', '{"prompt_tokens": -4}', '{"prompt_tokens": [1]}']
)  # fmt: skip
def test_an_answer_without_a_cost_is_taken_and_told(usage, caplog):
    with serve(Chat(lambda body, earlier: says('"fine"', usage))) as chat:
        assert ask(chat) == [Answer("fine")]
        assert chat.requests == 1
    assert "do not tell their tokens" in caplog.text


def test_content_that_is_no_text_is_an_empty_answer():
    for content in ("null", "5", '["a"]', "{}"):
        with serve(Chat(lambda body, earlier, content=content: says(content))) as chat:
            assert ask(chat) == [Answer("", 2, 3)]


def test_halves_of_characters_are_neither_sent_nor_kept():
    with serve(Chat(lambda body, earlier: says(r'"a\ud800b"'))) as chat:
        assert ask(chat, "\ud800?") == [Answer("a?b", 2, 3)]
        assert chat.bodies[0]["messages"][0]["content"] == "??"


@pytest.mark.parametrize("wished", ["nan", "inf", "1e400", "-5", "", "Wed, 21 Oct 2015 07:28 GMT"])
def test_a_wish_that_is_no_time_to_wait_is_none(monkeypatch, wished):
    monkeypatch.setattr(endpoint, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(endpoint, "_LONGEST_PAUSE_S", 0.01)
    busy = Failure(429, headers={"retry-after": wished})
    with serve(Chat(lambda body, earlier: says('"fine"') if earlier else busy)) as chat:
        assert ask(chat) == [Answer("fine", 2, 3)]


def test_a_server_that_hangs_or_is_gone_is_told(monkeypatch):
    monkeypatch.setattr(endpoint, "_FIRST_PAUSE_S", 0.001)
    hang = Failure(delay_s=0.6)
    with (
        serve(Chat(lambda body, earlier: hang)) as chat,
        pytest.raises(UserError, match=r"still failing after 2 tries \(Request timed out"),
    ):
        ask(chat, timeout_s=0.1)
    with pytest.raises(UserError, match=r"Connection error.*[Rr]efused"):
        ask(chat)  # its port is closed now


def request(number: int, **settings) -> Request:
    fixed = {"model": "m", **settings}
    return Request("generate", (Message("user", "?"),), number, tuple(fixed.items()))


def test_answers_are_kept_by_request(tmp_path):
    path = tmp_path / "answers.jsonl"
    with Journal(path) as journal:
        journal.put(request(1), Answer("one", 3, 5))
        journal.put(request(2), Answer(None, refusal="too long"))
        assert journal.get(request(2)) == Answer(None, refusal="too long")
        assert journal.cost == {"generate": Cost(1, 3, 5)}
    with Journal(path) as journal:
        assert journal.get(request(1)) == Answer("one", 3, 5)
        assert journal.get(request(2)) is None  # cost nothing, and may be taken another day
        assert journal.get(request(1, temperature=0.5)) is None
        assert journal.spent == Cost(1, 3, 5)


def test_a_line_cut_short_is_taken_away(tmp_path):
    path = tmp_path / "answers.jsonl"
    with Journal(path) as journal:
        journal.put(request(1), Answer("é" * 50))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-9])
    with Journal(path) as journal:
        journal.put(request(2), Answer("two"))
    with Journal(path) as journal:
        assert [journal.get(request(n)) for n in (1, 2)] == [Answer("é" * 50), Answer("two")]
    assert len(path.read_text().splitlines()) == 2


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    folder = tmp_path / "out"
    with (
        claimed(folder, "a: 1\n", key="--out"),
        pytest.raises(UserError, match="another process writes here"),
        claimed(folder, "a: 1\n", key="--out"),
    ):
        pass
    with claimed(folder, "a: 1\n", key="--out"):
        assert (folder / "config.yaml").is_file()
    assert not folder.exists()
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="cannot be written"),
        claimed(tmp_path / "file", "a: 1\n", key="x"),
    ):
        pass


@pytest.mark.parametrize(
    "line", [b"{}", b"[1]", b"{", b"\xff", b'{"key": "k", "kind": 3, "text": "x"}']
)
def test_a_damaged_line_of_answers_is_told(tmp_path, line):
    path = tmp_path / "answers.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(minirl.errors.UserError, match=r"line 1: .*not a file of answers"):
        Journal(path)


@pytest.mark.parametrize("line", [b"{}", b"[1]", b"{", b"\xff", b'{"id": "a", "sql": 3}'])
def test_a_damaged_line_of_choices_is_told(tmp_path, line):
    path = tmp_path / "choices.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(minirl.errors.UserError, match=r"line 1: .*; bring back the file of"):
        Choices(path, Mock(), Mock())
