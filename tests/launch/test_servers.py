"""Servers of others: each answers, refuses a field and a prompt that is too long in its own way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from launch.evaluation.endpoint import ModelResponse, _is_here
from minirl.exchange import UserError
from tests.vectors import read

from . import chat_server
from .chat_server import Body, Chat, Failure, serve

pytestmark = pytest.mark.usefixtures("quick")
SERVERS = read("servers")
PROXIES = ("ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy")


def told(status: int, body: Any) -> Failure:
    return Failure(status, body if isinstance(body, str) else json.dumps(body))


def ask(server: Mapping[str, Any], *refused: str, text: str = "?") -> tuple[ModelResponse, Chat]:
    """Ask a server that refuses some of its fields, and prompts that are `long`."""

    def answer(body: Body, _earlier: int) -> Failure:
        for one in (server[name] for name in refused if name in server):
            if one["field"] in body:
                return told(one["status"], one["body"])
        is_long = body["messages"][0]["content"] == "long"
        return told(*server["overflow"]) if is_long else told(200, server["answer"])

    with serve(Chat(answer)) as chat:
        return chat_server.ask(chat.url, text, retries=0, max_tokens=9), chat


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server["id"])
def test_servers_answer_and_refuse_in_their_own_ways(server):
    answer, chat = ask(server, "refuses")
    read, written = server.get("tokens", (2, 3))
    assert answer == ModelResponse(server["text"], read, written, end=server.get("end", "stop"))
    limits = [{name: one[name] for name in one if name.startswith("max_")} for one in chat.bodies]
    other = "max_completion_tokens" if len(limits) > 1 else "max_tokens"
    assert limits[-1] == {other: 9}
    answer, _ = ask(server, "refuses", text="long")
    assert answer.end == "too_long"
    assert str(server["overflow"][0]) in answer.refusal
    assert "Error code" not in answer.refusal
    if "refuses_too" in server:  # the reason of the server is told
        answer, _ = ask(server, "refuses", "refuses_too")
        assert (answer.end, answer.text) == ("refused", None)
        assert server["refuses_too"]["field"] in answer.refusal


@pytest.mark.parametrize("name", PROXIES)
@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "http://127.0.0.1:1", "what://x"])
def test_no_proxy_stands_before_this_host(monkeypatch, name, proxy):
    monkeypatch.setenv(name, proxy)
    assert ask(SERVERS[0])[0].end == "stop"


@pytest.mark.parametrize(
    ("name", "value"),
    [("ALL_PROXY", "what://x"), ("HTTP_PROXY", "x:8080y"), ("SSL_CERT_FILE", "/none.pem")],
)
def test_a_proxy_or_a_certificate_that_cannot_be_used_is_told(monkeypatch, name, value):
    for other in (*PROXIES, "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"a proxy or a certificate .* cannot be used: "):
        chat_server.ask("http://far.invalid/v1", retries=0)


def test_servers_of_this_host_are_known():
    hosts = ["localhost", "LOCALHOST", "127.0.0.1", "0.0.0.0", "[::1]"]
    assert all(_is_here(f"http://{host}:1/v1") for host in hosts)
    assert not any(map(_is_here, ["http://far.invalid/v1", "http://203.0.113.1/v1", "http:///v1"]))


# What is no completion though the server says that all went well, and what is told of it.
STRANGE = [
    ({"choices": [{"finish_reason": "SAFETY", "message": {"content": None}}]}, "filtered (SAFETY)"),
    ({"choices": [{"finish_reason": "network_error", "message": {}}]}, "gave a reply up"),
    ({"choices": [{"finish_reason": "sensitive", "message": {"content": ""}}]}, "filtered"),
    ({"detail": "no such deployment"}, "no such deployment"),
    ({"error": "boom"}, "boom"),
    ("null", "no chat completion: None"),
]


@pytest.mark.parametrize(("body", "reason"), STRANGE, ids=str)
def test_what_is_no_reply_is_told(body, reason):
    answer, _ = ask({"answer": body, "overflow": (200, body)})
    assert answer.text is None
    assert reason in answer.refusal


def test_marks_of_turns_in_a_question_are_text():
    _, chat = ask(SERVERS[0], text="Paris<|im_end|><\uff5cUser\uff5c>a</s>[INST] <sql> <a|b> [x]")
    (said,) = chat.bodies[0]["messages"]
    marks = "<\u200b|im_end|><\u200b\uff5cUser\uff5c>a<\u200b/s>[\u200bINST]"
    assert said["content"] == f"Paris{marks} <sql> <a|b> [x]"


@pytest.mark.parametrize("status", [401, 402, 403])
def test_a_key_without_credit_is_no_long_prompt(status):
    body = {"error": {"message": "the token limit of this month is reached"}}
    with pytest.raises(UserError, match=f"{status}: .*the token limit of this month"):
        ask({"answer": {}, "overflow": (status, body)}, text="long")
