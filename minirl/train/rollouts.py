"""Rollouts of training episodes: played when they are needed, or ahead of the learner.

An asynchronous rollout begins with the weights of an earlier step and goes on while the learner
updates; new weights reach it in the middle of replies, and each token keeps the version that
sampled it. So a step trains on weights up to `lag` steps older than its own, which the importance
ratio spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random
from threading import Condition, Thread
from time import perf_counter
from typing import Any

import numpy as np
from flax import nnx

from minirl.config import RolloutConfig, SamplerConfig, TrainConfig
from minirl.run import distributed, preemption
from minirl.run.metrics import Stopwatch
from minirl.sample.rollout import rollout
from minirl.sample.sampler import NativeSampler
from minirl.sglang.sampler import SglangSampler
from minirl.types import Environment, Sampler, Score, Tokenizer, Trajectory


@dataclass(frozen=True, slots=True)
class Task:
    """What there is to learn, as the learner sees it.

    Attributes:
        environment: Where training episodes are played.
        score: What a final episode earns.
        describe: Numbers of a final episode that are averaged into the metrics.
        record: A final episode for a person to look at, in `trajectories.jsonl`: `example`, which
            all episodes of a group share, and `turns`, one mapping for each reply.
        train: Examples to learn from.
        validate: The accuracy of weights, given with their version, that the best checkpoint is
            chosen by.
        max_turns: The most replies of a training episode.
    """

    environment: Environment
    score: Callable[[Any], Score]
    describe: Callable[[Any], Mapping[str, float]]
    record: Callable[[Any], Mapping[str, Any]]
    train: Sequence[Any]
    validate: Callable[[nnx.State, int], float]
    max_turns: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is kept of a final episode; the episode itself stays where it was played.

    Attributes:
        score: What it earned.
        numbers: What it adds to the metrics.
        record: The episode for a person to read, if it was asked for.
    """

    score: Score
    numbers: Mapping[str, float]
    record: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Episodes:
    """Scored groups of trajectories; the `episode` of each trajectory is an `Outcome`.

    Attributes:
        groups: The trajectories of each example, all groups of one size.
        late: How many of the groups are of earlier rollouts.
        cut: Groups that were given up: unfinished, and too old for the next step.
        unfinished: Episodes of those that were being played.
    """

    groups: list[list[Trajectory]] = field(default_factory=list)
    late: int = 0
    cut: int = 0
    unfinished: int = 0

    def __add__(self, other: Episodes) -> Episodes:
        return Episodes(
            self.groups + other.groups,
            self.late + other.late,
            self.cut + other.cut,
            self.unfinished + other.unfinished,
        )

    def select(self, numbers: Iterable[int]) -> Episodes:
        """Return some of the groups."""
        return Episodes([self.groups[n] for n in numbers])

    @property
    def scores(self) -> list[list[Score]]:
        """Return the score of each trajectory."""
        return [[trajectory.episode.score for trajectory in group] for group in self.groups]

    @property
    def rewards_NG(self) -> np.ndarray:
        """Return the total reward of each trajectory."""
        return np.array([[score.total for score in group] for group in self.scores])

    @property
    def correct_NG(self) -> np.ndarray:
        """Return whether each trajectory is correct."""
        return np.array([[score.correct for score in group] for group in self.scores])

    @property
    def lengths_NG(self) -> np.ndarray:
        """Return the tokens of each response, later observations included."""
        return np.array([[_response_tokens(one) for one in group] for group in self.groups])


def _response_tokens(trajectory: Trajectory) -> int:
    first = len(trajectory.turns[0].observation_ids)
    return sum(len(turn.observation_ids) + len(turn.reply.ids) for turn in trajectory.turns) - first


def examples_of_step(count: int, step: int, *, per_step: int, seed: int) -> list[int]:
    """Return the numbers of a step's examples, from the step (from 0) alone.

    Every example comes once before any comes again; each epoch has an order of its own.
    """

    def order(epoch: int) -> list[int]:
        return Random(f"{seed} examples {epoch}").sample(range(count), count)

    places = range(step * per_step, (step + 1) * per_step)
    orders = {epoch: order(epoch) for epoch in {place // count for place in places}}
    return [orders[place // count][place % count] for place in places]


def own_slots(sampler: SamplerConfig, train: TrainConfig, *, processes: int) -> SamplerConfig:
    """Return a sampler's settings with no more slots than a process has episodes at once."""
    most = -(-train.prompts_per_step // processes) * train.group_size
    return sampler.model_copy(update={"slots": min(sampler.slots, most)})


@dataclass(frozen=True, slots=True)
class Player:
    """Plays and scores this process's share of a rollout: a group for each of its examples.

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
        """Return the places of this process's examples among those of a rollout."""
        return distributed.own_share(self.config.prompts_per_step)

    def play(self, sampler: Sampler, number: int, **options: Any) -> list[list[Trajectory]]:
        """Play the rollout with this number (from 0), which decides examples and random streams.

        Args:
            sampler: Of this process alone.
            number: Rollouts before this one.
            **options: `progress`, `ended` and `check` of `sample.rollout.rollout`.

        Returns:
            The groups, in the order of the examples.

        Raises:
            Preempted: A signal came; the rollout is lost.
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
            **options,
        )

    def score(self, group: Sequence[Trajectory], *, has_record: bool) -> list[Trajectory]:
        """Score the trajectories of a group: the `episode` of each is then an `Outcome`."""
        task, scored = self.task, []
        for trajectory in group:
            episode = trajectory.episode
            record = task.record(episode) if has_record else None
            outcome = Outcome(task.score(episode), task.describe(episode), record)
            scored.append(replace(trajectory, episode=outcome))
        return scored


class Rollouts:
    """The rollouts of this process.

    Args:
        sampler: Samples with the weights that the learner pushed last.
        player: Plays them.
        config: How far ahead, and what is not waited for.
    """

    def __init__(
        self, sampler: NativeSampler | SglangSampler, player: Player, config: RolloutConfig
    ) -> None:
        self._sampler, self._player, self._config = sampler, player, config
        self._open: dict[int, _AsyncRollout] = {}

    def begin(self, numbers: Iterable[int], *, version: int) -> None:
        """Begin those rollouts that are not under way, if any are asynchronous.

        Args:
            numbers: Of the rollouts, from 0.
            version: Of the weights that are sampled with now.
        """
        sampler = self._sampler
        if not self._config.is_ahead or isinstance(sampler, NativeSampler):
            return
        for number in numbers:
            if number not in self._open:
                found = self._open[number] = _AsyncRollout(number, version, self._player)
                found.start(sampler.apart())

    def take(
        self, number: int, *, version: int, is_last: bool, has_records: bool, watch: Stopwatch
    ) -> Episodes:
        """Return the groups of a rollout, and those of earlier ones that were late.

        Args:
            number: Of the rollout; it has begun, or is played now.
            version: Of the weights that the step begins with.
            is_last: Whether no step follows, so that nothing can be late.
            has_records: Whether what is kept of episodes has their records.
            watch: Takes the time; `rollout` is that in which the learner waits.

        Raises:
            Preempted: A signal came.
            ServersLostError: Nobody samples.
        """
        if number not in self._open:
            return self._play(number, watch, has_records=has_records)
        config, current = self._config, self._open[number]
        with watch.phase("rollout"):
            current.wait(int(config.slow_share * len(self._player.share)))
        watch.seconds["round"] = current.seconds
        begun = {n: one for n, one in self._open.items() if n <= number}
        groups = current.taken()
        late = [group for n, one in begun.items() if n < number for group in one.taken()]
        oldest = -1 if is_last else config.oldest
        old = [one for one in begun.values() if version + 1 - one.version > oldest]
        cut = [one.cancel() for one in old]
        self._open = {n: one for n, one in self._open.items() if one.left and one not in old}
        groups = late + groups
        if not has_records:  # whether the step is sampled is known only now
            groups = [[_without_record(one) for one in group] for group in groups]
        return Episodes(groups, len(late), sum(one for one, _ in cut), sum(one for _, one in cut))

    def close(self) -> None:
        """Give up what is under way."""
        for one in self._open.values():
            one.cancel()
        for one in self._open.values():
            one.join()
        self._open = {}

    def _play(self, number: int, watch: Stopwatch, *, has_records: bool) -> Episodes:
        with watch.phase("rollout"):
            groups = [group for group in self._player.play(self._sampler, number) if group]
        with watch.phase("score"):
            score = self._player.score
            return Episodes([score(group, has_record=has_records) for group in groups])


def _without_record(trajectory: Trajectory) -> Trajectory:
    """Leave the record out where it is not wanted: processes exchange what is taken."""
    return replace(trajectory, episode=replace(trajectory.episode, record=None))


class _CancelledError(Exception):
    """A rollout is given up."""


@dataclass(eq=False)
class _AsyncRollout:
    """A rollout in a thread of its own.

    Attributes:
        number: Rollouts before it.
        version: Of the weights that it began with.
        player: Plays it.
        seconds: From its beginning until enough of it was done.
        left: Groups that nobody has taken yet.
    """

    number: int
    version: int
    player: Player
    seconds: float = 0.0
    _ready: dict[int, list[Trajectory]] = field(default_factory=dict)
    _error: BaseException | None = None
    _is_cancelled: bool = False
    _unfinished: int = 0

    def __post_init__(self) -> None:
        self._changed = Condition()
        self._began = perf_counter()
        self.left = len(self.player.share)

    def start(self, sampler: Sampler) -> None:
        """Begin to play."""
        name = f"rollout {self.number}"
        self._thread = Thread(target=self._play, args=(sampler,), name=name, daemon=True)
        self._thread.start()

    def wait(self, slow: int) -> None:
        """Wait until all groups but so many are done.

        Raises:
            BaseException: What ended the rollout.
        """
        with self._changed:
            while self._error is None and len(self._ready) < self.left - slow:
                self._changed.wait(preemption.POLL_S)
                preemption.check()
        self.seconds = perf_counter() - self._began

    def taken(self) -> list[list[Trajectory]]:
        """Return the groups that have been done since this was last asked; none is empty.

        Raises:
            BaseException: What ended the rollout.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            found, self._ready = self._ready, {}
            self.left -= len(found)
        return [found[place] for place in sorted(found) if found[place]]

    def cancel(self) -> tuple[int, int]:
        """Give up the rest; return how many groups and how many episodes under way that is."""
        with self._changed:
            self._is_cancelled = True
            return self.left, self._unfinished

    def join(self) -> None:
        """Wait for the end of what was given up."""
        self._thread.join()

    def _play(self, sampler: Sampler) -> None:
        try:
            # Scores are not waited for by episodes that go on.
            with ThreadPoolExecutor(1, thread_name_prefix="score") as scoring:
                scored: list[Future[None]] = []
                self.player.play(
                    sampler,
                    self.number,
                    progress=self._note,
                    ended=lambda *group: scored.append(scoring.submit(self._score, *group)),
                    check=self._check,
                )
            for one in scored:
                one.result()
        except _CancelledError:
            return
        except BaseException as error:  # noqa: BLE001 - raised where the rollout is waited for
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _score(self, place: int, group: list[Trajectory]) -> None:
        scored = self.player.score(group, has_record=True)
        with self._changed:
            self._ready[place] = scored
            self._changed.notify_all()

    def _note(self, ended: int, total: int) -> None:
        self._unfinished = total - ended

    def _check(self) -> None:
        if self._is_cancelled:
            raise _CancelledError
