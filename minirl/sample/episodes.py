"""The episodes of a run: which there are in a round, how they are played, what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minirl.config import SamplerConfig, TrainConfig
from minirl.run import distributed, preemption
from minirl.sample.rollout import rollout
from minirl.train.task import Task, examples_of_step
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


@dataclass(frozen=True, slots=True)
class Player:
    """Plays this process's share of any round: `prompts_per_step` examples, a group of each.

    Attributes:
        tokenizer: Encodes observations.
        task: What is played.
        config: How many examples, and episodes of each.
        sampler_config: Token limits.
        seed: Decides the order of the examples.
    """

    tokenizer: Tokenizer
    task: Task
    config: TrainConfig
    sampler_config: SamplerConfig
    seed: int

    @property
    def share(self) -> range:
        """Return the places of this process's examples among those of a round."""
        return distributed.own_share(self.config.prompts_per_step)

    def play(
        self,
        sampler: Sampler,
        number: int,
        *,
        progress: Callable[[int, int], None] | None = None,
        ended: Callable[[int, list[Trajectory]], None] | None = None,
        check: Callable[[], None] = preemption.check,
    ) -> list[list[Trajectory]]:
        """Play a round.

        Args:
            sampler: Of this process alone.
            number: Rounds before this one; decides the examples and the random streams.
            progress: See `rollout`.
            ended: See `rollout`.
            check: See `rollout`.

        Returns:
            The groups, in the order of the examples.

        Raises:
            Preempted: A signal came; the round is lost.
        """
        per_step, size = self.config.prompts_per_step, self.config.group_size
        train = self.task.train
        chosen = examples_of_step(len(train), number, per_step=per_step, seed=self.seed)
        return rollout(
            sampler,
            self.tokenizer,
            self.task.environment,
            [train[chosen[place]] for place in self.share],
            config=self.sampler_config,
            group_size=size,
            first_episode=(number * per_step + self.share.start) * size,
            max_turns=self.task.max_turns,
            env_workers=self.config.env_workers,
            progress=progress,
            ended=ended,
            check=check,
        )

    def judged(self, group: Sequence[Trajectory], *, has_record: bool) -> list[Trajectory]:
        """Score the trajectories of a group: the `episode` of each is then an `Outcome`."""
        return [self._judged(trajectory, has_record=has_record) for trajectory in group]

    def _judged(self, trajectory: Trajectory, *, has_record: bool) -> Trajectory:
        task, episode = self.task, trajectory.episode
        record = task.record(episode) if has_record else None
        outcome = Outcome(task.score(episode), task.describe(episode), record)
        return replace(trajectory, episode=outcome)
