"""Benchmarks import only what there is; a machine that can run them comes too late to find out."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))
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


def test_replies_are_compared_up_to_where_they_part():
    from benchmarks.reply_equality import compare

    def reply(ids, logprobs, prompt=(1, 2)):
        return {"prompt_ids": list(prompt), "ids": ids, "logprobs": logprobs}

    ours = [reply([5, 6], [-0.5, -1.0]), reply([5, 7, 8], [-0.25, -1.0, -2.0]), reply([9], [-1.0])]
    theirs = [reply([5, 6], [-0.5, -1.25]), reply([5, 4], [-0.75, -1.5]), reply([9], [-1.0], [3])]
    assert compare(ours, theirs) == {
        "prompts": 3,
        "same_prompts": 2,
        "same_replies": 2,
        "tokens": 4,
        "largest_gap": 0.5,
        "parted": [{"prompt": 1, "token": 1, "logprobs": [[-1.0], [-1.5]]}],
    }
