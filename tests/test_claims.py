"""The study of the papers' claims: its arms are settings that exist, its numbers are right."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from benchmarks import claims
from benchmarks._claims_credit import Blame, read_blame
from benchmarks._claims_data import in_other_words, with_other_columns
from benchmarks._claims_judge import judgement
from benchmarks._claims_outcomes import read_answers
from benchmarks._claims_page import write
from benchmarks._claims_statistics import Difference, crossed_bootstrap, holm, verdict
from benchmarks.claims import ARMS, ATTEMPTS, CHANGES, CLAIMS, COMPARED, PARTS, TAUGHT, Study
from launch.config import load_config
from rewards.expo.clauses import ClauseKind
from rewards.verbal import parse_scores

PAGE = Path(__file__).parents[1] / "docs" / "claims.md"


def configs_of(arm, folder):
    stages = [Study(folder).overrides(arm, changes, folder / "model") for changes in arm.stages]
    base = claims.START_CONFIGS[arm.start]
    return [load_config(base, [f"{key}={value}" for key, value in one.items()]) for one in stages]


@pytest.mark.parametrize("arm", [*ARMS.values(), *ATTEMPTS.values()], ids=lambda arm: arm.name)
def test_an_arm_is_a_job_of_the_same_budget(arm, tmp_path):
    for config in configs_of(arm, tmp_path):
        assert config.train.steps * len(arm.stages) == claims.STEPS
        assert config.train.prompts_per_step * config.train.group_size == 128
        is_mixed = arm.name.endswith("-mixed")
        assert config.train.algorithm.correctness_filter == ("mixed" if is_mixed else "none")


def test_the_page_describes_every_arm_and_every_change():
    page = PAGE.read_text()
    for arm in ARMS.values():
        assert f"| `{arm.name}` | {arm.start} |" in page
    for word in (*CHANGES, "narrow", "taught"):
        assert f"\n- `{word}`: " in page


def test_the_page_is_what_its_data_says(tmp_path):
    page, data = (shutil.copy(path, tmp_path) for path in (PAGE, PAGE.with_suffix(".json")))
    write(Path(page), PARTS, {}, {}, tmp_path)
    assert Path(page).read_text() == PAGE.read_text()
    assert Path(data).read_text() == PAGE.with_suffix(".json").read_text()


def test_a_change_is_made_to_both_sides_of_a_claim(tmp_path):
    compared = {name for one in COMPARED for name in (one.better, one.worse)}
    assert compared == {*ATTEMPTS, "grpo-4", *TAUGHT}
    for name, arm in ATTEMPTS.items():
        base, _, word = name.rpartition("-")
        for plain, changed in zip(
            configs_of(ARMS[base], tmp_path), configs_of(arm, tmp_path), strict=True
        ):
            first, second = plain.train.algorithm, changed.train.algorithm
            differing = {key for key, value in first if getattr(second, key) != value}
            assert (
                differing
                == {
                    "mixed": {"correctness_filter"},
                    "centred": {"estimator"},
                    "whitened": {"whiten"},
                    "hard": set(),
                    "narrow": {"clip_low", "clip_high"},
                }[word]
            )
            levels = changed.data.train.sources[0].levels
            assert levels == (("hard", "extra") if word == "hard" else ())


def test_blame_of_answers_that_differ_from_the_gold_in_one_kind_of_clause(tmp_path):
    sql = "SELECT count(*) FROM film WHERE price > 3"
    reply = f"<sql>{sql}</sql>"
    spans = [[0, 5, 21, -0.5], [0, 21, 31, 0.5], [0, 31, 46, 0.5]]

    def trajectory(correct, status="ok"):
        turn = {"reply": reply, "sql": sql, "result": {"status": status}}
        return {"correct": correct, "spans": spans, "turns": [turn]}

    lines = [
        {"step": 0, "version": 2},
        *(
            {"gold": gold, "trajectories": [trajectory(False)]}
            for gold in (
                "select COUNT(*) from film where price > 4",
                "SELECT count(*) FROM film",  # which leaves the answer's WHERE too many
                "SELECT sum(price) FROM film WHERE price > 4",
            )
        ),
        {
            "gold": "SELECT max(price) FROM film WHERE price > 3",
            "trajectories": [trajectory(True), trajectory(False, "error"), trajectory(False)],
        },
    ]
    (tmp_path / "trajectories.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    select: frozenset[ClauseKind] = frozenset({"SELECT"})
    assert [*read_blame(tmp_path)] == [
        Blame("WHERE", select),
        Blame("WHERE", select),
        Blame("SELECT", select),
    ]


@pytest.mark.parametrize("is_right", [(True, False), (False,) * 8])
def test_a_judgement_to_learn_from_is_read_as_it_is_meant(is_right):
    assert parse_scores(judgement(is_right), len(is_right)) == is_right


@pytest.mark.parametrize("is_judge", [True, False])
def test_where_a_choice_matters(tmp_path, is_judge):
    """Of four distinct candidates one fails; one of the three others is right."""
    database = tmp_path / "database" / "pets" / "pets.sqlite"
    database.parent.mkdir(parents=True)
    with closing(sqlite3.connect(database)) as db:
        db.execute("CREATE TABLE cat AS SELECT 3 AS age")
        db.commit()
    gold = "SELECT age FROM cat"
    queries = [gold, "SELECT 1", "select 1", "SELECT nothing", gold, "SELECT 2"]
    sure = [gold, "SELECT cat.age FROM cat"]
    lines = [
        {
            "id": str(n),
            "db_id": "pets",
            "question": "?",
            "gold": gold,
            "correct": n < 2,
            "samples": s,
        }
        for n, s in enumerate((queries, sure, queries, ["SELECT 4"]))
    ]
    kept = [{"id": one["id"], "candidates": one.pop("samples")} for one in lines if is_judge]
    notes = {"judged": 30, "left_out": 10} if is_judge else {}
    (tmp_path / "verdicts.json").write_text(json.dumps({"notes": notes}))
    for name, rows in (("predictions", lines), ("choices", kept)):
        if rows:
            text = "".join(f"{json.dumps(one)}\n" for one in rows)
            (tmp_path / f"{name}.jsonl").write_text(text)
    found = read_answers(tmp_path, tmp_path)
    assert list(found.right) == [True, True, False, False]
    assert (found.any_right, found.contested, found.chosen) == (0.75, 2, 0.5)
    assert found.chance == pytest.approx(1 / 3)
    assert (found.asked, found.read) == ((40, 30) if is_judge else (0, 0))


def test_claims_compare_arms_of_one_start_or_decodings_of_one_policy():
    for claim in CLAIMS:
        if {claim.better, claim.worse} == {*claims.DECODES}:
            continue
        assert ARMS[claim.better].start == ARMS[claim.worse].start


def test_an_effect_in_every_seed_is_found_and_noise_is_not():
    rng = np.random.default_rng(0)
    right = rng.random((5, 500)) < 0.3
    better = right | (rng.random((5, 500)) < 0.1)
    found = crossed_bootstrap(better.astype(float) - right)
    assert found.mean == pytest.approx(better.mean() - right.mean())
    assert found.low > 0.03
    assert found.p < 0.001
    other = rng.random((5, 500)) < 0.3
    nothing = crossed_bootstrap(other.astype(float) - right)
    assert nothing.low < 0 < nothing.high
    assert nothing.p > 0.05
    # One lucky seed of five is no effect, however many questions there are.
    lucky = np.zeros((5, 500))
    lucky[0] = 1.0
    assert crossed_bootstrap(lucky).p > 0.5


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("low", "high", "corrected", "expected"),
    [
        (0.01, 0.05, 0.01, "confirmed"),
        (-0.02, 0.05, 0.5, "undecided"),
        (-0.02, 0.005, 0.5, "refuted"),
        (-0.05, -0.01, 0.01, "refuted"),
        (0.001, 0.05, 0.2, "undecided"),
    ],
)
def test_verdicts(low, high, corrected, expected):
    assert verdict(Difference((low + high) / 2, low, high, corrected), corrected) == expected


def test_questions_are_put_in_other_words_and_columns_are_renamed():
    words = {"city": "town", "price": "cost", "film": "movie"}
    asked = "What are the cities of films, by price? Pricey ones too."
    assert in_other_words(asked, words) == "What are the towns of movies, by cost? Pricey ones too."
    renamed = with_other_columns(
        "SELECT t1.city FROM film AS t1 WHERE t1.city = 'city' AND price > 3", {"city": "town"}
    )
    assert renamed == "SELECT t1.town FROM film AS t1 WHERE t1.town = 'city' AND price > 3"
