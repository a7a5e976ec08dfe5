"""Play episodes: observations in, replies out, tokens only ever appended.

The only place that says which tokens the policy wrote (`flatten`). History is never rendered nor
encoded again: templates drop earlier thinking, and encoding anew moves token borders.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from minirl.config import SamplerConfig
from minirl.run import preemption
from minirl.types import (
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

# Tokens decoded while environments work on replies that ended: few, because the slots of those
# replies idle meanwhile. A count and no clock, so that a run can be repeated.
_STEPS_BESIDE_ENVIRONMENTS = 4
# Else a slot that ends idles for at most this share of the longest reply.
_IDLE_SHARE = 1 / 8
_MOST_STEPS = 32

# Marks of a thought in chat templates, and in how many ids a prompt's last one is.
_OPENED, _CLOSED, _MARK_IDS = "<think>", "</think>", 8

_log = logging.getLogger(__name__)


def flatten(trajectory: Trajectory) -> TokenRow:
    """Lay a trajectory out token by token; the one place where the action mask is made.

    Observations, the glue of the chat template among them, are not actions (papers' loss mask).
    """
    ids: list[int] = []
    is_action: list[bool] = []
    logprobs: list[float] = []
    for turn in trajectory.turns:
        observed, sampled = len(turn.observation_ids), len(turn.reply.ids)
        ids += [*turn.observation_ids, *turn.reply.ids]
        is_action += [False] * observed + [True] * sampled
        logprobs += [*([0.0] * observed), *turn.reply.logprobs]
    return TokenRow(
        ids=np.array(ids, np.int32),
        is_action=np.array(is_action, bool),
        logprobs=np.array(logprobs, np.float32),
        advantage=0.0,
        prompt_length=len(trajectory.turns[0].observation_ids),
    )


@dataclass(slots=True)
class _Play:
    """An episode being played, of the example `n`; `ended` is None until it is over."""

    n: int
    number: int
    state: Any
    observation: list[int]
    ids: list[int]
    prompt_length: int
    turns: list[Turn] = field(default_factory=list)
    ended: Literal["done", "budget", "failed"] | None = None

    def trajectory(self) -> Trajectory:
        assert self.ended in ("done", "budget")
        return Trajectory(tuple(self.turns), self.state, self.ended)


class _Call(NamedTuple):
    """A call in a thread: of which example, what the rollout's own thread does with its result,
    and whether the sampler idles meanwhile, for something is asked of it afterwards.
    """

    n: int
    then: Callable[[Any], None]
    future: Future[Any]
    idles: bool


@dataclass
class Rollout:
    """The episodes of examples, `group_size` of each: reset, sample, step, observe, to the end.

    Environments are called in threads. Where the sampler is repeatable, their results are awaited
    in the order of the calls, so that the schedule is deterministic; else each is taken when it is
    there, and a slow one delays no other.

    Attributes:
        sampler: Draws the replies.
        tokenizer: Encodes each observation once.
        environment: Called from several threads at a time, but never twice for one episode.
        examples: What episodes start from, opaque here.
        config: Token limits, and how tokens are drawn.
        first_episode: Number of the first episode, the others count on from it. Numbers decide
            the random streams: do not use one twice in a run.
        max_turns: The most replies that an episode can take, if known: the slot of a last reply
            is then free before the environment has judged it.
        env_workers: Threads that wait for environments.
        failed: Called with (index, error) when an environment has failed: the example's group is
            dropped, and the rollout goes on unless this raises. None to raise the error.
        finish: Called in a thread too, with the state of an episode that is over: what it returns
            is the trajectory's `episode`, and if it fails, the environment has. None to keep the
            state.
        check: Called now and then; the rollout ends with what it raises.
    """

    sampler: Sampler
    tokenizer: Tokenizer
    environment: Environment
    examples: Sequence[Any]
    _: KW_ONLY
    config: SamplerConfig
    group_size: int
    first_episode: int
    max_turns: int | None = None
    env_workers: int = 32
    failed: Callable[[int, Exception], None] | None = None
    finish: Callable[[Any], Any] | None = None
    check: Callable[[], None] = preemption.check

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.env_workers, thread_name_prefix="environment")
        # By example, once its environments are reset; empty where the prompt is too long, or an
        # environment has failed.
        self._groups: dict[int, list[_Play]] = {}
        self._episodes: dict[int, _Play] = {}
        self._too_long: list[tuple[int, Any]] = []
        self._calls: list[_Call] = []  # of which nothing has been taken yet, in order

    def play(self) -> list[list[Trajectory]]:
        """Play all episodes.

        Returns:
            Groups in the order of the examples. A group is empty where the first observation is
            longer than `config.max_prompt_tokens`: a warning counts them, and the run continues;
            and where an environment has failed.

        Raises:
            Preempted: A signal came; the episodes are lost, and the sampler is free.
        """
        try:
            self._play()
        finally:
            # After an error the sampler must not keep what nobody will ask for.
            for episode in self._episodes.values():
                if episode.ended is None:
                    self.sampler.release(episode.number)
            self._pool.shutdown(cancel_futures=True)
        if self._too_long:
            _log.warning(
                "%d of %d examples were not played: their prompts are over max_prompt_tokens = %d "
                "(the first has %d tokens: %.200r)",
                len(self._too_long), len(self.examples), self.config.max_prompt_tokens,
                *self._too_long[0],
            )  # fmt: skip
        groups = (self._groups[n] for n in range(len(self.examples)))
        return [[episode.trajectory() for episode in group] for group in groups]

    def _play(self) -> None:
        """Reset all environments, then sample and step until every episode has ended."""
        for n, example in enumerate(self.examples):
            self._call(n, partial(self._begin, n), self._reset, example, idles=True)
        self._take_results()
        few, longest = _STEPS_BESIDE_ENVIRONMENTS, self._longest_reply
        steps = max(few, min(_MOST_STEPS, int(longest * _IDLE_SHARE)))
        while self._calls or any(one.ended is None for one in self._episodes.values()):
            self.check()
            idles = any(call.idles for call in self._calls)
            replies = self.sampler.advance(max_steps=few if idles else steps)
            self._take_results()
            for number, reply in replies:
                if self._episodes[number].ended is None:  # and its group not dropped since
                    self._step(self._episodes[number], reply)

    def _call(
        self,
        n: int,
        then: Callable[[Any], None],
        function: Callable[..., Any],
        *given: Any,
        idles: bool = False,
    ) -> None:
        """Call a function for an example in a thread; `then` gets what it returns."""
        future = self._pool.submit(function, *given)
        self._calls.append(_Call(n, then, future, idles))
        future.add_done_callback(lambda _done: self.sampler.wake())

    def _take_results(self) -> None:
        """Continue with what was returned; where the sampler is repeatable, wait for all of it."""
        calls, self._calls = self._calls, []
        for call in calls:
            if not self.sampler.is_repeatable and not call.future.done():
                self._calls.append(call)
                continue
            if call.n in self._groups and not self._groups[call.n]:  # dropped since
                continue
            error = call.future.exception()
            if self.failed is not None and isinstance(error, Exception):
                self.failed(call.n, error)
                self._drop(call.n)
            else:  # raises an error for which no group may be dropped
                call.then(call.future.result())

    def _drop(self, n: int) -> None:
        """Drop the group of an environment that has failed."""
        for episode in self._groups.pop(n, []):
            if episode.ended is None:
                episode.ended = "failed"
                self.sampler.release(episode.number)
        self._groups[n] = []

    def _reset(self, example: Any) -> list[tuple[Any, Sequence[Message]]]:
        """Reset a group's environments one after the other: a prompt is made once for all."""
        return [self.environment.reset(example) for _ in range(self.group_size)]

    def _begin(self, n: int, resets: list[tuple[Any, Sequence[Message]]]) -> None:
        """Ask for a group's first replies; a prompt is encoded once for all that are shown it."""
        shown: Sequence[Message] = ()
        ids: list[int] = []
        group = []
        for number, (state, messages) in enumerate(
            resets, self.first_episode + n * self.group_size
        ):
            if not ids or shown != messages:
                shown, ids = messages, self.tokenizer.encode_chat(messages)
            group.append(_Play(n, number, state, list(ids), list(ids), len(ids)))
        longest = max(episode.prompt_length for episode in group)
        if longest > self.config.max_prompt_tokens:
            self._too_long.append((longest, self.examples[n]))
            group = []
        self._groups[n] = group
        for episode in group:
            self._episodes[episode.number] = episode
            self._ask(episode)

    @property
    def _longest_reply(self) -> int:
        return self.config.max_reply_tokens or self.config.max_response_tokens

    def _room(self, episode: _Play) -> int:
        """Return how many tokens the episode may still take."""
        return self.config.max_response_tokens - (len(episode.ids) - episode.prompt_length)

    def _is_last(self, episode: _Play) -> bool:
        """Tell, before the environment does, that no turn can follow: no room for an observation
        and a token, or no turn left.
        """
        return self._room(episode) < 2 or len(episode.turns) == self.max_turns

    def _ask(self, episode: _Play) -> None:
        """Ask for the next reply."""
        limit = min(self._longest_reply, self._room(episode))
        how = self.config.temperature, self.config.top_p
        self.sampler.submit(Request(episode.number, tuple(episode.ids), limit, *how))

    def _step(self, episode: _Play, reply: Reply) -> None:
        """Append a reply and let the environment judge it."""
        if reply.finish == "length" and _CLOSED not in reply.text and self._is_thinking(episode):
            reply = replace(reply, text=f"{_OPENED}\n{reply.text}")
        episode.turns.append(Turn(tuple(episode.observation), reply))
        episode.ids += reply.ids
        if is_last := self._is_last(episode):
            self.sampler.release(episode.number)
        step, then = self.environment.step, partial(self._observe, episode)
        self._call(episode.n, then, step, episode.state, reply.text, idles=not is_last)

    def _is_thinking(self, episode: _Play) -> bool:
        """Tell whether the prompt has opened a thought."""
        return self.tokenizer.decode(episode.ids[-_MARK_IDS:]).rstrip().endswith(_OPENED)

    def _observe(self, episode: _Play, result: tuple[Any, Sequence[Message] | None]) -> None:
        """Append the environment's observation and ask for the next reply, or end the episode."""
        episode.state, messages = result
        was_last = self._is_last(episode)
        if messages is None:
            episode.ended = "done"
        elif len(episode.turns) == self.max_turns:
            raise RuntimeError(f"the environment goes on after max_turns = {self.max_turns}")
        else:
            closed = episode.turns[-1].reply.finish == "stop"
            observation = self.tokenizer.encode_next(messages, closed=closed)
            if len(observation) + 1 > self._room(episode):
                episode.ended = "budget"
            else:
                episode.observation = observation
                episode.ids += observation
                self._ask(episode)
        if episode.ended is not None:
            if not was_last:
                self.sampler.release(episode.number)
            if self.finish is not None:
                keep = partial(setattr, episode, "state")
                self._call(episode.n, keep, self.finish, episode.state)
