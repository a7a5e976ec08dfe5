"""Supervised training on demonstrations, through the same batches and update as everything else."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from random import Random

import jax
import numpy as np
from flax import nnx

from minirl.config import SftConfig
from minirl.exchange import Message
from minirl.model.decoder import Decoder
from minirl.model.lora import trained
from minirl.model.sharding import row_parts
from minirl.run.checkpoint import Checkpoints, given_up
from minirl.run.memory import peak_bytes
from minirl.run.metrics import Metrics, Stopwatch
from minirl.run.preemption import Preempted
from minirl.train.batching import BatchShape, MicroBatches, layouts
from minirl.train.losses import likelihood
from minirl.train.optimizer import learning_rate, make_optimizer, stop_after_skips
from minirl.train.update import Learner
from minirl.types import Progress, Tokenizer, TokenRow


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation that ends in the reply to learn.

    Attributes:
        observations: What the policy is shown before each reply.
        replies: The last is the one to learn; earlier ones may be a mistake to be mended.
        key: Demonstrations of one key begin alike and are put side by side.
        learnt: How many of the last replies are trained on; all of them where the prompt is learnt.
        learn_responses: Where the prompt is learnt, learn the later observations too; not for those
            that a tool writes.
    """

    observations: tuple[Sequence[Message], ...]
    replies: tuple[str, ...]
    key: Hashable = None
    learnt: int = 1
    learn_responses: bool = True


def encode(
    demonstration: Demonstration, tokenizer: Tokenizer, *, learn_prompt: bool = False
) -> TokenRow:
    """Encode a demonstration as an episode; with `learn_prompt`, every token is trained on."""
    question, *later = demonstration.observations
    shown = [tokenizer.encode_chat(question)]
    shown += [tokenizer.encode_next(observation, closed=True) for observation in later]
    replies = demonstration.replies
    first, prompt_length = len(replies) - demonstration.learnt, 0
    ids, is_learnt = list[int](), list[bool]()
    for number, (observed, text) in enumerate(zip(shown, replies, strict=True)):
        reply = [*tokenizer.encode(text), tokenizer.stop_ids[0]]
        is_shown_to_learn = learn_prompt and (number == 0 or demonstration.learn_responses)
        is_learnt += [is_shown_to_learn] * len(observed)
        is_learnt += [learn_prompt or number >= first] * len(reply)
        ids += [*observed, *reply]
        if number == first:
            prompt_length = len(ids) - len(reply)
    none = np.zeros(len(ids), np.float32)
    return TokenRow(np.array(ids, np.int32), np.array(is_learnt), none, 1.0, prompt_length)


def share_prefix(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Let rows share the tokens with which all their prompts begin, of which none is learnt; a
    single row shares nothing of a prompt that is learnt.
    """
    shortest = min(row.prompt_length for row in rows)
    if len(rows) == 1:
        shortest = max(1, int(rows[0].is_action.argmax()))
    prompts = np.stack([row.ids[:shortest] for row in rows])
    is_common = (prompts == prompts[0]).all(axis=0)
    length = max(1, int(np.cumprod(is_common).sum()))
    # What is shared is never a target: a row's first target is the token after it.
    masks = [row.is_action & (np.arange(len(row.ids)) >= length) for row in rows]
    return [
        replace(row, prompt_length=length, is_action=mask)
        for row, mask in zip(rows, masks, strict=True)
    ]


@lru_cache(maxsize=2)
def epoch_groups(
    kinds: tuple[tuple[Hashable, int], ...], group_size: int, seed: int, epoch: int
) -> list[list[int]]:
    """Shuffle the numbers of demonstrations into groups of one key and of like length.

    `kinds` are key and length of each; a key's last group is filled up with others of the key.
    """
    rng = Random(f"{seed} supervised {epoch}")
    members: dict[Hashable, list[int]] = {}
    for number, (key, _) in enumerate(kinds):
        members.setdefault(key, []).append(number)
    groups = []
    for numbers in members.values():
        rng.shuffle(numbers)
        missing = -len(numbers) % group_size
        filled = numbers + [numbers[i % len(numbers)] for i in range(missing)]
        # Rows are padded to the longest of their group.
        filled.sort(key=lambda number: kinds[number][1])
        groups += [filled[i : i + group_size] for i in range(0, len(filled), group_size)]
    rng.shuffle(groups)
    return groups


@dataclass(frozen=True, slots=True)
class Lessons:
    """Demonstrations as rows, with key and length of each, and the order that a seed gives them."""

    rows: Sequence[TokenRow]
    kinds: tuple[tuple[Hashable, int], ...]
    pad_id: int
    seed: int

    @classmethod
    def of(
        cls,
        demonstrations: Sequence[Demonstration],
        tokenizer: Tokenizer,
        config: SftConfig,
        *,
        seed: int,
    ) -> Lessons:
        """Encode demonstrations."""
        as_row = partial(encode, tokenizer=tokenizer, learn_prompt=config.learn_prompt)
        rows = [as_row(demonstration) for demonstration in demonstrations]
        pairs = zip(demonstrations, rows, strict=True)
        kinds = tuple((demonstration.key, len(row.ids)) for demonstration, row in pairs)
        return cls(rows, kinds, tokenizer.pad_id, seed)

    def steps(self, config: SftConfig) -> int:
        """Return how many steps there are; of one pass the last one is filled from the next."""
        one_pass = len(epoch_groups(self.kinds, config.group_size, self.seed, 0))
        return config.steps or -(-one_pass // config.groups_per_step)

    def groups(self, step: int, config: SftConfig) -> list[list[TokenRow]]:
        """Return the groups of a step, counted from 0, from the step's number alone."""
        epoch = partial(epoch_groups, self.kinds, config.group_size, self.seed)
        per_step, per_epoch = config.groups_per_step, len(epoch(0))
        numbers = range(step * per_step, (step + 1) * per_step)
        chosen = (epoch(number // per_epoch)[number % per_epoch] for number in numbers)
        return [share_prefix([self.rows[n] for n in group]) for group in chosen]

    def shapes(self, config: SftConfig, *, parts: int) -> set[BatchShape]:
        """Return the shapes of all micro-batches, on each of so many parts of a mesh's rows."""
        steps = (self.groups(step, config) for step in range(self.steps(config)))
        cut = partial(layouts, sizes=config.batching, parts=parts)
        return {layout.shape for groups in steps for layout in cut(groups)}


def learner_of(model: Decoder, config: SftConfig) -> Learner:
    """Return what learns demonstrations."""
    return Learner(model, likelihood, make_optimizer(config.optimizer))


def supervise(
    model: Decoder,
    lessons: Lessons,
    config: SftConfig,
    *,
    folder: Path,
    progress: Progress = lambda *_: None,
) -> nnx.State:
    """Train on demonstrations, and return the weights that were trained; with adapters, they alone.

    Called again after a kill, it resumes from the last checkpoint.

    Raises:
        Preempted: A signal came, and all is saved.
    """
    learner, steps = learner_of(model, config), lessons.steps(config)
    rate = learning_rate(config.optimizer, steps=steps)
    state = learner.init(trained(model))
    cut = partial(
        MicroBatches,
        aggregation="token_mean",
        sizes=config.batching,
        pad_id=lessons.pad_id,
        parts=row_parts(model.mesh),
    )
    with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        done = checkpoints.newest_step()
        if done:
            state, _ = checkpoints.restore_newest(given_up(state), dict)
        metrics = Metrics(folder, resume_step=done)
        try:
            while done < steps:
                watch = Stopwatch()
                groups = lessons.groups(done, config)
                with watch.phase("update"):
                    state, stats, _ = learner.update(state, cut(groups), rate=float(rate(done)))
                done += 1
                stop_after_skips(state.opt_state, step=done)
                numbers = {f"sft/{name}": value for name, value in stats.items()}
                numbers["time/peak_memory_gib"] = peak_bytes(jax.local_devices()[0]) / 2**30
                metrics.write(done, numbers | watch.numbers())
                if done % config.checkpoint_every == 0 or done == steps:
                    checkpoints.save(done, state, {})
                progress(done, steps, f"loss {numbers['sft/loss']:.3f}")
        except Preempted as stop:
            checkpoints.leave(done, state, {})
            saved = f"{done} steps of the warm start are saved"
            raise Preempted(stop.signal, saved) from None
    return state.params
