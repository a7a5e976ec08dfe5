"""Advantages of groups, and which groups take part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from minirl.train.advantages import estimate, groups_to_train

CASES = json.loads((Path(__file__).parents[1] / "data" / "objective.json").read_text())


@pytest.mark.parametrize("case", CASES["advantages"], ids=lambda case: case["id"])
def test_group_normalised(case):
    advantages = estimate(
        np.array([case["rewards"]]), estimator="group_normalised", ddof=case["ddof"]
    )
    # The epsilon beside the standard deviation takes a millionth away.
    np.testing.assert_allclose(advantages, [case["advantages"]], rtol=2e-6, atol=1e-6)


def test_group_centred():
    advantages = estimate(np.array([[3, 1, 1, 1], [2, 2, 2, 2]]), estimator="group_centred")
    np.testing.assert_allclose(advantages, [[1.5, -0.5, -0.5, -0.5], [0, 0, 0, 0]])


# Rewards and correctness of groups of two, by what the rules look at.
GROUPS = {
    "mixed": ((2.0, 0.5), (True, False)),
    "all right": ((2.75, 2.5), (True, True)),
    "all wrong, shaped apart": ((0.75, 0.25), (False, False)),
    "mixed, equal rewards": ((1.0, 1.0), (True, False)),
    "all wrong, equal rewards": ((0.0, 0.0), (False, False)),
}


@pytest.mark.parametrize(
    ("equal_groups", "correctness_filter", "kept"),
    [
        ("keep", "none", list(GROUPS)),
        ("drop", "none", ["mixed", "all right", "all wrong, shaped apart"]),
        # Shaping alone moves the rewards of the second and third group: the filter asks execution.
        ("keep", "mixed", ["mixed", "mixed, equal rewards"]),
        ("drop", "mixed", ["mixed"]),
    ],
)
def test_groups_to_train(equal_groups, correctness_filter, kept):
    rewards, correct = map(np.array, zip(*GROUPS.values(), strict=True))
    numbers = groups_to_train(
        rewards, correct, equal_groups=equal_groups, correctness_filter=correctness_filter
    )
    assert [list(GROUPS)[number] for number in numbers] == kept
