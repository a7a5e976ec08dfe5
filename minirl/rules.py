"""The rules between settings of the learner and its sampler."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Sequence
from urllib.parse import urlsplit

from minirl.config import (
    CONTROL_TOKENS,
    SGLANG_PYTHON,
    AlgorithmConfig,
    OptimizerConfig,
    RolloutConfig,
    SamplerConfig,
    SftConfig,
    SglangConfig,
    TinyConfig,
    TrainConfig,
)
from minirl.errors import UserError

_BLANK = re.compile(r"\s")


def contradictions(train: TrainConfig, sampler: SamplerConfig) -> list[tuple[bool, str]]:
    """List rules that settings may break: whether they do, and a line that says what to write."""
    algorithm, size = train.algorithm, train.group_size
    direct = algorithm.estimator == "direct"
    has_kl = algorithm.kl_coef > 0
    by_token = direct or algorithm.token_credit == "return_to_go" or algorithm.correction != "none"
    by_token |= has_kl and algorithm.kl_in == "credit"
    filtered = algorithm.correctness_filter != "none" or algorithm.equal_groups != "keep"
    longest = sampler.max_response_tokens
    return [
        (
            size < 2 and not direct,
            "train.group_size: a group of one has no advantage; use 2 or more, "
            "or train.algorithm.estimator=direct",
        ),
        (
            size < 2 and filtered,
            "train.group_size: a group of one is neither mixed nor unequal; use 2 or more, or "
            "train.algorithm.correctness_filter=none and train.algorithm.equal_groups=keep",
        ),
        (
            has_kl and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1",
            "train.algorithm.kl_estimator: k1 in the loss has no gradient on average; use k2 or "
            "k3, or train.algorithm.kl_in=credit",
        ),
        (
            by_token and algorithm.ratio_level == "sequence",
            "train.algorithm.ratio_level: sequence needs one advantage a row, and these settings "
            "give one a token; use sequence_token",
        ),
        (
            algorithm.aggregation_divisor is not None and algorithm.aggregation != "constant",
            "train.algorithm.aggregation_divisor: divides with aggregation=constant only; "
            "set it to null",
        ),
        (
            train.mini_batches > train.prompts_per_step,
            f"train.mini_batches: {train.mini_batches} are more than train.prompts_per_step = "
            f"{train.prompts_per_step}, and each has at least one prompt",
        ),
        (
            bool(size % (train.batching.answers_per_batch or 1)),
            f"train.batching.answers_per_batch: {train.batching.answers_per_batch} does not divide "
            f"train.group_size = {size}",
        ),
        (
            algorithm.max_rounds > 1 and not filtered,
            "train.algorithm.max_rounds: without a filter the first round is full; use 1, or "
            "train.algorithm.correctness_filter=mixed",
        ),
        (
            algorithm.overlong_tokens >= longest,
            f"train.algorithm.overlong_tokens: {algorithm.overlong_tokens} is not below "
            f"sampler.max_response_tokens; the paper's share of it is a fifth: use {longest // 5}",
        ),
        (
            sampler.ratio_top_p < 1 and train.has_reference,
            "sampler.logprobs: nucleus has no KL to the start weights, whose nucleus is another "
            "one; use full, or train.algorithm.kl_coef=0 and train.kl_every=null",
        ),
        (
            sampler.ratio_top_p < 1 and train.mini_batches > 1,
            "sampler.logprobs: nucleus is that of the weights that sampled, which only the first "
            "update of a step has; use full, or train.mini_batches=1",
        ),
        *optimizer_contradictions(train, key="train"),
    ]


def of_rollouts(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, sampler: SamplerConfig
) -> list[tuple[bool, str]]:
    """List the rules of who samples, in the form of `contradictions`."""
    sglang = rollout.sglang
    given, launched = len(sglang.urls), sglang.launch
    odd = [url for url in sglang.urls if not _is_address(url)]
    return [
        (
            rollout.backend == "sglang" and bool(given) == bool(launched),
            "rollout.sglang: give either urls (servers that run) or launch (how many to start)",
        ),
        (bool(odd), f"rollout.sglang.urls: {odd[:1]} is not http://HOST:PORT"),
        (
            rollout.backend == "native" and rollout.is_ahead,
            "rollout.lag and rollout.slow_share: the native sampler takes turns with the learner; "
            "set rollout.backend=sglang",
        ),
        (
            rollout.is_ahead and algorithm.correction != "none",
            f"train.algorithm.correction: {algorithm.correction} needs the weights that sampled, "
            "which are gone when episodes are sampled ahead: their age would count as the "
            "sampler's error, and nothing be clipped; set it to none (the clipped ratio then spans "
            "both), or rollout.lag=0 and rollout.slow_share=0",
        ),
        (
            rollout.backend == "sglang" and sampler.ratio_top_p < 1,
            "sampler.logprobs: SGLang reports log-probabilities of the whole distribution alone, "
            "not of a nucleus; use full, or rollout.backend=native",
        ),
        (
            rollout.oldest < rollout.lag,
            f"rollout.max_age: {rollout.max_age} would cut every group that was sampled "
            f"rollout.lag = {rollout.lag} steps ahead; give at least that",
        ),
        (
            len({url.rstrip("/") for url in sglang.urls}) < given,
            "rollout.sglang.urls: a server is named twice; name each once",
        ),
        (
            bool({"host", "port"} & sglang.arguments.keys()),
            "rollout.sglang.arguments: host and port are chosen for each server; leave them out",
        ),
        (
            len(sglang.devices) not in (0, launched),
            f"rollout.sglang.devices: {len(sglang.devices)} for launch = {launched} servers; give "
            "one for each, or none",
        ),
    ]


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port
        host = (parts.hostname or "").encode("idna")  # no part of a name is empty, or very long
    except ValueError:
        return False
    is_bare = parts.path in ("", "/") and not parts.query and not parts.fragment
    return parts.scheme in ("http", "https") and bool(host) and is_bare and not _BLANK.search(url)


def check_installed(sglang: SglangConfig) -> None:
    """Look for what only some settings need.

    Raises:
        UserError: It is not there.
    """
    if sglang.push != "disk" and importlib.util.find_spec("torch") is None:
        raise UserError(
            f"rollout.sglang.push: {sglang.push} needs PyTorch beside the learner, which is not "
            "installed: pip install 'minirl-sql[torch]', or use disk"
        )
    python = sglang.interpreter
    if sglang.launch and shutil.which(python) is None:
        raise UserError(f"rollout.sglang.python (or {SGLANG_PYTHON}): there is no program {python}")


def optimizer_contradictions(phase: TrainConfig | SftConfig, *, key: str) -> list[tuple[bool, str]]:
    """List the rules of an optimizer and what it trains, in the form of `contradictions`.

    Args:
        phase: Settings that hold both.
        key: Where these stand.
    """
    return [
        (
            phase.lora is not None and phase.optimizer.kind == "muon",
            f"{key}.optimizer.kind: muon steps by whole matrices, and {key}.lora trains factors of "
            "them; use adamw",
        ),
        *schedule_contradictions(phase.optimizer, key=f"{key}.optimizer"),
    ]


def schedule_contradictions(optimizer: OptimizerConfig, *, key: str) -> list[tuple[bool, str]]:
    """List the rules of a learning rate's course, in the form of `contradictions`.

    Args:
        optimizer: Its settings.
        key: Where these stand.
    """
    ramp = optimizer.schedule == "ramp_cosine"
    return [
        (
            ramp and optimizer.warmup_steps > 0,
            f"{key}.warmup_steps: schedule=ramp_cosine rises for ramp_share of the steps; use 0",
        ),
        (
            ramp and optimizer.flat_share >= optimizer.ramp_share,
            f"{key}.flat_share: not below ramp_share, so that no step is left to rise in",
        ),
        (
            optimizer.lr_ramp == "code" and not ramp,
            f"{key}.lr_ramp: code is the rise of schedule=ramp_cosine; set that too",
        ),
    ]


def tiny_contradictions(shape: TinyConfig, *, marks: Sequence[str]) -> list[tuple[bool, str]]:
    """List the rules of a tiny model's shape, in the form of `contradictions`."""
    # Every byte, every control token and every mark is a token.
    least = 256 + len(CONTROL_TOKENS) + len(marks)
    return [
        (
            shape.vocab_size < least,
            f"model.tiny.vocab_size: {shape.vocab_size} is too small; write {least} or more",
        ),
        (
            shape.heads % shape.kv_heads != 0,
            f"model.tiny.kv_heads: {shape.kv_heads} does not divide heads = {shape.heads}",
        ),
        (
            shape.hidden_size % (2 * shape.heads) != 0,
            f"model.tiny.hidden_size: {shape.hidden_size} is not a multiple of "
            f"2 x heads = {2 * shape.heads}; rotary embedding needs heads of an even size",
        ),
    ]
