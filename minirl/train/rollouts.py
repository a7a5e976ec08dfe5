"""Rollouts of training episodes, played when they are needed or ahead of the learner; the sampler.

An asynchronous rollout begins with the weights of an earlier step and goes on while the learner
updates; new weights reach it in the middle of replies, and each token keeps the version that
sampled it. So a step trains on what weights up to `lag` steps older than its own have sampled, for
which the loss corrects (`losses.correction_weight`).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from random import Random
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx

from minirl.config import SamplerConfig, TrainConfig
from minirl.exchange import LostError, Score
from minirl.model.decoder import Decoder
from minirl.run import distributed, preemption
from minirl.run.metrics import Stopwatch
from minirl.sample.rollout import Rollout
from minirl.sample.sampler import NativeSampler
from minirl.sglang import EVENTS, IN_USE
from minirl.types import Environment, Sampler, Tokenizer, TokenRow, Trajectory

# A native run does without what talks to servers.
if TYPE_CHECKING:
    from minirl.sglang.sampler import Servers

_log = logging.getLogger(__name__)
# Groups of a rollout that may fail, as a share, before the run ends: what is broken is everybody's.
_FAILED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """What there is to learn, as the learner sees it.

    Attributes:
        score, describe: Called, as `record` is, in the threads of environments, several at a time.
        record: A final episode for a person to look at: `example`, which all episodes of a group
            share, and `turns`, one mapping for each reply.
        write: Takes the groups of a step that is sampled (`train.sample_every`), whose episodes
            have their records, with the rows of those that were trained on, None for others.
        shares: Of the numbers of `describe`, shares that the status line of a step tells, with the
            words for each.
        validate: The accuracy of weights, given with their version, that the best checkpoint is
            chosen by.
        max_turns: The most replies of a training episode.
        stratum: What an example belongs to; each is spread over the steps.
        log: Takes the numbers of a step too; a `LostError` ends the run with all steps saved.
    """

    environment: Environment
    score: Callable[[Any], Score]
    describe: Callable[[Any], Mapping[str, float]]
    record: Callable[[Any], Mapping[str, Any]]
    write: Callable[
        [int, Sequence[Sequence[Trajectory]], Sequence[Sequence[TokenRow] | None]], None
    ]
    train: Sequence[Any]
    validate: Callable[[nnx.State, int], float]
    max_turns: int
    stratum: Callable[[Any], Hashable] = lambda _example: None
    shares: Mapping[str, str] = field(default_factory=dict)
    log: Callable[[int, Mapping[str, float]], None] = lambda _step, _numbers: None


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """What is kept of a final episode: score, numbers for the metrics, and a record if wanted."""

    score: Score
    numbers: Mapping[str, float]
    record: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Episodes:
    """Groups of trajectories whose `episode` is a `ScoredEpisode`; all groups of one size.

    `too_long` groups were never begun, since their prompts are; of `failed`, environment or reward
    have failed.
    """

    groups: list[list[Trajectory]] = field(default_factory=list)
    too_long: int = 0
    failed: int = 0

    def __add__(self, other: Episodes) -> Episodes:
        lost = self.too_long + other.too_long, self.failed + other.failed
        return Episodes(self.groups + other.groups, *lost)

    @property
    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories of all groups, in order."""
        return [trajectory for group in self.groups for trajectory in group]

    @property
    def rewards_NG(self) -> np.ndarray:
        """Return the total reward of each trajectory."""
        return self._each(lambda trajectory: trajectory.episode.score.total)

    @property
    def correct_NG(self) -> np.ndarray:
        """Return whether each trajectory is correct."""
        return self._each(lambda trajectory: trajectory.episode.score.correct)

    def _each(self, number: Callable[[Trajectory], Any]) -> np.ndarray:
        return np.array([[number(trajectory) for trajectory in group] for group in self.groups])


def examples_of_step(
    strata: tuple[Hashable, ...], step: int, *, per_step: int, seed: int
) -> list[int]:
    """Return the numbers of a step's examples, whose strata are given, from the step (from 0)
    alone.

    Every example comes once before any comes again; each epoch has an order of its own.
    """
    order, count = partial(_order_of_epoch, strata, per_step, seed), len(strata)
    numbers = range(step * per_step, (step + 1) * per_step)
    return [order(number // count)[number % count] for number in numbers]


@lru_cache(maxsize=2)
def _order_of_epoch(
    strata: tuple[Hashable, ...], per_step: int, seed: int, epoch: int
) -> list[int]:
    # The first step is what the epoch before has left of one.
    first = -epoch * len(strata) % per_step or per_step
    return spread(strata, per_step, Random(f"{seed} examples {epoch}"), first=first)


def spread(strata: Sequence[Hashable], per_step: int, rng: Random, *, first: int) -> list[int]:
    """Order the numbers of examples at random, so that each step has as many of a stratum as its
    share comes to, rounded up at most: of small strata one. The first step has `first` examples.
    """
    members: dict[Hashable, list[int]] = {}
    for number, stratum in enumerate(strata):
        members.setdefault(stratum, []).append(number)
    most = {stratum: -(-len(each) * per_step // len(strata)) for stratum, each in members.items()}
    placed = []
    for numbers in members.values():
        rng.shuffle(numbers)
        start = rng.random()
        placed += [((start + n) / len(numbers), number) for n, number in enumerate(numbers)]
    waiting = deque(number for _, number in sorted(placed))
    order, size = list[int](), first
    while waiting:
        counts, taken, later = Counter[Hashable](), list[int](), list[int]()
        while waiting and len(taken) < size:
            number = waiting.popleft()
            is_full = counts[strata[number]] == most[strata[number]]
            (later if is_full else taken).append(number)
            counts[strata[number]] += not is_full
        missing = size - len(taken)
        order += [*taken, *later[:missing]]
        waiting.extendleft(reversed(later[missing:]))
        size = per_step
    return order


def needed_slots(sampler: SamplerConfig, train: TrainConfig, *, processes: int) -> SamplerConfig:
    """Return a sampler's settings with no more slots than a process has episodes at once."""
    most = -(-train.prompts_per_step // processes) * train.group_size
    return sampler.model_copy(update={"slots": min(sampler.slots, most)})


class Rollouts:
    """The rollouts of this process: a group for each of its share of a rollout's examples.

    The sampler has the weights that the learner pushed last; the seed decides the examples' order.
    Up to `lag` rollouts are played ahead of the one that is taken.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Tokenizer,
        task: TrainingTask,
        train: TrainConfig,
        limits: SamplerConfig,
        *,
        lag: int,
        seed: int,
    ) -> None:
        self._sampler, self._tokenizer, self._task = sampler, tokenizer, task
        self._train, self._limits, self._lag, self._seed = train, limits, lag, seed
        self._strata = tuple(map(task.stratum, task.train))
        self._open()
        # Numbers of this process's examples among those of a rollout.
        self.share = distributed.process_share(train.prompts_per_step)

    def _open(self) -> None:
        self._ahead: dict[int, Future[tuple[Episodes, float]]] = {}
        self._threads = ThreadPoolExecutor(self._lag + 1, thread_name_prefix="rollout")
        self._is_closed = Event()

    def begin(self, numbers: Iterable[int]) -> None:
        """Begin rollouts that are not under way, each in a thread of its own."""
        for number in numbers:
            if number not in self._ahead:
                self._ahead[number] = self._threads.submit(self._play_ahead, number)

    def take(self, number: int, *, has_records: bool, watch: Stopwatch) -> Episodes:
        """Return the groups of a rollout.

        Args:
            number: Of the rollout, from 0; it has begun, or is played now.
            has_records: Whether what is kept of episodes has their records.
            watch: Takes the time: `rollout` while the learner waits, `round` of rollouts ahead.
        """
        if number not in self._ahead:
            return self._round(self._sampler, number, has_records=has_records, watch=watch)
        future = self._ahead.pop(number)
        with watch.phase("rollout"):
            while not wait([future], preemption.POLL_S).done:
                preemption.check()
            episodes, seconds = future.result()
        watch.seconds["round"] = watch.seconds.get("round", 0.0) + seconds
        if has_records:
            return episodes
        # Processes exchange what is taken.
        groups = [[*map(_without_record, group)] for group in episodes.groups]
        return replace(episodes, groups=groups)

    def finish(self) -> None:
        """Wait until what is under way is played."""
        while wait(self._ahead.values(), preemption.POLL_S).not_done:
            preemption.check()

    def close(self) -> None:
        """Give up what is under way; a second stage may begin others."""
        self._is_closed.set()
        self._threads.shutdown()
        self._open()

    def _play_ahead(self, number: int) -> tuple[Episodes, float]:
        """Play and score while the learner does other things; return the seconds too."""
        sampler, watch = self._sampler.apart(), Stopwatch()

        def check() -> None:
            if self._is_closed.is_set():
                raise CancelledError

        episodes = self._round(sampler, number, has_records=True, watch=watch, check=check)
        return episodes, watch.seconds["rollout"]

    def _round(
        self, sampler: Sampler, number: int, *, has_records: bool, watch: Stopwatch, **options: Any
    ) -> Episodes:
        """Play a rollout with options of `Rollout`; its number decides all. The `episode` of each
        trajectory is a `ScoredEpisode`.
        """
        task, train, failed = self._task, self._train, set[int]()
        per_step, size = train.prompts_per_step, train.group_size
        chosen = examples_of_step(self._strata, number, per_step=per_step, seed=self._seed)

        def scored(episode: Any) -> ScoredEpisode:
            record = task.record(episode) if has_records else None
            return ScoredEpisode(task.score(episode), task.describe(episode), record)

        with watch.phase("rollout"):
            groups = Rollout(
                sampler,
                self._tokenizer,
                task.environment,
                [task.train[chosen[number]] for number in self.share],
                config=self._limits,
                group_size=size,
                first_episode=(number * per_step + self.share.start) * size,
                max_turns=task.max_turns,
                env_workers=train.env_workers,
                failed=partial(self._fail, failed),
                finish=scored,
                **options,
            ).play()
        whole = [group for n, group in enumerate(groups) if n not in failed]
        return Episodes([*filter(None, whole)], too_long=whole.count([]), failed=len(failed))

    def _fail(self, failed: set[int], n: int, error: Exception) -> None:
        """Drop a group because its environment or its reward has failed, with those before.

        Raises:
            LostError: As `check_failed`: other processes need not be asked.
        """
        failed.add(n)
        try:
            check_failed(len(failed), self._train.prompts_per_step, f", the last by {error!r}")
        except LostError:
            _log.error("the last error of an environment or a reward", exc_info=error)
            raise
        what = "%d of the %d groups of this process have failed, the last by %r; they are left out"
        _log.warning(what, len(failed), len(self.share), error)


def check_failed(failed: int, count: int, words: str = "") -> None:
    """Raise a `LostError` if more than a share of the groups of a rollout have failed, or all: the
    run has to end.
    """
    if failed > min(max(1, _FAILED_SHARE * count), count - 1):
        raise LostError(f"{failed} of {count} groups have failed{words}; mend that")


def _without_record(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, episode=replace(trajectory.episode, record=None))


def make_sampler(
    model: Decoder,
    config: SamplerConfig,
    tokenizer: Tokenizer,
    *,
    group_size: int,
    seed: int,
    servers: Servers | None = None,
) -> Sampler:
    """Make what samples with the weights of a model, once it has some: this process, or servers."""
    if servers is None:
        return NativeSampler(model, config, tokenizer, group_size=group_size, seed=seed)
    from minirl.sglang.sampler import SglangSampler

    return SglangSampler(tokenizer, servers)


def gather_metrics(
    sampler: Sampler, *, since: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the metrics of the samplers of all processes since the last call; all have to call.

    Counts add up over processes; of servers in use the fewest count, of other numbers the largest.
    With earlier metrics of the same step (`since`), only counts are returned, of both.
    """
    parts = distributed.gather(sampler.numbers)
    over = dict.fromkeys(EVENTS, sum) | {IN_USE: min}
    joined = {name: over.get(name, max)(numbers[name] for numbers in parts) for name in parts[0]}
    if since is None:
        return joined
    return {name: since.get(name, 0.0) + joined[name] for name in EVENTS if name in joined}
