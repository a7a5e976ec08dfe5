"""The smallest job of every phase, jobs that ask an endpoint, and ways to run commands."""

import fcntl
import importlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import cli, options
from launch import eval as evaluation
from minirl.exchange import UserError
from tests.forked import Copy
from tests.worlds import make_bird, make_database, make_downloads, make_set, make_spider, spider

from .chat_server import Chat

ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "data" / "tiny.yaml").read_text())

# Settings of the job of `place`: two of its six test questions have too long a prompt.
FINISHED = ("data.demo.seed=4", "evaluation.max_prompt_tokens=186", "evaluation.samples=2")
LEFT_OUT = 2

# What is looked for before a run.
MODEL_FILES = {
    "config.json": "{}",
    "tokenizer.json": "{}",
    "model.safetensors.index.json": '{"weight_map": {"w": "model-1.safetensors"}}',
    "model-1.safetensors": "weights",
}

Command = Callable[..., subprocess.CompletedProcess[str]]

# Runs many command lines in one process: the status, what each one printed, and whether JAX came.
MANY = """
import contextlib, importlib, io, json, sys

def main():
    from launch import cli, options
    told = []
    for module, *arguments in json.loads(sys.argv[1]):
        out, err = io.StringIO(), io.StringIO()
        cli.output.file, sys.argv = out, [module, *arguments]
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
            try:
                cli.run(importlib.import_module(module).main)
            except SystemExit as end:
                told.append([end.code, out.getvalue(), err.getvalue()])
    print(json.dumps([told, "jax" in sys.modules]))

if __name__ == "__main__":  # processes that a command starts read this file too
    main()
"""


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The config of the smallest job."""
    return ROOT / "tests" / "data" / "tiny.yaml"


@pytest.fixture(scope="session")
def process(environment: dict[str, str]) -> Command:
    """Return `process(module, *arguments, cwd=folder)`, started as `python -m module`."""

    def run(*words: str | Path, cwd: Path, code: str = "") -> Any:
        line = [sys.executable, *(["-c", code] if code else ["-m"]), *map(str, words)]
        return subprocess.run(
            line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    return run


@pytest.fixture(scope="session")
def command(copies: Callable[..., Copy]) -> Command:
    """Return what does the same in a copy of a process that has imported the libraries."""
    return lambda *words, cwd, code="": copies(*words, cwd=cwd, code=code).end()


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """Return the interpreter of an environment with SGLang, or skip."""
    named = os.environ.get("MINIRL_SGLANG_PYTHON")
    if not named and importlib.util.find_spec("sglang") is None:
        pytest.skip(
            "sglang is not installed here: set MINIRL_SGLANG_PYTHON to the interpreter of an "
            "environment that has it"
        )
    return named or sys.executable


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_database(tmp_path_factory.mktemp("db"), "emp")


@pytest.fixture(scope="session")
def place(command: Command, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder where the smallest job ran to its end, as `finished`; nobody changes it, and
    it is made once for all workers of pytest-xdist.
    """
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "place"
    place.mkdir(exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "stderr.txt").exists():
            line = ["--cfg", tiny, *FINISHED, "run.dir=finished"]
            done = command("launch.train", *line, cwd=place)
            assert done.returncode == 0, done.stderr
            (place / "stdout.txt").write_text(done.stdout)
            (place / "stderr.txt").write_text(done.stderr)
    return place


@pytest.fixture(scope="session")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Downloads of every data set, which nobody changes."""
    return make_downloads(tmp_path_factory.mktemp("downloads"))


@pytest.fixture(scope="session")
def spider_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Spider folder, which nobody changes."""
    return make_spider(tmp_path_factory.mktemp("served") / "spider_data")


@pytest.fixture(scope="session")
def bird_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same questions as a BIRD folder."""
    return make_bird(tmp_path_factory.mktemp("bird"))


@pytest.fixture(scope="session")
def served(spider_root: Path) -> Path:
    """The folder that this one is in, with a job of its five questions, and one of thirty others
    that asks for a fence; nobody changes them.
    """
    folder = spider_root.parent
    endpoint = {"parallel": 4, "retries": 2, "timeout_s": 20, "max_tokens": 99}
    judged = {"attempts": 12, "judgements": 4, "judge_retries": 1}
    every = {**TINY["evaluation"], "questions": None}
    write_job(folder / "five.yaml", spider_root, evaluation=every, endpoint=endpoint | judged)
    thirty = [spider(f"SELECT {n}", "pets", question=f"Number {n}?") for n in range(30)]
    make_set(folder / "many" / "dev.json", folder / "many" / "database", thirty)
    write_job(
        folder / "thirty.yaml", folder / "many",
        env={"kind": "single_turn", "wrapping": "fence"},
        reward={"kind": "one_shot"},
        evaluation={"wrapping": "fence"},
        endpoint=endpoint | {"parallel": 8, "retries": 0},
    )  # fmt: skip
    return folder


@pytest.fixture
def evaluate(served: Path, caplog) -> Callable[..., dict[str, Any]]:
    """Return `evaluate(out, chat, *words, job=name)`: the sheet of an endpoint's evaluation."""
    caplog.set_level(logging.INFO)

    def run(out: Path, chat: Chat, *more: str, job: str = "five") -> dict[str, Any]:
        evaluation.main(asking(served, out, chat, *more, job=job))
        return loaded(out)

    return run


@pytest.fixture
def ended(monkeypatch, capsys) -> Callable[..., tuple[int | str | None, str, str]]:
    """Return what runs a command as `python -m` does: its exit status and what it printed."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # which a command sets

    def run(main: Callable[[list[str]], object], *words: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["x", *words])
        with pytest.raises(SystemExit) as caught:
            cli.run(main)
        return caught.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def quick(monkeypatch) -> None:
    """Let repetitions of the client of an endpoint follow at once."""
    for name in ("INITIAL_RETRY_DELAY", "MAX_RETRY_DELAY"):
        monkeypatch.setattr(f"openai._base_client.{name}", 0.001)


@pytest.fixture
def root(downloads: Path, tmp_path: Path) -> Path:
    """Copy the downloads, to be spoilt."""
    return shutil.copytree(downloads, tmp_path / "data")


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def loaded(out: Path) -> dict[str, Any]:
    """Read a folder of results: the summary, and its questions."""
    summary = json.loads((out / "verdicts.json").read_text(encoding="utf-8"))
    return summary | {"questions": json_lines(out / "predictions.jsonl")}


def look_like_a_model(folder: Path, *, but: str = "") -> None:
    """Make a folder with the files of a model in two parts, one of them left out."""
    folder.mkdir(parents=True)
    for name, text in MODEL_FILES.items():
        if name != but:
            (folder / name).write_text(text)


def write_job(path: Path, root: Path, **sections: Any) -> Path:
    """Write the config of the smallest job on the data of a folder, with sections of its own."""
    data = {**TINY["data"], "demo": None, "root": str(root)}
    path.write_text(yaml.safe_dump({**TINY, "data": data, **sections}), encoding="utf-8")
    return path


def parsed(name: str, *words: str) -> dict[str, Any]:
    """Read the options of a command without running it."""
    importlib.import_module(f"launch.{name}")
    _, bound, _ = options.app.parse_args([name, *words], exit_on_error=False)
    bound.apply_defaults()
    return dict(bound.arguments)


def mistake(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Return the one line of the mistake that a call ends with."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def told_by(command: Command, *lines: Sequence[object], cwd: Path) -> list[tuple[int, str, str]]:
    """Run command lines one after the other in one process: status, output and errors of each."""
    done = command(json.dumps([[*map(str, line)] for line in lines]), cwd=cwd, code=MANY)
    assert done.returncode == 0, done.stderr
    return [tuple(each) for each in json.loads(done.stdout)[0]]


def succeed(command: Command, *lines: Sequence[object], cwd: Path) -> list[str]:
    """Do the same with commands that succeed, and return what each one printed."""
    told = told_by(command, *lines, cwd=cwd)
    assert not any(status for status, _, _ in told), told
    return [out + err for _, out, err in told]


def judging(file: str | Path, root: Path, *more: str, data: str = "spider-dev") -> list[str]:
    """Give the arguments of an evaluation of a file of predictions."""
    return ["--predictions", str(file), "--data-root", str(root), "--data", data, *more]


def asking(served: Path, out: Path, chat: Chat, *more: str, job: str = "five") -> list[str]:
    """Give the arguments of an evaluation of an endpoint, with a job or without."""
    data = "validation" if job == "thirty" else "spider-dev"
    settings = ["--cfg", str(served / f"{job}.yaml")]
    if not job:
        settings = ["--data-root", str(served / "spider_data")]
    named = ["--endpoint", chat.url, "--model", "m/one", "--data", data, "--out", str(out)]
    return [*settings, *named, *more]
