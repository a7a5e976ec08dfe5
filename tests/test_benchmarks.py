"""Benchmarks import only what there is; a machine that can run them comes too late to find out."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))
OURS = ("minirl", "sqlenv", "rewards", "launch", "benchmarks")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_is_imported_exists(script):
    tree = ast.parse(script.read_text(encoding="utf-8"))
    # Also in functions: benchmarks/gpu.py imports late.
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (name := node.module or "").split(".")[0] in OURS:
            module = import_module(name)
            for one in node.names:
                is_there = hasattr(module, one.name) or find_spec(f"{name}.{one.name}")
                assert is_there, f"{name}: {one.name}"
