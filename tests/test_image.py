"""The Dockerfile names what exists: targets, files, extras, pins, users, commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from launch import train
from launch.config import load_config
from minirl.config import SGLANG_PYTHON
from minirl.sglang.answers import TESTED

ROOT = Path(__file__).parents[1]
TARGETS = ("tpu", "gpu", "cpu")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
_PIN = re.compile(r"([\w.-]+)==([\w.+]+)")
# A pin may be of some versions of Python only.
_PYTHON = re.compile(r'python_version (<|>=) "3\.(\d+)"')

Instruction = tuple[str, str]


def stages() -> dict[str, list[Instruction]]:
    """Read the instructions of each stage, those of the stages that it starts from before them."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    found: dict[str, list[Instruction]] = {}
    name = ""
    for line in re.sub(r"\\\n", " ", code).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            parent, _, name = rest.split()
            found[name] = list(found.get(parent, []))
        elif word:
            found[name].append((word, rest))
    return found


def last(target: str, word: str) -> str:
    return [rest for found, rest in stages()[target] if found == word][-1]


def installs() -> list[list[str]]:
    """List the words of each `pip install`."""
    runs = [rest for stage in stages().values() for word, rest in stage if word == "RUN"]
    commands = [shlex.split(command) for run in runs for command in run.split("&&")]
    return [words for words in commands if words[0].endswith("pip") and words[1] == "install"]


def pins(name: str, *, python: int = 12) -> dict[str, str]:
    """Read the versions that a file pins for Python 3.`python`; the image has 3.12."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for line in lines:
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


def is_sent(path: str) -> bool:
    """Tell whether the context holds a file: nothing, but for what is named."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    everything, *named = [line for line in lines if line and not line.startswith("#")]
    assert everything == "*"
    return any(fnmatch(Path(path).parts[0], line[1:]) for line in named if line.startswith("!"))


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_starts_our_command_for_its_accelerator(target):
    python, flag, module, *arguments = json.loads(last(target, "ENTRYPOINT"))
    assert (python, flag, module) == ("python", "-m", "launch.train")
    options = train.make_parser().parse_intermixed_args(
        [*arguments, *json.loads(last(target, "CMD"))]
    )
    assert options.accel == target
    load_config(options.cfg, options.overrides)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs_as_a_user_whom_clusters_know_by_number(target):
    words = [word for word, _ in stages()[target]]
    assert int(last(target, "USER")) > 0
    assert not {"RUN", "COPY"} & set(words[words.index("USER") :])


@pytest.mark.parametrize(("fresh", "status"), [("metrics.jsonl", 0), ("sglang-0.log", 1)])
def test_a_job_is_healthy_while_it_writes(tmp_path, fresh, status):
    command = last("cpu", "HEALTHCHECK").partition(" CMD ")[2]
    folder = tmp_path / "runs" / "job"
    folder.mkdir(parents=True)
    for name in ("config.yaml", fresh):
        (folder / name).touch()
    os.utime(folder / "config.yaml", (0, 0))
    assert subprocess.run(command, shell=True, cwd=tmp_path, check=False).returncode == status


def test_sources_exist_and_are_sent():
    assert [*stages()][-1] == "cpu"  # what is built when no target is named
    copies = [rest.split() for stage in stages().values() for word, rest in stage if word == "COPY"]
    for *sources, _ in copies:
        if sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") in stages()
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source == "." or is_sent(source), source


def test_the_context_is_the_project_and_nothing_else():
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = ["pyproject.toml", PROJECT["project"]["readme"], "tests/conftest.py", "docs/papers.md"]
    for path in (*needed, *(f"{package}/__init__.py" for package in packages)):
        assert (ROOT / path).exists()
        assert is_sent(path), path
    for path in (".git/config", "data/dev.json", "runs/a/metrics.jsonl", "models/m/config.json"):
        assert not is_sent(path), path


def test_everything_installed_is_pinned():
    assert len(installs()) > 6
    for words in installs():
        if all(_PIN.fullmatch(word) for word in words[2:]):
            continue
        named = [words[at + 1] for at, word in enumerate(words) if word.endswith("-constraint")]
        named += [words[at + 1] for at, word in enumerate(words) if word == "--constraint"]
        assert "--constraint" in words or {"--no-deps", "--build-constraint"} <= set(words), words
        for name in named:
            assert (ROOT / Path(name).name).exists(), name
        if "--only-deps" in words:
            assert "--build-constraint" in words, words


def test_extras_exist_and_what_they_name_is_pinned():
    project, found = PROJECT["project"], pins("constraints.txt")
    extras = project["optional-dependencies"]
    named = re.findall(
        r"minirl-sql\[([\w,]+)\]", " ".join(word for line in installs() for word in line)
    )
    found_extras = {extra for one in named for extra in one.split(",")}
    assert found_extras == {"cpu", "gpu", "tpu", "dev"}
    needed = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    needed += [line for one in extras for line in extras[one]]
    for line in needed:
        name = re.split(r"[\[<>=;]", line)[0].strip().lower()
        assert name in {*found, "minirl-sql"}, line
    for name in ("jax-cuda13-plugin", "nvidia-cudnn-cu13", "libtpu"):
        assert name in found


@pytest.mark.parametrize("python", [11, 12, 13])
def test_pins_of_jax_are_of_one_version_and_within_the_bounds(python):
    found, extras = pins("constraints.txt", python=python), PROJECT["project"]
    assert len({found[name] for name in ("jax", "jaxlib", "jax-cuda13-plugin")}) == 1
    lines = [line for one in extras["optional-dependencies"].values() for line in one]
    bounds = {line.partition(">")[2] for line in lines if re.match(r"jax\b(\[\w+\])?>", line)}
    (bound,) = bounds
    low, high = (tuple(map(int, end.split("."))) for end in bound.removeprefix("=").split(",<"))
    assert low <= tuple(map(int, found["jax"].split("."))) < high


def test_the_image_has_the_newest_versions_that_are_pinned():
    image = re.findall(r"^FROM python:3\.(\d+)-", (ROOT / "Dockerfile").read_text("utf-8"), re.M)
    newest = pins("constraints.txt", python=99)
    assert [pins("constraints.txt", python=int(minor)) for minor in image] == [newest]


def test_sglang_is_the_version_that_was_tried():
    found = pins("constraints-sglang.txt")
    assert found["sglang"] == TESTED
    # Compilers of a newer CUDA write what the driver of SGLang's torch need not know.
    compilers = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")
    versions = [pinned[name] for pinned in (found, pins("constraints.txt")) for name in compilers]
    assert {version.rsplit(".", 1)[0] for version in versions} == {"13.0"}
    runs = " ".join(rest for word, rest in stages()["gpu"] if word == "RUN")
    variables = dict(word.split("=", 1) for word in shlex.split(last("gpu", "ENV")))
    place = Path(variables[SGLANG_PYTHON]).parents[1]
    assert "python -m venv ." in runs
    assert ("WORKDIR", str(place)) in stages()["sglang"]
    # Ours comes first; SGLang calls programs of its own (ninja).
    assert variables["PATH"] == f"$PATH:{place}/bin"
