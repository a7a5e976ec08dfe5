"""Mistakes of users and damage: one line, status 2, nothing made and nothing lost."""

import errno
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import apsw
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch import cli, score, train
from launch import eval as evaluation
from launch.config import TinyConfig, load_config
from launch.tiny import make_tiny
from tests.vectors import read
from tests.worlds import GOLDS, edit, make_bird, make_demo, make_spider, write

from .conftest import MANY, MODEL_FILES, TINY, judging, look_like_a_model, told_by
from .report_cases import make_run, sheet, unfinish

ROOT = "data.demo=null", "data.root=data"
DATABASE = Path("database", "pets", "pets.sqlite")
# What is wrong with a Spider folder, its predictions or its databases. What else may be wrong with
# a question file or a database: tests/sqlenv/test_damage.py and test_executor.py.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "journal": lambda r: beside(link(r / DATABASE), "-journal", b"\x37\x7f\x06\x82"),
    "cut-database": lambda r: os.truncate(r / DATABASE, 4096),
    "no-databases": lambda r: shutil.rmtree(r / "database"),
    "another-suite": lambda r: shutil.rmtree(r / "test_suite_database" / "pets"),
    "utf-16": lambda r: (r / "dev.json").write_bytes("[{}]".encode("utf-16")),
    "blank-gold": lambda r: edit(r / "dev.json", 2, query=" "),
    "latin-1": lambda r: (r / "p.sql").write_bytes(b"SELECT '\xc4'\n"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with data, a folder of somebody's, and what is broken in one way each."""
    place = tmp_path_factory.mktemp("place")
    data = make_demo(place / "data", 5)
    (place / "broken.yaml").write_text("train: [1\n")
    (place / "alien").mkdir()
    (place / "alien" / "thesis.txt").write_text("years of work")
    (place / "file").write_text("")
    make_bird(place / "bird")
    for name in ("spider", *DAMAGES):
        write(make_spider(place / name) / "p.sql", GOLDS)
    for name, damage in DAMAGES.items():
        damage(place / name)
    for name in ("no-database", "text", "cut"):
        shutil.copytree(data, place / name)
    one_of(place / "no-database").unlink()
    one_of(place / "text").write_text("CREATE TABLE t (a);")
    questions = place / "cut" / "test.json"
    questions.write_text(questions.read_text()[:-20])
    make_models(place)
    make_results(place / "results")
    return place


def one_of(data: Path) -> Path:
    return min((data / "database").rglob("*.sqlite"))


def make_models(folder: Path) -> None:
    """Make a model, others that break off where they are looked into, and some without a file."""
    make_tiny(folder / "model", ["select name"], TinyConfig(**TINY["model"]["tiny"]), 0)
    for name, changes in (("deeper", {"num_hidden_layers": 2}), ("narrower", {"vocab_size": 200})):
        path = shutil.copytree(folder / "model", folder / name) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    embedding = {"model.embed_tokens.weight": np.zeros((200, 32), np.float32)}
    path = folder / "narrower" / "model.safetensors"
    save_file(load_file(path) | embedding, path)
    for name in MODEL_FILES:
        look_like_a_model(folder / f"no-{name}", but=name)


def make_results(folder: Path) -> None:
    """Write a result, others that it cannot be compared with, and what is none."""
    base = sheet(folder / "base.json", "10")
    sheet(folder / "short.json", "1")
    for name, more in {
        "other": {"fingerprint": "g"}, "edited": {"databases": "c"}, "suite": {"suite": "s"},
        "dk": {"data": "spider-dk"},
    }.items():  # fmt: skip
        sheet(folder / f"{name}.json", "11", **more)
    write(folder / "nameless.json", json.loads(base.read_text()) | {"settings": {}})
    write(folder / "broken.json", "{")
    write(folder / "foreign.json", [{"file": "a"}])
    write(folder / "begun" / "config.yaml", "decode: greedy")
    (folder / "empty").mkdir()
    result = make_run(folder / "three", steps=1, questions=2) / "result.json"
    write(result, json.loads(result.read_text()) | {"questions": 3})
    unfinish(make_run(folder / "killed", steps=1, questions=2))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def mistakes(when: str, **names: object) -> list[Any]:
    """Read a table of command lines, and what the line that each one ends with has to tell."""
    text = json.dumps(read("mistakes")[when])
    for name, value in names.items():
        text = text.replace(name, str(value))
    return json.loads(text)


def check_mistakes(told: Sequence[tuple[int, str, str]], keys: Sequence[str]) -> None:
    """See that the first commands ended with status 2 and one line, which has its key."""
    for key, (status, _, err) in zip(keys, told, strict=False):
        assert (status, err.count("\n"), err.startswith("error: ")) == (2, 1, True), err
        assert key in err


def test_mistakes_are_told_in_a_line_before_jax_is_imported(process, place, tiny):
    cases = mistakes("at once", TINY=tiny, PLACE=place)
    helps = {"launch.train": "--dry-run", "launch.eval": "vote@8"}
    before = snapshot(place)
    lines = [case["words"] for case in cases] + [[module, "--help"] for module in helps]
    told, jax_came_in = json.loads(process(json.dumps(lines), cwd=place, code=MANY).stdout)
    check_mistakes(told, [case["told"] for case in cases])
    assert not jax_came_in
    assert snapshot(place) == before
    for (module, words), (status, out, _) in zip(helps.items(), told[len(cases) :], strict=True):
        shown = ["--cfg", "--accel", "progress-demo.yaml", "key.sub=", words]
        shown.append(f"python -m {module.replace('.', ' ')}")
        assert (status, [word for word in shown if word not in out]) == (0, [])


# Does not wait as long for the others.
LONELY = """
from launch import cli
from launch.train import main
from minirl.run import distributed
distributed._START_S = 1
cli.run(main)
"""


def test_what_jax_and_a_dry_run_do_not_find_is_told_in_a_line(command, place, tiny):
    before = snapshot(place)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, missing = taken.getsockname()[1], one_of(place / "data").name
        places = {"TINY": tiny, "REFERENCE": tiny.with_name("reference")}
        cases = mistakes("before a run", PORT=port, MISSING=missing, **places)
        told = told_by(command, *(case["words"] for case in cases), cwd=place)
    check_mistakes(told, [case["told"] for case in cases])
    line = ["--cfg", tiny, "--coordinator", "127.0.0.1:1", "--processes", "2", "--process", "1"]
    done = command(*line, cwd=place, code=LONELY)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert snapshot(place) == before


def link(path: Path) -> Path:
    """Put a link in place of a file; give the file's new place."""
    store = path.parents[2] / "store" / f"{path.stem}.db"
    store.parent.mkdir(exist_ok=True)
    path.replace(store)
    path.symlink_to(store)
    return store


def beside(path: Path, ending: str, content: bytes) -> None:
    path.with_name(path.name + ending).write_bytes(content)


def test_what_official_programs_read_is_judged(tmp_path, ended):
    """An empty log, a link, and a journal whose writer is done."""
    root = make_spider(tmp_path)
    beside(root / DATABASE, "-wal", b"")
    beside(link(root / "database" / "shop" / "shop.sqlite"), "-journal", bytes(512))
    words = judging(write(root / "p.sql", GOLDS), root, "--json", str(tmp_path / "o.json"))
    assert ended(evaluation.main, *words, "--comparators", "bird_ex")[0] == 0
    assert json.loads((tmp_path / "o.json").read_text())["measures"]["bird_ex"]["mean"] == 1


def test_a_folder_whose_name_is_not_utf8(tmp_path, command):
    """Also to a standard output that takes text alone, which is that of a process."""
    root = make_spider(tmp_path / os.fsdecode(b"n\xe4\xff") / "spider_data")
    words = judging(write(root / "p.sql", GOLDS), root, "--json", str(root / "o.json"))
    done = command("launch.eval", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((root / "o.json").read_text())["measures"]["spider_ts"]["mean"] == 1


@pytest.mark.parametrize(
    "text",
    ["SELECT name FROM pet WHERE age = 1" + " OR age = 1" * 200_000, "[" * 2_000_000],
    ids=["conditions", "names"],
)
def test_a_text_of_megabytes_is_refused_before_anything_reads_it(
    spider_root, tmp_path, ended, text
):
    """Reading it took 3 to 19 s a query, of which the limits of a query say nothing."""
    pair = ["--db", str(spider_root / DATABASE), "--gold", GOLDS[0], "--pred", text]
    status, out, _ = ended(score.main, *pair, "--timeout-s", "1")
    record = json.loads(out)
    assert (status, record["status"]) == (0, "too_large")
    assert record["seconds"] < 1
    path = write(tmp_path / "p.jsonl", [{"pred": sql} for sql in [text, *GOLDS[1:]]])
    words = judging(path, spider_root, "--json", str(tmp_path / "o.json"), "--timeout-s", "1")
    assert ended(evaluation.main, *words)[0] == 0
    found = json.loads((tmp_path / "o.json").read_text())
    assert [one["scores"]["spider_ex"] for one in found["questions"]] == [0, 1, 1, 1, 1]
    assert (found["questions"][0]["status"], found["late"]) == ("too_large", [])


def test_a_printed_command_can_be_typed_where_it_was_printed(tmp_path, monkeypatch):
    """`make demo` runs the environment's interpreter, which nobody has activated."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert (
        cli.command_line("launch.report", Path("a b")) == ".venv/bin/python -m launch.report 'a b'"
    )
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3.11")
    assert cli.command_line("launch.report", "runs/a") == "python -m launch.report runs/a"


def test_a_base_install_says_what_to_install(ended, place, tiny, monkeypatch):
    """That nothing before it needs JAX is seen where mistakes are told at once."""
    before = snapshot(place)
    monkeypatch.chdir(place)
    monkeypatch.setitem(sys.modules, "jax", None)
    status, out, err = ended(train.main, "--cfg", str(tiny))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: jax is not installed")
    assert snapshot(place) == before


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
    *_, prompt = dry_run(*ROOT, "model.tiny=null", "model.path=model", "--dry-run").splitlines()
    assert " tokens of " in prompt  # by the model's own tokenizer


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
