"""What a step of training is summed up to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from minirl.config import SamplerConfig
from minirl.run.metrics import Stopwatch
from minirl.sample.rollout import flatten
from minirl.sample.sampler import TOP_P_CUT
from minirl.types import Score, Trajectory

Groups = Sequence[Sequence[Trajectory]]
Scores = Sequence[Sequence[Score]]
# From a final episode to numbers for the metrics.
Describe = Callable[[Any], Mapping[str, float]]


def summarise(groups: Groups, scores: Scores, describe: Describe) -> dict[str, float]:
    """Average rewards, their parts and what the task says of every episode.

    A number that only some episodes have is averaged over these.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    trajectories = [trajectory for group in groups for trajectory in group]
    flat_scores = [score for group in scores for score in group]
    for trajectory, score in zip(trajectories, flat_scores, strict=True):
        lengths = [len(turn.reply.ids) for turn in trajectory.turns]
        numbers = {
            "reward/total": score.total,
            "rollout/accuracy": float(score.correct),
            "rollout/turns": len(lengths),
            "rollout/response_tokens": sum(lengths),
            "rollout/reply_tokens": sum(lengths) / len(lengths),
            "rollout/cut_share": float(trajectory.turns[-1].reply.finish == "length"),
        }
        numbers |= {f"reward/{name}": value for name, value in score.parts.items()}
        for name, value in (numbers | dict(describe(trajectory.episode))).items():
            sums[name] += value
            counts[name] += 1
    equal = [np.ptp([score.total for score in group]) == 0 for group in scores]
    means = {name: value / counts[name] for name, value in sums.items()}
    return means | {"groups/equal_share": float(np.mean(equal)) if equal else 0.0}


def ages(groups: Groups, version: int) -> dict[str, float]:
    """Return by how many steps the weights that sampled tokens are older than these.

    Args:
        groups: What is trained on.
        version: Of the weights that the step began with.
    """
    versions = [
        v for group in groups for t in group for turn in t.turns for v in turn.reply.versions
    ]
    if not versions:
        return {}
    age = version - np.array(versions)
    return {"rollout/age_mean": float(age.mean()), "rollout/age_max": float(age.max())}


def over_updates(name: str, values: Sequence[float]) -> float:
    """Return the mean of a statistic over the updates of a step; of a `_max` the largest, of
    `skipped` the number.
    """
    if name == "skipped":
        return sum(values)
    if name.endswith("_max"):
        return max(values)
    return sum(values) / len(values)


def speeds(groups: Groups, trained_on: Groups, watch: Stopwatch) -> dict[str, float]:
    """Return seconds of each phase and tokens a second; update tokens count each prompt once.

    Args:
        groups: What was sampled.
        trained_on: Those of them that the filters left for the update.
        watch: The seconds; `rollout` is what the learner waited, `round` what the last round took
            where that is something else.
    """
    sampled = sum(len(turn.reply.ids) for group in groups for t in group for turn in t.turns)
    trained = sum(
        len(flatten(t).ids) - (len(group[0].turns[0].observation_ids) if i else 0)
        for group in trained_on
        for i, t in enumerate(group)
    )
    return watch.numbers() | {
        "time/rollout_tokens_per_s": sampled / watch.seconds.get("round", watch.seconds["rollout"]),
        "time/update_tokens_per_s": trained / watch.seconds["update"],
    }


def nucleus_words(config: SamplerConfig, told: Mapping[str, float]) -> str:
    """Say in a line what `top_p` does to the importance ratio.

    Args:
        config: With `top_p` below 1.
        told: What the sampler tells of a step.
    """
    share = f"{told[TOP_P_CUT]:.2%}" if TOP_P_CUT in told else "an unknown part (SGLang tells none)"
    words = f"sampler.top_p={config.top_p:g} keeps {share} of the probability from being drawn"
    if config.logprobs == "nucleus":
        return f"{words}; the ratio is that of what is drawn from"
    return (
        f"{words}, and the ratio is that of the whole distribution: the gradient is not quite that "
        "of the policy which sampled (sampler.logprobs=nucleus makes it so)"
    )


def status(numbers: Mapping[str, float]) -> str:
    """Say in a line how a step went."""
    if "reward/total" not in numbers:
        return "no episode: every prompt is over sampler.max_prompt_tokens"
    return (
        f"reward {numbers['reward/total']:.2f}, accuracy {numbers['rollout/accuracy']:.2f}, "
        f"turns {numbers['rollout/turns']:.1f}"
    )
