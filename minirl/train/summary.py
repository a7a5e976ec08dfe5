"""The metrics of a step of training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from minirl.run.metrics import Stopwatch
from minirl.train.batching import Groups
from minirl.train.rollouts import Episodes

# Of a sequence's mean log-ratio; and of one token's, which would else be the whole KL.
_FAR, _LARGEST_GAP = 0.01, 20.0


def summarise(episodes: Episodes) -> dict[str, float]:
    """Average rewards, their parts and the task's numbers over the episodes that have them."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in episodes.trajectories:
        score = trajectory.episode.score
        lengths = [len(turn.reply.ids) for turn in trajectory.turns]
        numbers = {
            "reward/total": score.total,
            "rollout/accuracy": float(score.correct),
            "rollout/turns": len(lengths),
            "rollout/response_tokens": sum(lengths),
            "rollout/reply_tokens": sum(lengths) / len(lengths),
            "rollout/cut_share": float(trajectory.is_cut_off),
        }
        numbers |= {f"reward/{name}": value for name, value in score.parts.items()}
        for name, value in (numbers | dict(trajectory.episode.numbers)).items():
            values[name].append(value)
    means = {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
    lost = {"groups/too_long": episodes.too_long, "groups/failed": episodes.failed}
    return means | {name: float(count) for name, count in lost.items()}


def ages(trained: Episodes, *, version: int) -> dict[str, float]:
    """Return how far behind a step's weights (`version`) those were that sampled its tokens."""
    versions = [number for trajectory in trained.trajectories for number in trajectory.versions]
    if not versions:
        return {}
    age = version - np.array(versions)
    return {"rollout/age_mean": float(age.mean()), "rollout/age_max": float(age.max())}


def mismatch(rows: Groups) -> dict[str, float]:
    """Describe d = log p(learner) - log p(sampler) of all sampled tokens of a step's rows.

    Returns:
        The mean, 99th percentile and largest of |d|; the estimate of KL(sampler || learner), the
        mean of e^d - 1 - d, in nats a token; and the share of sequences of which the mean of d is
        more than 0.01 from 0: their probabilities are off by a hundredth a token.
    """
    gaps = [
        (row.old_logprobs - row.logprobs)[row.is_action]
        for group in rows
        for row in group
        if row.is_action.any() and row.old_logprobs is not None
    ]
    if not gaps:
        return {}
    gap = np.concatenate(gaps).astype(np.float64)
    size = np.abs(gap)
    return {
        "mismatch/gap_mean": float(size.mean()),
        "mismatch/gap_p99": float(np.percentile(size, 99)),
        "mismatch/gap_max": float(size.max()),
        "mismatch/kl": float(np.mean(np.expm1(np.minimum(gap, _LARGEST_GAP)) - gap)),
        "mismatch/far_share": float(np.mean([abs(gap.mean()) > _FAR for gap in gaps])),
    }


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each statistic over the updates of a step; skips add up."""
    numbers = {}
    for name in updates[0] if updates else ():
        values = [update[name] for update in updates]
        join = sum if name == "skipped" else np.mean
        numbers[f"update/{name}"] = float(join(values))
    return numbers


def speeds(sampled: Episodes, rows: Groups, watch: Stopwatch) -> dict[str, float]:
    """Return seconds of each phase and tokens a second of all processes; update tokens count each
    prompt once, and those of rollouts that overlap with updates are of what these took themselves.
    """
    trained = sum(len(row.ids) for group in rows for row in group)
    trained -= sum(row.prompt_length for group in rows for row in group[1:])
    tokens = sum(len(trajectory.versions) for trajectory in sampled.trajectories)
    rollout_s = watch.seconds.get("round", watch.seconds["rollout"])
    return watch.numbers() | {
        "time/rollout_tokens_per_s": tokens / rollout_s,
        "time/update_tokens_per_s": trained / watch.seconds["update"],
    }


def status(numbers: Mapping[str, float], shares: Mapping[str, str]) -> str:
    """Say in a line how a step went; `shares` are the task's own (`TrainingTask.shares`)."""
    if "reward/total" not in numbers:
        return "no episode: every prompt is over sampler.max_prompt_tokens"
    told = [
        f"reward {numbers['reward/total']:.2f}, accuracy {numbers['rollout/accuracy']:.2f}",
        f"turns {numbers['rollout/turns']:.1f}",
    ]
    shown = {**shares, "rollout/cut_share": "cut off"}
    # A share of nothing, such as of answers that look right, is none.
    told += [
        f"{words} {100 * numbers[name]:.0f} %" for name, words in shown.items() if name in numbers
    ]
    if too_long := numbers.get("groups/too_long"):
        told.append(f"prompts too long {too_long:.0f}")
    if failed := numbers.get("groups/failed"):
        told.append(f"groups failed {failed:.0f}")
    return ", ".join(told)
