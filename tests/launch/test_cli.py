"""Mistakes of users: one line, status 2, nothing made and nothing lost."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import yaml

import minirl.errors
from launch import cli, folders
from launch.config import JobConfig, dump, load_config
from launch.evaluation.testsets import SPLITS
from launch.inputs import check_data, check_inputs
from minirl.run import preemption
from sqlenv.config import DemoConfig
from sqlenv.data.layouts import locate
from sqlenv.demo import generate
from sqlenv.errors import UserError
from sqlenv.types import Example

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
        ([*train, "train.stps=1"], "train.stps: unknown key; did you mean train.steps?"),
        ([*train, "train.steps=few"], "train.steps: input should be a valid integer"),
        ([*train, "data.root=data"], "data: give one of data.demo"),
        (["launch.train", "--cfg", "progress.yaml", f"data.root={away}"], f"no folder {away}"),
        (["launch.train", "--cfg", "progress.yaml", "data.root=data"], "data.train.sources.0: "),
        ([*train, *ROOT, "data.test.sources.0.layout=bird"], "data.test.sources.0: "),
        ([*train, *ROOT, "data.test.sources.0.file=no.json"], "no no.json in it"),
        ([*train, "model.tiny=null", f"model.path={away}"], f"no config.json in {away}"),
        ([*train, "run.dir=alien"], "alien: holds files that are not a run (such as thesis.txt)"),
        ([*train, "run.dir=file"], "file: is a file; set run.dir"),
        (["launch.sft", "--cfg", str(tiny), "warm_start=null"], "warm_start is null"),
        (["launch.sft", "--cfg", str(tiny), "run.dir=alien"], "not a run (such as thesis.txt)"),
        (["launch.sft", "--cfg", str(tiny), "model.tiny.heads=5"], "32 is not a multiple of"),
        ([*train, "seed=99999999999999999999"], "seed: input should be less than"),
        ([*train, "run.dir=file/below", "--dry-run"], "file/below: cannot be written ("),
        ([*train, "--processes", "2"], "--processes N and --process I belong together"),
        ([*train, "--coordinator", "h:1", "--processes", "2", "--process", "2"], "from 0 to 1"),
        (["launch.score"], "give one pair (--db, --gold and --pred), a file of pairs (--file)"),
        ([*evaluate, "--decode", "beam"], "--decode beam: write greedy or vote@n"),
        ([*evaluate, "--checkpoint", away], f"--checkpoint {away}: no such folder"),
        ([*evaluate, "--data", "dev"], "invalid choice: 'dev'"),
        ([*train, "train.lora.rank=0"], "train.lora.rank: input should be greater than 0"),
        ([*train, "train.lora.targets=[q, w]"], "train.lora.targets.1: input should be 'q', 'k'"),
        ([*train, "train.lora={}", "train.optimizer.kind=muon"], "train.optimizer.kind: muon"),
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
    modules = ("launch.train", "launch.sft", "launch.eval")
    done = command(json.dumps([[m, "--help"] for m in modules]), cwd=place, code=MANY)
    told, jax_came_in = json.loads(done.stdout)
    for module, (status, out, _) in zip(modules, told, strict=True):
        assert status == 0
        for words in (f"python -m {module}", "--cfg", "--accel", "progress-demo.yaml", "key.sub="):
            assert words in out
    assert "--dry-run" in told[0][1]
    assert all(word in told[2][1] for word in ("--checkpoint", "vote@8", "--data", "--out"))
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


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        ("launch.train", "jax"),
        ("launch.sft", "jax"),
        ("launch.eval", "jax"),
        ("launch.train", "flax"),
    ],
)
def test_a_base_install_says_what_to_install(command, place, tiny, module, blocked):
    parts = {blocked} if blocked == "flax" else {"jax", "jaxlib", "flax", "optax", "orbax"}
    before = snapshot(place)
    code = WITHOUT.format(blocked=parts, module=module)
    done = command("--cfg", tiny, cwd=place, code=code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {blocked} is not installed, and this command needs it: "
        "pip install '.[cpu]' (or '.[gpu]', '.[tpu]')\n"
    )
    assert snapshot(place) == before
    # What is missing beside it is a mistake of ours.
    code = WITHOUT.format(blocked={"apsw"}, module=module)
    assert "ModuleNotFoundError" in command("--cfg", tiny, cwd=place, code=code).stderr


@pytest.mark.parametrize("accelerator", ["gpu", "tpu"])
def test_an_accelerator_that_is_not_there(command, place, tiny, accelerator):
    before = snapshot(place)
    done = command("launch.train", "--cfg", tiny, "--accel", accelerator, cwd=place)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --accel {accelerator}: ")
    assert "use --accel cpu" in done.stderr
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


@pytest.mark.parametrize("kind", ["training", "test"])
def test_a_run_that_has_nothing_to_do_stops_before_it_begins(command, place, tiny, tmp_path, kind):
    """No prompt fits. Training prompts can lose columns; those of the test set here cannot."""
    limit = {"training": 5, "test": 700}[kind]
    if kind == "test":
        shutil.copytree(place / "data", tmp_path / "data")
        for path in [tmp_path / "data" / "test.json"]:
            records = json.loads(path.read_text())
            long = [record | {"question": "word " * 800} for record in records]
            path.write_text(json.dumps(long))
    root = ROOT if kind == "test" else ()
    line = ["--cfg", tiny, *root, f"sampler.max_prompt_tokens={limit}", "run.dir=run"]
    done = command("launch.train", *line, cwd=tmp_path)
    assert done.returncode == 2
    told = [text for text in done.stderr.splitlines() if "max_prompt_tokens" in text]
    assert len(told) == 1
    words = f"error: sampler.max_prompt_tokens: no {kind} prompt fits {limit} tokens, and the"
    assert told[0].startswith(words)
    assert not {"warm", "before", "metrics.jsonl"}.intersection(
        p.name for p in (tmp_path / "run").iterdir()
    )


FAILING = """
import errno
from launch import cli
def main(arguments):
    raise {}
cli.run(main)
"""


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("ENOSPC", "f: full; make room, and the same command goes on from what it has saved"),
        ("ENOTDIR", "f: full; move away what is there, or choose another folder"),
        ("EACCES", "f: full; allow it, or choose another folder"),
        ("ENAMETOOLONG", "f: full; write a shorter path"),
    ],
)
def test_what_the_file_system_refuses_is_told_in_a_line(command, tmp_path, kind, told):
    done = command(cwd=tmp_path, code=FAILING.format(f"OSError(errno.{kind}, 'full', 'f')"))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {told}\n")


@pytest.mark.parametrize(("said", "status"), [("RESOURCE_EXHAUSTED: Out of memory", 2), ("?", 1)])
def test_a_full_device_is_told_in_a_line(command, tmp_path, said, status):
    done = command(cwd=tmp_path, code=FAILING.format(f"RuntimeError('{said}')"))
    assert done.returncode == status
    assert ("lower sampler.cache_gb" in done.stderr) == (status == 2)
    assert ("Traceback" in done.stderr) == (status == 1)


def test_a_database_that_is_not_sqlite(command, place, tiny, tmp_path):
    shutil.copytree(place / "data", tmp_path / "data")
    broken = min((tmp_path / "data" / "database").rglob("*.sqlite"))
    broken.write_text("not a database")
    done = command("launch.train", "--cfg", tiny, *ROOT, cwd=tmp_path)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert f"{broken.name}: not a SQLite database" in last
    assert "Traceback" not in done.stderr
    assert broken.read_text() == "not a database"


def test_the_papers_run_reads_omnisqls_download(tmp_path):
    """The folder as it comes out of data.zip, with its files of finished prompts."""
    for name in ("train_spider.json", "train_bird.json", "dev_spider.json", "dev_bird.json"):
        (tmp_path / name).write_text('[{"input_seq": "...", "output_seq": "..."}]')
    for name, databases in (
        ("bird/train/train.json", "bird/train/train_databases"),
        ("bird/dev_20240627/dev.json", "bird/dev_20240627/dev_databases"),
        ("spider/train_spider.json", "spider/database"),
        ("spider/test.json", "spider/test_database"),
        ("spider/dev.json", "spider/database"),
        ("SynSQL-2.5M/data.json", "SynSQL-2.5M/databases"),
    ):
        (tmp_path / databases).mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("[]")
    config = load_config("progress.yaml", [f"data.root={tmp_path}", "model.path=nowhere"])
    for split in SPLITS:
        check_data(config, split)
    with pytest.raises(UserError, match=r"model.path: no config.json in /.*nowhere"):
        check_inputs(config)
    source = config.data.train.sources[1].model_copy(update={"path": tmp_path})
    assert locate(source).files == (tmp_path / "spider" / "train_spider.json",)
    (tmp_path / "SynSQL-2.5M" / "data.json").unlink()
    with pytest.raises(UserError, match=r"data.train.sources.2: .*no data.json in it"):
        check_inputs(config)


def test_a_folder_for_weights_that_cannot_be_made_is_told_before_the_run(tiny, tmp_path):
    place = tmp_path / "file" / "weights"
    place.parent.write_text("")
    given = ["rollout.backend=sglang", "rollout.sglang.urls=[http://a:1]"]
    config = load_config(str(tiny), [*given, f"rollout.sglang.weights={place}"])
    with pytest.raises(UserError, match=r"cannot be written .*; set rollout\.sglang\.weights to"):
        check_inputs(config)
    assert place.parent.read_text() == ""


# Folders.


def claim_run(config: JobConfig) -> Path:
    """Leave a run folder behind as a run that was killed would."""
    return folders.claim(config.folder, dump(config), key="run.dir")


def test_a_folder_of_other_settings_is_refused_and_kept(tiny, tmp_path):
    ours = load_config(str(tiny), [f"run.dir={tmp_path / 'run'}"])
    folder = claim_run(ours)
    assert claim_run(ours) == folder
    (folder / "metrics.jsonl").write_text("work\n")
    before = snapshot(folder)
    assert claim_run(ours) == folder
    others = ours.model_copy(update={"seed": 9})
    for refuse in (folders.check_run, claim_run):
        with pytest.raises(UserError, match="seed is 0 there and 9 here") as caught:
            refuse(others)
        assert "run.dir" in str(caught.value)
    assert snapshot(folder) == before


def test_progress_goes_on_after_a_signal():
    """Of several processes one alone must not stop where the others would wait for it."""
    with preemption.watched():
        signal.raise_signal(signal.SIGTERM)
        assert preemption.noticed() == signal.SIGTERM
        with cli.progress_bar("learning") as progress:
            progress(1, 2, "")


def test_a_run_may_go_on_with_another_mesh(tiny, tmp_path):
    ours = load_config(str(tiny), [f"run.dir={tmp_path / 'run'}"])
    folder = claim_run(ours)
    (folder / "metrics.jsonl").write_text("work\n")
    for mesh in ("mesh={fsdp: 4, tensor: 2}", "mesh={data: 2}", "mesh=auto"):
        other = load_config(str(tiny), [f"run.dir={folder}", mesh])
        assert claim_run(other) == folder
        assert load_config(str(folder / "config.yaml"), []).mesh == other.mesh
    with pytest.raises(UserError, match=r"train\.steps is 3 there and 9 here"):
        claim_run(load_config(str(tiny), [f"run.dir={folder}", "mesh={data: 2}", "train.steps=9"]))


def test_a_run_may_go_on_with_other_servers(tiny, tmp_path):
    """Those of a cluster come and go, and a wrong address is noticed late."""
    served = "rollout.backend=sglang"
    ours = load_config(
        str(tiny), [f"run.dir={tmp_path / 'run'}", served, "rollout.sglang.launch=2"]
    )
    folder = claim_run(ours)
    (folder / "metrics.jsonl").write_text("work\n")
    given = [f"run.dir={folder}", served, "rollout.sglang.urls=[http://a:1, http://b:1]"]
    other = load_config(str(tiny), [*given, "rollout.sglang.wait_s=5"])
    assert claim_run(other) == folder
    assert load_config(str(folder / "config.yaml"), []).rollout == other.rollout
    with pytest.raises(UserError, match=r"rollout\.lag is 0 there and 1 here"):
        claim_run(load_config(str(tiny), [*given, "rollout.lag=1"]))


def test_a_folder_without_work_may_have_other_settings(tiny, tmp_path):
    """A first start that failed must not stand in the way of the corrected one."""
    ours = load_config(str(tiny), [f"run.dir={tmp_path / 'run'}"])
    folder = claim_run(ours)
    claim_run(ours.model_copy(update={"seed": 9}))
    assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == 9


def test_versions_that_changed_since_are_named(tiny, tmp_path, caplog):
    ours = load_config(str(tiny), [f"run.dir={tmp_path / 'run'}"])
    path = claim_run(ours) / "versions.json"
    claim_run(ours)
    assert not caplog.records
    noted = json.loads(path.read_text())
    path.write_text(json.dumps(noted | {"sqlite": "3.40.1"}))
    claim_run(ours)
    assert "sqlite 3.40.1 began" in caplog.text
    assert json.loads(path.read_text()) == noted


def test_a_kill_while_the_folder_was_claimed_is_no_obstacle(tiny, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".config.yaml.part").write_text("seed")
    ours = load_config(str(tiny), [f"run.dir={folder}"])
    assert claim_run(ours) == folder
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "versions.json"}


def test_a_damaged_config_of_a_run_is_told(tiny, tmp_path):
    ours = load_config(str(tiny), [f"run.dir={tmp_path / 'run'}"])
    folder = claim_run(ours)
    (folder / "metrics.jsonl").write_text("work\n")
    (folder / "config.yaml").write_text("seed: [")
    with pytest.raises(UserError, match=r"its config.yaml is damaged"):
        claim_run(ours)


@pytest.mark.parametrize("text", ["{", "[]", "\x00", '{"sqlite": 3}'])
def test_damaged_versions_are_told(tiny, tmp_path, text):
    ours = load_config(str(tiny), [f"run.dir={tmp_path / 'run'}"])
    path = claim_run(ours) / "versions.json"
    path.write_text(text)
    with pytest.raises(minirl.errors.UserError, match=r"versions.json: .*; delete it to go on"):
        claim_run(ours)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_damaged_notes_of_questions_are_told(tmp_path, text):
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(minirl.errors.UserError, match=r"data.json: .*; delete it to go on"):
        folders.claim_data(tmp_path, {"train": []})


def test_questions_that_changed_under_a_run_are_refused(tmp_path):
    first, second = (Example(str(n), "?", "d", tmp_path, f"SELECT {n}") for n in (1, 2))
    facts = folders.claim_data(tmp_path, {"train": [first, second]})
    assert facts["train"]["questions"] == 2
    assert folders.claim_data(tmp_path, {"train": [first, second]}) == facts
    with pytest.raises(UserError, match=r"data.train: the files hold other questions"):
        folders.claim_data(tmp_path, {"train": [second, first]})
