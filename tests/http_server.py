"""A server of HTTP on 127.0.0.1, whose answers a function gives."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Mapping[str, str], bytes]


class Server(ThreadingHTTPServer):
    """Answers each request, in a thread of its own, until it is closed.

    `answer` is called with the handler of a request and its JSON, None without any; it returns a
    status, headers and the content, or None to hang up.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler, Any], Answer | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients go away, as they may."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        answer = self.server.answer(self, json.loads(content) if content else None)
        if answer is None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        status, headers, text = answer
        self.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass
