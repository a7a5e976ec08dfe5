"""A small server that speaks OpenAI's chat completions, on 127.0.0.1, and fails as it is told."""

import hashlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launch.config import load_config
from launch.evaluation.answers import GREEDY, AnswerFile, Sampled
from launch.evaluation.endpoint import Endpoint, ModelResponse
from minirl.exchange import Message
from rewards.verbal import ReplyRequest
from sqlenv.types import Example

Body = Mapping[str, Any]


@dataclass
class Failure:
    """An answer that is none."""

    status: int = 500
    text: str = '{"error": {"message": "told to fail"}}'
    headers: Mapping[str, str] = field(default_factory=dict)
    hang_up: bool = False
    delay_s: float = 0.0


@dataclass
class Chat:
    """What the server answers, and what it has seen.

    Attributes:
        answer: From a request and how often this one came before, the text or a failure.
        before: Called with the number of requests so far, before each is answered.
        paid: How often each request was answered in full, by its content.
    """

    answer: Callable[[Body, int], str | Failure]
    before: Callable[[int], None] = lambda count: None
    url: str = ""
    requests: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    paid: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    keys: set[str] = field(default_factory=set)
    bodies: list[Body] = field(default_factory=list)
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    under_way: int = 0

    def begin(self, body: Body, key: str, authorization: str) -> int:
        """Count a request; return how often it came before."""
        with self.lock:
            self.requests += 1
            self.under_way += 1
            self.most_at_once = max(self.most_at_once, self.under_way)
            self.seen[key] += 1
            self.keys.add(authorization)
            self.bodies.append(body)
            count, earlier = self.requests, self.seen[key] - 1
        self.before(count)
        return earlier

    def pay(self, key: str, usage: Mapping[str, int]) -> None:
        with self.lock:
            self.paid[key] += 1
            self.tokens.update(usage)


@contextmanager
def serve(chat: Chat) -> Generator[Chat]:
    """Serve until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
            earlier = chat.begin(body, key, self.headers.get("authorization", ""))
            try:
                self.reply(body, key, earlier)
            finally:
                with chat.lock:
                    chat.under_way -= 1

        def reply(self, body: Body, key: str, earlier: int) -> None:
            if self.path != "/v1/chat/completions":
                self.send(Failure(404))
                return
            text = chat.answer(body, earlier)
            if isinstance(text, Failure):
                self.send(text)
                return
            usage = {"prompt_tokens": 7, "completion_tokens": len(text), "total_tokens": 0}
            choice = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
            }
            completion = {
                "id": "x", "object": "chat.completion", "created": 0,
                "model": body["model"], "choices": [choice], "usage": usage,
            }  # fmt: skip
            self.send(Failure(200, json.dumps(completion), {"content-type": "application/json"}))
            chat.pay(key, usage)

        def send(self, answer: Failure) -> None:
            time.sleep(answer.delay_s)
            if answer.hang_up:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            data = answer.text.encode()
            self.send_response(answer.status)
            for name, value in {"content-type": "application/json", **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that was killed

    with Server(("127.0.0.1", 0), Handler) as server:
        chat.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield chat
        finally:
            server.shutdown()
            thread.join(10)


def ask(url: str, text: str = "?", **settings: Any) -> ModelResponse:
    """Ask a server once, of which others had an answer."""
    with TemporaryDirectory() as folder:
        calls = [f"endpoint.{key}={value}" for key, value in {"parallel": 1, **settings}.items()]
        job = load_config("plain.yaml", calls)
        endpoint = Endpoint(url, "m", job, GREEDY, AnswerFile(Path(folder)))
        assert endpoint.cost["generate"] == {}
        return ask_endpoint(endpoint, text)


def ask_endpoint(endpoint: Endpoint, text: str) -> ModelResponse:
    """Ask as an evaluation of one question does."""
    found: list[ModelResponse] = []

    async def play(example: Example) -> Sampled:
        request = ReplyRequest("generate", 0, (Message("user", text),))
        found.extend(await endpoint.ask(example.id, [request]))
        return Sampled((found[0].text or "",))

    endpoint.run([Example("q", text, "d", Path(), "")], play, lambda *_: None)
    return found[0]
