"""Reinforcement learning: roll out, score, advantages, update, and everything written down.

The path of a step: `Trainer._step` -> `rounds.Rounds` (`rollout.rollout`, the task's score) ->
`credit.token_advantages` -> `batching.micro_batches` -> `update.Learner.update` -> the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import nnx
from pydantic import BaseModel, NonNegativeInt

from minirl.config import OptimizerConfig, RolloutConfig, SamplerConfig, TrainConfig
from minirl.errors import ServersLostError
from minirl.model.decoder import Decoder
from minirl.model.lora import split
from minirl.run import distributed
from minirl.run.checkpoint import Checkpoints, given_up
from minirl.run.metrics import Metrics, Stopwatch
from minirl.run.preemption import Preempted
from minirl.sample.episodes import Player, own_slots
from minirl.sample.local import in_compute_type
from minirl.sample.rollout import flatten
from minirl.sample.rounds import Rounds, Taken, cuts
from minirl.sample.samplers import joined, make_sampler, told_numbers
from minirl.sglang.sampler import Servers
from minirl.train.advantages import groups_to_train
from minirl.train.batching import (
    Batch,
    TokenRow,
    extents,
    micro_batches,
    mini_batches,
    read_back,
    row_length,
    sizes_on,
    split_groups,
    token_mean,
    token_weights,
)
from minirl.train.credit import Spans, kl_numbers, overlong_penalty, token_advantages
from minirl.train.guard import Guard, GuardFacts
from minirl.train.optimizer import Restart, restart, second_optimizer
from minirl.train.packing import padding
from minirl.train.recording import TRAJECTORIES, group_line, open_records, within_limit
from minirl.train.spans import span_credit
from minirl.train.summary import (
    Groups,
    Scores,
    ages,
    nucleus_words,
    over_updates,
    speeds,
    status,
    summarise,
)
from minirl.train.task import Task
from minirl.train.update import Learner, make_optimizer, policy_objective
from minirl.types import Score, Tokenizer, Trajectory

Progress = Callable[[int, int, str], None]
Rows = Sequence[Sequence[TokenRow]]  # of each group
_log = logging.getLogger(__name__)
# Statistics of an update that are means over tokens, whatever the weights of the loss add up to.
_MEANS = ("entropy", "clip_fraction", "kl", "correction_mean")


class _Facts(BaseModel):
    """What a checkpoint knows beside its arrays.

    Attributes:
        rounds: Rollouts so far.
        curve: Validation accuracies so far.
        guard: What gradients are compared with.
        unfinished: Numbers of a step whose weights were still to be measured.
    """

    rounds: NonNegativeInt | None = None
    curve: list[tuple[int, float]] = []
    guard: GuardFacts = GuardFacts()
    unfinished: dict[str, float] | None = None


class Trainer:
    """Holds the state of a run: weights, optimizer, sampler, checkpoints.

    Args:
        model: Structure and start weights; with adapters, they alone are trained.
        tokenizer: Its tokenizer.
        task: What there is to learn.
        config: The course of the run.
        sampler: The sampler's settings.
        seed: Decides data order and every random stream.
        folder: The run folder; a run found there goes on.
        servers: Those that sample in place of the native sampler.
        rollout: How far ahead of the learner they do; None for never.
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
        servers: Servers | None = None,
        rollout: RolloutConfig | None = None,
    ) -> None:
        self._task, self._config, self._seed = task, config, seed
        self._tokenizer, self._sampler_config = tokenizer, sampler
        graph, params, frozen = split(model)
        self._reference = in_compute_type(params, model.dtype) if config.has_reference else None
        self._sizes = sizes_on(config.batching, model.mesh)
        self._learner = Learner(
            graph,
            policy_objective(
                config.algorithm, temperature=sampler.temperature, top_p=sampler.ratio_top_p
            ),
            self._optimizer(config.optimizer, steps=config.steps),
            frozen=frozen,
            temperature=sampler.temperature,
            mesh=model.mesh,
        )
        slots = own_slots(sampler, config, processes=distributed.count())
        self._sampler = make_sampler(
            model, slots, tokenizer, group_size=config.group_size, seed=seed, servers=servers
        )
        # Every step brings its own.
        self._sampler.free_memory()
        self._rollout = rollout or RolloutConfig()
        player = Player(tokenizer, task, config, sampler, seed)
        self._played = Rounds(self._sampler, player, self._rollout)
        self._state = self._learner.init(params)
        self._folder = folder
        norm = config.optimizer.max_grad_norm
        self._guard = Guard(config.guard, max_grad_norm=norm, folder=folder, key="train.guard")
        self._checkpoints = Checkpoints(folder / "checkpoints", keep=config.keep_checkpoints)
        self.step = self._checkpoints.newest_step()
        self._rounds = self.step  # rollouts so far, of prompts_per_step prompts each
        self._curve: list[tuple[int, float]] = []
        self._unfinished: dict[str, float] | None = None
        self.restart: Restart | None = None
        self._is_nucleus_told = sampler.top_p == 1
        if self.step:
            self._resume()
        written = self.step if self._unfinished is None else self.step - 1
        self._metrics = Metrics(folder, resume_step=written)
        self._samples = open_records(folder / TRAJECTORIES, resume_step=self.step)

    def run(self, progress: Progress) -> None:
        """Train to the last step.

        Args:
            progress: Called with (steps done, steps in all, a line on how it goes).

        Raises:
            Preempted: A signal came, and all is saved.
            ServersLostError: Nobody samples any more, and all is saved.
        """
        # After an error too: what is being written is whole, and threads end.
        with closing(self._metrics), closing(self._checkpoints), closing(self._played):
            try:
                while self.step < self._config.all_steps or self._unfinished is not None:
                    progress(*self._advance())
                    distributed.check()
            except (Preempted, ServersLostError) as stop:
                self._checkpoints.leave(self.step, self._state, self._facts)
                saved = f"all {self.step} steps are saved"
                if isinstance(stop, Preempted):
                    raise Preempted(stop.signal, saved) from None
                raise ServersLostError(f"{stop}; {saved}, the same command goes on") from None

    def _optimizer(self, config: OptimizerConfig, *, steps: int) -> optax.GradientTransformation:
        return make_optimizer(config, steps=steps, updates_per_step=self._config.mini_batches)

    def _resume(self) -> None:
        """Go on from the newest checkpoint."""
        self._state, known = self._checkpoints.restore_newest(given_up(self._state), _Facts)
        self._rounds = self.step if known.rounds is None else known.rounds
        self._curve, self._unfinished = known.curve, known.unfinished
        self._guard.restart(known.guard)
        if self.step > self._config.steps:
            self._decide()

    def _advance(self) -> tuple[int, int, str]:
        """Take a step, or what is left of one; write it down, and say how it went."""
        config = self._config
        if self._unfinished is None:
            self._unfinished = self._take_step()
        numbers = dict(self._unfinished)
        if self.step % config.eval_every == 0 or self._is_last:
            numbers["validation/accuracy"] = self._task.validate(self.params, self.step)
            self._curve.append((self.step, numbers["validation/accuracy"]))
            # Servers may have failed meanwhile, and have other weights.
            numbers |= joined(numbers, told_numbers(self._sampler))
        if config.second_stage is not None:
            numbers["stage/number"] = 1.0 if self.step <= config.steps else 2.0
        if self.restart is not None and self.step == config.steps + 1:
            numbers |= self.restart.numbers()
        self._metrics.write(self.step, numbers)
        self._unfinished = None
        if self.step % config.checkpoint_every == 0 or self._is_last:
            # Checkpoints between evaluations are never the best.
            score = numbers.get("validation/accuracy", -1.0)
            self._checkpoints.save(self.step, self._state, self._facts, score=score)
        return self.step, config.all_steps, status(numbers)

    def _take_step(self) -> dict[str, float]:
        """Make the next update; what is abandoned before it leaves no trace."""
        if self.step == self._config.steps:
            self._begin_second_stage()
        before = self._rounds
        self.step += 1
        try:
            return self._step()
        except (Preempted, ServersLostError):
            self.step, self._rounds = self.step - 1, before
            raise

    def _begin_second_stage(self) -> None:
        """Take the weights of the first stage's best checkpoint, and a fresh optimizer state."""
        start = self._decide()
        _log.info("%s", start)
        self._played.close()
        self._checkpoints.wait()
        self._state, _ = self._checkpoints.restore(start.step, given_up(self._state))
        self._state = self._learner.init(self._state.params)
        self._guard.restart()

    def _decide(self) -> Restart:
        """Decide how the second stage begins, from the first stage's curve alone; take its rate.

        A run that was killed in its second stage decides the same again.
        """
        config, stage = self._config, self._config.second_stage
        assert stage is not None
        start = restart(
            [point for point in self._curve if point[0] <= config.steps],
            config.optimizer,
            steps=config.steps,
            saved={*range(0, config.steps, config.checkpoint_every), config.steps},
            alpha=stage.alpha,
        )
        optimizer = second_optimizer(config.optimizer, stage, start)
        self._learner.use(self._optimizer(optimizer, steps=config.second_steps))
        self.restart = start
        return start

    def use_best(self) -> int:
        """Take the weights of the best checkpoint; return its step."""
        best = self._checkpoints.best_step()
        assert best is not None
        self._state, _ = self._checkpoints.restore(best, given_up(self._state))
        return best

    @property
    def params(self) -> nnx.State:
        """Return the weights that are trained, as they are now."""
        return self._state.params

    @property
    def _last(self) -> int:
        """Return the last step of this stage."""
        return self._config.steps if self.step <= self._config.steps else self._config.all_steps

    @property
    def _is_last(self) -> bool:
        return self.step == self._last

    @property
    def _facts(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "rounds": self._rounds,
            "curve": self._curve,
            "guard": self._guard.facts,
            "unfinished": self._unfinished,
        }

    def _step(self) -> dict[str, float]:
        config, watch, version = self._config, Stopwatch(), self.step - 1
        with watch.phase("weights"):
            self._sampler.set_weights(self._state.params, version=version)
        taken: list[Taken] = []
        groups: list[list[Trajectory]] = []
        scores: list[list[Score]] = []
        kept: list[int] = []
        before = self._rounds
        while self._rounds < before + config.algorithm.max_rounds:
            taken += self._take(version, watch)
            groups = [group for part in taken for group in part.groups]
            scores = [[trajectory.episode.score for trajectory in group] for group in groups]
            kept = self._choose(groups, scores)
            if len(kept) >= config.prompts_per_step:
                break
        told = told_numbers(self._sampler)
        if not self._is_nucleus_told:
            self._is_nucleus_told = True
            _log.info("%s", nucleus_words(self._sampler_config, told))
        # Nothing is sampled before the next weights.
        self._sampler.free_memory()
        # Late groups stand for those that an earlier step lacked.
        kept = kept[: config.prompts_per_step + sum(part.late for part in taken)]
        chosen = [groups[n] for n in kept]
        with watch.phase("update"):
            numbers, rows = self._update(chosen, [scores[n] for n in kept])
        if config.algorithm.max_rounds > 1:
            numbers["groups/rounds"] = float(self._rounds - before)
        numbers |= summarise(groups, scores, lambda outcome: outcome.numbers)
        numbers |= speeds(groups, chosen, watch) | told
        if self._rollout.is_ahead:
            numbers |= ages(chosen, version) | cuts(taken)
        if self._is_sampled:
            self._sample(groups, scores, dict(zip(kept, rows, strict=False)))
        return numbers

    def _take(self, version: int, watch: Stopwatch) -> list[Taken]:
        """Return what all processes have of the next round; let those ahead of it begin."""
        number = self._rounds
        # Nothing is played ahead of a stage's end.
        ahead = min(self._rollout.lag, self._last - self.step)
        self._played.begin(range(number, number + 1 + ahead), version=version)
        taken = distributed.gather(
            lambda: self._played.take(
                number,
                version=version,
                is_last=self._is_last,
                has_records=self._is_sampled,
                watch=watch,
            )
        )
        self._rounds += 1
        return taken

    def _choose(self, groups: Groups, scores: Scores) -> list[int]:
        """Return the numbers of the groups that the filters leave."""
        if not groups:
            return []
        chosen = groups_to_train(
            _rewards(scores) + self._penalties(groups),
            np.array([[score.correct for score in group] for group in scores]),
            equal_groups=self._config.algorithm.equal_groups,
            correctness_filter=self._config.algorithm.correctness_filter,
        )
        return list(chosen)

    def _penalties(self, groups: Groups) -> np.ndarray:
        """Return what the length of each response, observations included, adds to its reward."""
        return overlong_penalty(
            np.array([[_response_length(trajectory) for trajectory in group] for group in groups]),
            longest=self._sampler_config.max_response_tokens,
            cache=self._config.algorithm.overlong_tokens,
        )

    def _update(self, groups: Groups, scores: Scores) -> tuple[dict[str, float], Rows]:
        """Update on the groups that take part; without any, the weights stay as they are.

        Returns:
            Numbers for the metrics, and the rows that were trained on, with their advantages.
        """
        algorithm = self._config.algorithm
        numbers = {"groups/trained": float(len(groups))}
        if not groups:
            return numbers, []
        rows = [[_row(trajectory) for trajectory in group] for group in groups]
        flat = [row for group in rows for row in group]
        penalties = self._penalties(groups)
        if algorithm.overlong_tokens:
            numbers["reward/overlong"] = float(penalties.mean())
        kl = None
        if algorithm.kl_coef > 0 and algorithm.kl_in != "loss":
            kl = self._divergence(rows)
            numbers["update/kl"] = token_mean(kl, flat)
        credit = iter(
            token_advantages(
                flat,
                _rewards(scores),
                algorithm,
                penalty_NG=penalties,
                spans=self._spans(groups, scores) if algorithm.estimator == "direct" else None,
                kl=kl,
            )
        )
        rows = [[replace(row, advantage=next(credit)) for row in group] for group in rows]
        every = self._config.kl_every
        is_measured = algorithm.kl_coef == 0 and every is not None and self.step % every == 0
        in_loss = algorithm.kl_coef > 0 and algorithm.kl_in == "loss"
        shown = (
            self._with_logprobs(rows) if self._is_sampled and self._config.sample_tokens else rows
        )
        numbers |= self._apply(rows, self._reference if in_loss or is_measured else None)
        return numbers, shown

    def _apply(self, rows: Rows, reference: nnx.State | None) -> dict[str, float]:
        """Make an update with each mini-batch of a step; return the means of their statistics."""
        if self._config.mini_batches > 1 and self._config.algorithm.correction != "none":
            # After the first update the weights that sampled are gone.
            rows = self._with_logprobs(rows)
        found = []
        for part in mini_batches(rows, count=self._config.mini_batches):
            batches = self._micro_batches(part)
            self._state, stats = self._learner.update(
                self._state,
                # From the second update on there is no way back to the start of the step.
                batches if found else distributed.checked(batches),
                reference=reference,
                max_norm=self._guard.limit,
            )
            self._guard.note(stats, part, step=self.step)
            whole = self._whole_weight([row for group in part for row in group])
            found.append({k: v / whole if k in _MEANS else v for k, v in stats.items()})
            found[-1]["padding"] = padding(extents(split_groups(part, self._sizes)), self._sizes)
        return {f"update/{key}": over_updates(key, [one[key] for one in found]) for key in found[0]}

    def _micro_batches(self, rows: Rows) -> Iterator[Batch]:
        return micro_batches(
            rows,
            aggregation=self._config.algorithm.aggregation,
            sizes=self._sizes,
            pad_id=self._tokenizer.pad_id,
            divisor=self._divisor,
        )

    @property
    def _divisor(self) -> int:
        algorithm = self._config.algorithm
        return algorithm.aggregation_divisor or self._sampler_config.max_response_tokens

    def _whole_weight(self, rows: Sequence[TokenRow]) -> float:
        """Return what the weights of all sampled tokens add up to: 1 for a mean."""
        aggregation = self._config.algorithm.aggregation
        if aggregation in ("sequence_mean", "token_mean"):
            return 1.0
        lengths = [row_length(row, aggregation=aggregation) for row in rows]
        weights = token_weights(lengths, aggregation=aggregation, divisor=self._divisor)
        counts = [int(row.is_action.sum()) for row in rows]
        return float(np.dot(counts, weights)) or 1.0

    def _logprobs(self, params: nnx.State, rows: Rows) -> list[list[np.ndarray]]:
        """Return the log-probability of each id under these weights, 0 on prompts."""
        values = self._learner.logprobs(params, self._micro_batches(rows))
        return read_back(rows, values, sizes=self._sizes)

    def _with_logprobs(self, rows: Rows) -> Rows:
        """Add the log-probabilities under the weights as they are now."""
        known = self._logprobs(self._state.params, rows)
        return [
            [replace(row, start_logprobs=logp) for row, logp in zip(*pair, strict=True)]
            for pair in zip(rows, known, strict=True)
        ]

    def _divergence(self, rows: Rows) -> list[np.ndarray]:
        """Return the KL of each id to the reference, of the policy as it sampled."""
        assert self._reference is not None
        reference = self._logprobs(self._reference, rows)
        estimator = self._config.algorithm.kl_estimator
        return [
            np.where(row.is_action, kl_numbers(row.logprobs, logprobs, estimator=estimator), 0.0)
            for pair in zip(rows, reference, strict=True)
            for row, logprobs in zip(*pair, strict=True)
        ]

    def _spans(self, groups: Groups, scores: Scores) -> list[Spans | None]:
        decode = self._tokenizer.decode
        return [
            Spans(*span_credit(trajectory, score.spans, decode)) if score.spans else None
            for pair in zip(groups, scores, strict=True)
            for trajectory, score in zip(*pair, strict=True)
        ]

    def _sample(
        self, groups: Groups, scores: Scores, rows: Mapping[int, Sequence[TokenRow]]
    ) -> None:
        """Write the groups of the step, for a person to look at.

        Args:
            groups: All that were played.
            scores: Their scores.
            rows: Of those that were trained on, by number.
        """
        recorded = [n for n, group in enumerate(groups) if group[0].episode.record]
        lines = (
            group_line(
                groups[n],
                [trajectory.episode.record for trajectory in groups[n]],
                self._tokenizer.decode,
                scores=scores[n],
                rows=rows.get(n),
                has_tokens=self._config.sample_tokens,
            )
            for n in recorded
        )
        for number, line in enumerate(within_limit(lines)):
            self._samples.write(self.step, {"group": number, **line})

    @property
    def _is_sampled(self) -> bool:
        """Tell whether the groups of this step are written down."""
        return self.step % self._config.sample_every == 0 or self.step == 1


def _row(trajectory: Trajectory) -> TokenRow:
    flat = flatten(trajectory)
    return TokenRow(flat.ids, flat.is_action, flat.logprobs, 0.0, flat.prompt_length)


def _rewards(scores: Scores) -> np.ndarray:
    return np.array([[score.total for score in group] for group in scores])


def _response_length(trajectory: Trajectory) -> int:
    first = len(trajectory.turns[0].observation_ids)
    return sum(len(turn.observation_ids) + len(turn.reply.ids) for turn in trajectory.turns) - first
