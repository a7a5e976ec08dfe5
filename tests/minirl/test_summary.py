"""What the metrics of a step say of its episodes."""

from __future__ import annotations

from minirl.train.rollouts import Episodes, ScoredEpisode
from minirl.train.summary import over_updates, summarise
from minirl.types import Reply, Trajectory, Turn

from .toy_run import Score


def test_a_number_of_some_episodes_is_averaged_over_these():
    turn = Turn((9,), Reply((1, 2), (0.0, 0.0), "ab", "stop", (0, 0)))
    numbers = [{"all": 1.0, "some": 1.0}, {"all": 0.0}, {"all": 0.0, "some": 0.0}, {"all": 1.0}]
    scored = [ScoredEpisode(Score(1.0, number < 1), found) for number, found in enumerate(numbers)]
    means = summarise(Episodes([[Trajectory((turn,), one, "done")] for one in scored]))
    assert (means["all"], means["some"], means["rollout/accuracy"]) == (0.5, 0.5, 0.25)
    assert summarise(Episodes()) == {"groups/equal_share": 0.0}


def test_of_several_updates_means_are_averaged_and_skips_are_counted():
    updates = [
        {"loss": 1.0, "gap_max": 2.0, "skipped": 1.0},
        {"loss": 2.0, "gap_max": 1.0, "skipped": 1.0},
    ]
    found = over_updates(updates)
    assert found == {"update/loss": 1.5, "update/gap_max": 2.0, "update/skipped": 2.0}
    assert over_updates([]) == {}
