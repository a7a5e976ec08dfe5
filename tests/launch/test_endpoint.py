"""Answers over HTTP, whatever comes back, and the cache that keeps them."""

from __future__ import annotations

import pytest

from launch.config import EndpointConfig
from launch.evaluation.answers import AnswerFile
from launch.evaluation.endpoint import Endpoint, ModelResponse
from minirl.exchange import UserError

from . import chat_server
from .chat_server import Chat, Failure, ask_endpoint, serve

pytestmark = pytest.mark.usefixtures("quick")
JSON = {"content-type": "application/json"}


def ask(chat: Chat, text: str = "?", timeout_s: float = 20.0) -> ModelResponse:
    """Ask a server once, with one repetition."""
    return chat_server.ask(chat.url, text, retries=1, timeout_s=timeout_s)


def says(content: str, usage: str = '{"prompt_tokens": 2, "completion_tokens": 3}') -> Failure:
    """Make a completion out of JSON."""
    text = f'{{"choices": [{{"message": {{"content": {content}}}}}], "usage": {usage}}}'
    return Failure(200, text, JSON)


PASSING = {
    "an error": Failure(500),
    "busy": Failure(429, headers={"retry-after": "0"}),
    "a wish that is no time": Failure(429, headers={"retry-after": "nan"}),
    "a wish below 0": Failure(503, "<html>busy</html>", {"retry-after": "-5"}),
    "hangs up": Failure(hang_up=True),
}


@pytest.mark.parametrize("name", PASSING)
def test_what_may_pass_is_asked_for_again(name):
    with serve(Chat(lambda body, earlier: says('"fine"') if earlier else PASSING[name])) as chat:
        assert ask(chat) == ModelResponse("fine", 2, 3)
        assert chat.requests == 2


TEXTS = ("[1]", "", "{", "[" * 200_000, '{"choices": []}', '{"choices": [null]}')
TEXTS += ('{"choices": "abc"}', '{"choices": [{"message": null}]}')


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:24] or "nothing")
def test_what_is_no_completion_is_a_failure_of_the_server(text):
    with serve(Chat(lambda body, earlier: Failure(200, text, JSON))) as chat:
        answer = ask(chat)
        assert (answer.text, answer.end, chat.requests) == (None, "failed", 1)


@pytest.mark.parametrize("usage", ["null", "7", "{}", '{"prompt_tokens": 1e999}'])
def test_an_answer_without_a_cost_is_taken_and_told(usage, caplog):
    with serve(Chat(lambda body, earlier: says('"fine"', usage))) as chat:
        assert ask(chat) == ModelResponse("fine")
        assert chat.requests == 1
    assert len(caplog.messages) == 1


def test_content_that_is_no_text_is_an_empty_answer():
    for content in ("null", "5", "[7]", '[{"type": "image"}]'):
        with serve(Chat(lambda body, earlier, content=content: says(content))) as chat:
            assert ask(chat) == ModelResponse("", 2, 3)


def test_halves_of_characters_are_neither_sent_nor_kept():
    with serve(Chat(lambda body, earlier: says(r'"a\ud800b"'))) as chat:
        assert ask(chat, "\ud800?") == ModelResponse("a?b", 2, 3)
        assert chat.bodies[0]["messages"][0]["content"] == "??"


def test_a_server_that_hangs_or_is_gone_is_told():
    hang = Failure(delay_s=0.6)
    with (
        serve(Chat(lambda body, earlier: hang)) as chat,
        pytest.raises(UserError, match="timed out"),
    ):
        ask(chat, timeout_s=0.1)
    with pytest.raises(UserError, match="Connection error"):
        ask(chat)  # its port is closed now


PAID = {"calls": 1, "prompt_tokens": 2, "completion_tokens": 3}


def test_answers_are_kept_by_request(tmp_path):
    def answer(body, earlier):
        is_long = body["messages"][0]["content"] == "long"
        return Failure(400, "too long") if is_long and not earlier else says('"é"')

    def client() -> Endpoint:
        return Endpoint(chat.url, "m", EndpointConfig(), AnswerFile(tmp_path))

    with serve(Chat(answer)) as chat:
        first = client()
        assert ask_endpoint(first, "short").text == "é"
        assert ask_endpoint(first, "long").end == "too_long"
        again = client()
        assert first.cost == again.cost == {"generate": PAID}
        assert ask_endpoint(again, "short").text == "é"
        assert chat.requests == 2
        # A refusal cost nothing, and may be taken another day.
        assert ask_endpoint(again, "long").text == "é"


def test_a_damaged_file_of_answers_is_told(tmp_path):
    (tmp_path / "answers.jsonl").write_text("no answer\n")
    with pytest.raises(UserError, match=r"answers\.jsonl: line 1.*delete it to ask again"):
        Endpoint("http://a/v1", "m", EndpointConfig(), AnswerFile(tmp_path))
