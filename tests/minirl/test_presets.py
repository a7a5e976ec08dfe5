"""Presets of the one objective, and settings that contradict each other."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from minirl.config import (
    Algorithm,
    AlgorithmConfig,
    Dapo,
    Expo,
    TrainConfig,
)

PRESETS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp", "expo")


def test_presets_are_defaults_of_one_class():
    base = AlgorithmConfig().model_dump()
    differing = {
        kind: {key for key, value in preset.items() if key != "kind" and value != base[key]}
        for kind, preset in (
            (kind, TypeAdapter(Algorithm).validate_python({"kind": kind}).model_dump())
            for kind in PRESETS[:-1]
        )
    }
    assert differing == {
        "grpo": set(),
        "dr_grpo": {"estimator", "aggregation"},
        "dapo": {"clip_high", "aggregation", "correctness_filter", "max_rounds"},
        "gspo": {"ratio_level", "correction_level"},
        "cispo": {"surrogate", "clip_high", "aggregation"},
        "reinforce_pp": {
            "estimator", "token_credit", "whiten", "aggregation", "kl_estimator", "kl_in"
        },
    }  # fmt: skip
    assert (Dapo().clip_low, Dapo().clip_high) == (0.2, 0.28)
    assert (Expo().kl_coef, Expo().kl_estimator, Expo().kl_in) == (0.01, "k1", "credit")


class Together(BaseModel):
    """The settings of a run, as a job holds them."""

    train: TrainConfig


def refused(settings):
    """Return the path of the setting that is refused; None where none is."""
    try:
        Together.model_validate({"train": settings})
    except ValidationError as error:
        (mistake,) = error.errors()
        assert mistake["type"] == "contradiction"
        return ".".join(map(str, (*mistake["loc"], mistake["ctx"]["key"])))
    return None


def algorithm(kind, **settings):
    return {"algorithm": {"kind": kind, **settings}}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"group_size": 1}, "train.group_size"),
        ({"group_size": 1, **algorithm("expo", correctness_filter="mixed")}, "train.group_size"),
        (algorithm("grpo", kl_coef=0.1, kl_estimator="k1"), "train.algorithm.grpo.kl_estimator"),
        (algorithm("expo", ratio_level="sequence"), "train.algorithm.expo.ratio_level"),
        (algorithm("gspo", kl_coef=0.1, kl_in="credit"), "train.algorithm.gspo.ratio_level"),
        (algorithm("gspo", correction_level="token"), "train.algorithm.gspo.correction_level"),
        (algorithm("grpo", aggregation_divisor=3), "train.algorithm.grpo.aggregation_divisor"),
        ({"mini_batches": 65}, "train.mini_batches"),
        (
            {"optimizer": {"schedule": "ramp_cosine", "warmup_steps": 3}},
            "train.optimizer.warmup_steps",
        ),
    ],
)
def test_contradictions_are_refused_by_their_key(settings, key):
    assert refused(settings) == key


@pytest.mark.parametrize("kind", PRESETS)
def test_presets_do_not_contradict_themselves(kind):
    assert refused(algorithm(kind)) is None
    # Those without a group take one trajectory.
    is_alone = kind in ("reinforce_pp", "expo")
    assert refused({"group_size": 1, **algorithm(kind)}) == (
        None if is_alone else "train.group_size"
    )
