"""What the project declares is pinned, and its pins agree with each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from minirl.sglang.server import TESTED

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
_PIN = re.compile(r"([\w.-]+)==([\w.+]+)")
# A pin may be of some versions of Python only.
_PYTHON = re.compile(r'python_version (<|>=) "3\.(\d+)"')


def pins(name: str, *, python: int = 12) -> dict[str, str]:
    """Read the versions that a file pins for Python 3.`python`."""
    found: dict[str, str] = {}
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pin, _, marker = line.partition("; ")
        named, where = _PIN.fullmatch(pin), _PYTHON.fullmatch(marker)
        assert named, line
        assert where or not marker, line
        if where and (python < int(where[2])) != (where[1] == "<"):
            continue
        assert found.setdefault(re.sub("[-_.]+", "-", named[1]).lower(), named[2]) == named[2], line
    return found


def test_what_is_declared_is_pinned():
    found, project = pins("constraints.txt"), PROJECT["project"]
    needed = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    needed += [line for lines in EXTRAS.values() for line in lines]
    for line in needed:
        name = re.split(r"[\[<>=;]", line)[0].strip().lower()
        assert name in {*found, "minirl-sql"}, line
    assert {"jax-cuda13-plugin", "nvidia-cudnn-cu13", "libtpu"} <= found.keys()


@pytest.mark.parametrize("python", [11, 12, 13])
def test_pins_of_jax_are_of_one_version_and_within_the_bounds(python):
    found = pins("constraints.txt", python=python)
    assert len({found[name] for name in ("jax", "jaxlib", "jax-cuda13-plugin")}) == 1
    lines = [line for one in EXTRAS.values() for line in one]
    bounds = {line.partition(">")[2] for line in lines if re.match(r"jax\b(\[\w+\])?>", line)}
    (bound,) = bounds
    low, high = (tuple(map(int, end.split("."))) for end in bound.removeprefix("=").split(",<"))
    assert low <= tuple(map(int, found["jax"].split("."))) < high


def test_sglang_is_the_version_that_was_tried():
    found = pins("constraints-sglang.txt")
    assert found["sglang"] == TESTED
    # Compilers of a newer CUDA write what the driver of SGLang's torch need not know.
    compilers = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")
    versions = [pinned[name] for pinned in (found, pins("constraints.txt")) for name in compilers]
    assert {version.rsplit(".", 1)[0] for version in versions} == {"13.0"}
