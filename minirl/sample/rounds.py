"""Rounds of episodes, played when the learner wants them or ahead of it.

A round ahead begins with the weights of an earlier step and goes on while the learner updates; new
weights reach it in the middle of replies, and each token keeps the version that sampled it. So a
step trains on weights up to `lag` steps older than its own, which the importance ratio spans.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Condition, Thread
from time import perf_counter

from minirl.config import RolloutConfig
from minirl.run import preemption
from minirl.run.metrics import Stopwatch
from minirl.sample.episodes import Player
from minirl.sample.local import LocalSampler
from minirl.sglang.sampler import SglangSampler
from minirl.types import Sampler, Trajectory


@dataclass(frozen=True, slots=True)
class Taken:
    """What a process has of a step's episodes.

    Attributes:
        groups: Played and scored; the `episode` of a trajectory is an `Outcome`.
        late: How many of them are of earlier rounds.
        cut: Groups that were given up: they were not done, and would be too old for the next step.
        unfinished: Episodes of those that were being played.
    """

    groups: list[list[Trajectory]]
    late: int = 0
    cut: int = 0
    unfinished: int = 0


def cuts(taken: Iterable[Taken]) -> dict[str, float]:
    """Count what was late and what was given up, over rounds and processes."""
    parts = list(taken)
    return {
        "groups/late": float(sum(part.late for part in parts)),
        "groups/cut": float(sum(part.cut for part in parts)),
        "groups/cut_episodes": float(sum(part.unfinished for part in parts)),
    }


class Rounds:
    """The rounds of this process.

    Args:
        sampler: Samples with what the learner has pushed last.
        player: Plays a round.
        config: How far ahead, and what is not waited for.
    """

    def __init__(
        self, sampler: LocalSampler | SglangSampler, player: Player, config: RolloutConfig
    ) -> None:
        self._sampler, self._player, self._config = sampler, player, config
        self._open: dict[int, _Round] = {}

    def begin(self, numbers: Iterable[int], *, version: int) -> None:
        """Begin those rounds that are not under way, if any are played ahead.

        Args:
            numbers: Rounds before each; decides its examples.
            version: Of the weights that are sampled with now.
        """
        sampler = self._sampler
        if not self._config.is_ahead or isinstance(sampler, LocalSampler):
            return
        for number in numbers:
            if number not in self._open:
                found = self._open[number] = _Round(number, version, self._player)
                found.start(sampler.apart())

    def take(
        self,
        number: int,
        *,
        version: int,
        is_last: bool,
        watch: Stopwatch,
        has_records: bool = True,
    ) -> Taken:
        """Give the groups of a round, and those of earlier ones that were late.

        Args:
            number: Of the round; it has begun, or is played now.
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
        # Whether the step is sampled is known only now.
        kept = partial(_without_records, has_records=has_records)
        groups = kept(current.taken())
        late = [group for n, one in begun.items() if n < number for group in kept(one.taken())]
        oldest = -1 if is_last else config.oldest
        old = [one for one in begun.values() if version + 1 - one.version > oldest]
        cut = [one.cut() for one in old]
        self._open = {
            n: one for n, one in self._open.items() if not one.is_empty and one not in old
        }
        return Taken(
            late + groups, len(late), sum(one for one, _ in cut), sum(one for _, one in cut)
        )

    def close(self) -> None:
        """Give up what is under way."""
        for one in self._open.values():
            one.cut()
        for one in self._open.values():
            one.join()
        self._open = {}

    def _play(self, number: int, watch: Stopwatch, *, has_records: bool) -> Taken:
        with watch.phase("rollout"):
            groups = [group for group in self._player.play(self._sampler, number) if group]
        with watch.phase("score"):
            judged = partial(self._player.judged, has_record=has_records)
            return Taken([judged(group) for group in groups])


def _without_records(
    groups: list[list[Trajectory]], *, has_records: bool
) -> list[list[Trajectory]]:
    """Leave records out where they are not wanted: processes exchange what is taken."""
    if has_records:
        return groups
    return [
        [replace(one, episode=replace(one.episode, record=None)) for one in group]
        for group in groups
    ]


class _CutError(Exception):
    """A round is given up."""


@dataclass(eq=False)
class _Round:
    """A round in a thread of its own.

    Attributes:
        number: Rounds before it.
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
    _is_cut: bool = False
    _unfinished: int = 0

    def __post_init__(self) -> None:
        self._changed = Condition()
        self._began = perf_counter()
        self.left = len(self.player.share)

    def start(self, sampler: Sampler) -> None:
        """Begin to play."""
        name = f"round {self.number}"
        self._thread = Thread(target=self._play, args=(sampler,), name=name, daemon=True)
        self._thread.start()

    def wait(self, slow: int) -> None:
        """Wait until all groups but so many are done.

        Raises:
            BaseException: What ended the round.
        """
        with self._changed:
            while self._error is None and len(self._ready) < self.left - slow:
                self._changed.wait(preemption.POLL_S)
                preemption.check()
        self.seconds = perf_counter() - self._began

    def taken(self) -> list[list[Trajectory]]:
        """Return the groups that have been done since this was last asked; none is empty.

        Raises:
            BaseException: What ended the round.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            found, self._ready = self._ready, {}
            self.left -= len(found)
        return [found[place] for place in sorted(found) if found[place]]

    @property
    def is_empty(self) -> bool:
        """Tell whether all has been taken."""
        return not self.left

    def cut(self) -> tuple[int, int]:
        """Give up the rest; return how many groups and how many episodes under way that is."""
        with self._changed:
            self._is_cut = True
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
        except _CutError:
            return
        except BaseException as error:  # noqa: BLE001 - raised where the round is wanted
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _score(self, place: int, group: list[Trajectory]) -> None:
        judged = self.player.judged(group, has_record=True)
        with self._changed:
            self._ready[place] = judged
            self._changed.notify_all()

    def _note(self, ended: int, total: int) -> None:
        self._unfinished = total - ended

    def _check(self) -> None:
        if self._is_cut:
            raise _CutError
