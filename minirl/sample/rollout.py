"""Play episodes: observations in, replies out, tokens only ever appended.

The only place that says which tokens the policy wrote (`flatten`). History is never rendered nor
encoded again: templates drop earlier thinking, and encoding anew moves token borders.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Literal

import numpy as np

from minirl.config import SamplerConfig
from minirl.run import preemption
from minirl.types import (
    Decoding,
    Environment,
    Message,
    Reply,
    Request,
    Sampler,
    Tokenizer,
    TokenRow,
    Trajectory,
    Turn,
)

# Steps that the others decode while environments work on the replies that just ended: few, because
# the slots of those replies wait as long. A count and no clock, so that a run can be repeated.
_STEPS_BESIDE_ENVIRONMENTS = 4
_STEPS = 32

_log = logging.getLogger(__name__)


def flatten(trajectory: Trajectory) -> TokenRow:
    """Lay a trajectory out token by token; the one place where the action mask is made.

    Observations, the glue of the chat template among them, are not actions (papers' loss mask).
    """
    ids: list[int] = []
    is_action: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in trajectory.turns:
        observed, sampled = len(turn.observation_ids), len(turn.reply.ids)
        ids += [*turn.observation_ids, *turn.reply.ids]
        is_action += [False] * observed + [True] * sampled
        logprobs += [*([0.0] * observed), *turn.reply.logprobs]
        versions += [*([-1] * observed), *turn.reply.versions]
    return TokenRow(
        ids=np.array(ids, np.int32),
        is_action=np.array(is_action, bool),
        logprobs=np.array(logprobs, np.float32),
        advantage=0.0,
        prompt_length=len(trajectory.turns[0].observation_ids),
        versions=np.array(versions, np.int32),
    )


@dataclass(slots=True)
class _Episode:
    """An episode being played; `ended` is None until it is over."""

    number: int
    state: Any
    observation: list[int]
    ids: list[int]
    prompt_length: int
    turns: list[Turn] = field(default_factory=list)
    ended: Literal["done", "budget"] | None = None

    def trajectory(self) -> Trajectory:
        assert self.ended is not None
        return Trajectory(tuple(self.turns), self.state, self.ended)


@dataclass(frozen=True, slots=True)
class _Limits:
    config: SamplerConfig
    decoding: Decoding
    max_turns: int | None

    def room(self, episode: _Episode) -> int:
        """Return how many tokens the episode may still take."""
        return self.config.max_response_tokens - (len(episode.ids) - episode.prompt_length)

    def is_last(self, episode: _Episode) -> bool:
        """Tell, before the environment does, that no turn can follow: no room for an observation
        and a token, or no turn left.
        """
        return self.room(episode) < 2 or len(episode.turns) == self.max_turns

    def request(self, episode: _Episode) -> Request:
        longest = self.config.max_reply_tokens or self.config.max_response_tokens
        max_tokens = min(longest, self.room(episode))
        return Request(episode.number, tuple(episode.ids), max_tokens, self.decoding)


def rollout(
    sampler: Sampler,
    tokenizer: Tokenizer,
    environment: Environment,
    examples: Sequence[Any],
    *,
    config: SamplerConfig,
    group_size: int,
    first_episode: int,
    decoding: Decoding | None = None,
    max_turns: int | None = None,
    env_workers: int = 32,
    progress: Callable[[int, int], None] | None = None,
    ended: Callable[[int, list[Trajectory]], None] | None = None,
    check: Callable[[], None] = preemption.check,
) -> list[list[Trajectory]]:
    """Play `group_size` episodes of every example.

    Args:
        sampler: Draws the replies.
        tokenizer: Encodes each observation once.
        environment: Called from several threads at a time, but never twice for one episode.
        examples: What episodes start from, opaque here.
        config: Token limits, and how tokens are drawn where `decoding` does not say.
        group_size: Episodes of an example (G).
        first_episode: Number of the first episode, the others count on from it. Numbers decide
            the random streams: do not use one twice in a run.
        decoding: How tokens are drawn, in place of the configuration's.
        max_turns: The most replies that an episode can take, if known: the place of a last reply
            is then free before the environment has judged it.
        env_workers: Threads that wait for environments.
        progress: Called with (episodes ended, episodes in all).
        ended: Called with (place, group) when all episodes of an example have ended; at once and
            with none where it is left out.
        check: Called now and then; the rollout ends with what it raises.

    Returns:
        Groups in the order of the examples. A group is empty where the first observation is longer
        than `config.max_prompt_tokens`: a warning counts them, and the run goes on.

    Raises:
        Preempted: A signal came; the episodes are lost, and the sampler is free.
    """
    limits = _Limits(config, decoding or Decoding(config.temperature, config.top_p), max_turns)
    pool = ThreadPoolExecutor(env_workers, thread_name_prefix="environment")
    work = _Work(sampler, pool)
    played = _Round(
        sampler, tokenizer, environment, work, limits, examples, group_size, first_episode, ended
    )
    try:
        played.reset()
        played.play(progress, check)
    finally:
        # After an error the sampler must not keep what nobody will ask for.
        for episode in played.episodes.values():
            if episode.ended is None:
                sampler.release(episode.number)
        pool.shutdown(cancel_futures=True)
    return [[episode.trajectory() for episode in group] for group in played.groups]


class _Work:
    """What environments do in threads, and what follows from it in the thread of the rollout.

    Where the sampler's replies can be repeated, results are awaited in the order in which they were
    asked for, so that time has no say in the schedule; else each is taken when it is there, and
    what takes long delays nobody.
    """

    def __init__(self, sampler: Sampler, pool: ThreadPoolExecutor) -> None:
        self._sampler, self._pool = sampler, pool
        self._ended: SimpleQueue[tuple[Callable[[Any], None], Future[Any]]] = SimpleQueue()
        self.awaited: list[tuple[Callable[[Any], None], Future[Any]]] = []

    def begin(self, then: Callable[[Any], None], function: Callable[..., Any], *given: Any) -> None:
        """Call a function in a thread; `then` gets what it returns."""
        future = self._pool.submit(function, *given)
        if self._sampler.is_repeatable:
            self.awaited.append((then, future))
        else:
            future.add_done_callback(lambda ended: self._note(then, ended))

    def take(self) -> bool:
        """Go on with what has ended; tell whether there was any."""
        found, self.awaited = self.awaited, []
        with suppress(Empty):
            while True:
                found.append(self._ended.get_nowait())
        for then, future in found:
            then(future.result())
        return bool(found)

    def _note(self, then: Callable[[Any], None], ended: Future[Any]) -> None:
        if not ended.cancelled():
            self._ended.put((then, ended))
            self._sampler.wake()


class _Round:
    """The episodes of a rollout.

    Attributes:
        groups: Of each example; empty before they begin, and where the prompt is too long.
        episodes: Those that have begun, by number.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Tokenizer,
        environment: Environment,
        work: _Work,
        limits: _Limits,
        examples: Sequence[Any],
        group_size: int,
        first_episode: int,
        ended: Callable[[int, list[Trajectory]], None] | None,
    ) -> None:
        self._sampler, self._tokenizer, self._environment = sampler, tokenizer, environment
        self._work, self._limits, self._examples = work, limits, examples
        self._group_size, self._first_episode, self._tell = group_size, first_episode, ended
        self.groups: list[list[_Episode]] = [[] for _ in examples]
        self.episodes: dict[int, _Episode] = {}
        self._too_long: list[tuple[int, Any]] = []
        self._waiting = len(examples)  # groups that have not begun
        self._ended = 0

    def reset(self) -> None:
        """Start all episodes, each group when it is there."""
        for n, example in enumerate(self._examples):
            self._work.begin(partial(self._begin, n), self._start, example)
        if self._work.awaited:
            self._work.take()

    def play(self, progress: Callable[[int, int], None] | None, check: Callable[[], None]) -> None:
        """Sample and step until every episode ended; environments work meanwhile."""
        work, sampler = self._work, self._sampler
        while self._waiting or self._ended < len(self.episodes):
            check()
            steps = _STEPS_BESIDE_ENVIRONMENTS if work.awaited else _STEPS
            replies = sampler.advance(max_steps=steps)
            if work.take() and progress is not None:
                progress(self._ended, len(self.episodes) + self._waiting * self._group_size)
            for number, reply in replies:
                self._judge(self.episodes[number], reply)

    def _start(self, example: Any) -> list[tuple[Any, Sequence[Message]]]:
        """Start a group, its members one after the other: a prompt is then made once for all."""
        return [self._environment.reset(example) for _ in range(self._group_size)]

    def _begin(self, n: int, starts: list[tuple[Any, Sequence[Message]]]) -> None:
        """Ask for a group's first replies; a prompt is encoded once for all that are shown it."""
        encoded: tuple[Sequence[Message], list[int]] | None = None
        group = []
        first = self._first_episode + n * self._group_size
        for number, (state, messages) in enumerate(starts, first):
            if encoded is None or encoded[0] != messages:
                encoded = (messages, self._tokenizer.encode_chat(messages))
            ids = encoded[1]
            group.append(_Episode(number, state, list(ids), list(ids), len(ids)))
        self._waiting -= 1
        longest = max(episode.prompt_length for episode in group)
        if longest > self._limits.config.max_prompt_tokens:
            self._too_long.append((longest, self._examples[n]))
            group = []
        self.groups[n] = group
        if not group:
            self._note(n)
        for episode in group:
            self.episodes[episode.number] = episode
            self._sampler.submit(self._limits.request(episode))
        if self._too_long and not self._waiting:
            _log.warning(
                "%d of %d examples are left out: their prompts are over sampler.max_prompt_tokens "
                "= %d (the first has %d tokens: %.200r)",
                len(self._too_long), len(self._examples), self._limits.config.max_prompt_tokens,
                *self._too_long[0],
            )  # fmt: skip

    def _judge(self, episode: _Episode, reply: Reply) -> None:
        """Let the environment see a reply."""
        episode.turns.append(Turn(tuple(episode.observation), reply))
        episode.ids += reply.ids
        if self._limits.is_last(episode):
            self._sampler.release(episode.number)
        step = self._environment.step
        self._work.begin(partial(self._observe, episode), step, episode.state, reply.text)

    def _observe(self, episode: _Episode, result: tuple[Any, Sequence[Message] | None]) -> None:
        """Take the environment's answer in: the episode ends, or asks for its next reply."""
        limits = self._limits
        episode.state, messages = result
        is_last = limits.is_last(episode)
        if messages is None:
            episode.ended = "done"
        elif len(episode.turns) == limits.max_turns:
            raise RuntimeError(f"the environment goes on after max_turns = {limits.max_turns}")
        else:
            closed = episode.turns[-1].reply.finish == "stop"
            observation = self._tokenizer.encode_next(messages, closed=closed)
            if len(observation) + 1 > limits.room(episode):
                episode.ended = "budget"
            else:
                episode.observation = observation
                episode.ids += observation
                self._sampler.submit(limits.request(episode))
        if episode.ended is not None:
            self._ended += 1
            if not is_last:
                self._sampler.release(episode.number)
            self._note((episode.number - self._first_episode) // self._group_size)

    def _note(self, n: int) -> None:
        """Tell of a group whose episodes have all ended."""
        group = self.groups[n]
        if self._tell is not None and all(episode.ended for episode in group):
            self._tell(n, [episode.trajectory() for episode in group])
