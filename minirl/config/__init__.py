"""Every setting of the learner, its sampler and its servers, but the algorithms (`algorithms.py`);
checks are validators. Defaults are Progress-SQL's (appendix B, table 4).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import Literal, Self, get_args

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from minirl.config.algorithms import AlgorithmConfig
from minirl.exchange import UserError
from minirl.exchange.settings import Place, Settings, contradiction

Remat = Literal["none", "dots", "full"]
Schedule = Literal["constant", "cosine", "ramp_cosine"]
Matrix = Literal["q", "k", "v", "o", "gate", "up", "down", "in_qkv", "in_z", "out"]

MOST_TOKENS = 16_384
"""The most that `micro_batch_tokens: auto` takes."""
SGLANG_PYTHON = "MINIRL_SGLANG_PYTHON"
"""Environment variable that names the interpreter where `rollout.sglang.python` does not."""
_NAME = r"[\w-]{1,63}(?:\.[\w-]{1,63})*\.?"
_ADDRESS = re.compile(rf"https?://(?:\[[\da-fA-F:.]+\]|{_NAME})(?::(\d{{1,5}}))?/?")
_PORTS = range(1, 2**16)


class ModelSource(Settings):
    """Where the policy comes from."""

    path: Place | None = None
    """Hugging Face folder with config.json, tokenizer and safetensors."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of activations; trained weights and optimizer state are float32."""
    remat: Remat = "none"
    """What the backward pass recomputes: nothing, all but products with weights (`dots`), or
    everything (`full`: least memory, a third more work)."""


class OptimizerConfig(Settings):
    """The optimizer and its learning rate."""

    kind: Literal["adamw", "muon"] = "adamw"
    """AdamW, or `muon` (arXiv:2502.16982) for the layers' matrices: half the steps for an untrained
    model."""
    learning_rate: PositiveFloat = 1e-6
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    schedule: Schedule = "constant"
    """`ramp_cosine` is PaVeRL-SQL's: flat for 3 % of the steps, a linear rise up to 10 %, a
    cosine."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the learning rate at the end of a cosine and in a flat start."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's beta2; beta1 is 0.9, and Muon's momentum 0.95."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Type of the first moment; bfloat16 saves 2 bytes a parameter."""
    weight_decay: float = Field(default=0.01, ge=0)
    max_grad_norm: PositiveFloat = 1.0
    """Global norm that gradients are clipped to."""

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if self.schedule == "ramp_cosine" and self.warmup_steps > 0:
            raise contradiction("warmup_steps", "use 0: schedule=ramp_cosine has a rise of its own")
        return self


class SftOptimizerConfig(OptimizerConfig):
    """The optimizer of the warm start: a higher rate, and a cosine."""

    learning_rate: PositiveFloat = 1e-5
    schedule: Schedule = "cosine"


class LoraConfig(Settings):
    """Low-rank adapters (LoRA, arXiv:2106.09685): W + alpha / rank A B.

    They want about ten times the learning rate of whole weights. Weight decay draws them to 0, and
    so the model to its start.
    """

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    targets: tuple[Matrix, ...] = Field(default=get_args(Matrix), min_length=1)
    """Matrices with adapters, of those that a model has; `in_qkv`, `in_z` and `out` are of linear
    attention."""

    @property
    def scale(self) -> float:
        """Return what A B is multiplied by."""
        return self.alpha / self.rank


class MeshConfig(Settings):
    """Shape of the device mesh; its product is the number of devices."""

    data: PositiveInt = 1
    """Copies of the model, each with its own rows."""
    fsdp: PositiveInt = 1
    """Devices that share weights and optimizer state, each with its own rows."""
    tensor: PositiveInt = 1
    """Devices that share heads and MLP widths."""


class BatchingConfig(Settings):
    """How a batch is split to save memory; gradients differ only by rounding."""

    micro_batch_tokens: PositiveInt | Literal["auto"] = "auto"
    """Tokens of a micro-batch for each data x fsdp part, prompts counted once a group; `auto` is
    what fits, at most 16,384."""
    prompt_multiple: PositiveInt = 256
    """Padding granularity of prompts in attention; larger values compile fewer programs."""
    answer_multiple: PositiveInt = 128
    """The same for answers."""

    @property
    def budget(self) -> int:
        """Return the tokens of a micro-batch; for `auto` the most."""
        tokens = self.micro_batch_tokens
        return MOST_TOKENS if tokens == "auto" else tokens


class _Phase(Settings):
    """What both phases of training have."""

    lora: LoraConfig | None = None
    """Train adapters only, on weights in `model.dtype`; None for all weights."""
    optimizer: OptimizerConfig = OptimizerConfig()
    batching: BatchingConfig = BatchingConfig()

    @model_validator(mode="after")
    def _check_muon(self) -> Self:
        if self.lora is not None and self.optimizer.kind == "muon":
            raise contradiction(
                "optimizer.kind", "use adamw: muon steps by whole matrices, not lora"
            )
        return self


class SftConfig(_Phase):
    """Supervised training on demonstrations: the warm start."""

    steps: PositiveInt | None = None
    """Steps; None for one pass over the demonstrations."""
    groups_per_step: PositiveInt = 32
    group_size: PositiveInt = 1
    """Demonstrations about one database, which share the beginning of their prompts."""
    learn_prompt: bool = False
    """Also learn prompts, beyond what a group shares, which teaches an untrained model to copy
    names."""
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    checkpoint_every: PositiveInt = 100
    """Steps between checkpoints."""


class TrainConfig(_Phase):
    """The course of reinforcement learning."""

    steps: PositiveInt = 312
    """Steps of the first stage; 312 of 64 prompts are one pass over 20,000 questions."""
    prompts_per_step: PositiveInt = 64
    group_size: PositiveInt = 8
    """Trajectories of a prompt (G)."""
    mini_batches: PositiveInt = 1
    """Updates of a step, each on a part of its groups."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    average: float | None = Field(default=None, gt=0, lt=1)
    """Decay per step of an exponential average of the trained weights, which is measured and
    exported in their place; None for none. 0.9 averages about the last ten steps."""
    eval_every: PositiveInt = 20
    """Steps between validations."""
    checkpoint_every: PositiveInt = 20
    """Steps between checkpoints; the newest two are kept, and the best weights of those that are
    validated too."""
    kl_every: PositiveInt | None = None
    """Steps between measurements of the KL to the initial weights if `algorithm.kl_coef` is 0; None
    disables them."""
    sample_every: PositiveInt = 10
    """Steps between records of whole groups (docs/reports.md)."""
    env_workers: PositiveInt = 32
    """Threads that run environments, and rewards."""

    @property
    def has_reference(self) -> bool:
        """Return whether a KL to the start weights is wanted, and so a copy of them."""
        return self.algorithm.kl_coef > 0 or self.kl_every is not None

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        algorithm, size = self.algorithm, self.group_size
        if size < 2 and algorithm.estimator != "direct":
            raise contradiction(
                "group_size", "a group of one has no advantage; use 2, or estimator=direct"
            )
        is_filtered = algorithm.correctness_filter != "none" or algorithm.equal_groups != "keep"
        if size < 2 and is_filtered:
            raise contradiction("group_size", "a group of one cannot be filtered; use 2 or more")
        if self.mini_batches > self.prompts_per_step:
            raise contradiction(
                "mini_batches",
                f"{self.mini_batches} are more than prompts_per_step = {self.prompts_per_step}",
            )
        return self


class SamplerConfig(Settings):
    """How episodes are sampled."""

    slots: PositiveInt = 64
    """Episodes that the native sampler decodes in parallel."""
    max_prompt_tokens: PositiveInt = 6000
    """Longest first observation."""
    max_response_tokens: PositiveInt = 8192
    """Longest rest of an episode: all replies and later observations."""
    max_reply_tokens: PositiveInt | None = None
    """Longest single reply; None for what is left of the response."""
    cache_gb: float | None = Field(default=None, gt=0)
    """Key/value cache of a device, in 10^9 bytes; None for what all slots need, at most 90 % of the
    memory that weights and optimizer leave (CPU a quarter of all)."""
    repeatable: bool | None = None
    """Handle environments' results in the order of the replies, so that runs repeat bit by bit;
    None for true on CPUs only."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; below 1 the gradient is biased (docs/training.md)."""

    @model_validator(mode="after")
    def _check(self) -> SamplerConfig:
        if (self.max_reply_tokens or 0) > self.max_response_tokens:
            raise contradiction("max_reply_tokens", "use sampler.max_response_tokens or less")
        return self


class SglangConfig(Settings):
    """SGLang servers (written for 0.5.23)."""

    urls: tuple[str, ...] = ()
    """Running servers, http://HOST:PORT each; at least one for each process."""
    launch: int = Field(default=0, ge=0)
    """Servers that each process starts on its host, and stops."""
    python: str | None = None
    """Interpreter of SGLang's environment; None for MINIRL_SGLANG_PYTHON, else this one."""
    arguments: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Options of launched servers, such as {mem-fraction-static: 0.8}; true for flags."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables of launched servers."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each launched server, such as ["0,1", "2,3"]; none for the run's."""
    weights: Place | None = None
    """Folder for new weights, at the same path on all hosts, with room for two copies; None for
    `weights` in the run folder."""
    parallel: PositiveInt = 256
    """Concurrent requests to a server."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait for a reply before a server is taken out."""
    wait_s: PositiveFloat = 600.0
    """Longest wait for a server to start, to load weights, or to come back when none is left; then
    the run is saved and stops."""

    def find_python(self) -> str:
        """Return the program that launched servers run in; a `UserError` if there is none."""
        python = self.python or os.environ.get(SGLANG_PYTHON) or sys.executable
        program = shutil.which(python)
        if program is None:
            raise UserError(
                f"rollout.sglang.python (or {SGLANG_PYTHON}): there is no program {python}"
            )
        return program

    @model_validator(mode="after")
    def _check(self) -> SglangConfig:
        matches = {url: _ADDRESS.fullmatch(url) for url in self.urls}
        wrong = [url for url, m in matches.items() if not m or int(m[1] or 1) not in _PORTS]
        if wrong:
            raise contradiction("urls", f"{wrong[:1]} is not http://HOST:PORT")
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise contradiction("urls", "a server is named twice")
        if {"host", "port"} & self.arguments.keys():
            raise contradiction("arguments", "leave out host and port: each server has its own")
        if len(self.devices) not in (0, self.launch):
            raise contradiction(
                "devices", f"{len(self.devices)} for launch = {self.launch} servers; one for each"
            )
        return self


class RolloutConfig(Settings):
    """The sampler of training and evaluation."""

    backend: Literal["auto", "native", "sglang"] = "auto"
    """Sampler; `auto` for SGLang where servers are named or launched, else the native one."""
    sglang: SglangConfig = SglangConfig()
    lag: int = Field(default=0, ge=0)
    """Rollouts that servers sample ahead of training."""

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        sglang = self.sglang
        if self.sampler == "sglang" and bool(sglang.urls) == bool(sglang.launch):
            raise contradiction(
                "sglang", "give either urls (servers that run) or launch (how many to start)"
            )
        if self.sampler == "native" and self.lag:
            raise contradiction(
                "lag",
                "the native sampler takes turns with the learner; set rollout.sglang.launch=N",
            )
        return self

    @property
    def sampler(self) -> Literal["native", "sglang"]:
        """Return who samples."""
        if self.backend != "auto":
            return self.backend
        return "sglang" if self.sglang.urls or self.sglang.launch else "native"

    def __str__(self) -> str:
        """Say who samples, and why."""
        sglang = self.sglang
        if self.sampler == "native":
            reason = "no server in rollout.sglang" if self.backend == "auto" else "rollout.backend"
            return f"the native sampler ({reason})"
        if sglang.launch:
            return f"{sglang.launch} SGLang servers of each host (rollout.sglang.launch)"
        return f"{len(sglang.urls)} SGLang servers (rollout.sglang.urls)"
