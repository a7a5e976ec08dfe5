"""`launch.prepare`: from downloads in every form to checked questions, samples and splits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import prepare
from launch.data.samples import SAMPLES
from launch.data.summary import Summary, render
from sqlenv.config import DataConfig, ExecutorConfig
from sqlenv.data.loading import load
from sqlenv.errors import UserError
from sqlenv.executor import Executor
from sqlenv.types import Example

from .conftest import json_lines
from .downloads import GOLDS

EVALUATIONS = {"bird-dev", "spider-dev", "spider-test", "spider-syn", "spider-dk"}
EVALUATIONS |= {"spider-realistic", "spider2-local"}
TRAINING = {"bird-train", "spider-train", "spider-syn-train", "synsql"}
NONE = ("--validation", "0")
QUICK = ("executor.isolation=thread", "executor.workers=1", "executor.timeout_s=5")


@pytest.fixture(scope="module")
def prepared(downloads: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "prepared"
    run(downloads, out)
    return out


def run(root: Path, out: Path, *more: str) -> dict[str, Any]:
    prepare.main(["--data-root", str(root), "--out", str(out), *more, *QUICK])
    return json.loads((out / "prepared.json").read_text())


def test_every_data_set_is_recognised_and_counted(prepared: Path):
    sets = json.loads((prepared / "prepared.json").read_text())["sets"]
    assert set(sets) == EVALUATIONS | TRAINING
    sizes = {name: (one["questions"], one["databases"]) for name, one in sets.items()}
    assert sizes["spider-train"] == (18, 3)  # both files
    assert sizes["bird-train"] == (18, 3)
    assert sizes["spider-dk"] == (12, 2)  # its own databases and Spider's
    assert sizes["synsql"] == (24, 4)
    assert sizes["spider2-local"] == (1, 1)
    assert sets["spider2-local"]["found"] == {"blank gold": 1, "not for SQLite": 1}
    flaws = ("empty gold", "failing gold", "non-deterministic gold")
    assert sets["bird-train"]["found"] == dict.fromkeys(flaws, 3)
    for name, one in sets.items():
        assert len(json_lines(prepared / f"{name}.jsonl")) == one["questions"]


def test_flawed_golds_are_listed_with_the_reason(prepared: Path):
    found = {one["id"]: one for one in json_lines(prepared / "gold_issues.jsonl")}
    failing = found["bird/train/1"]
    assert (failing["db_id"], failing["issues"], failing["gold"]) == (
        "mine",
        ["failing gold"],
        GOLDS[1],
    )
    assert "no such column: nme" in failing["note"]
    assert found["bird/train/2"]["issues"] == ["empty gold"]
    assert found["bird/train/3"]["issues"] == ["non-deterministic gold"]
    assert "bird/train/0" not in found


def test_a_question_and_a_schema_have_all_that_was_found_of_them(prepared: Path, downloads: Path):
    first = json_lines(prepared / "bird-train.jsonl")[0]
    assert first["question"] == "Who of database mine lives in New York, number 0?"
    assert first["evidence"] == "young refers to age < 30"
    assert first["hints"] == [["person", "City", "New York"]]
    assert (first["rows"], first["flaws"], first["prompt_tokens"]) == (1, [], None)
    assert Path(first["database"]) == downloads / "bird/train/train_databases/mine/mine.sqlite"
    (local,) = json_lines(prepared / "spider2-local.jsonl")
    assert (local["id"], local["evidence"]) == ("spider2/local001", "what RFM means")
    syn = json_lines(prepared / "spider-syn.jsonl")[0]
    assert syn["question"].startswith("Who of database club dwells in")
    entries = {one["db_id"]: one for one in json_lines(prepared / "databases.jsonl")}
    stored = json.loads((prepared / entries["farm"]["schema_file"]).read_text())
    assert "    age INTEGER, -- years of age, example: [30, 20]" in stored["text"]
    assert len({one["fingerprint"] for one in entries.values()}) == len(entries)


def test_full_descriptions_and_profiles_where_the_job_wants_them(downloads: Path, tmp_path: Path):
    run(downloads, tmp_path / "p", "--data", "bird-dev", "bird-train", "--cfg", "paverl.yaml")
    for entry in json_lines(tmp_path / "p" / "databases.jsonl"):
        text = json.loads((tmp_path / "p" / entry["schema_file"]).read_text())["text"]
        assert "name TEXT, --the caf\u00e9 name; first and last, Example Ann, Bo, Cid," in text
        assert "MIN 20 MAX 50" in text


def config(root: Path, **more: Any) -> DataConfig:
    pairs = (("bird", "train"), ("spider", "train"), ("synsql", "train"))
    sources = [{"layout": layout, "path": root, "split": split} for layout, split in pairs]
    return DataConfig.model_validate({"sources": sources, **more})


def bare(examples: tuple[Example, ...]) -> list[tuple[str, ...]]:
    return [(e.id, e.question, str(e.database), e.gold_sql, e.difficulty) for e in examples]


@pytest.mark.parametrize(
    "settings",
    [{}, {"drop_failing_gold": False, "drop_empty_gold": False}, {"total": 20, "seed": 3}],
)
def test_prepared_questions_are_those_of_the_downloads(
    downloads: Path, prepared: Path, settings: dict[str, Any]
):
    with Executor(ExecutorConfig(isolation="thread", workers=1)) as executor:
        raw = load(config(downloads, **settings), executor=executor)
    # Without an executor: no gold query is run again.
    again = load(config(prepared, **settings))
    assert bare(again.examples) == bare(raw.examples)
    kept = [[source.kept for source in one.reports] for one in (again, raw)]
    assert kept[0] == kept[1]
    assert set(again.schemas) == {example.database for example in again.examples}


def test_processes_find_what_one_process_finds(downloads: Path, prepared: Path, tmp_path: Path):
    arguments = ["--data-root", str(downloads), "--out", str(tmp_path / "p"), "executor.workers=2"]
    prepare.main(arguments)  # more than 64 questions: two processes, each with its workers
    for name in ("bird-train.jsonl", "synsql.jsonl", "spider-dk.jsonl"):
        assert (tmp_path / "p" / name).read_bytes() == (prepared / name).read_bytes()


@pytest.mark.parametrize(("name", "layout"), [("dev", "spider"), ("b", "bird")])
def test_the_golds_of_a_question_file_are_checked_alone(root, tmp_path, name, layout):
    """A data set's own file, and one of another name, by an absolute path."""
    own = root / {"spider": "spider/dev.json", "bird": "bird/dev_20240627/dev.json"}[layout]
    file = own.with_stem(name)
    file.write_bytes(own.read_bytes())
    out = tmp_path / "p"
    prepare.main(["--data-root", str(file), "--only", "check", "--out", str(out), *QUICK])
    assert not {"prepared.json", "job.yaml", "databases.jsonl"} & {p.name for p in out.iterdir()}
    assert not list(out.glob("*dev*"))
    found = json_lines(out / "gold_issues.jsonl")
    flaws = ("failing gold", "empty gold", "non-deterministic gold")
    assert [one["issues"] for one in found] == [[flaw] for flaw in flaws]
    assert all(one["id"].startswith(f"{layout}/{name}/") for one in found)


# Samples and splits.


def test_a_papers_sample_is_drawn_by_seed(downloads: Path, tmp_path: Path):
    drawn = []
    for number, seed in enumerate(("1", "1", "3")):
        arguments = ("--data", "bird-dev", "--sample", "paverl-synsql", "--validation", "2")
        out = tmp_path / str(number)
        summary = run(downloads, out, *arguments, "--seed", seed)
        assert set(summary["sets"]) == {"bird-dev", "train", "validation"}
        train = json_lines(out / "train.jsonl")
        drawn.append([one["id"] for one in train])
        validated = {one["db_id"] for one in json_lines(out / "validation.jsonl")}
        assert validated
        assert not {one["db_id"] for one in train} & validated
        assert validated <= set(summary["held_out"])
        assert {one["style"] for one in train} == {"Formal"}
    assert drawn[0] == drawn[1] != drawn[2]


def test_samples_take_what_the_papers_take(downloads: Path, tmp_path: Path, monkeypatch):
    summary = run(downloads, tmp_path / "expo", "--data", "bird-dev", "--sample", "expo", *NONE)
    levels = {one["difficulty"] for one in json_lines(tmp_path / "expo" / "train.jsonl")}
    assert levels == {"Complex"}
    assert summary["wanted"] == 5_000
    run(downloads, tmp_path / "astra", "--data", "bird-dev", "--sample", "astra-both", *NONE)
    kept = [one["query"] for one in json_lines(tmp_path / "astra" / "train.jsonl")]
    # What fails is left out, what returns nothing is not.
    assert sorted(set(kept)) == sorted(set(GOLDS) - {GOLDS[1]})
    assert len(kept) == 2 * 3 * 5
    # Equal shares of three.
    whole = SAMPLES["progress"]
    assert whole.data().train.total == 20_000
    small = replace(whole, overrides=("data.train.total=9",))
    monkeypatch.setitem(SAMPLES, "progress", small)
    run(downloads, tmp_path / "p", "--data", "bird-dev", "--sample", "progress", *NONE)
    drawn = [one["source"] for one in json_lines(tmp_path / "p" / "train.jsonl")]
    assert drawn == ["bird"] * 3 + ["spider"] * 3 + ["synsql"] * 3


def test_whole_sets_lose_the_databases_that_validate(downloads: Path, tmp_path: Path):
    sets = ("spider-train", "bird-train")
    held = set(run(downloads, tmp_path, "--data", *sets, "--validation", "6")["held_out"])
    # Three questions of each data set: four of a database's six golds run and return rows.
    assert len(held) == 2
    validation = json_lines(tmp_path / "validation.jsonl")
    assert [one["source"] for one in validation] == ["spider"] * 3 + ["bird"] * 3
    assert {one["db_id"] for one in validation} == held
    rest = [one for name in sets for one in json_lines(tmp_path / f"{name}.jsonl")]
    assert len(rest) == 36 - 12
    assert not held & {one["db_id"] for one in rest}


# Leaks.


def test_leaks_between_learning_and_measuring_are_refused_or_told(root, tmp_path, capsys):
    # BIRD's dev database is a training database by another name, and asks one of its questions.
    place = root / "bird" / "dev_20240627"
    (place / "dev_databases/pub/pub.sqlite").write_bytes(
        (root / "bird/train/train_databases/mill/mill.sqlite").read_bytes()
    )
    asked = json.loads((place / "dev.json").read_text())
    asked[4]["question"] = " who of DATABASE mill lives in new york, number 4? "
    (place / "dev.json").write_text(json.dumps(asked))
    both = ("--data", "bird-dev", "bird-train")
    with pytest.raises(UserError) as caught:
        run(root, tmp_path / "p", *both)
    line = str(caught.value)
    assert "pub" in line
    assert "bird/dev/4" in line
    assert "data.train.exclude_databases='[formula_1, mill]'" in line
    assert "\n" not in line
    assert not (tmp_path / "p" / "prepared.json").exists()
    # As the line says.
    clean = run(root, tmp_path / "r", *both, "data.train.exclude_databases=[mill]")
    assert clean["contamination"] == []
    assert clean["sets"]["bird-train"]["questions"] == 12
    assert clean["sets"]["bird-train"]["found"]["in exclude_databases"] == 6
    shown = [list(column.cells) for column in render(Summary.model_validate(clean)).columns]
    row = shown[0].index("bird-train")
    assert [column[row] for column in shown[1:5]] == [
        "12 of 18", "2", "6 in exclude_databases", "2 empty, 2 failing, 2 non-deterministic",
    ]  # fmt: skip
    summary = run(root, tmp_path / "p", *both, "data.overlap=tell")
    kinds = {leak["kind"]: leak for leak in summary["contamination"]}
    assert set(kinds) == {"database file", "tables and columns", "question"}
    assert kinds["question"]["examples"] == ["bird/dev/4"]
    assert kinds["database file"]["examples"] == ["pub"]
    assert "bird/dev/4" in capsys.readouterr().out
