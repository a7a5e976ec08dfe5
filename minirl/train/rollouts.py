"""Rollouts of training episodes, played when they are needed or ahead of the learner; the sampler.

An asynchronous rollout begins with the weights of an earlier step and goes on while the learner
updates; new weights reach it in the middle of replies, and each token keeps the version that
sampled it. So a step trains on what weights up to `lag` steps older than its own have sampled, for
which the loss corrects (`losses.correction_weight`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from random import Random
from threading import Condition, Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import optax
from flax import nnx

from exchange import Score
from minirl.config import BatchingConfig, RolloutConfig, SamplerConfig, TrainConfig
from minirl.errors import LostError
from minirl.model.decoder import Decoder
from minirl.model.lora import split
from minirl.model.sharding import row_parts
from minirl.run import distributed, preemption
from minirl.run.metrics import Stopwatch
from minirl.sample.rollout import rollout
from minirl.sample.sampler import NativeSampler
from minirl.sglang.metrics import EVENTS, IN_USE, PROBE_GAP
from minirl.train.batching import micro_batches, read_back
from minirl.train.update import LIKELIHOOD, Learner
from minirl.types import Decoding, Environment, Sampler, Tokenizer, TokenRow, Trajectory

# A native run does without what talks to servers.
if TYPE_CHECKING:
    from minirl.sglang.sampler import Logprobs, Servers

_log = logging.getLogger(__name__)
# Groups of a rollout that may fail, as a share, before the run ends: what is broken is everybody's.
_FAILED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """What there is to learn, as the learner sees it.

    Attributes:
        record: A final episode for a person to look at: `example`, which all episodes of a group
            share, and `turns`, one mapping for each reply.
        write: Takes the groups of a step that is sampled (`train.sample_every`), whose episodes
            have their records, with the rows of those that were trained on, None for others.
        shares: Of the numbers of `describe`, shares that the status line of a step tells, with the
            words for each.
        validate: The accuracy of weights, given with their version, that the best checkpoint is
            chosen by.
        max_turns: The most replies of a training episode.
        log: Takes the numbers of a step too, beside the metrics in the run folder.
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
    shares: Mapping[str, str] = field(default_factory=dict)
    log: Callable[[int, Mapping[str, float]], None] | None = None


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """What is kept of a final episode: score, numbers for the metrics, and a record if wanted."""

    score: Score
    numbers: Mapping[str, float]
    record: Mapping[str, Any] | None = None


# Empty where the prompt is too long, None where environment or reward have failed.
Group = list[Trajectory] | None


@dataclass(frozen=True, slots=True)
class Episodes:
    """Groups of trajectories whose `episode` is a `ScoredEpisode`; all groups of one size.

    `late` of them are of earlier rollouts; `cut` were given up, unfinished and too old; `too_long`
    were never begun, since their prompts are; of `failed`, environment or reward have failed.
    """

    groups: list[list[Trajectory]] = field(default_factory=list)
    late: int = 0
    cut: int = 0
    too_long: int = 0
    failed: int = 0

    @classmethod
    def of(cls, groups: Sequence[Group], **counts: int) -> Episodes:
        """Count the groups that are not there."""
        too_long, failed = (groups.count(nothing) for nothing in ([], None))
        return cls([group for group in groups if group], too_long=too_long, failed=failed, **counts)

    def __add__(self, other: Episodes) -> Episodes:
        names = (field.name for field in fields(self))
        return Episodes(*(getattr(self, name) + getattr(other, name) for name in names))

    def select(self, numbers: Iterable[int]) -> Episodes:
        """Return some of the groups."""
        return Episodes([self.groups[n] for n in numbers])

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

    @property
    def lengths_NG(self) -> np.ndarray:
        """Return the tokens of each response, later observations included."""

        def length(trajectory: Trajectory) -> int:
            turns = trajectory.turns
            tokens = sum(len(turn.observation_ids) + len(turn.reply.ids) for turn in turns)
            return tokens - len(turns[0].observation_ids)

        return self._each(length)

    def _each(self, number: Callable[[Trajectory], Any]) -> np.ndarray:
        return np.array([[number(trajectory) for trajectory in group] for group in self.groups])


def examples_of_step(count: int, step: int, *, per_step: int, seed: int) -> list[int]:
    """Return the numbers of a step's examples, from the step (from 0) alone.

    Every example comes once before any comes again; each epoch has an order of its own.
    """

    def order(epoch: int) -> list[int]:
        return Random(f"{seed} examples {epoch}").sample(range(count), count)

    numbers = range(step * per_step, (step + 1) * per_step)
    orders = {epoch: order(epoch) for epoch in {number // count for number in numbers}}
    return [orders[number // count][number % count] for number in numbers]


def own_slots(sampler: SamplerConfig, train: TrainConfig, *, processes: int) -> SamplerConfig:
    """Return a sampler's settings with no more slots than a process has episodes at once."""
    most = -(-train.prompts_per_step // processes) * train.group_size
    return sampler.model_copy(update={"slots": min(sampler.slots, most)})


class Failures:
    """The groups of a rollout whose environment or reward has failed: they are dropped.

    `count` groups begin. If more than a share of them fail, or all, the run has to end.
    """

    def __init__(self, count: int) -> None:
        self.groups: set[int] = set()
        self._count = count

    def add(self, n: int, error: Exception) -> None:
        """Drop a group because of an error.

        Raises:
            LostError: Too many have failed.
        """
        self.groups.add(n)
        what = f"{len(self.groups)} of {self._count} groups have failed, the last by {error!r}"
        if len(self.groups) > min(max(1, _FAILED_SHARE * self._count), self._count - 1):
            _log.error("the last error of an environment or a reward", exc_info=error)
            raise LostError(f"{what}; mend that")
        _log.warning("%s; they are left out", what)


class Rollouts:
    """The rollouts of this process: a group for each of its share of a rollout's examples.

    The sampler has the weights that the learner pushed last; the seed decides the examples' order.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Tokenizer,
        task: TrainingTask,
        train: TrainConfig,
        limits: SamplerConfig,
        rollout: RolloutConfig,
        *,
        seed: int,
    ) -> None:
        self._sampler, self._tokenizer, self._task = sampler, tokenizer, task
        self._train, self._limits, self._config, self._seed = train, limits, rollout, seed
        self._open: dict[int, _AsyncRollout] = {}
        # Numbers of this process's examples among those of a rollout.
        self.share = distributed.own_share(train.prompts_per_step)

    def begin(self, numbers: Iterable[int], *, version: int) -> None:
        """Begin asynchronous rollouts that are not under way, with weights of this version."""
        if not self._config.is_ahead:
            return
        for number in numbers:
            if number not in self._open:
                self._open[number] = _AsyncRollout(number, version, self, self._sampler.apart())
                self._open[number].start()

    def take(
        self, number: int, *, version: int, is_last: bool, has_records: bool, watch: Stopwatch
    ) -> Episodes:
        """Return the groups of a rollout, and those of earlier ones that were late.

        Args:
            number: Of the rollout, from 0; it has begun, or is played now.
            version: Of the weights that the step begins with.
            is_last: Whether no step follows, so that nothing can be late.
            has_records: Whether what is kept of episodes has their records.
            watch: Takes the time; `rollout` is that in which the learner waits.
        """
        if number not in self._open:
            failures = Failures(len(self.share))
            with watch.phase("rollout"):
                played = self.play(self._sampler, number, failed=failures.add)
            with watch.phase("score"):
                score = partial(self.score, failures=failures, has_record=has_records)
                return Episodes.of([score(*numbered) for numbered in enumerate(played)])
        config, current = self._config, self._open[number]
        with watch.phase("rollout"):
            round_s = current.wait(int(config.slow_share * len(self.share)))
        watch.seconds["round"] = round_s
        rollouts = {n: rollout for n, rollout in self._open.items() if n <= number}
        groups = current.taken()
        late = [group for n, rollout in rollouts.items() if n < number for group in rollout.taken()]
        oldest = -1 if is_last else config.oldest
        old = [rollout for rollout in rollouts.values() if version + 1 - rollout.version > oldest]
        cut = sum(rollout.cancel() for rollout in old)
        going_on = (item for item in self._open.items() if item[1] not in old)
        self._open = {n: rollout for n, rollout in going_on if rollout.left}
        taken = Episodes.of(late + groups, late=sum(map(bool, late)), cut=cut)
        if not has_records:  # processes exchange what is taken
            taken = replace(
                taken, groups=[[*map(_without_record, group)] for group in taken.groups]
            )
        return taken

    def close(self) -> None:
        """Give up what is under way."""
        for going_on in self._open.values():
            going_on.cancel()
        for going_on in self._open.values():
            going_on.join()
        self._open = {}

    def play(self, sampler: Sampler, number: int, **options: Any) -> list[list[Trajectory]]:
        """Play a rollout with options of `sample.rollout.rollout`; its number decides all."""
        train, examples = self._train, self._task.train
        per_step, size = train.prompts_per_step, train.group_size
        chosen = examples_of_step(len(examples), number, per_step=per_step, seed=self._seed)
        return rollout(
            sampler,
            self._tokenizer,
            self._task.environment,
            [examples[chosen[number]] for number in self.share],
            config=self._limits,
            decoding=Decoding(
                self._limits.temperature, self._limits.top_p, train.algorithm.score_centering
            ),
            group_size=size,
            first_episode=(number * per_step + self.share.start) * size,
            max_turns=self._task.max_turns,
            env_workers=train.env_workers,
            **options,
        )

    def score(
        self, n: int, group: list[Trajectory], *, failures: Failures, has_record: bool
    ) -> Group:
        """Score the trajectories of a group: the `episode` of each is then a `ScoredEpisode`."""
        task, scored = self._task, []
        try:
            for trajectory in group:
                episode = trajectory.episode
                record = task.record(episode) if has_record else None
                kept = ScoredEpisode(task.score(episode), task.describe(episode), record)
                scored.append(replace(trajectory, episode=kept))
        except Exception as error:  # noqa: BLE001 - a reward reads databases too
            failures.add(n, error)
        return None if n in failures.groups else scored


def _without_record(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, episode=replace(trajectory.episode, record=None))


class _CancelledError(Exception):
    """A rollout is given up."""


class _AsyncRollout(Thread):
    """A rollout in a thread of its own, begun with weights of a version; `left` groups of it have
    not been taken yet.
    """

    def __init__(self, number: int, version: int, rollouts: Rollouts, sampler: Sampler) -> None:
        super().__init__(name=f"rollout {number}", daemon=True)
        self.number, self.version, self.left = number, version, len(rollouts.share)
        self._rollouts, self._sampler = rollouts, sampler
        self._changed, self._began = Condition(), perf_counter()
        self._ready: dict[int, Group] = {}
        self._failures = Failures(len(rollouts.share))
        self._error: BaseException | None = None
        self._is_cancelled = False

    def wait(self, slow: int) -> float:
        """Wait until all groups but so many are done; return the seconds since it began."""
        with self._changed:
            while self._error is None and len(self._ready) < self.left - slow:
                self._changed.wait(preemption.POLL_S)
                preemption.check()
        return perf_counter() - self._began

    def taken(self) -> list[Group]:
        """Return the groups done since this was last asked; or raise what ended the rollout."""
        with self._changed:
            if self._error is not None:
                raise self._error
            groups, self._ready = self._ready, {}
            self.left -= len(groups)
        return [groups[n] for n in sorted(groups)]

    def cancel(self) -> int:
        """Give up the rest; return how many groups that is."""
        with self._changed:
            self._is_cancelled = True
            return self.left

    def run(self) -> None:
        """Play and score."""
        try:
            # Scores are not waited for by episodes that go on.
            with ThreadPoolExecutor(1, thread_name_prefix="score") as scoring:
                scored: list[Future[None]] = []
                self._rollouts.play(
                    self._sampler,
                    self.number,
                    failed=self._failures.add,
                    ended=lambda *group: scored.append(scoring.submit(self._score, *group)),
                    check=self._check,
                )
            for future in scored:
                future.result()
        except _CancelledError:
            return
        except BaseException as error:  # noqa: BLE001 - raised where the rollout is waited for
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _score(self, n: int, group: list[Trajectory]) -> None:
        scored = self._rollouts.score(n, group, failures=self._failures, has_record=True)
        with self._changed:
            self._ready[n] = scored
            self._changed.notify_all()

    def _check(self) -> None:
        if self._is_cancelled:
            raise _CancelledError


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

    return SglangSampler(tokenizer, servers, logprobs=_logprobs(model, tokenizer))


def _logprobs(model: Decoder, tokenizer: Tokenizer) -> Logprobs:
    """Return what computes log-probabilities of ids as the learner does."""
    graph, _, frozen = split(model)
    learner = Learner(graph, LIKELIHOOD, optax.identity(), frozen=frozen, mesh=model.mesh)
    sizes, parts = BatchingConfig(), row_parts(model.mesh)

    def logprobs(params: nnx.State, ids: Sequence[int], prompt_length: int) -> np.ndarray:
        is_action = np.arange(len(ids)) >= prompt_length
        none = np.zeros(len(ids), np.float32)
        rows = [[TokenRow(np.array(ids, np.int32), is_action, none, 0.0, prompt_length)]]
        pad_id = tokenizer.pad_id
        batches = micro_batches(
            rows, aggregation="token_mean", sizes=sizes, pad_id=pad_id, parts=parts
        )
        logp = read_back(rows, learner.logprobs(params, batches), sizes=sizes, parts=parts)
        return logp[0][0][prompt_length:]

    return logprobs


def gather_metrics(
    sampler: Sampler, *, since: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the metrics of the samplers of all processes since the last call; all have to call.

    Counts add up over processes; of servers in use the fewest count, of other numbers the largest.
    With earlier metrics of the same step (`since`), only counts and the largest difference to the
    learner are returned, and these are of both.
    """
    parts = distributed.gather(sampler.numbers)
    over = dict.fromkeys(EVENTS, sum) | {IN_USE: min}
    joined = {name: over.get(name, max)(numbers[name] for numbers in parts) for name in parts[0]}
    if since is None:
        return joined
    join = dict.fromkeys(EVENTS, sum) | {PROBE_GAP: max}
    return {
        name: over((since.get(name, 0.0), joined[name]))
        for name, over in join.items()
        if name in joined
    }
