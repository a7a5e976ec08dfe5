"""The pages for people name only what exists, and the example of the README runs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from launch.config import JobConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAPERS = ROOT / "docs" / "papers.md"

_NAME = re.compile(r"`((?:minirl|sqlenv|rewards|launch)(?:\.\w+)*):([\w.]+)`")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_SETTING = re.compile(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)+)=(-?[\w.]+)`")
_FILE = re.compile(r"`((?:minirl|sqlenv|rewards|launch|tests|docs)/[\w./-]*)`")
_LINK = re.compile(r"\]\(([^)#:]+)\)")


def found(pattern: re.Pattern[str], page: Path) -> list[Any]:
    return pattern.findall(page.read_text(encoding="utf-8"))


@cache
def names_in(path: Path) -> frozenset[str]:
    """List what a module defines, methods and fields as `Class.name`, without importing it."""
    return frozenset(_defined(ast.parse(path.read_text(encoding="utf-8")).body))


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{name}" for name in _defined(node.body))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def module_file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page):
    for module, name in found(_NAME, page):
        assert name in names_in(module_file(module)), f"{module}:{name}"
    for path, name in found(_TEST, page):
        assert name in names_in(ROOT / path), f"{path}::{name}"
    for path in found(_FILE, page):
        assert (ROOT / path).exists(), path
    for link in found(_LINK, page):
        assert (page.parent / link).exists(), link


def test_every_function_of_a_paper_has_a_test():
    rows = [line for line in PAPERS.read_text(encoding="utf-8").splitlines() if _NAME.search(line)]
    assert len(rows) > 30
    for row in rows:
        assert _TEST.search(row), row


def test_an_id_names_one_question():
    # Rows of one id (its parts) stand together; the same id further down would be another question.
    ids = re.findall(r"^\| ([PEVA]\d+) \|", PAPERS.read_text(encoding="utf-8"), re.MULTILINE)
    runs = [name for name, _ in groupby(ids)]
    assert len(runs) > 30
    assert len(runs) == len(set(runs)), sorted({name for name in runs if runs.count(name) > 1})


def defaults(kind: Any, path: list[str]) -> list[Any]:
    """Return the defaults of a key, one for each member of a union that has it."""
    if members := get_args(kind):
        return [value for member in members for value in defaults(member, path)]
    field = getattr(kind, "model_fields", {}).get(path[0])
    if field is None:
        return []
    return defaults(field.annotation, path[1:]) if path[1:] else [field.get_default()]


def test_settings_named_with_a_value_have_it_as_default():
    settings = found(_SETTING, PAPERS)
    assert len(settings) > 10
    for key, text in settings:
        values = defaults(JobConfig, key.split("."))
        assert values, f"{key}: no such setting"
        assert yaml.safe_load(text) in values, f"{key}={text}: the default is {values}"


def test_the_example_of_the_readme_prints_what_it_says(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL)
    (_, code), (_, expected) = blocks
    without_jax = "\nimport sys\nassert not {'jax', 'flax', 'minirl'} & set(sys.modules)\n"
    for _ in range(2):  # what the first run made does not stand in the way of the second
        run = subprocess.run(
            [sys.executable, "-c", code + without_jax],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )
        assert (run.stdout, run.stderr) == (expected, "")
