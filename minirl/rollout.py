"""Play episodes: observations in, replies out, tokens only ever appended.

The only place that says which tokens the policy wrote (`flatten`). History is never rendered nor
encoded again: templates drop earlier thinking, and encoding anew moves token borders.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from minirl import preemption
from minirl.config import SamplerConfig
from minirl.types import (
    Decoding,
    Environment,
    Message,
    Reply,
    Request,
    Sampler,
    Tokenizer,
    Trajectory,
    Turn,
)

# Steps that the others decode while environments work on the replies that just ended: few, because
# the slots of those replies wait as long. A count and no clock, so that a run can be repeated.
_STEPS_BESIDE_ENVIRONMENTS = 4
_STEPS = 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Flat:
    """A trajectory as arrays over all its tokens, the prompt first.

    Attributes:
        ids: Token ids in the order in which they were sent and sampled.
        is_action: True exactly on the ids that the policy sampled, stop tokens included.
        logprobs: Log-probability under the sampler where `is_action`, else 0.
        versions: Weight version that sampled the token where `is_action`, else -1.
        prompt_length: Ids of the first observation, which the group shares.
    """

    ids: np.ndarray
    is_action: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    prompt_length: int


def flatten(trajectory: Trajectory) -> Flat:
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
    return Flat(
        np.array(ids, np.int32),
        np.array(is_action, bool),
        np.array(logprobs, np.float32),
        np.array(versions, np.int32),
        len(trajectory.turns[0].observation_ids),
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
    env_workers: int = 8,
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
    with ThreadPoolExecutor(env_workers, thread_name_prefix="environment") as pool:
        groups = _reset(tokenizer, environment, examples, pool, config, group_size, first_episode)
        episodes = {episode.number: episode for group in groups for episode in group}
        left = Counter({place: len(group) for place, group in enumerate(groups)})

        def note(episode: _Episode) -> None:
            place = (episode.number - first_episode) // group_size
            left[place] -= 1
            if progress is not None:
                progress(len(episodes) - left.total(), len(episodes))
            if ended is not None and not left[place]:
                ended(place, [episode.trajectory() for episode in groups[place]])

        for place, group in enumerate(groups):
            if ended is not None and not group:
                ended(place, [])
        try:
            for episode in episodes.values():
                sampler.submit(limits.request(episode))
            _play(sampler, tokenizer, environment, episodes, pool, limits, note, check)
        finally:
            # After an error the sampler must not keep what nobody will ask for.
            for episode in episodes.values():
                if episode.ended is None:
                    sampler.release(episode.number)
    return [[episode.trajectory() for episode in group] for group in groups]


def _reset(
    tokenizer: Tokenizer,
    environment: Environment,
    examples: Sequence[Any],
    pool: ThreadPoolExecutor,
    config: SamplerConfig,
    group_size: int,
    first_episode: int,
) -> list[list[_Episode]]:
    """Start all episodes; a prompt is encoded once for a group that is shown the same."""
    # A group's members one after the other: the first one's prompt is then there for the others.
    rounds = [
        [pool.submit(environment.reset, example) for example in examples] for _ in range(group_size)
    ]
    starts = list(zip(*rounds, strict=True))
    groups: list[list[_Episode]] = []
    too_long: list[tuple[int, Any]] = []
    for n, group_starts in enumerate(starts):
        encoded: tuple[Sequence[Message], list[int]] | None = None
        group = []
        for g, start in enumerate(group_starts):
            state, messages = start.result()
            if encoded is None or encoded[0] != messages:
                encoded = (messages, tokenizer.encode_chat(messages))
            ids = encoded[1]
            number = first_episode + n * group_size + g
            group.append(_Episode(number, state, list(ids), list(ids), len(ids)))
        longest = max(episode.prompt_length for episode in group)
        if longest > config.max_prompt_tokens:
            too_long.append((longest, examples[n]))
            group = []
        groups.append(group)
    if too_long:
        _log.warning(
            "%d of %d examples are left out: their prompts are over sampler.max_prompt_tokens = %d "
            "(the first has %d tokens: %.200r)",
            len(too_long), len(examples), config.max_prompt_tokens, *too_long[0],
        )  # fmt: skip
    return groups


def _play(
    sampler: Sampler,
    tokenizer: Tokenizer,
    environment: Environment,
    episodes: dict[int, _Episode],
    pool: ThreadPoolExecutor,
    limits: _Limits,
    note: Callable[[_Episode], None],
    check: Callable[[], None],
) -> None:
    """Sample and step until every episode ended.

    Environments work while the sampler goes on with other episodes. Where its replies can be
    repeated, results are awaited after its next run, in the order of the replies, so that time has
    no say in the schedule; else each is taken when it is there, and delays nobody.
    """
    judged: list[tuple[_Episode, Future[Any]]] = []
    ended = 0
    while ended < len(episodes):
        check()
        replies = sampler.advance(max_steps=_STEPS_BESIDE_ENVIRONMENTS if judged else _STEPS)
        ready, judged = _ready(judged, wait=sampler.is_repeatable)
        for episode, result in ready:
            _observe(sampler, tokenizer, episode, result.result(), limits)
            if episode.ended is not None:
                ended += 1
                note(episode)
        for number, reply in replies:
            episode = episodes[number]
            _append(episode, reply)
            if limits.is_last(episode):
                sampler.release(number)
            result = pool.submit(environment.step, episode.state, reply.text)
            result.add_done_callback(lambda _: sampler.wake())
            judged.append((episode, result))


def _ready(
    judged: list[tuple[_Episode, Future[Any]]], *, wait: bool
) -> tuple[list[tuple[_Episode, Future[Any]]], list[tuple[_Episode, Future[Any]]]]:
    """Part results that are taken now from those that are awaited later."""
    if wait:
        return judged, []
    ready, later = [], []
    for pair in judged:
        (ready if pair[1].done() else later).append(pair)
    return ready, later


def _append(episode: _Episode, reply: Reply) -> None:
    episode.turns.append(Turn(tuple(episode.observation), reply))
    episode.ids += reply.ids


def _observe(
    sampler: Sampler,
    tokenizer: Tokenizer,
    episode: _Episode,
    result: tuple[Any, Sequence[Message] | None],
    limits: _Limits,
) -> None:
    """Take the environment's answer in: the episode ends, or asks for its next reply."""
    episode.state, messages = result
    is_last = limits.is_last(episode)
    if messages is None:
        episode.ended = "done"
    elif len(episode.turns) == limits.max_turns:
        raise RuntimeError(f"the environment goes on after max_turns = {limits.max_turns}")
    else:
        closed = episode.turns[-1].reply.finish == "stop"
        observation = tokenizer.encode_next(messages, closed=closed)
        if len(observation) + 1 > limits.room(episode):
            episode.ended = "budget"
        else:
            episode.observation = observation
            episode.ids += observation
            sampler.submit(limits.request(episode))
    if episode.ended is not None and not is_last:
        sampler.release(episode.number)
