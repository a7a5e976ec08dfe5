"""The page of runs that go on, served on this machine alone and read anew for every request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_HOST = "127.0.0.1"
RELOAD_S = 30.0
"""After how many seconds the page of a run that goes on loads itself anew."""


def serve(make: Callable[[], str], tell: Callable[[str], None], *, port: int = 0) -> None:
    """Serve what `make` gives until an interruption; `tell` is given the address."""
    with page_server(make, port=port) as server, suppress(KeyboardInterrupt):
        tell(f"http://{_HOST}:{server.server_address[1]}/")
        server.serve_forever()


def page_server(make: Callable[[], str], *, port: int = 0) -> ThreadingHTTPServer:
    """Make a server of one page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Another site must not read the page through a name that it points here.
            is_ours = self.headers.get("Host", "").partition(":")[0] in (_HOST, "localhost")
            status = 403 if not is_ours else 200 if self.path == "/" else 404
            body = make().encode() if status == 200 else b""
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_arguments: object) -> None:
            """Say nothing of requests."""

    return ThreadingHTTPServer((_HOST, port), Page)
