"""Reinforcement learning: the step, and the run around it.

`Trainer.step` is the algorithm: push weights, roll out and score, advantages, batch, update.
`Trainer.run` repeats it, and holds what is not: stages, validation, metrics, checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
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
from minirl.run.checkpoint import Checkpoints, given_up, read_params
from minirl.run.metrics import Metrics, Stopwatch
from minirl.run.preemption import Preempted
from minirl.sample.local import in_compute_type
from minirl.sample.rollout import flatten
from minirl.sglang.sampler import Servers
from minirl.train.advantages import (
    group_spans,
    groups_to_train,
    overlong_penalty,
    token_advantages,
)
from minirl.train.batching import (
    Groups,
    empty_batches,
    micro_batches,
    mini_batches,
    padded_share,
    read_back,
    sizes_on,
    token_mean,
)
from minirl.train.losses import kl_divergence
from minirl.train.optimizer import make_optimizer, stop_after_skips
from minirl.train.packing import Extent
from minirl.train.recording import TRAJECTORIES, group_line, open_records, within_limit
from minirl.train.rollouts import (
    Episodes,
    Rollouts,
    TrainingTask,
    gather_metrics,
    make_sampler,
    own_slots,
)
from minirl.train.second_stage import Restart, restart, second_optimizer
from minirl.train.summary import ages, over_updates, speeds, status, summarise
from minirl.train.update import Learner, TrainState, policy_objective
from minirl.types import Tokenizer, TokenRow

Progress = Callable[[int, int, str], None]
_log = logging.getLogger(__name__)
# Statistics of an update that are means over tokens, whatever the weights of the loss add up to.
_MEANS = ("entropy", "clip_fraction", "kl", "correction_mean")


class _Facts(BaseModel):
    """What a checkpoint holds beside its arrays.

    Attributes:
        rollouts: Rollouts so far.
        curve: Validation accuracies so far.
        unfinished: Metrics of a step whose weights are still to be validated.
    """

    rollouts: NonNegativeInt | None = None
    curve: list[tuple[int, float]] = []
    unfinished: dict[str, float] | None = None


class Trainer:
    """The state of a run: weights, optimizer, sampler, checkpoints.

    Args:
        model: Structure and start weights, which are given up; with adapters, they alone are
            trained.
        tokenizer: Its tokenizer.
        task: What there is to learn.
        config: The course of the run.
        sampler: The sampler's settings.
        seed: Decides data order and every random stream.
        folder: The run folder; a run found there is resumed.
        servers: Those that sample in place of the native sampler.
        rollout: How far ahead of the learner they do; None for never.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        task: TrainingTask,
        config: TrainConfig,
        sampler: SamplerConfig,
        *,
        seed: int,
        folder: Path,
        servers: Servers | None = None,
        rollout: RolloutConfig | None = None,
    ) -> None:
        self._task, self._config, self._seed, self._folder = task, config, seed, folder
        self._tokenizer, self._limits = tokenizer, sampler
        self._rollout_config = rollout or RolloutConfig()
        algorithm, (graph, params, frozen) = config.algorithm, split(model)
        self._reference = in_compute_type(params, model.dtype) if config.has_reference else None
        self._sizes = sizes_on(config.batching, model.mesh)
        answers = config.batching.answers_per_batch or config.group_size
        longest_answers = (sampler.max_response_tokens,) * answers
        self._longest = Extent(sampler.max_prompt_tokens - 1, longest_answers)
        self._micro_batches = partial(
            micro_batches,
            aggregation=algorithm.aggregation,
            sizes=self._sizes,
            pad_id=tokenizer.pad_id,
            divisor=algorithm.aggregation_divisor or sampler.max_response_tokens,
            longest=self._longest,
        )
        objective = policy_objective(
            algorithm, temperature=sampler.temperature, top_p=sampler.ratio_top_p
        )
        optimizer = self._optimizer(config.optimizer, steps=config.steps)
        self._learner = Learner(graph, objective, optimizer, frozen=frozen, mesh=model.mesh)
        self._state = self._learner.init(params)
        slots = own_slots(sampler, config, processes=distributed.count())
        self._sampler = make_sampler(
            model, slots, tokenizer, group_size=config.group_size, seed=seed, servers=servers
        )
        # Every step pushes its own weights.
        self._sampler.free_memory()
        self._rollouts = Rollouts(
            self._sampler, tokenizer, task, config, sampler, self._rollout_config, seed=seed
        )
        self._checkpoints = Checkpoints(folder / "checkpoints", keep=config.keep_checkpoints)
        self.steps_done = self._checkpoints.newest_step()
        self._rollouts_done = self.steps_done  # rollouts so far, of prompts_per_step prompts each
        self._curve: list[tuple[int, float]] = []
        self._unfinished: dict[str, float] | None = None
        self.restart: Restart | None = None
        if self.steps_done:
            self._resume()
        written = self.steps_done if self._unfinished is None else self.steps_done - 1
        self._metrics = Metrics(folder, resume_step=written)
        self._samples = open_records(folder / TRAJECTORIES, resume_step=self.steps_done)
        if config.batching.pack and self.steps_done < config.all_steps:
            # While the first episodes are played.
            batches = empty_batches(self._longest, self._sizes)
            if self._has_start:
                batches = (batch._replace(start_logp_BC=batch.old_logp_BC) for batch in batches)
            self._learner.compile_ahead(self._state.params, batches)

    @property
    def params(self) -> nnx.State:
        """Return the weights that are trained, as they are now."""
        return self._state.params

    def run(self, progress: Progress) -> None:
        """Train to the last step.

        Args:
            progress: Called with (steps done, steps in all, a line on how it goes).

        Raises:
            Preempted: A signal came, and all is saved.
            ServersLostError: Nobody samples any more, and all is saved.
        """
        config = self._config
        # After an error too: what is being written is whole, and threads end.
        with closing(self._metrics), closing(self._checkpoints), closing(self._rollouts):
            try:
                while self.steps_done < config.all_steps or self._unfinished is not None:
                    if self._unfinished is None:
                        if self.steps_done == config.steps:
                            self._begin_second_stage()
                        self._unfinished = self.step()
                    progress(self.steps_done, config.all_steps, self._record_step())
                    distributed.check()
            except (Preempted, ServersLostError) as stop:
                self._checkpoints.leave(self.steps_done, self._state, self._facts)
                saved = f"all {self.steps_done} steps are saved"
                if isinstance(stop, Preempted):
                    raise Preempted(stop.signal, saved) from None
                raise ServersLostError(
                    f"{stop}; {saved}: run the same command again to resume"
                ) from None

    def step(self) -> dict[str, float]:
        """Make the next step, and return its metrics; one that is abandoned leaves no trace."""
        watch, version, updates = Stopwatch(), self.steps_done, []
        # Push the weights of the step before.
        with watch.phase("weights"):
            self._sampler.set_weights(self._state.params, version=version)
        # Roll out and score; `trained` is what the filters leave.
        sampled, trained, rollouts = self._roll_out(watch)
        sampler_metrics = gather_metrics(self._sampler)
        # Nothing is sampled before the next weights.
        self._sampler.free_memory()
        with watch.phase("update"):
            # Rewards, spans and penalties become an advantage for each token.
            rows, numbers = self._token_rows(trained)
            if self._is_recorded(version + 1):
                self._record(sampled, trained, rows)
            for part in mini_batches(rows, count=self._config.mini_batches):
                batches = self._micro_batches(part)
                # From the second update on there is no way back to the start of the step.
                batches = batches if updates else distributed.checked(batches)
                self._state, stats = self._learner.update(
                    self._state, batches, reference=self._reference_to_measure
                )
                updates.append(self._update_metrics(stats, part))
        self.steps_done, self._rollouts_done = version + 1, self._rollouts_done + rollouts
        numbers |= {"groups/trained": float(len(rows))} | over_updates(updates)
        numbers |= summarise(sampled) | speeds(sampled, rows, watch) | sampler_metrics
        numbers["time/update_programs"] = float(self._learner.programs)
        if self._config.algorithm.max_rounds > 1:
            numbers["groups/rounds"] = float(rollouts)
        if self._rollout_config.is_ahead:
            numbers |= ages(sampled, trained, version=version)
        return numbers

    def use_best(self) -> int:
        """Take the weights of the best checkpoint; return its step. No step can follow."""
        best = self._checkpoints.best_step()
        assert best is not None
        self._state = TrainState(self._read_weights(best), ())
        return best

    def _roll_out(self, watch: Stopwatch) -> tuple[Episodes, Episodes, int]:
        """Play rollouts until the filters leave enough groups, or there were `max_rounds`.

        Returns:
            All episodes, those to train on, and how many rollouts there were.
        """
        config, version, sampled, rollouts = self._config, self.steps_done, Episodes(), 0
        # Nothing is played ahead of a stage's end.
        left = self._last(version + 1) - (version + 1)
        ahead = min(self._rollout_config.lag, left)
        kept: list[int] = []
        while rollouts < config.algorithm.max_rounds and len(kept) < config.prompts_per_step:
            number = self._rollouts_done + rollouts
            self._rollouts.begin(range(number, number + 1 + ahead), version=version)
            parts = distributed.gather(
                lambda number=number: self._rollouts.take(
                    number,
                    version=version,
                    is_last=not left,
                    has_records=self._is_recorded(version + 1),
                    watch=watch,
                )
            )
            sampled, rollouts = sum(parts, sampled), rollouts + 1
            kept = self._filter(sampled)
        # Late groups stand for those that an earlier step lacked.
        return sampled, sampled.select(kept[: config.prompts_per_step + sampled.late]), rollouts

    def _filter(self, episodes: Episodes) -> list[int]:
        """Return the numbers of the groups that the filters leave."""
        if not episodes.groups:
            return []
        chosen = groups_to_train(
            episodes.rewards_NG + self._penalties(episodes),
            episodes.correct_NG,
            equal_groups=self._config.algorithm.equal_groups,
            correctness_filter=self._config.algorithm.correctness_filter,
        )
        return list(chosen)

    def _penalties(self, episodes: Episodes) -> np.ndarray:
        """Return what the length of each response, observations included, adds to its reward."""
        return overlong_penalty(
            episodes.lengths_NG,
            longest=self._limits.max_response_tokens,
            cache=self._config.algorithm.overlong_tokens,
        )

    def _token_rows(self, episodes: Episodes) -> tuple[Groups, dict[str, float]]:
        """Return the rows of the groups, with the advantage of each token, and metrics."""
        algorithm, numbers, kl, spans = self._config.algorithm, {}, None, None
        if not episodes.groups:
            return [], numbers
        rows = [flatten(one) for group in episodes.groups for one in group]
        penalties = self._penalties(episodes)
        if algorithm.overlong_tokens:
            numbers["reward/overlong"] = float(penalties.mean())
        if algorithm.kl_coef > 0 and algorithm.kl_in != "loss":
            kl = self._token_kl(rows)
            numbers["update/kl"] = token_mean(kl, rows)
        if algorithm.estimator == "direct":
            spans = group_spans(episodes.groups, self._tokenizer.decode)
        advantages = token_advantages(
            rows, episodes.rewards_NG, algorithm, penalty_NG=penalties, spans=spans, kl=kl
        )
        rows = [replace(row, advantage=a) for row, a in zip(rows, advantages, strict=True)]
        if self._has_start:
            known = self._logprobs(self._state.params, rows)
            rows = [replace(row, start_logprobs=p) for row, p in zip(rows, known, strict=True)]
        return self._grouped(rows), numbers

    def _token_kl(self, rows: Sequence[TokenRow]) -> list[np.ndarray]:
        """Return the KL of each id to the reference, of the policy as it sampled."""
        assert self._reference is not None
        estimator = self._config.algorithm.kl_estimator
        return [
            np.where(row.is_action, kl_divergence(row.logprobs, logp, estimator=estimator), 0.0)
            for row, logp in zip(rows, self._logprobs(self._reference, rows), strict=True)
        ]

    @property
    def _has_start(self) -> bool:
        """Return whether updates need log-probabilities of weights that are gone by then."""
        return self._config.mini_batches > 1 and self._config.algorithm.correction != "none"

    def _grouped(self, rows: Sequence[TokenRow]) -> Groups:
        size = self._config.group_size
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _logprobs(self, params: nnx.State, rows: Sequence[TokenRow]) -> list[np.ndarray]:
        """Return the log-probability of each id under these weights, 0 on prompts."""
        groups = self._grouped(rows)
        values = self._learner.logprobs(params, self._micro_batches(groups))
        found = read_back(groups, values, sizes=self._sizes, longest=self._longest)
        return [logp for group in found for logp in group]

    @property
    def _reference_to_measure(self) -> nnx.State | None:
        """Return the reference where the update of this step needs or measures a KL to it."""
        algorithm, every = self._config.algorithm, self._config.kl_every
        if algorithm.kl_coef > 0:
            return self._reference if algorithm.kl_in == "loss" else None
        is_measured = every is not None and (self.steps_done + 1) % every == 0
        return self._reference if is_measured else None

    def _update_metrics(self, stats: dict[str, float], part: Groups) -> dict[str, float]:
        """Return the metrics of an update; end the run if too many updates were skipped."""
        where = {"step": self.steps_done + 1, "folder": self._folder, "key": "train.guard"}
        stop_after_skips(self._state.opt_state, self._config, stats, part, **where)
        whole = stats.pop("weight") or 1.0
        numbers = {name: v / whole if name in _MEANS else v for name, v in stats.items()}
        share = padded_share(part, self._sizes, longest=self._longest)
        return numbers | {"padding": share}

    def _is_recorded(self, step: int) -> bool:
        """Return whether the groups of a step are written to `trajectories.jsonl`."""
        return step % self._config.sample_every == 0 or step == 1

    def _record(self, sampled: Episodes, trained: Episodes, groups: Groups) -> None:
        """Write the groups of this step, and the rows of those that are trained on.

        A resume takes away what was written of a step that was abandoned.
        """
        has_tokens = self._config.sample_tokens
        if has_tokens:
            rows = [row for group in groups for row in group]
            known = self._logprobs(self._state.params, rows)
            groups = self._grouped(
                [replace(row, start_logprobs=p) for row, p in zip(rows, known, strict=True)]
            )
        rows_of = {id(group[0]): rows for group, rows in zip(trained.groups, groups, strict=True)}
        lines = (
            group_line(
                group,
                [trajectory.episode.record for trajectory in group],
                self._tokenizer.decode,
                scores=[trajectory.episode.score for trajectory in group],
                rows=rows_of.get(id(group[0])),
                has_tokens=has_tokens,
            )
            for group in sampled.groups
        )
        for number, line in enumerate(within_limit(lines)):
            self._samples.write(self.steps_done + 1, {"group": number, **line})

    def _record_step(self) -> str:
        """Validate, write metrics and a checkpoint where they are due; return a status line."""
        config, step = self._config, self.steps_done
        numbers = dict(self._unfinished or {})
        is_last = step == self._last(step)
        if step % config.eval_every == 0 or is_last:
            numbers["validation/accuracy"] = self._task.validate(self.params, step)
            self._curve.append((step, numbers["validation/accuracy"]))
            # Servers may have failed meanwhile, and have other weights.
            numbers |= gather_metrics(self._sampler, since=numbers)
        if config.second_stage is not None:
            numbers["stage/number"] = 1.0 if step <= config.steps else 2.0
        if self.restart is not None and step == config.steps + 1:
            numbers |= self.restart.numbers()
        self._metrics.write(step, numbers)
        self._unfinished = None
        if step % config.checkpoint_every == 0 or is_last:
            # Checkpoints between evaluations are never the best.
            score = numbers.get("validation/accuracy", -1.0)
            self._checkpoints.save(step, self._state, self._facts, score=score)
        return status(numbers)

    def _last(self, step: int) -> int:
        """Return the last step of the stage of a step."""
        return self._config.steps if step <= self._config.steps else self._config.all_steps

    @property
    def _facts(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "rollouts": self._rollouts_done,
            "curve": self._curve,
            "unfinished": self._unfinished,
        }

    def _resume(self) -> None:
        """Continue from the newest checkpoint; the start weights are given up."""
        self._state, facts = self._checkpoints.restore_newest(given_up(self._state), _Facts)
        self._rollouts_done = self.steps_done if facts.rollouts is None else facts.rollouts
        self._curve, self._unfinished = facts.curve, facts.unfinished
        if self.steps_done > self._config.steps:
            self._decide()

    def _begin_second_stage(self) -> None:
        """Take the weights of the first stage's best checkpoint, and a fresh optimizer state."""
        start = self._decide()
        _log.info("%s", start)
        self._rollouts.close()
        self._checkpoints.wait()
        self._state = self._learner.init(self._read_weights(start.step))

    def _decide(self) -> Restart:
        """Decide how the second stage begins, from the first stage's curve alone; set its rate.

        A run that was killed in its second stage decides the same again.
        """
        config, stage = self._config, self._config.second_stage
        assert stage is not None
        self.restart = restart(
            [point for point in self._curve if point[0] <= config.steps],
            config.optimizer,
            steps=config.steps,
            saved={*range(0, config.steps, config.checkpoint_every), config.steps},
            alpha=stage.alpha,
        )
        optimizer = second_optimizer(config.optimizer, stage, self.restart)
        self._learner.use(self._optimizer(optimizer, steps=config.second_steps))
        return self.restart

    def _read_weights(self, step: int) -> nnx.State:
        """Read the weights of a checkpoint; all arrays of the current state are given up."""
        where = self._folder / "checkpoints" / str(step)
        return read_params(where, given_up(self._state).params)

    def _optimizer(
        self, config: OptimizerConfig, *, steps: int
    ) -> optax.GradientTransformationExtraArgs:
        train = self._config
        return make_optimizer(
            config, steps=steps, updates_per_step=train.mini_batches, guard=train.guard
        )
