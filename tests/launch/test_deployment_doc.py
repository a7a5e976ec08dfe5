"""The commands of docs/deployment.md are ones that we have, and their settings agree."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from launch import cli, train
from launch.config import load_config
from minirl.config import SglangConfig

from .conftest import TINY

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
ENTRY = "minirl-sql:gpu"


def commands() -> list[list[str]]:
    """List the words of every command, those of indented blocks."""
    blocks = re.findall(r"(?m)^    (?! ).*(?:\n {5,}\S.*)*", TEXT)
    return [shlex.split(re.sub(r"\\\n *", " ", block), comments=True) for block in blocks]


def jobs() -> list[list[str]]:
    """List the arguments of launch.train, however it is started."""
    found = []
    for words in commands():
        if "launch.train" in words:
            found.append(words[words.index("launch.train") + 1 :])
        elif ENTRY in words and "--entrypoint" not in words and "build" not in words:
            found.append(["--accel", "gpu", *words[words.index(ENTRY) + 1 :]])
        elif words[1:2] == ["sbatch"]:
            config, folder, *rest = words[3:]
            found.append(["--accel", "gpu", "--cfg", config, f"run.dir={folder}", *rest])
    return found


@pytest.mark.parametrize("arguments", jobs(), ids=lambda arguments: " ".join(arguments)[:60])
def test_settings_agree(arguments):
    options = train.make_parser().parse_intermixed_args(arguments)
    cli.read_processes(options)
    config = load_config(options.cfg, options.overrides)
    sglang = config.rollout.sglang
    assert (config.rollout.backend == "native") == (sglang == SglangConfig())


def test_a_dry_run_of_a_job_with_servers(command, tiny, tmp_path):
    chosen = next(words for words in jobs() if any(".devices=" in word for word in words))
    own = {"--accel": "cpu", "--cfg": str(tiny)}
    words = [own.get(before, word) for before, word in zip(["", *chosen], chosen, strict=False)]
    done = command("launch.train", *words, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["rollout"]["backend"] == "sglang"
    assert yaml.safe_load(done.stdout)["run"]["name"] == TINY["run"]["name"]


def test_every_way_is_shown():
    assert len(jobs()) >= 7
    modules = [words[words.index("-m") + 1] for words in commands() if "-m" in words]
    assert set(modules) == {"launch.train", "pytest", "sglang.launch_server"}
    servers = [words for words in commands() if "sglang.launch_server" in words]
    assert all("--model-path" in words for words in servers)


def test_files_and_other_commands_exist():
    for words in commands():
        for word in words:
            if word.startswith(("launch/", "tests/")):
                assert (ROOT / word).exists(), word
    for topology in re.findall(r"--topology ([\w:]+)", TEXT):
        assert topology in (ROOT / "README.md").read_text(encoding="utf-8")
