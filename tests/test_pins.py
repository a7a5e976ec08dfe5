"""What the project declares is pinned, and its pins agree with each other."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from minirl.sglang.server import TESTED

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def of_python(lines: list[str], minor: int) -> list[Requirement]:
    """Read those requirements that are of Python 3.`minor`."""
    every = map(Requirement, lines)
    here = {"python_version": f"3.{minor}"}
    return [one for one in every if one.marker is None or one.marker.evaluate(here)]


def pins(name: str, python: int) -> dict[str, str]:
    """Read the versions that a file pins for a version of Python."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for one in of_python([line for line in lines if line and not line.startswith("#")], python):
        (pin,) = one.specifier
        assert pin.operator == "==", one
        assert found.setdefault(canonicalize_name(one.name), pin.version) == pin.version, one
    return found


@pytest.mark.parametrize("python", [11, 12, 13])
def test_what_is_declared_is_pinned_within_its_bounds(python):
    found, project = pins("constraints.txt", python), PROJECT["project"]
    lines = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    lines += [line for extra in project["optional-dependencies"].values() for line in extra]
    for one in of_python(lines, python):
        if one.name != project["name"]:
            assert one.specifier.contains(found[canonicalize_name(one.name)]), one
    assert len({found[name] for name in ("jax", "jaxlib", "jax-cuda13-plugin")}) == 1


def test_sglang_is_the_version_that_was_tried():
    found = pins("constraints-sglang.txt", 12)
    assert found["sglang"] == TESTED
    # Compilers of a newer CUDA write what the driver of SGLang's torch need not know.
    compilers = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")
    versions = [one[name] for one in (found, pins("constraints.txt", 12)) for name in compilers]
    assert {version.rsplit(".", 1)[0] for version in versions} == {"13.0"}
