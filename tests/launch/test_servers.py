"""Servers of others: each answers, refuses a field and a prompt that is too long in its own way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from launch.config import EndpointConfig
from launch.evaluation.endpoint import Endpoint, ModelRequest, ModelResponse
from minirl.exchange import Message, UserError
from tests.vectors import read

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

    answers: list[ModelResponse] = []
    with serve(Chat(answer)) as chat:
        one = Endpoint(chat.url, "m", EndpointConfig(retries=0, parallel=1, max_tokens=9))
        asked = ModelRequest("generate", (Message("user", text),), 0)
        one.answer([asked], lambda _, answer: answers.append(answer))
    return answers[0], chat


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
    if "refuses_too" in server:
        answer, _ = ask(server, "refuses", "refuses_too")
        assert (answer.end, answer.text) == ("refused", None)
        assert f"set {server['refuses_too']['told']}" in answer.refusal


@pytest.mark.parametrize("name", PROXIES)
@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "http://127.0.0.1:1", "what://x"])
def test_no_proxy_stands_before_this_host(monkeypatch, name, proxy):
    monkeypatch.setenv(name, proxy)
    assert ask(SERVERS[0])[0].end == "stop"


def test_a_proxy_that_cannot_be_used_is_named(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", "what://x")
    one = Endpoint("http://far.invalid/v1", "m", EndpointConfig(retries=0))
    with pytest.raises(UserError, match=r"the proxy of ALL_PROXY cannot be used"):
        one.answer([ModelRequest("generate", (), 0)], lambda *_: None)
