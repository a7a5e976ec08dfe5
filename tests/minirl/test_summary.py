"""What the metrics of a step say of its episodes."""

from __future__ import annotations

from minirl.train.summary import summarise
from minirl.types import Reply, Trajectory, Turn

from .toy_run import Score


def test_a_number_of_some_episodes_is_averaged_over_these():
    turn = Turn((9,), Reply((1, 2), (0.0, 0.0), "ab", "stop", (0, 0)))
    episodes = [{"all": 1.0, "some": 1.0}, {"all": 0.0}, {"all": 0.0, "some": 0.0}, {"all": 1.0}]
    groups = [[Trajectory((turn,), episode, "done")] for episode in episodes]
    scores = [[Score(1.0, correct)] for correct in (True, False, False, False)]
    means = summarise(groups, scores, lambda episode: episode)
    assert (means["all"], means["some"], means["rollout/accuracy"]) == (0.5, 0.5, 0.25)
    assert summarise([], [], lambda episode: episode) == {"groups/equal_share": 0.0}
