"""Answers over HTTP: whatever comes back, each server in its own way; the file that keeps them."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from launch.config import load_config
from launch.evaluation.answers import GREEDY, AnswerFile, Sampled
from launch.evaluation.endpoint import Endpoint, ModelResponse, _is_here
from minirl.exchange import Message, UserError
from rewards.verbal import ReplyRequest
from sqlenv.types import Example
from tests.vectors import read

from .chat_server import Body, Chat, Failure, completion, serve
from .conftest import mistake

pytestmark = pytest.mark.usefixtures("quick")
SERVERS = read("servers")
PROXIES = ("ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy")
FINE = completion("fine")


def ask_endpoint(endpoint: Endpoint, text: str) -> ModelResponse:
    """Ask as an evaluation of one question does."""
    found: list[ModelResponse] = []

    async def play(example: Example) -> Sampled:
        request = ReplyRequest("generate", 0, (Message("user", text),))
        found.extend(await endpoint.ask(example.id, [request]))
        return Sampled((found[0].text or "",))

    asyncio.run(endpoint.run([Example("q", text, "d", Path(), "")], play, lambda *_: None))
    return found[0]


def ask_url(url: str, text: str = "?", **settings: Any) -> ModelResponse:
    """Ask a server once, of which others had an answer."""
    calls = {"parallel": 1, "retries": 0, "max_tokens": 9, **settings}
    job = load_config("plain.yaml", [f"endpoint.{key}={value}" for key, value in calls.items()])
    with TemporaryDirectory() as folder:
        endpoint = Endpoint(url, "m", job, GREEDY, AnswerFile(Path(folder)))
        assert endpoint.cost["generate"] == {}
        return ask_endpoint(endpoint, text)


def ask(answer: Any, text: str = "?", **settings: Any) -> tuple[ModelResponse, Chat]:
    """Do so of one whose answer is a function of a request and of how often it came before."""
    with serve(Chat(answer if callable(answer) else lambda *_: answer)) as chat:
        return ask_url(chat.url, text, **settings), chat


def told(status: int, body: Any) -> Failure:
    return Failure(status, body if isinstance(body, str) else json.dumps(body))


PASSING = {
    "an error": Failure(500),
    "busy": Failure(429, headers={"retry-after": "0"}),
    "a wish that is no time": Failure(429, headers={"retry-after": "nan"}),
    "a wish below 0": Failure(503, "<html>busy</html>", {"retry-after": "-5"}),
    "hangs up": Failure(hang_up=True),
}


@pytest.mark.parametrize("name", PASSING)
def test_what_may_pass_is_asked_for_again(name):
    answer, chat = ask(lambda _, earlier: FINE if earlier else PASSING[name], retries=1)
    assert (answer, chat.requests) == (ModelResponse("fine", 2, 3), 2)


# What is no completion though the server says that all went well, and what is told of it.
STRANGE: dict[str, str] = dict.fromkeys(("[1]", "", "{", "[" * 200_000, '{"choices": []}'), "")
STRANGE |= dict.fromkeys(('{"choices": [null]}', '{"choices": "abc"}'), "")
STRANGE |= {
    '{"choices": [{"message": null}]}': "",
    completion(None, finish="SAFETY").text: "no reply, but SAFETY",
    completion("", finish="sensitive").text: "no reply, but sensitive",
    '{"choices": [{"finish_reason": "network_error", "message": {}}]}': "but network_error",
    '{"detail": "no such deployment"}': "no such deployment",
    '{"error": "boom"}': "boom",
    "null": "no chat completion: None",
}


@pytest.mark.parametrize("text", STRANGE, ids=lambda text: text[:48] or "nothing")
def test_what_is_no_completion_is_a_failure_of_the_server(text):
    answer, chat = ask(Failure(200, text), retries=1)
    assert (answer.text, answer.end, chat.requests) == (None, "failed", 1)
    assert STRANGE[text] in answer.problem


@pytest.mark.parametrize("usage", [None, 7, {}, {"prompt_tokens": float("inf")}])
def test_an_answer_without_a_cost_is_taken_and_told(usage, caplog):
    answer, chat = ask(completion("fine", usage=usage), retries=1)
    assert (answer, chat.requests) == (ModelResponse("fine"), 1)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("content", [None, 5, [7], [{"type": "image"}]])
def test_content_that_is_no_text_is_an_empty_answer(content):
    assert ask(completion(content))[0] == ModelResponse("", 2, 3)


def test_halves_of_characters_and_marks_of_turns_are_neither_sent_nor_kept():
    answer, chat = ask(completion("a\ud800b"), "\ud800?")
    assert answer == ModelResponse("a?b", 2, 3)
    assert chat.bodies[0]["messages"][0]["content"] == "??"
    _, chat = ask(FINE, "Paris<|im_end|><\uff5cUser\uff5c>a</s>[INST] <sql> <a|b> [x]")
    marks = "<\u200b|im_end|><\u200b\uff5cUser\uff5c>a<\u200b/s>[\u200bINST]"
    assert chat.bodies[0]["messages"][0]["content"] == f"Paris{marks} <sql> <a|b> [x]"


def test_a_server_that_hangs_is_told():
    assert "timed out" in mistake(ask, Failure(delay_s=0.6), timeout_s=0.1)


# Servers of others: each answers, refuses a field and a prompt that is too long in its own way.


def ask_server(
    server: Mapping[str, Any], *refused: str, text: str = "?"
) -> tuple[ModelResponse, Chat]:
    """Ask a server that refuses some of its fields, and prompts that are `long`."""

    def answer(body: Body, _earlier: int) -> Failure:
        for one in (server[name] for name in refused if name in server):
            if one["field"] in body:
                return told(one["status"], one["body"])
        is_long = body["messages"][0]["content"] == "long"
        return told(*server["overflow"]) if is_long else told(200, server["answer"])

    return ask(answer, text)


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server["id"])
def test_servers_answer_and_refuse_in_their_own_ways(server):
    answer, chat = ask_server(server, "refuses")
    read, written = server.get("tokens", (2, 3))
    assert answer == ModelResponse(server["text"], read, written, end=server.get("end", "stop"))
    limits = [{name: one[name] for name in one if name.startswith("max_")} for one in chat.bodies]
    other = "max_completion_tokens" if len(limits) > 1 else "max_tokens"
    assert limits[-1] == {other: 9}
    answer, _ = ask_server(server, "refuses", text="long")
    assert (answer.end, answer.text) == ("failed", None)
    assert str(server["overflow"][0]) in answer.problem
    assert "Error code" not in answer.problem
    if "refuses_too" in server:  # the reason of the server is told
        answer, _ = ask_server(server, "refuses", "refuses_too")
        assert (answer.end, answer.text) == ("failed", None)
        assert server["refuses_too"]["field"] in answer.problem


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "http://127.0.0.1:1", "what://x"])
def test_no_proxy_stands_before_this_host(monkeypatch, proxy):
    for name in PROXIES:
        monkeypatch.setenv(name, proxy)
    assert ask(FINE)[0].end == "stop"
    hosts = ["localhost", "LOCALHOST", "127.0.0.1", "0.0.0.0", "[::1]"]
    assert all(_is_here(f"http://{host}:1/v1") for host in hosts)
    assert not any(map(_is_here, ["http://far.invalid/v1", "http://203.0.113.1/v1", "http:///v1"]))


@pytest.mark.parametrize(
    ("name", "value"),
    [("ALL_PROXY", "what://x"), ("HTTP_PROXY", "x:8080y"), ("SSL_CERT_FILE", "/none.pem")],
)
def test_a_proxy_or_a_certificate_that_cannot_be_used_is_told(monkeypatch, name, value):
    for other in (*PROXIES, "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"a proxy or a certificate .* cannot be used: "):
        ask_url("http://far.invalid/v1")


@pytest.mark.parametrize("status", [401, 402, 403, 404])
def test_a_key_without_credit_is_no_long_prompt(status):
    line = mistake(ask, told(status, "the token limit of this month is reached"))
    assert f"still failing ({status}: the token limit of this month is reached); " in line
    assert "check --endpoint (it ends with /v1), --model m and the key in OPENAI_API_KEY" in line


# Answers are kept.


def test_answers_are_kept_by_request(tmp_path):
    def answer(body, earlier):
        is_long = body["messages"][0]["content"] == "long"
        return Failure(400, "too long") if is_long and not earlier else completion("é")

    def client() -> Endpoint:
        return Endpoint(chat.url, "m", load_config("plain.yaml", []), GREEDY, AnswerFile(tmp_path))

    paid = {"generate": {"calls": 1, "prompt_tokens": 2, "completion_tokens": 3}}
    with serve(Chat(answer)) as chat:
        first = client()
        assert ask_endpoint(first, "short").text == "é"
        assert ask_endpoint(first, "long").end == "failed"
        again = client()
        assert first.cost == again.cost == paid
        assert (ask_endpoint(again, "short").text, chat.requests) == ("é", 2)
        # A refusal cost nothing, and may be taken another day.
        assert ask_endpoint(again, "long").text == "é"
    (tmp_path / "answers.jsonl").write_text("no answer\n")
    with pytest.raises(UserError, match=r"answers\.jsonl: line 1.*delete it to ask again"):
        client()
