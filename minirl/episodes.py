"""The episodes of a step: each process plays and scores its share, and all get to know all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from minirl import hosts
from minirl.config import SamplerConfig, TrainConfig
from minirl.metrics import Stopwatch
from minirl.rollout import rollout
from minirl.task import Task, examples_of_step
from minirl.types import Sampler, Score, Tokenizer, Trajectory


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is kept of a final episode, which itself stays where it was played.

    Attributes:
        score: What it earned.
        numbers: What it adds to the metrics.
        record: The episode for a person to read, if it was asked for.
    """

    score: Score
    numbers: Mapping[str, float]
    record: Mapping[str, Any] | None = None


def own_slots(sampler: SamplerConfig, train: TrainConfig, *, processes: int) -> SamplerConfig:
    """Return a sampler's settings with no more slots than a process has episodes at once."""
    most = -(-train.prompts_per_step // processes) * train.group_size
    return sampler.model_copy(update={"slots": min(sampler.slots, most)})


def play(
    sampler: Sampler,
    tokenizer: Tokenizer,
    task: Task,
    config: TrainConfig,
    sampler_config: SamplerConfig,
    *,
    number: int,
    seed: int,
    watch: Stopwatch,
) -> list[list[Trajectory]]:
    """Play and score the episodes of the next examples.

    Args:
        sampler: Of this process alone.
        tokenizer: Encodes observations.
        task: What is played.
        config: How many examples, and episodes of each.
        sampler_config: Token limits.
        number: Rounds before this one; decides the examples and the random streams.
        seed: Decides the order of the examples.
        watch: Takes the time.

    Returns:
        The groups of all processes, those without episodes left out, in the order of the examples;
        the `episode` of a trajectory is an `Outcome`.

    Raises:
        Preempted: A signal came; the round is lost.
    """
    per_step, size = config.prompts_per_step, config.group_size
    chosen = examples_of_step(len(task.train), number, per_step=per_step, seed=seed)
    share = hosts.own_share(per_step)

    def own_part() -> list[list[Trajectory]]:
        with watch.phase("rollout"):
            groups = rollout(
                sampler,
                tokenizer,
                task.environment,
                [task.train[chosen[place]] for place in share],
                config=sampler_config,
                group_size=size,
                first_episode=(number * per_step + share.start) * size,
                max_turns=task.max_turns,
                env_workers=config.env_workers,
            )
        with watch.phase("score"):
            # The first group may be the one that is shown.
            played = [group for group in groups if group]
            return [
                [_judged(trajectory, task, has_record=n == 0) for trajectory in group]
                for n, group in enumerate(played)
            ]

    return [group for part in hosts.gather(own_part) for group in part]


def _judged(trajectory: Trajectory, task: Task, *, has_record: bool) -> Trajectory:
    episode = trajectory.episode
    record = task.record(episode) if has_record else None
    return replace(trajectory, episode=Outcome(task.score(episode), task.describe(episode), record))
