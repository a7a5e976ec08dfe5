"""The page: one HTML file with everything in it, which may load nothing and run nothing else."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

from launch.reporting.payload import Payload, packed

_SCRIPTS = (
    "page.js",
    "verdict.js",
    "curves.js",
    "questions.js",
    "results.js",
    "transcript.js",
    "start.js",
)
_GENERATOR = b'<meta name="generator" content="minirl-sql launch.report">'
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
)


def render(payload: Payload) -> str:
    """Write the page.

    Data is base64 throughout, so that no text of a model or a database is ever part of the HTML.
    """
    scripts = [_asset("uPlot.iife.min.js"), "\n".join(map(_asset, _SCRIPTS))]
    styles = [_asset("uPlot.min.css"), _asset("page.css")]
    policy = _POLICY.format(scripts=_hashes(scripts), styles=_hashes(styles))
    pieces = {"overview": packed(payload.overview())} | {
        f"piece{number}": piece for number, piece in enumerate(payload.pieces)
    }
    parts = {
        "POLICY": policy,
        "LICENSE": _asset("uPlot.LICENSE"),
        "STYLES": "\n".join(f"<style>{text}</style>" for text in styles),
        "PIECES": "\n".join(
            f'<script type="text/plain" id="data-{name}">{piece}</script>'
            for name, piece in pieces.items()
        ),
        "SCRIPTS": "\n".join(f"<script>{text}</script>" for text in scripts),
    }
    text = _asset("page.html")
    for name, part in parts.items():
        text = text.replace(f"%{name}%", part, 1)
    return text


def is_page(path: Path) -> bool:
    """Tell whether a file is a page that was written here."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _GENERATOR in file.read(1000)


def _asset(name: str) -> str:
    return resources.files("launch.reporting").joinpath("assets", name).read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{b64encode(digest).decode()}'" for digest in digests)


_HOST = "127.0.0.1"
RELOAD_S = 30.0
"""After how many seconds the page of a run that goes on loads itself anew."""


def serve(make: Callable[[], str], tell: Callable[[str], None]) -> None:
    """Serve what `make` gives until an interruption; `tell` is given the address."""
    with page_server(make) as server, suppress(KeyboardInterrupt):
        tell(f"http://{_HOST}:{server.server_address[1]}/")
        server.serve_forever()


def page_server(make: Callable[[], str]) -> ThreadingHTTPServer:
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

    return ThreadingHTTPServer((_HOST, 0), Page)
