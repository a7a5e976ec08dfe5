"""Settings of the model and its training. Defaults are Progress-SQL's (appendix B, table 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self, get_args

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from exchange import Settings
from minirl.config.algorithms import Algorithm, Grpo
from minirl.config.base import contradiction
from minirl.config.rollout import SamplerConfig

Remat = Literal["none", "dots", "full"]
Matrix = Literal["q", "k", "v", "o", "gate", "up", "down"]

MOST_TOKENS = 16_384
"""Of a micro-batch whose size is left to the program."""


class ModelSource(Settings):
    """Where the policy comes from."""

    path: Path | None = None
    """Hugging Face folder with config.json, tokenizer and safetensors."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of activations; what is trained and its optimizer state stay in float32."""
    remat: Remat = "none"
    """What the backward pass computes again of each layer: nothing; all but the matrix products
    with weights; or everything, which needs the least memory and a third more work."""


class OptimizerConfig(Settings):
    """The optimizer and its learning rate."""

    kind: Literal["adamw", "muon"] = "adamw"
    """AdamW; or Muon (arXiv:2502.16982) for the layers' matrices and Nesterov's AdamW for the rest,
    at one learning rate: a model that starts from nothing learns in half the steps."""
    learning_rate: PositiveFloat = 1e-6
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear rise to the learning rate."""
    schedule: Literal["constant", "cosine", "ramp_cosine"] = "constant"
    """`ramp_cosine` is PaVeRL-SQL's first stage: flat and low for 3 % of the steps, a linear rise
    up to 10 %, then a cosine."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the learning rate that a cosine ends at, and a flat start begins with."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's second; the first is 0.9, and Muon's own momentum 0.95."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """What the first running moment is kept in; bfloat16 takes 2 bytes a parameter off."""
    weight_decay: float = Field(default=0.01, ge=0)
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if self.schedule == "ramp_cosine" and self.warmup_steps > 0:
            raise contradiction("warmup_steps", "use 0: schedule=ramp_cosine has a rise of its own")
        return self


class LoraConfig(Settings):
    """Low-rank adapters (LoRA, arXiv:2106.09685): W + alpha / rank A B, of which A and B learn.

    They want about ten times the learning rate of whole weights. Weight decay draws them to 0, and
    so the model to its start.
    """

    rank: PositiveInt = 16
    """Columns of A, and rows of B."""
    alpha: PositiveFloat = 32.0
    targets: tuple[Matrix, ...] = Field(default=get_args(Matrix), min_length=1)
    """Which matrices of every layer have adapters."""

    @property
    def scale(self) -> float:
        """Return what A B is multiplied by."""
        return self.alpha / self.rank


class MeshConfig(Settings):
    """How devices are arranged; their numbers multiply to that of all devices."""

    data: PositiveInt = 1
    """Copies of the model, each with rows of its own."""
    fsdp: PositiveInt = 1
    """Devices that share weights and optimizer state, each with rows of its own."""
    tensor: PositiveInt = 1
    """Devices that share the heads and the inner width of every layer."""


class BatchingConfig(Settings):
    """How a batch is cut for memory; the gradient does not depend on it but for rounding."""

    micro_batch_tokens: PositiveInt | Literal["auto"] = "auto"
    """Tokens of one micro-batch for each of the mesh's data x fsdp parts, a group's prompt counted
    once; at least one trajectory with its prompt. `auto` is what there is memory for, at most
    16,384: more is not faster."""
    prompt_multiple: PositiveInt = 256
    """Granularity of the padded lengths of prompts in attention: larger compiles fewer shapes."""
    answer_multiple: PositiveInt = 128
    """The same of what comes after the prompt."""

    @property
    def budget(self) -> int:
        """Return the tokens of a micro-batch; for `auto` the most."""
        tokens = self.micro_batch_tokens
        return MOST_TOKENS if tokens == "auto" else tokens


class GuardConfig(Settings):
    """Which updates are skipped: weights and optimizer state stay as they are. One whose loss or
    gradient is not finite always is."""

    max_spike: PositiveFloat | None = 20.0
    """A gradient is also skipped if its norm is over so many times the median of the last ones, and
    of `max_grad_norm`; None for no such limit."""
    window: PositiveInt = 16
    """Norms that the median is taken of; before there are so many, none is too large."""
    max_skipped: PositiveInt = 5
    """Updates skipped in a row that end the run; the last one's batch is saved as skipped.npz."""


class _Phase(Settings):
    """What both phases of training have."""

    lora: LoraConfig | None = None
    """Train adapters alone, on weights that are kept in model.dtype; None for all weights. The
    warm start leaves a model that has them merged, in float32."""
    optimizer: OptimizerConfig = OptimizerConfig()
    batching: BatchingConfig = BatchingConfig()
    guard: GuardConfig = GuardConfig()

    @model_validator(mode="after")
    def _check_muon(self) -> Self:
        if self.lora is not None and self.optimizer.kind == "muon":
            raise contradiction(
                "optimizer.kind", "use adamw: muon steps by whole matrices, not lora"
            )
        return self


class SftConfig(_Phase):
    """Supervised training on demonstrations: the warm start."""

    steps: PositiveInt = 500
    groups_per_step: PositiveInt = 32
    group_size: PositiveInt = 1
    """Demonstrations side by side that share the beginning of their prompts (one database)."""
    learn_prompt: bool = False
    """Also compute the loss on the part of the prompt that the group does not share: a model that
    is new to language learns to copy names."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, schedule="cosine")
    checkpoint_every: PositiveInt = 100
    """Steps between checkpoints."""


class TrainConfig(_Phase):
    """The course of reinforcement learning."""

    steps: PositiveInt = 312
    """Steps (of the first stage); 312 batches of 64 prompts pass once over 20,000 examples."""
    prompts_per_step: PositiveInt = 64
    group_size: PositiveInt = 8
    """Trajectories a prompt (G)."""
    mini_batches: PositiveInt = 1
    """Parts of a step's groups, with an update each, at one learning rate: from the second on the
    importance ratio is away from 1. Where filters leave fewer groups, there are fewer updates."""
    algorithm: Algorithm = Grpo()
    eval_every: PositiveInt = 20
    """Steps between evaluations on the validation examples."""
    checkpoint_every: PositiveInt = 20
    """Steps between checkpoints, of which the newest two are kept, and the weights of the best by
    validation accuracy."""
    kl_every: PositiveInt | None = None
    """Steps between measurements of the KL to the start where `algorithm.kl_coef` is 0; they take a
    forward pass and a copy of the start weights. None for no measurements, no copy."""
    sample_every: PositiveInt = 10
    """Steps between those whose groups are written to trajectories.jsonl (docs/reports.md)."""
    env_workers: PositiveInt = 32
    """Threads that wait for environments."""

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
        if size < 2 and algorithm.is_filtered:
            raise contradiction("group_size", "a group of one cannot be filtered; use 2 or more")
        if self.mini_batches > self.prompts_per_step:
            raise contradiction(
                "mini_batches",
                f"{self.mini_batches} are more than prompts_per_step = {self.prompts_per_step}",
            )
        return self


def check_together(train: TrainConfig, sampler: SamplerConfig) -> None:
    """Check the settings of different parts of a run against each other, for its validator.

    Raises:
        PydanticCustomError: They contradict each other.
    """
    algorithm, longest = train.algorithm, sampler.max_response_tokens
    if algorithm.overlong_tokens >= longest:
        raise contradiction(
            "train.algorithm.overlong_tokens",
            f"{algorithm.overlong_tokens} is not below sampler.max_response_tokens; the paper's "
            f"share of it is a fifth: use {longest // 5}",
        )
    if algorithm.score_centering and sampler.top_p < 1:
        raise contradiction(
            "train.algorithm.score_centering",
            "it is of the whole distribution: use sampler.top_p=1",
        )
