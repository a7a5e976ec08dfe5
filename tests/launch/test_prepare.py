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

from .conftest import json_lines
from .downloads import GOLDS

ISSUES = ("failing gold", "empty gold", "non-deterministic gold")
QUICK = ("executor.isolation=thread", "executor.workers=1", "executor.timeout_s=5")
# Questions and databases of each set.
SIZES = {
    "bird-train": (18, 3), "spider-train": (18, 3), "spider-syn-train": (12, 2), "synsql": (24, 4),
    "bird-dev": (6, 1), "spider-dev": (6, 1), "spider-test": (6, 1), "spider-syn": (6, 1),
    "spider-dk": (12, 2), "spider-realistic": (6, 1), "spider2-local": (1, 1),
}  # fmt: skip


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
    sizes = {name: (one["questions"], one["databases"]) for name, one in sets.items()}
    assert sizes == SIZES
    assert sets["spider2-local"]["found"] == {"blank gold": 1, "not for SQLite": 1}
    assert sets["bird-train"]["found"] == dict.fromkeys(ISSUES, 3)
    for name, (questions, _) in sizes.items():
        assert len(json_lines(prepared / f"{name}.jsonl")) == questions
    found = {one["id"]: one for one in json_lines(prepared / "gold_issues.jsonl")}
    assert [found[f"bird/train/{n}"]["issues"] for n in (1, 2, 3)] == [[issue] for issue in ISSUES]
    failing = found["bird/train/1"]
    assert (failing["db_id"], failing["gold"]) == ("mine", GOLDS[1])
    assert "no such column: nme" in failing["note"]
    assert "bird/train/0" not in found


def test_a_question_and_a_schema_have_all_that_was_found_of_them(prepared: Path, downloads: Path):
    first = json_lines(prepared / "bird-train.jsonl")[0]
    expected = {
        "question": "Who of database mine lives in New York, number 0?",
        "evidence": "young refers to age < 30",
        "hints": [["person", "City", "New York"]],
        "rows": 1, "flaws": [], "prompt_tokens": None,
        "database": str(downloads / "bird/train/train_databases/mine/mine.sqlite"),
    }  # fmt: skip
    assert expected.items() <= first.items()
    entries = {one["db_id"]: one for one in json_lines(prepared / "databases.jsonl")}
    stored = json.loads((prepared / entries["farm"]["schema_file"]).read_text())
    assert "    age number, -- years of age, example: [30, 20]" in stored["text"]
    assert len({one["fingerprint"] for one in entries.values()}) == len(entries)


def test_full_descriptions_and_profiles_where_the_job_wants_them(downloads: Path, tmp_path: Path):
    run(downloads, tmp_path / "p", "--data", "bird-dev", "bird-train", "--cfg", "paverl.yaml")
    for entry in json_lines(tmp_path / "p" / "databases.jsonl"):
        text = json.loads((tmp_path / "p" / entry["schema_file"]).read_text())["text"]
        assert "name TEXT, --the caf\u00e9 name; first and last, Example Ann, Bo, Cid," in text
        assert "MIN 20 MAX 50" in text


@pytest.mark.parametrize(
    "settings",
    [{}, {"drop_failing_gold": False, "drop_empty_gold": False}, {"total": 20, "seed": 3}],
)
def test_prepared_questions_are_those_of_the_downloads(
    downloads: Path, prepared: Path, settings: dict[str, Any]
):
    def config(root: Path) -> DataConfig:
        layouts = ("bird", "spider", "synsql")
        sources = [{"layout": layout, "path": root, "split": "train"} for layout in layouts]
        return DataConfig.model_validate({"sources": sources, **settings})

    with Executor(ExecutorConfig(isolation="thread", workers=1)) as executor:
        raw = load(config(downloads), executor=executor)
    again = load(config(prepared))  # without an executor: no gold query is run again
    plain = [replace(example, value_matches=()) for example in again.examples]
    assert plain == list(raw.examples)
    assert [one.kept for one in again.reports] == [one.kept for one in raw.reports]
    assert set(again.schemas) == {example.database for example in again.examples}


def test_processes_find_what_one_process_finds(downloads, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("launch.evaluation.process_pool._ALONE", 0)  # few questions are enough
    sets = ("bird-train", "synsql")
    arguments = ["--data-root", str(downloads), "--out", str(tmp_path), "--data", *sets]
    prepare.main([*arguments, "executor.isolation=thread", "executor.workers=2"])
    for name in sets:
        found = (tmp_path / f"{name}.jsonl").read_bytes()
        assert found == (prepared / f"{name}.jsonl").read_bytes()


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
    assert [one["issues"] for one in found] == [[issue] for issue in ISSUES]
    assert all(one["id"].startswith(f"{layout}/{name}/") for one in found)


# Samples and splits.


def test_samples_take_what_the_papers_take(downloads: Path, tmp_path: Path, monkeypatch):
    assert SAMPLES["progress"].data().train.total == 20_000
    small = replace(SAMPLES["progress"], overrides=("data.train.total=9",))
    monkeypatch.setitem(SAMPLES, "progress", small)

    def sample(name: str, *more: str, validation: int = 0) -> list[dict[str, Any]]:
        out = tmp_path / "-".join((name, *more))
        few = ("--validation", str(validation))
        summary = run(downloads, out, "--data", "bird-dev", "--sample", name, *few, *more)
        assert set(summary["sets"]) - {"validation"} == {"bird-dev", "train"}
        assert summary["wanted"] == SAMPLES[name].data().train.total
        return json_lines(out / "train.jsonl")

    assert {one["difficulty"] for one in sample("expo")} == {"Complex"}
    # What fails is left out, what returns nothing is not.
    golds = [one["query"] for one in sample("astra-both")]
    assert sorted(golds) == sorted([gold for gold in GOLDS if gold != GOLDS[1]] * 6)
    shares = [one["source"] for one in sample("progress")]
    assert shares == ["bird"] * 3 + ["spider"] * 3 + ["synsql"] * 3
    drawn = [sample("paverl-synsql", "--seed", seed, validation=2) for seed in ("1", "3")]
    assert [one["id"] for one in drawn[0]] != [one["id"] for one in drawn[1]]
    assert {one["style"] for one in drawn[0]} == {"Formal"}
    apart = json_lines(tmp_path / "paverl-synsql---seed-1" / "validation.jsonl")
    assert len(apart) == 2
    assert not {one["db_id"] for one in drawn[0]} & {one["db_id"] for one in apart}


def test_whole_sets_lose_the_databases_that_validate(downloads: Path, tmp_path: Path):
    sets = ("spider-train", "bird-train")
    with pytest.raises(UserError, match="--validation 99 "):
        run(downloads, tmp_path, "--data", *sets, "--validation", "99")
    held = set(run(downloads, tmp_path, "--data", *sets, "--validation", "6")["held_out"])
    # Three questions of each data set: four of a database's six golds run and return rows.
    assert len(held) == 2
    validation = json_lines(tmp_path / "validation.jsonl")
    assert [one["source"] for one in validation] == ["spider"] * 3 + ["bird"] * 3
    assert {one["db_id"] for one in validation} == held
    rest = [one for name in sets for one in json_lines(tmp_path / f"{name}.jsonl")]
    assert len(rest) == 36 - 12
    assert not held & {one["db_id"] for one in rest}


# Contamination.


def test_what_learning_and_measuring_share_is_refused_or_told(root, tmp_path, capsys):
    # BIRD's dev database is a training database by another name, and asks one of its questions.
    place = root / "bird" / "dev_20240627"
    (place / "dev_databases/pub/pub.sqlite").write_bytes(
        (root / "bird/train/train_databases/mill/mill.sqlite").read_bytes()
    )
    asked = json.loads((place / "dev.json").read_text())
    asked[4]["question"] = " who of DATABASE mill lives in new york, number 4? "
    (place / "dev.json").write_text(json.dumps(asked))
    both = ("--data", "bird-dev", "bird-train")
    advice = r"bird/dev/4.*data\.train\.exclude_databases='\[formula_1, mill\]'"
    with pytest.raises(UserError, match=advice):
        run(root, tmp_path / "p", *both)
    assert not {"prepared.json", "bird-dev.jsonl"} & {path.name for path in tmp_path.glob("p/*")}
    # As the line says.
    clean = run(root, tmp_path / "p", *both, "data.train.exclude_databases=[mill]")
    assert clean["contamination"] == []
    shown = [list(column.cells) for column in render(Summary.model_validate(clean)).columns]
    row = shown[0].index("bird-train")
    assert [column[row] for column in shown[1:5]] == [
        "12 of 18", "2", "6 in exclude_databases", "2 empty, 2 failing, 2 non-deterministic",
    ]  # fmt: skip
    summary = run(root, tmp_path / "r", *both, "data.overlap=tell")
    found = {one["kind"]: one["examples"] for one in summary["contamination"]}
    told = {"database file": ["pub"], "tables and columns": ["pub"], "question": ["bird/dev/4"]}
    assert found == told
    assert "bird/dev/4" in capsys.readouterr().out
