"""Reinforcement learning: roll out, score, advantages, update, and everything written down.

The path of a step: `Trainer._step` -> `rollout.rollout` -> the task's score ->
`advantages.estimate` -> `batching.micro_batches` -> `update.Learner.update` -> the loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
from flax import nnx

from minirl.advantages import estimate, groups_to_train
from minirl.batching import TokenRow, micro_batches
from minirl.checkpoint import Checkpoints
from minirl.config import SamplerConfig, TrainConfig
from minirl.metrics import JsonLines, Metrics, Stopwatch
from minirl.model import Decoder
from minirl.rollout import flatten, rollout
from minirl.sampler import NativeSampler
from minirl.types import Environment, Score, Tokenizer, Trajectory
from minirl.update import Learner, make_optimizer, policy_objective

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Task:
    """What there is to learn, as the learner sees it.

    Attributes:
        environment: Where training episodes are played.
        score: What a final episode earns.
        describe: Numbers of a final episode that are averaged into the metrics, and a record of it
            for `trajectories.jsonl`.
        train: Examples to learn from.
        validate: The accuracy of weights, given with their version, that the best checkpoint is
            chosen by.
        max_turns: The most replies of a training episode.
    """

    environment: Environment
    score: Callable[[Any], Score]
    describe: Callable[[Any], tuple[Mapping[str, float], Mapping[str, Any]]]
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


class Trainer:
    """Holds the state of a run: weights, optimizer, sampler, checkpoints.

    Args:
        model: Structure and start weights.
        tokenizer: Its tokenizer.
        task: What there is to learn.
        config: The course of the run.
        sampler: The sampler's settings.
        seed: Decides data order and every random stream.
        folder: The run folder; a run found there goes on.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        task: Task,
        config: TrainConfig,
        sampler: SamplerConfig,
        *,
        seed: int,
        folder: Path,
    ) -> None:
        self._task, self._config, self._seed = task, config, seed
        self._tokenizer, self._sampler_config = tokenizer, sampler
        graph, params = nnx.split(model)
        self._reference = jax.tree.map(lambda leaf: leaf.copy(), params)
        self._learner = Learner(
            graph,
            policy_objective(config.algorithm, temperature=sampler.temperature),
            make_optimizer(config.optimizer, steps=config.steps),
            temperature=sampler.temperature,
        )
        self._sampler = NativeSampler(
            model, sampler, tokenizer, group_size=config.group_size, seed=seed
        )
        self._state = self._learner.init(params)
        self._checkpoints = Checkpoints(folder / "checkpoints", keep=config.keep_checkpoints)
        self.step = self._checkpoints.latest_step() or 0
        if self.step:
            self._state, _ = self._checkpoints.restore(self.step, self._state)
        self._metrics = Metrics(folder, resume_step=self.step)
        self._samples = JsonLines(folder / "trajectories.jsonl", resume_step=self.step)

    def run(self, progress: Progress) -> None:
        """Train to the last step.

        Args:
            progress: Called with (steps done, steps in all, a line on how it goes).
        """
        try:
            while self.step < self._config.steps:
                progress(*self._advance())
        finally:
            # After an error too: what is being written is whole, and threads end.
            self._checkpoints.close()
            self._metrics.close()

    def _advance(self) -> tuple[int, int, str]:
        """Take a step, write it down, and say how it went."""
        self.step += 1
        numbers = self._step()
        is_last = self.step == self._config.steps
        if self.step % self._config.eval_every == 0 or is_last:
            numbers["validation/accuracy"] = self._task.validate(self.params, self.step)
        self._metrics.write(self.step, numbers)
        if self.step % self._config.checkpoint_every == 0 or is_last:
            # Checkpoints between evaluations are never the best.
            self._save(numbers.get("validation/accuracy", -1.0))
        return self.step, self._config.steps, _status(numbers)

    def use_best(self) -> int:
        """Take the weights of the best checkpoint; return its step."""
        best = self._checkpoints.best_step()
        assert best is not None
        self._state, _ = self._checkpoints.restore(best, self._state)
        return best

    @property
    def params(self) -> nnx.State:
        """Return the weights as they are now."""
        return self._state.params

    def _save(self, score: float) -> None:
        self._checkpoints.save(self.step, self._state, {"seed": self._seed}, score=score)

    def _step(self) -> dict[str, float]:
        config, watch = self._config, Stopwatch()
        chosen = examples_of_step(
            len(self._task.train), self.step - 1, per_step=config.prompts_per_step, seed=self._seed
        )
        with watch.phase("rollout"):
            groups = self._roll_out([self._task.train[number] for number in chosen])
        with watch.phase("score"):
            scores = [[self._task.score(t.episode) for t in group] for group in groups]
        with watch.phase("update"):
            numbers = self._update(groups, scores)
        numbers |= self._summarise(groups, scores)
        numbers |= _speeds(groups, watch)
        if self.step % config.sample_every == 0 or self.step == 1:
            self._sample(groups, scores)
        return numbers

    def _roll_out(self, examples: Sequence[Any]) -> list[list[Trajectory]]:
        config = self._config
        self._sampler.set_weights(self._state.params, version=self.step - 1)
        groups = rollout(
            self._sampler,
            self._tokenizer,
            self._task.environment,
            examples,
            config=self._sampler_config,
            group_size=config.group_size,
            first_episode=(self.step - 1) * config.prompts_per_step * config.group_size,
            max_turns=self._task.max_turns,
            env_workers=config.env_workers,
        )
        return [group for group in groups if group]

    def _update(
        self, groups: Sequence[Sequence[Trajectory]], scores: Sequence[Sequence[Score]]
    ) -> dict[str, float]:
        """Update on the groups that take part; without any, the weights stay as they are."""
        config, algorithm = self._config, self._config.algorithm
        rewards_NG = np.array([[score.total for score in group] for group in scores])
        correct_NG = np.array([[score.correct for score in group] for group in scores])
        kept = (
            groups_to_train(
                rewards_NG,
                correct_NG,
                equal_groups=algorithm.equal_groups,
                correctness_filter=algorithm.correctness_filter,
            )
            if groups
            else []
        )
        numbers = {"groups/trained": float(len(kept))}
        if not kept:
            return numbers
        advantages_NG = estimate(
            rewards_NG[kept], estimator=algorithm.estimator, ddof=algorithm.adv_std_ddof
        )
        batches = micro_batches(
            [
                [_row(trajectory, advantage) for trajectory, advantage in zip(*pair, strict=True)]
                for pair in zip([groups[n] for n in kept], advantages_NG, strict=True)
            ],
            aggregation=algorithm.aggregation,
            sizes=config.batching,
            pad_id=self._tokenizer.pad_id,
        )
        needs_reference = algorithm.kl_coef > 0 or self.step % config.kl_every == 0
        self._state, stats = self._learner.update(
            self._state, batches, reference=self._reference if needs_reference else None
        )
        return numbers | {f"update/{name}": value for name, value in stats.items()}

    def _summarise(
        self, groups: Sequence[Sequence[Trajectory]], scores: Sequence[Sequence[Score]]
    ) -> dict[str, float]:
        """Average rewards, their parts and what the task says of every episode."""
        sums: defaultdict[str, float] = defaultdict(float)
        trajectories = [trajectory for group in groups for trajectory in group]
        flat_scores = [score for group in scores for score in group]
        counts: defaultdict[str, int] = defaultdict(int)
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
            for name, value in (numbers | dict(self._task.describe(trajectory.episode)[0])).items():
                sums[name] += value
                counts[name] += 1
        equal = [np.ptp([score.total for score in group]) == 0 for group in scores]
        # A number that only some episodes have is averaged over these.
        means = {name: value / counts[name] for name, value in sums.items()}
        return means | {"groups/equal_share": float(np.mean(equal)) if equal else 0.0}

    def _sample(
        self, groups: Sequence[Sequence[Trajectory]], scores: Sequence[Sequence[Score]]
    ) -> None:
        """Write the first group of the step, for a person to read."""
        for trajectory, score in zip(groups[0], scores[0], strict=True) if groups else ():
            parts = {name: round(value, 6) for name, value in score.parts.items()}
            record = {"reward": score.total, "parts": parts, "correct": score.correct}
            self._samples.write(
                self.step, record | dict(self._task.describe(trajectory.episode)[1])
            )


def _row(trajectory: Trajectory, advantage: float) -> TokenRow:
    flat = flatten(trajectory)
    return TokenRow(flat.ids, flat.is_action, flat.logprobs, float(advantage), flat.prompt_length)


def _speeds(groups: Sequence[Sequence[Trajectory]], watch: Stopwatch) -> dict[str, float]:
    """Return seconds of each phase and tokens a second; update tokens count each prompt once."""
    sampled = sum(len(turn.reply.ids) for group in groups for t in group for turn in t.turns)
    trained = sum(
        len(flatten(t).ids) - (len(group[0].turns[0].observation_ids) if i else 0)
        for group in groups
        for i, t in enumerate(group)
    )
    return watch.numbers() | {
        "time/rollout_tokens_per_s": sampled / watch.seconds["rollout"],
        "time/update_tokens_per_s": trained / watch.seconds["update"],
    }


def _status(numbers: Mapping[str, float]) -> str:
    if "reward/total" not in numbers:
        return "no episode: every prompt is over sampler.max_prompt_tokens"
    return (
        f"reward {numbers['reward/total']:.2f}, accuracy {numbers['rollout/accuracy']:.2f}, "
        f"turns {numbers['rollout/turns']:.1f}"
    )
