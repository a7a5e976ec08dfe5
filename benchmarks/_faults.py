"""A proxy that corrupts the answers of a server on demand."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Makes another answer of one: a status and a body; None to close the connection.
Spoil = Callable[["Proxy", bytes], tuple[int, bytes] | None]


class Proxy:
    """Forwards requests to a server, and corrupts answers of `/generate` while `spoil` is set.

    Attributes:
        earlier: An answer that was given before.
        freed: Set to release answers that are held back.
    """

    def __init__(self, server: str) -> None:
        self._server = urlsplit(server).netloc
        self.spoil: Spoil | None = None
        self.earlier = b"{}"
        self.freed = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                proxy.answer(self)

            do_POST = do_GET

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients go away, as they may."""

        self._listener = Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.freed.set()
        self._listener.shutdown()
        self._listener.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Forward a request; send the server's answer, or the corrupted one."""
        body = handler.rfile.read(int(handler.headers["content-length"] or 0))
        answer: tuple[int, bytes] | None
        try:
            answer = self._ask(handler.command, handler.path, body)
        except (OSError, http.client.HTTPException):
            answer = None
        if handler.path == "/generate" and self.spoil is not None:
            answer = self.spoil(self, answer[1] if answer else b"{}")
        elif handler.path == "/generate" and answer and answer[0] == 200:
            self.earlier = answer[1]
        if answer is None:
            handler.close_connection = True
            handler.connection.close()
            return
        status, text = answer
        handler.send_response(status)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._server)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def edited(change: Callable[[dict[str, Any]], None]) -> Spoil:
    """Return a fault that changes the fields of an answer."""

    def spoil(_proxy: Proxy, answer: bytes) -> tuple[int, bytes]:
        fields = json.loads(answer)
        if "meta_info" in fields:
            change(fields)
        return 200, json.dumps(fields).encode()

    return spoil


def _not_a_number(fields: dict[str, Any]) -> None:
    for name in ("output_token_logprobs", "input_token_logprobs"):
        for triple in fields["meta_info"].get(name) or []:
            triple[0] = float("nan")


def _another_vocabulary(fields: dict[str, Any]) -> None:
    fields["output_ids"] = [number + 150_000 for number in fields["output_ids"]]
    for triple in fields["meta_info"].get("output_token_logprobs") or []:
        triple[1] += 150_000


def _swapped(fields: dict[str, Any]) -> None:
    # Ids of the vocabulary, but not those that the log-probabilities are of.
    fields["output_ids"] = [max(number - 1, 0) for number in fields["output_ids"]]


def _held(proxy: Proxy, answer: bytes) -> tuple[int, bytes]:
    proxy.freed.wait()
    return 200, answer


SPOILS: dict[str, Spoil] = {
    "answers 500": lambda *_: (500, b"Internal Server Error"),
    "answers 503": lambda *_: (503, b"Service Unavailable"),
    "hangs up in place of an answer": lambda *_: None,
    "answers garbage": lambda *_: (200, b"\x00\xff<html>busy</html>"),
    "answers truncated JSON": lambda _proxy, answer: (200, answer[: len(answer) // 2]),
    "answers NaN log-probabilities": edited(_not_a_number),
    "answers another vocabulary's tokens": edited(_another_vocabulary),
    "answers other tokens than it tells the log-probabilities of": edited(_swapped),
    "answers another request": lambda proxy, *_: (200, proxy.earlier),
    "is too slow": _held,
}
"""Faults of answers by name."""


def session(leader: int) -> dict[int, str]:
    """Return the processes of a session, with what they call themselves."""
    found = {}
    for path in Path("/proc").iterdir():
        try:
            number = int(path.name)
            if os.getsid(number) == leader:
                found[number] = (path / "cmdline").read_text().replace("\0", " ")
        except (ValueError, OSError):
            continue
    return found
