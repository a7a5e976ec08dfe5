"""The study of the papers' claims: its arms are settings that exist, its numbers are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import claims
from benchmarks._claims_data import in_other_words, with_other_columns
from benchmarks._claims_page import Difference, crossed_bootstrap, holm, verdict
from benchmarks.claims import ARMS, CLAIMS, Study
from launch.config import load_config

PAGE = Path(__file__).parents[1] / "docs" / "claims.md"


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.name)
def test_an_arm_is_a_job_that_the_page_describes(arm, tmp_path):
    for changes in arm.stages:
        settings = Study(tmp_path).overrides(arm, changes, tmp_path / "model")
        config = load_config(
            claims.START_CONFIGS[arm.start], [f"{key}={value}" for key, value in settings.items()]
        )
        steps = config.train.steps * len(arm.stages)
        assert steps == claims.STEPS
        assert config.train.prompts_per_step * config.train.group_size == 128
        assert config.train.algorithm.correctness_filter == "none"
    assert f"| `{arm.name}` | {arm.start} |" in PAGE.read_text()


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
