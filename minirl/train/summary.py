"""The metrics of a step of training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from minirl.run.metrics import Stopwatch
from minirl.train.batching import Groups
from minirl.train.rollouts import Episodes


def summarise(episodes: Episodes) -> dict[str, float]:
    """Average rewards, their parts and the task's numbers over the episodes that have them."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in (trajectory for group in episodes.groups for trajectory in group):
        score, lengths = trajectory.episode.score, [len(one.reply.ids) for one in trajectory.turns]
        numbers = {
            "reward/total": score.total,
            "rollout/accuracy": float(score.correct),
            "rollout/turns": len(lengths),
            "rollout/response_tokens": sum(lengths),
            "rollout/reply_tokens": sum(lengths) / len(lengths),
            "rollout/cut_share": float(trajectory.turns[-1].reply.finish == "length"),
        }
        numbers |= {f"reward/{name}": value for name, value in score.parts.items()}
        for name, value in (numbers | dict(trajectory.episode.numbers)).items():
            values[name].append(value)
    means = {name: sum(found) / len(found) for name, found in values.items()}
    equal = [float(np.ptp(rewards) == 0) for rewards in episodes.rewards_NG if len(rewards) > 1]
    if equal:
        means["groups/equal_share"] = sum(equal) / len(equal)
    return means | {"groups/too_long": float(episodes.too_long)}


def ages(sampled: Episodes, trained: Episodes, *, version: int) -> dict[str, float]:
    """Return how far behind a step's weights (`version`) its episodes were, and what was late."""
    numbers = {"groups/late": float(sampled.late), "groups/cut": float(sampled.cut)}
    turns = (turn for group in trained.groups for one in group for turn in one.turns)
    versions = [number for turn in turns for number in turn.reply.versions]
    if versions:
        age = version - np.array(versions)
        numbers |= {"rollout/age_mean": float(age.mean()), "rollout/age_max": float(age.max())}
    return numbers


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each statistic over the updates of a step; skips add up, of a `_max` the largest."""
    numbers = {}
    for name in updates[0] if updates else ():
        values = [update[name] for update in updates]
        join = max if name.endswith("_max") else sum if name == "skipped" else np.mean
        numbers[f"update/{name}"] = float(join(values))
    return numbers


def speeds(sampled: Episodes, rows: Groups, watch: Stopwatch) -> dict[str, float]:
    """Return seconds of each phase and tokens a second; update tokens count each prompt once.

    Where rollouts overlap with updates, `round` is what the last one took.
    """
    turns = (turn for group in sampled.groups for one in group for turn in one.turns)
    trained = sum(len(row.ids) for group in rows for row in group)
    trained -= sum(row.prompt_length for group in rows for row in group[1:])
    rollout_s = watch.seconds.get("round", watch.seconds["rollout"])
    return watch.numbers() | {
        "time/rollout_tokens_per_s": sum(len(turn.reply.ids) for turn in turns) / rollout_s,
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
    told += [f"{words} {100 * numbers.get(name, 0.0):.0f} %" for name, words in shown.items()]
    if too_long := numbers.get("groups/too_long"):
        told.append(f"prompts too long {too_long:.0f}")
    return ", ".join(told)
