"""Reinforcement learning: the step, and the run around it.

`Trainer.step` is the algorithm: push weights, roll out and score, advantages, batch, update.
`Trainer.run` repeats it, and holds what is not: stages, validation, metrics, checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx
from pydantic import BaseModel, NonNegativeInt

from minirl.config import OptimizerConfig, SamplerConfig, TrainConfig
from minirl.exchange import LostError, UserError
from minirl.model.decoder import Decoder
from minirl.model.lora import trained
from minirl.model.sharding import row_parts
from minirl.run import distributed
from minirl.run.checkpoint import Checkpoints, given_up, read_params
from minirl.run.memory import peak_bytes
from minirl.run.metrics import Metrics, Stopwatch
from minirl.run.preemption import Preempted
from minirl.sample.rollout import flatten
from minirl.sample.weights import in_compute_type
from minirl.train import advantages, batching, losses, rollouts, summary
from minirl.train.advice import LIVE_SHARE, advice
from minirl.train.optimizer import learning_rate, make_optimizer, stop_after_skips
from minirl.train.rollouts import Episodes, Rollouts, TrainingTask
from minirl.train.update import Learner, TrainState
from minirl.types import Progress, Tokenizer, TokenRow

if TYPE_CHECKING:
    from minirl.sglang.sampler import Servers

_log = logging.getLogger(__name__)
# Statistics of an update that are no means over tokens, whatever the loss's weights add up to.
_NO_MEANS = ("loss", "grad_norm", "skipped", "learning_rate")


class _Facts(BaseModel):
    """What a checkpoint holds beside its arrays: rollouts and validation accuracies so far, and the
    metrics of a step whose weights are still to be validated.
    """

    rollouts: NonNegativeInt = 0
    curve: list[tuple[int, float]] = []
    unfinished: dict[str, float] | None = None


def learner_of(model: Decoder, config: TrainConfig, *, temperature: float) -> Learner:
    """Return what learns from trajectories that were sampled at a temperature."""
    loss = partial(losses.policy_loss, config.algorithm)
    return Learner(model, loss, make_optimizer(config.optimizer), temperature=temperature)


class Trainer:
    """The state of a run: weights, optimizer, sampler, checkpoints.

    A run found in the folder is resumed; the seed decides data order and every random stream.

    Args:
        model: Structure and start weights, which are given up; of adapters they alone are trained.
        servers: Those that sample in place of the native sampler.
        lag: How many rollouts ahead of the learner they do.
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
        lag: int = 0,
    ) -> None:
        self._task, self._config, self._folder = task, config, folder
        self._tokenizer, self._lag = tokenizer, lag
        algorithm, params = config.algorithm, trained(model)
        self._reference = in_compute_type(params, model.dtype) if config.has_reference else None
        self._micro_batches = partial(
            batching.MicroBatches,
            aggregation=algorithm.aggregation,
            pad_id=tokenizer.pad_id,
            divisor=algorithm.aggregation_divisor or sampler.max_response_tokens,
            sizes=config.batching,
            parts=row_parts(model.mesh),
        )
        # The numbers of the groups that the filters leave.
        self._kept = partial(
            advantages.groups_to_train, correctness_filter=algorithm.correctness_filter
        )
        self._rate = learning_rate(config.optimizer, steps=config.steps)
        self._learner = learner_of(model, config, temperature=sampler.temperature)
        self._state = self._start(params)
        slots = rollouts.needed_slots(sampler, config, processes=distributed.count())
        self._sampler = rollouts.make_sampler(
            model, slots, tokenizer, group_size=config.group_size, seed=seed, servers=servers
        )
        self._rollouts = Rollouts(
            self._sampler, tokenizer, task, config, sampler, lag=lag, seed=seed
        )
        self._checkpoints = Checkpoints(folder / "checkpoints")
        self.steps_done = self._checkpoints.newest_step()
        if not self.steps_done and (best := self._checkpoints.best_step()) is not None:
            raise UserError(
                f"{folder / 'checkpoints'}: {best} has weights and no optimizer to go on with; set "
                "run.dir to another folder, or delete it to begin anew"
            )
        self._facts = _Facts()
        self._last = config.steps
        if self.steps_done:
            newest = self._checkpoints.restore_newest(given_up(self._state), _Facts)
            self._state, self._facts = newest
        written = self.steps_done - (self._facts.unfinished is not None)
        self._metrics = Metrics(folder, resume_step=written)

    @property
    def params(self) -> nnx.State:
        """Return the weights to measure, as they are now (`TrainState.policy`)."""
        return self._state.policy

    @property
    def curve(self) -> Sequence[tuple[int, float]]:
        """Return the validation accuracies so far, with the steps of their weights."""
        return self._facts.curve

    def run(self, progress: Progress) -> None:
        """Train to the last step of the stage, unless a run of a later stage is resumed.

        Raises:
            Preempted: A signal came, and all is saved.
            LostError: Nobody samples any more, or a tracker has failed, and all is saved.
        """
        if self.steps_done > self._last:
            return
        # After an error too: what is being written is whole, and threads end.
        with closing(self._checkpoints), closing(self._rollouts):
            try:
                while self.steps_done < self._last or self._facts.unfinished is not None:
                    if self._facts.unfinished is None:
                        self._facts.unfinished = self.step()
                        # Servers take them while metrics and a checkpoint are written.
                        self._sampler.send_weights(self._state.params, version=self.steps_done)
                    progress(self.steps_done, self._last, self._record_step())
                    distributed.check()
            except (Preempted, LostError) as stop:
                self._checkpoints.leave(self.steps_done, self._state, self._facts.model_dump())
                saved = f"all {self.steps_done} steps are saved"
                if isinstance(stop, Preempted):
                    raise Preempted(stop.signal, saved) from None
                raise LostError(f"{stop}; {saved}: run the same command again to resume") from None

    def begin_stage(self, optimizer: OptimizerConfig, *, steps: int, start: int) -> None:
        """Go on for more steps: from the weights of a checkpoint (`start`), with a fresh optimizer
        state and a learning rate that counts its steps anew.

        A stage that had begun is resumed.
        """
        rate, first = learning_rate(optimizer, steps=steps), self._config.steps
        self._rate, self._last = lambda step: rate(step - first), first + steps
        if self.steps_done == first:
            # Closed when the stage before had ended.
            self._checkpoints = Checkpoints(self._folder / "checkpoints")
            self._state = self._start(self._read_weights(start))

    def step(self) -> dict[str, float]:
        """Make the next step, and return its metrics; one that is abandoned leaves no trace."""
        watch, version, updates = Stopwatch(), self.steps_done, []
        # Servers may have them already.
        with watch.phase("weights"):
            self._sampler.set_weights(self._state.params, version=version)
        # Roll out and score; `kept` is what the filters leave.
        sampled, kept, rounds = self._roll_out(watch)
        sampler_metrics = rollouts.gather_metrics(self._sampler)
        # Nothing is sampled before the next weights.
        self._sampler.free_memory()
        with watch.phase("update"):
            # Rewards and spans become an advantage for each token.
            rows, numbers = self._token_rows(kept)
            rate = float(self._rate(version))
            for part in batching.split_evenly(rows, count=self._config.mini_batches):
                reference, batches = self._reference_to_measure, self._micro_batches(part)
                # From the second update on there is no way back to the start of the step.
                self._state, stats, known = self._learner.update(
                    self._state, batches, rate=rate, reference=reference, can_stop=not updates
                )
                updates.append(self._update_metrics(stats) | {"padding": batches.padding})
                if part[0][0].old_logprobs is None:  # the only update of the step
                    rows = _with_logprobs(part, batches.read_back(known))
            if (decay := self._config.average) is not None:
                self._state = self._learner.average(self._state, decay=decay)
        if self._is_recorded(version + 1):
            self._write(sampled, kept, rows)
        self.steps_done, self._facts.rollouts = version + 1, self._facts.rollouts + rounds
        numbers |= {"groups/trained": float(len(rows))} | summary.over_updates(updates)
        numbers |= summary.summarise(sampled) | summary.speeds(sampled, rows, watch)
        numbers |= summary.mismatch(rows) | sampler_metrics
        numbers["time/update_programs"] = float(self._learner.programs)
        numbers["time/peak_memory_gib"] = peak_bytes(jax.local_devices()[0]) / 2**30
        if sampled.groups and self._config.algorithm.estimator != "direct":
            live = self._kept(sampled.rewards_NG, sampled.correct_NG, equal_groups="drop")
            numbers[LIVE_SHARE] = len(live) / len(sampled.groups)
        if self._config.algorithm.max_rounds > 1:
            numbers["groups/rounds"] = float(rounds)
        if self._lag:
            numbers |= summary.ages(kept, version=version)
        return numbers

    def use_best(self) -> int:
        """Take the weights of the best checkpoint; return its step. No step can follow."""
        best = self._checkpoints.best_step()
        assert best is not None
        self._state = TrainState(self._read_weights(best), ())
        return best

    def _start(self, params: nnx.State) -> TrainState:
        return self._learner.init(params, has_average=self._config.average is not None)

    def _roll_out(self, watch: Stopwatch) -> tuple[Episodes, Episodes, int]:
        """Play rollouts until the filters leave enough groups, or there were `max_rounds`; return
        all episodes, those to train on, and how many rollouts there were.
        """
        config, version, sampled, rounds = self._config, self.steps_done, Episodes(), 0
        algorithm, kept = config.algorithm, []
        # Nothing is played ahead of a stage's end.
        ahead = min(self._lag, self._last - (version + 1))
        while rounds < algorithm.max_rounds and len(kept) < config.prompts_per_step:
            number = self._facts.rollouts + rounds
            if self._lag:
                self._rollouts.begin(range(number, number + 1 + ahead))
            parts = distributed.gather(
                lambda number=number: self._rollouts.take(
                    number, has_records=self._is_recorded(version + 1), watch=watch
                )
            )
            rollouts.check_failed(sum(part.failed for part in parts), config.prompts_per_step)
            sampled, rounds = sum(parts, sampled), rounds + 1
            rewards_NG, correct_NG = sampled.rewards_NG, sampled.correct_NG
            kept = self._kept(rewards_NG, correct_NG, equal_groups=algorithm.equal_groups)
        trained_on = [sampled.groups[n] for n in kept[: config.prompts_per_step]]
        return sampled, Episodes(trained_on), rounds

    def _token_rows(self, episodes: Episodes) -> tuple[batching.Groups, dict[str, float]]:
        """Return the rows of the groups, with the advantage of each token, and metrics."""
        algorithm, numbers, kl, spans = self._config.algorithm, {}, None, None
        if not episodes.groups:
            return [], numbers
        rows = [flatten(trajectory) for trajectory in episodes.trajectories]
        if algorithm.kl_coef > 0 and algorithm.kl_in != "loss":
            # Of the policy as it sampled.
            known = zip(
                rows, chain(*self._logprobs(self._reference, self._grouped(rows))), strict=True
            )
            estimate = partial(losses.kl_divergence, estimator=algorithm.kl_estimator)
            kl = [np.where(row.is_action, estimate(row.logprobs, r), 0.0) for row, r in known]
            numbers["update/kl"] = batching.token_mean(kl, rows)
        if algorithm.estimator == "direct":
            spans = advantages.all_spans(episodes.trajectories, self._tokenizer.decode)
        credit = advantages.token_advantages(
            rows, episodes.rewards_NG, algorithm, spans=spans, kl=kl
        )
        rows = [replace(row, advantage=value) for row, value in zip(rows, credit, strict=True)]
        if algorithm.mask_cut_off:
            rows = batching.without_cut_off(rows, episodes.trajectories)
        groups = self._grouped(rows)
        if min(self._config.mini_batches, len(groups)) > 1:
            # From the second update on the weights that the ratio compares with are gone.
            groups = _with_logprobs(groups, self._logprobs(self._state.params, groups))
        return groups, numbers

    def _grouped(self, rows: Sequence[TokenRow]) -> batching.Groups:
        size = self._config.group_size
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _logprobs(
        self, params: nnx.State | None, groups: batching.Groups
    ) -> list[list[np.ndarray]]:
        """Return the log-probability of each id under these weights, 0 on prompts."""
        assert params is not None
        batches = self._micro_batches(groups)
        return batches.read_back(self._learner.logprobs(params, batches))

    @property
    def _reference_to_measure(self) -> nnx.State | None:
        algorithm, every = self._config.algorithm, self._config.kl_every
        if algorithm.kl_coef > 0:
            return self._reference if algorithm.kl_in == "loss" else None
        is_measured = every is not None and (self.steps_done + 1) % every == 0
        return self._reference if is_measured else None

    def _update_metrics(self, stats: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an update; end the run if too many were skipped."""
        stop_after_skips(self._state.opt_state, step=self.steps_done + 1)
        whole = stats.pop("weight") or 1.0
        return {name: v if name in _NO_MEANS else v / whole for name, v in stats.items()}

    def _is_recorded(self, step: int) -> bool:
        return step % self._config.sample_every == 0 or step == 1

    def _write(self, sampled: Episodes, kept: Episodes, groups: batching.Groups) -> None:
        """Let the task write the groups of this step down, and the rows of those kept."""
        rows_of = {id(group[0]): rows for group, rows in zip(kept.groups, groups, strict=True)}
        rows = [rows_of.get(id(group[0])) for group in sampled.groups]
        self._task.write(self.steps_done + 1, sampled.groups, rows)

    def _record_step(self) -> str:
        """Validate, write metrics and a checkpoint where they are due; return a status line."""
        config, step = self._config, self.steps_done
        numbers = dict(self._facts.unfinished or {})
        is_last = step == self._last
        if step % config.eval_every == 0 or is_last:
            if config.average is not None:
                # Servers would go on with the average.
                distributed.gather(self._rollouts.finish)
            numbers["validation/accuracy"] = self._task.validate(self.params, step)
            # Servers may have failed meanwhile, and have other weights.
            numbers |= rollouts.gather_metrics(self._sampler, since=numbers)
            self._facts.curve.append((step, numbers["validation/accuracy"]))
        self._metrics.write(step, numbers)
        self._facts.unfinished = None
        if step % config.checkpoint_every == 0 or is_last:
            score = numbers.get("validation/accuracy")
            self._checkpoints.save(step, self._state, self._facts.model_dump(), score=score)
        # Where it fails in one process, all save what is done.
        distributed.gather(lambda: self._task.log(step, numbers))
        live = [line.get(LIVE_SHARE) for line in self._metrics.steps]
        told = summary.status(numbers, self._task.shares), advice(live)
        return "; ".join(filter(None, told))

    def _read_weights(self, step: int) -> nnx.State:
        """Read the weights of a checkpoint, in place of the current state."""
        where = self._folder / "checkpoints" / str(step)
        return read_params(where, given_up(self._state).params)


def _with_logprobs(
    groups: batching.Groups, logprobs: Sequence[Sequence[np.ndarray]]
) -> batching.Groups:
    """Add the learner's log-probabilities to rows."""
    return [
        [replace(row, old_logprobs=logp) for row, logp in zip(*pair, strict=True)]
        for pair in zip(groups, logprobs, strict=True)
    ]
