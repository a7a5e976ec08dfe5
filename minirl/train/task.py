"""What there is to learn, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from flax import nnx

from minirl.train.summary import Describe
from minirl.types import Environment, Score


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
    describe: Describe
    record: Callable[[Any], Mapping[str, Any]]
    train: Sequence[Any]
    validate: Callable[[nnx.State, int], float]
    max_turns: int


def examples_of_step(count: int, step: int, *, per_step: int, seed: int) -> list[int]:
    """Return the numbers of a step's examples, from the step (from 0) alone.

    Every example comes once before any comes again; each epoch has an order of its own.
    """

    def order(epoch: int) -> list[int]:
        return Random(f"{seed} examples {epoch}").sample(range(count), count)

    places = range(step * per_step, (step + 1) * per_step)
    orders = {epoch: order(epoch) for epoch in {place // count for place in places}}
    return [orders[place // count][place % count] for place in places]
