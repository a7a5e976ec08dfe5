"""The records of the learner, and the one key of its shape suffixes.

Suffixes of array names, one letter an axis:
    N groups (prompts)    G trajectories a group        B rows (N x G flattened)
    P prompt positions    C positions after the prompt  T positions in general
    S sampler slots       L cache positions, keys       V vocabulary
    D width               F feed-forward width          E size of one head
    H query heads         K key/value heads
    W steps of a decode run               X, Q any rows and their queries
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Finish = Literal["stop", "length"]


class Message(Protocol):
    """One chat message of an environment."""

    @property
    def role(self) -> str:
        """Name who speaks: system, user or tool."""
        ...

    @property
    def content(self) -> str:
        """Give the text."""
        ...


class Tokenizer(Protocol):
    """What the learner needs of a tokenizer with a chat template."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Give the tokens that end a reply."""
        ...

    @property
    def pad_id(self) -> int:
        """Give the token to fill rows with."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a text as it is."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Encode the first observation, up to where the reply begins."""
        ...

    def encode_next(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """Encode what comes after a reply; `closed` when that ended with a stop token."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text."""
        ...


class Environment(Protocol):
    """What the learner needs of an environment; episodes are opaque to it."""

    def reset(self, example: Any) -> tuple[Any, Sequence[Message]]:
        """Start an episode: its state and the first observation."""
        ...

    def step(self, episode: Any, reply: str) -> tuple[Any, Sequence[Message] | None]:
        """Judge a reply: the new state, and the next observation, or None when it is over."""
        ...


class CreditSpan(Protocol):
    """Credit for the characters [start, end) of one turn's reply text, counted from 0."""

    @property
    def turn(self) -> int:
        """Give the number of the turn, from 0."""
        ...

    @property
    def start(self) -> int:
        """Give the first character."""
        ...

    @property
    def end(self) -> int:
        """Give the character after the last."""
        ...

    @property
    def value(self) -> float:
        """Give the credit of every token there, dimensionless."""
        ...


class Score(Protocol):
    """What the learner needs of a reward."""

    @property
    def total(self) -> float:
        """Give what the learner maximises."""
        ...

    @property
    def correct(self) -> bool:
        """Tell whether the answer is right, apart from any shaping."""
        ...

    @property
    def parts(self) -> Mapping[str, float]:
        """Give the named summands of `total`."""
        ...

    @property
    def spans(self) -> Sequence[CreditSpan]:
        """Give the credit of parts of replies: clauses, or whole turns; none for all alike."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy sampled in one turn.

    Attributes:
        ids: Sampled token ids, the stop token included.
        logprobs: Natural-log probability of each id under softmax(logits / temperature), before
            any top-p cut; at temperature 1 where sampling was greedy.
        text: The decoded ids without the stop token.
        finish: `stop` when the last id is a stop token, `length` when the budget ran out.
        versions: Version of the weights that sampled each id: weights may change within a reply.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: Finish
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """An observation, as the ids that were appended for it, and the reply to it."""

    observation_ids: tuple[int, ...]
    reply: Reply


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one episode, token by token as sampled.

    Attributes:
        turns: At least one.
        episode: The environment's own final state, opaque here.
        ended: Why it ended: the environment said so, or the token budget was spent.
    """

    turns: tuple[Turn, ...]
    episode: Any
    ended: Literal["done", "budget"]


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens are drawn.

    Attributes:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_p: Draw only from the likeliest tokens that together reach this probability.
    """

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """The wish for one reply.

    Attributes:
        episode: Names the episode, and with the seed its random stream.
        ids: All tokens of the episode so far; a later request extends an earlier one.
        max_tokens: Longest reply, at least 1.
        decoding: How tokens are drawn.
    """

    episode: int
    ids: tuple[int, ...]
    max_tokens: int
    decoding: Decoding


class Sampler(Protocol):
    """What a rollout needs of a sampler, native or behind HTTP."""

    @property
    def is_repeatable(self) -> bool:
        """Tell whether the same requests always have the same replies, in the same order: the
        rollout then takes no notice of time.
        """
        ...

    def set_weights(self, weights: Any, *, version: int) -> None:
        """Sample with these weights from now on; replies carry the version."""
        ...

    def submit(self, request: Request) -> None:
        """Ask for a reply; returns at once."""
        ...

    def advance(self, *, max_steps: int) -> list[tuple[int, Reply]]:
        """Work until a reply ends, or for so many tokens each; give (episode, reply) pairs."""
        ...

    def wake(self) -> None:
        """Let `advance` return where it waits for others; from any thread."""
        ...

    def release(self, episode: int) -> None:
        """Forget an episode; its place is free."""
        ...
