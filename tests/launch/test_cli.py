"""Mistakes of users: one line, status 2, nothing made and nothing lost."""

import errno
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from tempfile import gettempdir

import apsw
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch import cli, train
from launch.config import TinyConfig, load_config
from launch.tiny import make_tiny
from tests.worlds import GOLDS, make_bird, make_demo, make_spider, write

from .conftest import MANY, MODEL_FILES, check_mistakes, look_like_a_model, told_by

ROOT = "data.demo=null", "data.root=data"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with data, a folder of somebody's, and a broken config."""
    place = tmp_path_factory.mktemp("place")
    make_demo(place / "data", 5)
    (place / "broken.yaml").write_text("train: [1\n")
    (place / "alien").mkdir()
    (place / "alien" / "thesis.txt").write_text("years of work")
    (place / "file").write_text("")
    make_bird(place / "bird")
    write(make_spider(place / "spider") / "p.sql", GOLDS)
    return place


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def test_mistakes_are_told_in_a_line_before_jax_is_imported(process, place, tiny):
    text = (Path(__file__).parents[1] / "data" / "mistakes.json").read_text()
    cases = json.loads(text.replace("TINY", str(tiny)).replace("PLACE", str(place)))
    helps = {"launch.train": "--dry-run", "launch.eval": "vote@8"}
    before = snapshot(place)
    lines = [case["words"] for case in cases] + [[module, "--help"] for module in helps]
    told, jax_came_in = json.loads(process(json.dumps(lines), cwd=place, code=MANY).stdout)
    check_mistakes(told, [case["told"] for case in cases])
    assert all(err.count("\n") <= 1 for _, _, err in told)
    assert not jax_came_in
    assert snapshot(place) == before
    for (module, words), (status, out, _) in zip(helps.items(), told[len(cases) :], strict=True):
        shown = ["--cfg", "--accel", "progress-demo.yaml", "key.sub=", words]
        shown.append(f"python -m {module.replace('.', ' ')}")
        assert (status, [word for word in shown if word not in out]) == (0, [])


def test_a_printed_command_can_be_typed_where_it_was_printed(tmp_path, monkeypatch):
    """`make demo` runs the environment's interpreter, which nobody has activated."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert (
        cli.command_line("launch.report", Path("a b")) == ".venv/bin/python -m launch.report 'a b'"
    )
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3.11")
    assert cli.command_line("launch.report", "runs/a") == "python -m launch.report runs/a"


# Lets the learner's packages be imported as little as where they are not installed.
WITHOUT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jax", "jaxlib", "flax", "optax", "orbax"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from launch import cli
from launch.train import main
cli.run(main)
"""


def test_a_base_install_says_what_to_install(process, place, tiny):
    before = snapshot(place)
    done = process("--cfg", tiny, cwd=place, code=WITHOUT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: jax is not installed")
    assert done.stderr.count("\n") == 1
    assert snapshot(place) == before


# Does not wait as long for the others.
LONELY = """
from launch import cli
from launch.train import main
from minirl.run import distributed
distributed._START_S = 1
cli.run(main)
"""


def test_what_jax_does_not_find_is_told_in_a_line(command, place, tiny):
    taken = socket.create_server(("127.0.0.1", 0))
    before = snapshot(place)
    train = ["launch.train", "--cfg", str(tiny)]
    cases = [
        ([*train, "--processes", "2"], "--process"),
        ([*train, "--coordinator", "h:1", "--processes", "2", "--process", "2"], "process_id=2"),
        *(
            ([*train, "--coordinator", where, "--processes", "2", "--process", "0"], where[-5:])
            for where in ("h", "h:x", "h:99999", f"127.0.0.1:{taken.getsockname()[1]}")
        ),
        (["launch.export", "--checkpoint", "away", "--out", "a"], "--checkpoint away"),
        ([*train, "--accel", "gpu"], "--accel gpu"),
    ]
    told = told_by(command, *(case for case, _ in cases), cwd=place)
    check_mistakes(told, [key for _, key in cases])
    assert all(err.count("\n") == 1 for _, _, err in told)
    line = ["--cfg", tiny, "--coordinator", "127.0.0.1:1", "--processes", "2", "--process", "1"]
    done = command(*line, cwd=place, code=LONELY)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert snapshot(place) == before
    taken.close()


def test_what_nobody_can_catch_is_told_unless_it_is_of_a_damaged_checkpoint(ended):
    class Ours:
        def __init__(self, words: str) -> None:
            self.words = words

        def __del__(self) -> None:
            raise RuntimeError(self.words)

    def main(_arguments: list[str]) -> None:
        for words in ("a bug", "Event loop is closed"):
            Ours(words)

    told = ended(main)[2]
    assert ("a bug" in told, "Event loop" in told) == (True, False)


@pytest.mark.parametrize(("release", "is_set"), [((0, 12, 1), True), ((0, 13, 0), False)])
def test_xla_gets_a_flag_of_those_versions_alone_that_have_it(release, is_set, monkeypatch):
    """XLA aborts the process for a flag that it does not know."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    monkeypatch.setattr(jax, "__version_info__", release)
    monkeypatch.setattr(jax.config, "update", lambda *_, **__: None)
    # Devices are made once a process, and by these flags there is one of them.
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    cli.use_accelerator("cpu")
    assert ("ynn_fusion_type" in os.environ["XLA_FLAGS"]) == is_set


@pytest.fixture
def dry_run(place, tiny, monkeypatch, capsys):
    """Return what describes a run of the smallest job; nothing is made for it."""
    monkeypatch.chdir(place)

    def run(*words: str) -> str:
        before = snapshot(place)
        train.main(["--cfg", str(tiny), *words])
        assert snapshot(place) == before
        return capsys.readouterr().out

    return run


def test_dry_run_prints_a_config_that_loads(dry_run, tiny, tmp_path):
    copy = tmp_path / "printed.yaml"
    copy.write_text(dry_run(*ROOT, "seed=5", "--yaml"))
    assert load_config(str(copy), []) == load_config(str(tiny), [*ROOT, "seed=5"])


def test_dry_run_says_in_six_lines_what_the_run_would_be(dry_run):
    """Of data that is there, and of the demo's, which is made for it and gone afterwards."""
    demo = "data.demo={train_databases: 1, validation_databases: 1, test_databases: 1, " + (
        "questions_per_database: 5}"
    )
    for data in (ROOT, [demo]):
        told = dict(line.split(maxsplit=1) for line in dry_run(*data, "--dry-run").splitlines())
        assert [*told] == ["questions", "passes", "steps", "sampler", "memory", "prompt"]
        assert told["questions"] == (
            "5 to learn from, 4 of 5 to choose checkpoints by, 5 of 5 to test on"
        )
        assert told["passes"].startswith("1.20 over")  # 3 steps of 2 prompts
        assert told["steps"] == "after 3 of the warm start, 3 of 2 prompts x 2 answers"
        assert told["sampler"] == "the native sampler (no server in rollout.sglang)"
        little = "little; micro-batches of up to"
        assert told["memory"] == f"{little} 16,384 tokens; for the warm start {little} 8,192 tokens"
        assert told["prompt"].startswith("about ")


def make_models(folder: Path) -> dict[str, str]:
    """Make a model, and others that break off where they are looked into; give their faults."""
    shape = TinyConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, layers=1, heads=2, kv_heads=1
    )
    make_tiny(folder / "model", ["select name"], shape, 0)
    for name, changes in (("deeper", {"num_hidden_layers": 2}), ("narrower", {"vocab_size": 200})):
        path = shutil.copytree(folder / "model", folder / name) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    embedding = {"model.embed_tokens.weight": np.zeros((200, 16), np.float32)}
    path = folder / "narrower" / "model.safetensors"
    save_file(load_file(path) | embedding, path)
    return {
        "deeper": "tensor model.layers.1.input_layernorm.weight is missing, config.json says",
        "narrower": "an embedding of 200 rows",
    }


def test_dry_run_says_what_the_run_would_miss(command, dry_run, place, tiny, tmp_path):
    faults = make_models(tmp_path)
    for name in ("whole", "no-database", "text", "cut"):
        shutil.copytree(place / "data", tmp_path / name)
    missing = min((tmp_path / "no-database" / "database").rglob("*.sqlite"))
    missing.unlink()
    min((tmp_path / "text" / "database").rglob("*.sqlite")).write_text("CREATE TABLE t (a);")
    questions = tmp_path / "cut" / "test.json"
    questions.write_text(questions.read_text()[:-20])
    for name in MODEL_FILES:
        look_like_a_model(tmp_path / f"no-{name}", but=name)
    train = ["launch.train", "--cfg", str(tiny), "--dry-run", "data.demo=null"]
    model = [*train, "data.root=whole", "model.tiny=null"]
    served = [*train, "data.root=whole", "rollout.sglang.urls=[http://a:1]"]
    served += ["rollout.sglang.weights=cut/test.json/below"]
    cases = [
        ([*train, "data.root=text"], missing.name),
        ([*train, "data.root=no-database"], missing.name),
        ([*train, "data.root=whole", "run.dir=/proc/x"], "/proc/x"),
        ([*train, "data.root=cut"], "data.test"),
        (served, "rollout.sglang.weights"),
        ([*train, "data.root=whole", "mesh.tensor=3"], "mesh"),
        *(([*model, f"model.path=no-{name}"], name) for name in MODEL_FILES),
        *(([*model, f"model.path={name}"], fault) for name, fault in faults.items()),
    ]
    before = snapshot(tmp_path)
    told = told_by(command, *(case for case, _ in cases), cwd=tmp_path)
    check_mistakes(told, [key for _, key in cases])
    assert snapshot(tmp_path) == before
    told = dry_run(*ROOT, "model.tiny=null", f"model.path={tmp_path / 'model'}", "--dry-run")
    assert " tokens of " in told.splitlines()[-1]


def test_a_run_that_has_nothing_to_do_stops_before_it_begins(command, tiny, tmp_path):
    """No prompt fits: also training prompts, which can lose columns."""
    limit = "sampler.max_prompt_tokens"
    line = ["launch.train", "--cfg", str(tiny), f"{limit}=5", "run.dir=run"]
    check_mistakes(told_by(command, line, cwd=tmp_path), [limit])
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not {"warm", "before", "metrics.jsonl"} & names


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "full", "f"), "f: full"),
        (OSError(errno.ENOSPC, "full"), "standard output: full"),
        (OSError(errno.EACCES, "closed", "f"), "f: closed"),
        (apsw.FullError("full"), f"{gettempdir()}: full"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "sampler.cache_gb"),
        (ModuleNotFoundError("?", name="flax"), "flax is not installed"),
        (ModuleNotFoundError("?", name="launch.none"), None),
        (ModuleNotFoundError("?", name="luanch"), None),
        (ModuleNotFoundError("?", name="ml_dtypes"), None),  # of a library that is broken
        (RuntimeError("?"), None),
        (OSError(errno.EBADF, "ours", "f"), None),
    ],
)
def test_errors_of_the_system_are_told_in_a_line(error, told, ended):
    def main(_arguments: list[str]) -> None:
        raise error

    if told is None:
        with pytest.raises(type(error)):
            ended(main)
    else:
        line = ended(main)[2]
        assert (line.count("\n"), line.startswith("error: "), told in line) == (1, True, True)
