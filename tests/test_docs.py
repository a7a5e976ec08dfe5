"""The pages for people name only what exists, by names with one meaning, and their commands and
examples work.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from docs.generate import fill
from launch import options
from launch.config import JobConfig, load_config
from minirl.config.algorithms import PRESETS, AlgorithmConfig
from rewards.columns import binary_accuracy, csmr, fractional_accuracy
from sqlenv.config import ExecutorConfig
from sqlenv.evaluators.comparators import COMPARATORS, Case, compare_cases
from sqlenv.executor import Executor
from sqlenv.types import Table
from tests.worlds import PET, make_file

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAPERS = ROOT / "docs" / "papers.md"
EVALUATION = ROOT / "docs" / "evaluation.md"
LOG = ROOT / "docs" / "LOG.md"  # also names scripts that are gone

_NAME = re.compile(r"`((?:minirl|sqlenv|rewards|launch)(?:\.\w+)*):([\w.]+)`")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_SETTING = re.compile(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)+)=(-?[\w.]+)`")
_FILE = re.compile(r"`((?:minirl|sqlenv|rewards|launch|tests|docs)/[\w./-]*)`")
_RUNS = re.compile(r"launch\.\w|launch/|benchmarks/|minirl-sql:")
_LINK = re.compile(r"\]\(([^)#:]*)(?:#([\w-]+))?\)")


def found(pattern: re.Pattern[str], page: Path) -> list[Any]:
    return pattern.findall(page.read_text(encoding="utf-8"))


@cache
def names_in(path: Path) -> frozenset[str]:
    """List what a module defines, methods and fields as `Class.name`, without importing it."""
    return frozenset(_defined(ast.parse(path.read_text(encoding="utf-8")).body))


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{name}" for name in _defined(node.body))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_a_class_name_has_one_meaning():
    """Types are named once in all packages; what begins with an underscore is of its module."""
    places = defaultdict[str, list[str]](list)
    for package in ("minirl", "sqlenv", "rewards", "launch"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in names_in(path):
                if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
                    places[name].append(str(path.relative_to(ROOT)))
    assert places
    assert not {name: files for name, files in places.items() if len(files) > 1}


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
    for link, anchor in found(_LINK, page):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Return the names that a page's headings have as targets of links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one).lower().replace(" ", "-") for one in headings}


def test_every_function_of_a_paper_has_a_test():
    rows = [line for line in PAPERS.read_text(encoding="utf-8").splitlines() if _NAME.search(line)]
    assert rows
    for row in rows:
        assert _TEST.search(row), row


def defaults(kind: Any, path: list[str]) -> list[Any]:
    """Return the defaults of a key: of each member of a union that has it, and each algorithm."""
    if members := get_args(kind):
        return [value for member in members for value in defaults(member, path)]
    field = getattr(kind, "model_fields", {}).get(path[0])
    if field is None:
        return []
    if path[1:]:
        return defaults(field.annotation, path[1:])
    others = PRESETS.values() if kind is AlgorithmConfig else ()
    return [field.get_default(), *(own[path[0]] for _, own in others if path[0] in own)]


def test_settings_named_with_a_value_have_it_as_default():
    text = PAPERS.read_text(encoding="utf-8").partition("## The papers' tables")[0]
    settings = _SETTING.findall(text)
    assert settings
    for key, text in settings:
        values = defaults(JobConfig, key.split("."))
        assert values, f"{key}: no such setting"
        assert yaml.safe_load(text) in values, f"{key}={text}: the default is {values}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_from_the_code_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert fill(text) == text, "run python docs/generate.py"


def commands(page: Path) -> list[list[str]]:
    """List the words of every command of ours in indented blocks, without the shell's `< file`."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"(?m)^    (?! ).*(?:\n {5,}\S.*)*", text)
    joined = [re.sub(r"\\\n *", " ", block).partition(" < ")[0] for block in blocks]
    return [shlex.split(line, comments=True) for line in joined if _RUNS.search(line)]


_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_\-0-9]+)*=")


@pytest.mark.parametrize("page", [one for one in PAGES if one != LOG], ids=lambda page: page.name)
def test_commands_load(page):
    """Their files are there, their options are the command's own, their settings make a job."""
    for words in commands(page):
        for at, word in enumerate(words):
            if word.startswith(("launch/", "tests/", "benchmarks/")):
                assert (ROOT / word).exists(), word
            if word.startswith("launch."):
                import_module(word)
                options.app.parse_args(
                    [word.removeprefix("launch."), *words[at + 1 :]], exit_on_error=False
                )
        if any(word.startswith(("launch.report", "benchmarks/")) for word in words):
            continue
        overrides = [word for word in words if _OVERRIDE.match(word)]
        named = dict(pairwise(words)).get("--cfg", "")
        is_ours = (ROOT / "launch" / "configs" / named).is_file()
        assert load_config(named if is_ours else "progress.yaml", overrides)


def test_examples_of_evaluators_are_judged_as_the_page_says(tmp_path):
    lines = EVALUATION.read_text(encoding="utf-8")
    lines = lines[lines.index("| gold |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in lines]
    (_, _, *names), _, *rows = rows
    pets = "('ann', 3), ('bob', 5), ('cid', 5), ('ann', 9)"
    path = make_file(tmp_path / "pet.sqlite", f"{PET} {pets}")
    columns = {"ex_f": fractional_accuracy, "ex_b": binary_accuracy, "csmr": csmr}
    assert rows
    with Executor(ExecutorConfig()) as executor:
        cases = [Case(predicted, gold, path) for gold, predicted, *_ in rows]
        judged = compare_cases(executor, cases, [name for name in names if name in COMPARATORS])
        for (gold, predicted, *told), one in zip(rows, judged, strict=True):
            tables = [executor.execute(path, sql) for sql in (predicted, gold)]
            assert all(isinstance(table, Table) for table in tables)
            scores = {**one.scores} | {name: score(*tables) for name, score in columns.items()}
            expected = [float(cell) for cell in told]
            assert [scores[name] for name in names] == pytest.approx(expected, abs=5e-4), predicted


def test_every_comparator_is_named():
    assert set(COMPARATORS) <= set(re.findall(r"`([a-z0-9_]+)`", EVALUATION.read_text("utf-8")))


def test_the_examples_print_what_the_pages_say(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (_, code), (_, expected) = re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL)
    learner = {"jax", "flax", "minirl.config", "minirl.types"}
    without_jax = f"\nimport sys\nassert not {learner} & set(sys.modules)\n"
    for _ in range(2):  # what the first run made does not stand in the way of the second
        assert run(code + without_jax, tmp_path) == expected
    text = (ROOT / "docs" / "executor.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)  # on the same database
    assert run(code + without_jax, tmp_path) == "('name',) (('Ada',),)\n"


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.stderr == ""
    return done.stdout
