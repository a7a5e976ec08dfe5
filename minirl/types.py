"""The learner's records and protocols, and the key of the shape suffixes.

Suffixes of array names, one letter an axis:
    N groups (prompts)    G trajectories a group        B rows (N x G flattened)
    P prompt positions    C positions after the prompt  T positions in general
    S sampler slots       L cache positions, keys       V vocabulary
    D width               F feed-forward width          E size of one head
    H query heads         K key/value heads
    W steps of a decode run               I, O inputs, outputs of a matrix; R their rank
    Q tokens of a chunk
In attention:
    X flat lists, or any rows             R cells of the rows of a flat list
    Y heads K of all rows X               Q queries of a head K: of its query heads, at all T
    M queries that a kernel takes at once, or of all rows of a prompt; C of a kernel, blocks of M
In linear attention:
    K key heads, H value heads            E, U size of a key, of a value; W taps of the convolution
    Z chunks, C tokens of a chunk
"""

# ruff: noqa: D102 - the docstring of a protocol says what its properties are
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from minirl.exchange import Message

Finish = Literal["stop", "length"]
Progress = Callable[[int, int, str], None]
"""Called with (done, how many there are in all, a line on how it goes)."""


class Tokenizer(Protocol):
    """A tokenizer with a chat template; `stop_ids` end a reply, `pad_id` fills rows."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    @property
    def pad_id(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Encode plain text."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Encode the first observation, up to the start of the reply."""

    def encode_next(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """Encode what follows a reply; `closed` if that ended with a stop token."""

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids."""


class Environment(Protocol):
    """An environment; the learner does not look into its episodes."""

    def reset(self, example: Any) -> tuple[Any, Sequence[Message]]:
        """Start an episode: return its state and the first observation."""

    def step(self, episode: Any, reply: str) -> tuple[Any, Sequence[Message] | None]:
        """Judge a reply: return the new state and the next observation, None at the end."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy sampled in one turn.

    Attributes:
        ids: With the stop token, if `finish` is `stop` and not the end of the budget.
        logprobs: Natural-log probability of each id under softmax(logits / temperature), before
            any top-p cut; at temperature 1 where sampling was greedy.
        text: The decoded ids without the stop token.
        versions: Version of the weights that sampled each id.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: Finish
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """An observation, as ids, and the reply to it."""

    observation_ids: tuple[int, ...]
    reply: Reply


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one episode, at least one; the environment's own final state, or what
    `Rollout.finish` made of it, opaque here; and whether the environment ended it, or the token
    budget.
    """

    turns: tuple[Turn, ...]
    episode: Any
    ended: Literal["done", "budget"]

    @property
    def is_cut_off(self) -> bool:
        """Return whether a token limit cut the last reply, or left no room for the next."""
        return self.ended == "budget" or self.turns[-1].reply.finish == "length"

    @property
    def versions(self) -> list[int]:
        """Return the version of the weights that sampled each id."""
        return [version for turn in self.turns for version in turn.reply.versions]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A trajectory as arrays over its tokens, from `sample.rollout.flatten` to the batch.

    Attributes:
        ids: The prompt first, in the order in which they were sent and sampled.
        is_action: The action mask: True on the ids that are trained on.
        logprobs: Log-probability under the sampler where `is_action`, else 0.
        advantage: One number for the whole row, or one for each id.
        prompt_length: Number of ids that the group shares.
        old_logprobs: Log-probability under the learner before the step's first update; None before
            it is known.
    """

    ids: np.ndarray
    is_action: np.ndarray
    logprobs: np.ndarray
    advantage: float | np.ndarray
    prompt_length: int
    old_logprobs: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one reply, of at least one token, in an episode of this number.

    The ids are all of the episode so far; a later request extends an earlier one. Tokens are drawn
    as `sampler.temperature` and `sampler.top_p` say.
    """

    episode: int
    ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


class Sampler(Protocol):
    """A sampler, native or behind HTTP."""

    @property
    def is_repeatable(self) -> bool:
        """Return whether the same requests always give the same replies in the same order."""

    def set_weights(self, weights: Any, *, version: int) -> None:
        """Sample with these weights from now on; tokens carry the version.

        All processes have to call it.
        """

    def send_weights(self, weights: Any, *, version: int) -> None:
        """Begin what `set_weights` will end, where that is done beside the learner."""

    def free_memory(self) -> None:
        """Give back what is needed only to sample; `set_weights` takes it again."""

    def numbers(self) -> dict[str, float]:
        """Return metrics of what happened since this was last asked, or weights were set."""

    def apart(self) -> Sampler:
        """Return another sampler with the same weights, for another thread; NotImplementedError
        where one thread uses the devices.
        """

    def submit(self, request: Request) -> None:
        """Ask for a reply; return at once."""

    def advance(self, *, max_steps: int) -> list[tuple[int, Reply]]:
        """Work until a reply ends, or for this many tokens each; return (episode, reply) pairs."""

    def wake(self) -> None:
        """Let a waiting `advance` return; may be called from any thread."""

    def release(self, episode: int) -> None:
        """Forget an episode and free its slot."""
