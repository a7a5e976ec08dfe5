"""The sampler of a job: in this process, or behind servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import optax
from flax import nnx

from minirl.config import BatchingConfig, SamplerConfig
from minirl.model.decoder import Decoder
from minirl.model.lora import split
from minirl.run import distributed
from minirl.sample.sampler import NativeSampler
from minirl.sglang.pool import EVENTS, IN_USE, OUT_S, PROBE_GAP
from minirl.sglang.sampler import Logprobs, Servers, SglangSampler
from minirl.train.batching import TokenRow, micro_batches, read_back, sizes_on
from minirl.train.update import Learner, likelihood_objective
from minirl.types import Tokenizer

JobSampler = NativeSampler | SglangSampler


def make_sampler(
    model: Decoder,
    config: SamplerConfig,
    tokenizer: Tokenizer,
    *,
    group_size: int,
    seed: int,
    servers: Servers | None = None,
) -> JobSampler:
    """Make what samples with the weights of a model.

    Args:
        model: The learner's; the sampler has no weights before `set_weights`.
        config: Slots and token limits, of the native sampler.
        tokenizer: Its tokenizer.
        group_size: Episodes of a prompt.
        seed: Of the random streams; servers have their own.
        servers: Those that sample; None for this process.
    """
    if servers is None:
        return NativeSampler(model, config, tokenizer, group_size=group_size, seed=seed)
    return SglangSampler(model, tokenizer, servers, logprobs=_logprobs(model, tokenizer))


def gather_metrics(
    sampler: JobSampler, *, since: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the metrics of the samplers of all processes since the last call; all have to call.

    Counts add up over processes; of servers in use the fewest count, of other numbers the largest.

    Args:
        sampler: This process's.
        since: Earlier metrics of the same step: only counts, outages and the largest difference to
            the learner are returned, and these are of both.
    """
    parts = distributed.gather(sampler.numbers)
    over = dict.fromkeys(EVENTS, sum) | {IN_USE: min}
    found = {name: over.get(name, max)(one[name] for one in parts) for name in parts[0]}
    if since is None:
        return found
    merged = {
        name: since.get(name, 0.0) + found[name] for name in (*EVENTS, OUT_S) if name in found
    }
    if PROBE_GAP in found:
        merged[PROBE_GAP] = max(since.get(PROBE_GAP, 0.0), found[PROBE_GAP])
    return merged


def _logprobs(model: Decoder, tokenizer: Tokenizer) -> Logprobs:
    """Return what computes log-probabilities of ids as the learner does."""
    graph, _, frozen = split(model)
    learner = Learner(
        graph, likelihood_objective(), optax.identity(), frozen=frozen, mesh=model.mesh
    )
    sizes = sizes_on(BatchingConfig(), model.mesh)
    cut = partial(micro_batches, aggregation="token_mean", sizes=sizes, pad_id=tokenizer.pad_id)

    def logprobs(params: nnx.State, ids: Sequence[int], prompt_length: int) -> np.ndarray:
        is_action = np.arange(len(ids)) >= prompt_length
        none = np.zeros(len(ids), np.float32)
        rows = [[TokenRow(np.array(ids, np.int32), is_action, none, 0.0, prompt_length)]]
        values = learner.logprobs(params, cut(rows), temperature=1.0)
        return read_back(rows, values, sizes=sizes)[0][0][prompt_length:]

    return logprobs
