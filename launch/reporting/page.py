"""The page: one self-contained HTML file; its policy forbids requests and foreign scripts."""

from __future__ import annotations

import hashlib
from base64 import b64encode
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
