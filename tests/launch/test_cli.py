"""Mistakes of users: one line, status 2, nothing made and nothing lost."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from launch import cli
from launch.config import load_config
from launch.data.preflight import check_inputs
from sqlenv.config import DemoConfig
from sqlenv.demo import generate
from sqlenv.errors import UserError

# Runs many command lines in one process, and says what each one printed and whether JAX came in.
MANY = """
import contextlib, importlib, io, json, logging, sys
from launch import cli
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
"""
ROOT = "data.demo=null", "data.root=data"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with data, a model without weights, and run folders of others."""
    place = tmp_path_factory.mktemp("place")
    sizes = DemoConfig(
        train_databases=1, validation_databases=1, test_databases=1, questions_per_database=5
    )
    generate(place / "data", sizes)
    (place / "broken.yaml").write_text("train: [1\n")
    (place / "alien").mkdir()
    (place / "alien" / "thesis.txt").write_text("years of work")
    (place / "file").write_text("")
    return place


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def test_mistakes_are_told_in_a_line_before_jax_is_imported(command, place, tiny):
    train = ["launch.train", "--cfg", str(tiny)]
    evaluate = ["launch.eval", "--cfg", str(tiny)]
    away = str(place / "nowhere")
    cases = [
        (["launch.train"], "the following arguments are required: --cfg"),
        ([*train, "--sped"], "unrecognized arguments: --sped"),
        ([*train, "--accel", "abacus"], "invalid choice: 'abacus'"),
        (["launch.train", "--cfg", "none.yaml"], "--cfg none.yaml: no such file"),
        (["launch.train", "--cfg", "broken.yaml"], "broken.yaml: not YAML"),
        ([*train, "train.stps=1"], "train.stps: unknown key; did you mean steps?"),
        (["launch.train", "--cfg", "progress.yaml", f"data.root={away}"], f"no folder {away}"),
        (["launch.train", "--cfg", "progress.yaml", "data.root=data"], "data.train.sources.0: "),
        ([*train, *ROOT, "data.test.sources.0.layout=bird"], "data.test.sources.0: "),
        ([*train, *ROOT, "data.test.sources.0.file=no.json"], "no no.json in it"),
        ([*train, "model.tiny=null", f"model.path={away}"], f"no config.json in {away}"),
        ([*train, "run.dir=alien"], "alien: holds files that are not a run (such as thesis.txt)"),
        ([*train, "run.dir=file"], "file: is a file; set run.dir"),
        ([*train, "--only", "warm-start", "warm_start=null"], "warm_start is null"),
        ([*train, "--only", "tests"], "invalid choice: 'tests'"),
        ([*train, "run.dir=file/below", "--dry-run"], "file/below: cannot be written ("),
        ([*train, "--processes", "2"], "--processes N and --process I belong together"),
        ([*train, "--coordinator", "h:1", "--processes", "2", "--process", "2"], "from 0 to 1"),
        (["launch.score"], "give one pair (--db, --gold and --pred), a file of pairs (--file)"),
        ([*evaluate, "--decode", "beam"], "--decode beam: write greedy, vote@n"),
        ([*evaluate, "--checkpoint", away], f"--checkpoint {away}: no such folder"),
        ([*evaluate, "--data", "dev"], "invalid choice: 'dev'"),
        ([*train, "train.lora={}", "train.optimizer.kind=muon"], "train.optimizer.kind: "),
        (["launch.export"], "the following arguments are required: --checkpoint, --out"),
        (["launch.export", "--checkpoint", away, "--out", "a"], f"--checkpoint {away}: no such"),
        (["launch.export", "--checkpoint", "data", "--out", "alien"], "alien: is there already"),
        (["launch.export", "--checkpoint", "data", "--out", "file/a"], "file/a: cannot be written"),
    ]
    before = snapshot(place)
    done = command(json.dumps([case for case, _ in cases]), cwd=place, code=MANY)
    assert done.returncode == 0, done.stderr
    told, jax_came_in = json.loads(done.stdout)
    for (arguments, words), (status, out, err) in zip(cases, told, strict=True):
        assert status == 2, arguments
        assert err.startswith("error: "), arguments
        assert err.count("\n") == 1, err
        assert words in err
        assert not out or "--dry-run" in arguments
    assert not jax_came_in
    assert snapshot(place) == before


def test_help_names_every_argument_and_gives_examples(command, place):
    modules = ("launch.train", "launch.eval")
    done = command(json.dumps([[m, "--help"] for m in modules]), cwd=place, code=MANY)
    told, jax_came_in = json.loads(done.stdout)
    for module, (status, out, _) in zip(modules, told, strict=True):
        assert status == 0
        for words in (f"python -m {module}", "--cfg", "--accel", "progress-demo.yaml", "key.sub="):
            assert words in out
    assert "--dry-run" in told[0][1]
    assert all(word in told[1][1] for word in ("--checkpoint", "vote@8", "--data", "--out"))
    assert not jax_came_in


# Lets nothing of the learner be imported, as where it is not installed.
WITHOUT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
from launch import cli
from {module} import main
cli.run(main)
"""


@pytest.mark.parametrize(("module", "blocked"), [("launch.train", "flax"), ("launch.eval", "jax")])
def test_a_base_install_says_what_to_install(command, place, tiny, module, blocked):
    parts = {blocked} if blocked == "flax" else {"jax", "jaxlib", "flax", "optax", "orbax"}
    before = snapshot(place)
    code = WITHOUT.format(blocked=parts, module=module)
    done = command("--cfg", tiny, cwd=place, code=code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {blocked} is not installed, and this command needs it: ")
    assert done.stderr.count("\n") == 1
    assert snapshot(place) == before
    # What is missing beside it is a mistake of ours.
    code = WITHOUT.format(blocked={"apsw"}, module=module)
    assert "ModuleNotFoundError" in command("--cfg", tiny, cwd=place, code=code).stderr


def test_an_accelerator_that_is_not_there(command, place, tiny):
    before = snapshot(place)
    done = command("launch.train", "--cfg", tiny, "--accel", "tpu", cwd=place)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --accel tpu: ")
    assert done.stderr.count("\n") == 1
    assert snapshot(place) == before


def test_dry_run_prints_a_config_that_loads_and_makes_nothing(command, place, tiny):
    before = snapshot(place)
    line = ["--cfg", tiny, *ROOT, "seed=5", "--dry-run"]
    done = command("launch.train", *line, cwd=place)
    assert done.returncode == 0, done.stderr
    assert snapshot(place) == before
    printed, verdict = done.stdout.rsplit("# ", 1)
    assert verdict == "data, model and cpu are there\n"
    copy = place.parent / "printed.yaml"
    copy.write_text(printed)
    assert load_config(str(copy), []) == load_config(str(tiny), [*ROOT, "seed=5"])


def test_dry_run_says_what_the_run_would_miss(command, place, tiny, tmp_path):
    shutil.copytree(place / "data", tmp_path / "whole")
    for name in ("no-database", "text", "cut"):
        shutil.copytree(place / "data", tmp_path / name)
    missing = min((tmp_path / "no-database" / "database").rglob("*.sqlite"))
    missing.unlink()
    min((tmp_path / "text" / "database").rglob("*.sqlite")).write_text("CREATE TABLE t (a);")
    questions = tmp_path / "cut" / "test.json"
    questions.write_text(questions.read_text()[:-20])
    files = {
        "config.json": "{}",
        "tokenizer.json": "{}",
        "model.safetensors.index.json": '{"weight_map": {"w": "model-1.safetensors"}}',
        "model-1.safetensors": "",
    }
    for left_out in files:
        (tmp_path / f"no-{left_out}").mkdir()
        for name, text in files.items():
            if name != left_out:
                (tmp_path / f"no-{left_out}" / name).write_text(text)
    train = ["launch.train", "--cfg", str(tiny), "--dry-run", "data.demo=null"]
    model = [*train, "data.root=whole", "model.tiny=null"]
    cases = [
        ([*train, "data.root=text"], f"{missing.name}: not a SQLite database; download it again"),
        ([*train, "data.root=whole", "run.dir=/proc/x"], "/proc/x: cannot be written (/proc: "),
        ([*train, "data.root=no-database"], f"{missing.name} is not there, but question "),
        ([*train, "data.root=no-database"], ".drop_missing_database=true to leave such questions"),
        ([*train, "data.root=cut"], "data.test: "),
        *(([*model, f"model.path=no-{name}"], name) for name in files),
    ]
    before = snapshot(tmp_path)
    done = command(json.dumps([case for case, _ in cases]), cwd=tmp_path, code=MANY)
    told, _ = json.loads(done.stdout)
    for (arguments, words), (status, _, err) in zip(cases, told, strict=True):
        assert status == 2, arguments
        assert err.count("\n") == 1, err
        assert words in err
    assert snapshot(tmp_path) == before


def test_a_run_that_has_nothing_to_do_stops_before_it_begins(command, tiny, tmp_path):
    """No prompt fits: also training prompts, which can lose columns."""
    limit = "sampler.max_prompt_tokens"
    done = command("launch.train", "--cfg", tiny, f"{limit}=5", "run.dir=run", cwd=tmp_path)
    assert done.returncode == 2
    (told,) = [text for text in done.stderr.splitlines() if limit in text]
    assert told.startswith(f"error: {limit}: no training prompt fits 5 tokens, and the")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not {"warm", "before", "metrics.jsonl"} & names


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "full", "f"), "f: full; "),
        (OSError(errno.EACCES, "closed", "f"), "f: closed; "),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "lower sampler.cache_gb"),
        (RuntimeError("?"), None),
        (OSError(errno.EBADF, "ours", "f"), None),
    ],
)
def test_errors_of_the_system_are_told_in_a_line(error, told, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_set_up_output", lambda: None)
    monkeypatch.setattr(cli.sys, "argv", ["x"])

    def main(_arguments: list[str]) -> None:
        raise error

    with pytest.raises(SystemExit if told else type(error)):
        cli.run(main)
    line = capsys.readouterr().err
    assert (line.count("\n"), line.startswith("error: ")) == ((1, True) if told else (0, False))
    assert (told or "") in line


def test_a_folder_for_weights_that_cannot_be_made_is_told_before_the_run(tiny, tmp_path):
    place = tmp_path / "file" / "weights"
    place.parent.write_text("")
    given = ["rollout.backend=sglang", "rollout.sglang.urls=[http://a:1]"]
    config = load_config(str(tiny), [*given, f"rollout.sglang.weights={place}"])
    with pytest.raises(UserError, match=r"cannot be written .*; set rollout\.sglang\.weights to"):
        check_inputs(config)
    assert place.parent.read_text() == ""
