"""Presets of the one objective, and settings that contradict each other."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from minirl.config import (
    Algorithm,
    AlgorithmConfig,
    Dapo,
    Expo,
    Grpo,
    Gspo,
    SamplerConfig,
    TrainConfig,
)
from minirl.rules import contradictions


def test_presets_are_defaults_of_one_class():
    base = AlgorithmConfig().model_dump()
    differing = {
        kind: {key for key, value in preset.items() if key != "kind" and value != base[key]}
        for kind, preset in (
            (kind, TypeAdapter(Algorithm).validate_python({"kind": kind}).model_dump())
            for kind in ("grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "rloo", "reinforce_pp")
        )
    }
    assert differing == {
        "grpo": set(),
        "dr_grpo": {"estimator", "aggregation"},
        "dapo": {
            "clip_high", "aggregation", "correctness_filter", "max_rounds", "overlong_tokens"
        },
        "gspo": {"ratio_level"},
        "gspo_token": {"ratio_level"},
        "rloo": {"estimator", "aggregation", "aggregation_divisor", "kl_estimator", "kl_in"},
        "reinforce_pp": {
            "estimator", "token_credit", "whiten", "aggregation", "kl_estimator", "kl_in"
        },
    }  # fmt: skip
    assert (Dapo().clip_low, Dapo().clip_high, Dapo().overlong_tokens) == (0.2, 0.28, 4096)
    assert (Expo().kl_coef, Expo().kl_estimator, Expo().kl_in) == (0.01, "k1", "credit")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"group_size": 1}, "train.group_size: a group of one has no advantage"),
        (
            {"group_size": 1, "algorithm": Expo(correctness_filter="mixed")},
            "train.group_size: a group of one is neither mixed",
        ),
        ({"algorithm": Grpo(kl_coef=0.1, kl_estimator="k1")}, "k1 in the loss has no gradient"),
        ({"algorithm": Expo(ratio_level="sequence")}, "use sequence_token"),
        ({"algorithm": Gspo(kl_coef=0.1, kl_in="credit")}, "use sequence_token"),
        ({"algorithm": Gspo(correction="masked")}, "use sequence_token"),
        ({"algorithm": Grpo(aggregation_divisor=3)}, "divides with aggregation=constant only"),
        ({"algorithm": Grpo(max_rounds=2)}, "without a filter the first round is full"),
        ({"algorithm": Dapo(overlong_tokens=8192)}, "the paper's share of it is a fifth: use 1638"),
        (
            {"optimizer": {"schedule": "ramp_cosine", "warmup_steps": 3}},
            "train.optimizer.warmup_steps",
        ),
        (
            {"optimizer": {"schedule": "ramp_cosine", "flat_share": 0.2}},
            "train.optimizer.flat_share",
        ),
        ({"optimizer": {"lr_ramp": "code"}}, "train.optimizer.lr_ramp"),
    ],
)
def test_contradictions_are_one_line(settings, words):
    rules = contradictions(TrainConfig(**settings), SamplerConfig())
    lines = [line for is_wrong, line in rules if is_wrong]
    assert any(words in line for line in lines)
    assert all(line.startswith("train.") and "\n" not in line for line in lines)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "rloo"])
def test_presets_do_not_contradict_themselves(kind):
    train = TrainConfig.model_validate({"algorithm": {"kind": kind}})
    assert not [line for is_wrong, line in contradictions(train, SamplerConfig()) if is_wrong]


@pytest.mark.parametrize("kind", ["reinforce_pp", "expo"])
def test_presets_without_a_group_take_one_trajectory(kind):
    train = TrainConfig.model_validate({"group_size": 1, "algorithm": {"kind": kind}})
    assert not [line for is_wrong, line in contradictions(train, SamplerConfig()) if is_wrong]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kl_every": 5}, "nucleus has no KL to the start weights"),
        ({"algorithm": Grpo(kl_coef=0.1)}, "nucleus has no KL to the start weights"),
        ({"mini_batches": 2}, "or train.mini_batches=1"),
        ({}, None),
    ],
)
def test_what_a_nucleus_does_not_go_with(settings, words):
    sampler = SamplerConfig(top_p=0.95, logprobs="nucleus")
    lines = [
        line for is_wrong, line in contradictions(TrainConfig(**settings), sampler) if is_wrong
    ]
    assert len(lines) == (words is not None)
    assert all(words in line and line.startswith("sampler.logprobs: ") for line in lines)
