"""A folder of results belongs to its settings, its questions and one process at a time."""

import json
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from launch.config import JobConfig, dump, load_config
from launch.files import (
    check_alike,
    check_place,
    check_settings,
    claim_data,
    claimed,
    fingerprints,
)
from minirl.exchange import UserError
from sqlenv.types import Example
from tests.vectors import read

from .conftest import mistake


@pytest.fixture
def job(tiny, tmp_path):
    """Return what makes the job of one folder."""
    return lambda *settings: load_config(str(tiny), [f"run.dir={tmp_path / 'run'}", *settings])


def claim(config: JobConfig, *, work: bool = False) -> Path:
    """Leave a folder behind as a run that was killed would."""
    config.folder.mkdir(exist_ok=True)
    with claimed(config.folder, dump(config)) as folder:
        if work:
            (folder / "metrics.jsonl").write_text("work\n")
    return folder


@pytest.mark.parametrize("case", read("settings")["elsewhere"], ids=lambda case: case["why"])
def test_a_run_may_go_on_with_other_devices_servers_cores_and_places(job, case):
    folder = claim(job(*case["settings"]), work=True)
    other = job(*case["others"])
    assert claim(other) == folder
    assert load_config(str(folder / "config.yaml"), []) == other
    other = job(*case["others"], case["refused"])
    assert case["refused"].split("=")[0] in mistake(claim, other)


def test_a_run_may_go_on_in_another_place(job, tmp_path):
    """The folder was moved, or its path is written otherwise."""
    folder = claim(job(), work=True).rename(tmp_path / "moved")
    assert claim(job(f"run.dir={folder}")) == folder


def test_a_folder_without_work_may_have_other_settings(job, tmp_path):
    """A first start that failed or was killed must not stand in the way of the corrected one."""
    folder = claim(job())
    (folder / ".config.yaml.part").write_text("seed")
    claim_data(folder, {"train": {"questions": 3}})
    claim_data(claim(job("seed=9")), {"train": {"questions": 4}})
    assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == 9
    # Where the run made the folder itself, nothing of it is left.
    with claimed(tmp_path / "new" / "run", "a: 1\n") as made:
        assert made.is_dir()
    assert not (tmp_path / "new").exists()


def test_a_process_that_tries_a_place_is_no_work_to_another(job, monkeypatch):
    """Both of one run, in a folder that was made for it."""
    job().folder.mkdir()

    @contextmanager
    def tried(**place):
        with TemporaryDirectory(**place):
            check_settings(job().folder, dump(job()))
            yield

    monkeypatch.setattr("launch.files.TemporaryDirectory", tried)
    check_place(job().folder, key="run.dir")


def test_settings_that_somebody_wrote_by_hand_are_not_written_over(tmp_path):
    (tmp_path / "config.yaml").write_text("base: laptop.yaml  # mine\n")
    claiming = claimed(tmp_path, "a: 1\n").__enter__
    assert "not a run (such as config.yaml)" in mistake(claiming)
    assert "mine" in (tmp_path / "config.yaml").read_text()


def test_another_checkpoint_at_the_same_place_is_noticed(tmp_path):
    weights = tmp_path / "3" / "tree" / "data"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(2**20))
    (weights.parent / "places").write_text("1")
    (tmp_path / "3" / "optimizer").mkdir()
    out, moved = tmp_path / "out", tmp_path / "moved"
    claim_data(out, fingerprints({}, None, str(tmp_path / "3")))
    (tmp_path / "3" / "optimizer").rmdir()  # as of an older one
    (tmp_path / "3").rename(moved)
    claim_data(out, fingerprints({}, None, str(moved)))
    (moved / "tree" / "places").write_text("2")
    told = mistake(claim_data, out, fingerprints({}, None, str(moved)))
    assert told.startswith("--checkpoint: the files are others")


def test_one_process_at_a_time_which_a_second_start_leaves_its_folder(job, monkeypatch):
    """Also where the second one did not see the folder yet, as on another host."""
    folder, settings, exists = job().folder, dump(job()), Path.exists
    with claimed(folder, settings):
        monkeypatch.setattr(Path, "exists", lambda path: path != folder and exists(path))
        assert "another process" in mistake(claimed(folder, settings).__enter__)
        monkeypatch.undo()
        assert {path.name for path in folder.iterdir()} == {"config.yaml", "versions.json"}


def test_versions_that_changed_since_are_named(job, caplog):
    path = claim(job()) / "versions.json"
    claim(job())
    assert not caplog.records
    noted = json.loads(path.read_text())
    path.write_text(json.dumps(noted | {"sqlite": "3.40.1"}))
    claim(job())
    assert "sqlite 3.40.1" in caplog.text
    assert json.loads(path.read_text()) == noted


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.yaml", "a: 1\n  b: 2\n"), ("versions.json", "[]"), ("data.json", "\x00")],
)
def test_damaged_files_are_named(job, name, text):
    folder = claim(job(), work=True)
    (folder / name).write_text(text)
    assert name in mistake(lambda: claim_data(claim(job()), fingerprints({"train": []})))


def test_questions_that_changed_under_a_run_or_on_another_host_are_refused(tmp_path):
    database = tmp_path / "d.sqlite"
    database.write_bytes(b"first")
    first, second = (Example(str(n), "?", "d", database, f"SELECT {n}") for n in (1, 2))
    facts, others = (fingerprints({"train": each}) for each in ([first, second], [second, first]))
    assert claim_data(tmp_path, facts)["train"]["questions"] == 2
    assert claim_data(tmp_path, facts) == facts
    check_alike(facts, facts)
    for refuse in (claim_data, tmp_path, others), (check_alike, others, facts):
        told = mistake(*refuse)
        assert ("data.train: " in told, "executor.timeout_s" in told) == (True, True)
    database.write_bytes(b"another")
    others = fingerprints({"train": [first, second]})
    for refuse in (claim_data, tmp_path, others), (check_alike, others, facts):
        assert "data.databases: " in mistake(*refuse)


@pytest.mark.parametrize(
    ("name", "text", "is_same"),
    [
        ("model.safetensors", "other weights", False),
        ("model-00002-of-00002.safetensors", "one more", False),
        ("tokenizer.json", "{}", False),
        ("chat_template.jinja", "{{ messages }}", False),
        ("README.md", "another", True),
    ],
)
def test_a_run_and_its_adapters_belong_to_the_model_it_began_with(tmp_path, name, text, is_same):
    run, model = tmp_path / "run", tmp_path / "model"
    model.mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (model / file).write_text(file)
    claim_data(run, fingerprints({}, model))
    model = model.rename(tmp_path / "elsewhere")
    claim_data(run, fingerprints({}, model))
    (model / name).write_text(text)
    with nullcontext() if is_same else pytest.raises(UserError, match=r"^model\.path: "):
        claim_data(run, fingerprints({}, model))
