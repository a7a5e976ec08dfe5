"""Settings of the learner and its sampler. Defaults are Progress-SQL's (appendix B, table 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class Settings(BaseModel):
    """Base of all settings here: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TinyConfig(Settings):
    """Shape of a model that is made on the spot, with its tokenizer."""

    vocab_size: PositiveInt = 2048
    """Entries of the tokenizer and rows of the embedding."""
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 384
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    rope_theta: PositiveFloat = 10_000.0


class ModelSource(Settings):
    """Where the policy comes from."""

    path: Path | None = None
    """Hugging Face folder with config.json, tokenizer and safetensors."""
    tiny: TinyConfig | None = None
    """Make a tiny model in the run folder in place of reading one."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What activations are computed in; weights and optimizer state stay in float32."""
    remat: bool = False
    """Recompute each layer in the backward pass: less memory, a third more work."""


class SamplerConfig(Settings):
    """The native sampler."""

    slots: PositiveInt = 64
    """Episodes decoded side by side."""
    max_prompt_tokens: PositiveInt = 6000
    """Longest first observation."""
    max_response_tokens: PositiveInt = 8192
    """Longest rest of an episode: every reply and every later observation."""
    max_reply_tokens: PositiveInt | None = None
    """Longest single reply; None for what is left of the response."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; log-probabilities stay those of the whole distribution."""


class AlgorithmConfig(Settings):
    """The one objective; presets differ in their defaults only."""

    estimator: Literal["group_normalised", "group_centred"] = "group_normalised"
    """How rewards of a group become advantages."""
    adv_std_ddof: Literal[0, 1] = 1
    """1: divide the variance by G - 1; 0: by G."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Importance ratio of each token, or of the whole row (GSPO)."""
    clip_low: float = Field(default=0.2, ge=0)
    """Largest fall of the ratio below 1 that still gets a gradient."""
    clip_high: float = Field(default=0.2, ge=0)
    """Largest rise of the ratio above 1 that still gets a gradient."""
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    """Mean over rows of the mean over their tokens, or mean over all tokens."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the loss; 0 for none, as in the paper."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """Estimator of that KL; k1 has no gradient in a loss and is not offered."""
    equal_groups: Literal["keep", "drop"] = "keep"
    """Groups of equal rewards: count them in the means (no pull), or leave them out."""
    correctness_filter: Literal["none", "mixed"] = "none"
    """`mixed` trains only on groups with both correct and wrong trajectories."""


class Grpo(AlgorithmConfig):
    """GRPO (arXiv:2402.03300) as Progress-SQL uses it (appendix E.6)."""

    kind: Literal["grpo"] = "grpo"


class Gspo(AlgorithmConfig):
    """GSPO (arXiv:2507.18071) as Progress-SQL uses it: sequence ratio, the same clip bounds."""

    kind: Literal["gspo"] = "gspo"
    ratio_level: Literal["token", "sequence"] = "sequence"


Algorithm = Annotated[Grpo | Gspo, Field(discriminator="kind")]


class OptimizerConfig(Settings):
    """The optimizer and the course of its learning rate."""

    kind: Literal["adamw", "muon"] = "adamw"
    """AdamW; or Muon (arXiv:2502.16982) for the layers' matrices and Nesterov's AdamW for the rest,
    at one learning rate: a model that starts from nothing learns in half the steps."""
    learning_rate: PositiveFloat = 1e-6
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear rise to the learning rate."""
    schedule: Literal["constant", "cosine"] = "constant"
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the learning rate that a cosine ends at."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's; Muon's own momentum is 0.95."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""


class BatchingConfig(Settings):
    """How a batch is cut for memory; the gradient does not depend on it but for rounding."""

    groups_per_batch: PositiveInt = 1
    """Groups (prompts) of one micro-batch."""
    prompt_multiple: PositiveInt = 256
    """Granularity of the padded lengths of prompts: larger compiles fewer shapes and pads more."""
    answer_multiple: PositiveInt = 128
    """The same of what comes after the prompt."""


class SftConfig(Settings):
    """Supervised training on demonstrations: the warm start."""

    steps: PositiveInt = 500
    groups_per_step: PositiveInt = 32
    group_size: PositiveInt = 1
    """Demonstrations side by side that share the beginning of their prompts (one database)."""
    learn_prompt: bool = False
    """Also learn to predict what stands before the last reply and is not shared by the group (the
    question, earlier replies, feedback): a model that is new to language learns to copy names."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, schedule="cosine")
    batching: BatchingConfig = BatchingConfig(groups_per_batch=8)
    checkpoint_every: PositiveInt = 100
    """Steps between checkpoints."""


class TrainConfig(Settings):
    """The course of reinforcement learning."""

    steps: PositiveInt = 312
    """Updates; 312 batches of 64 prompts pass once over 20,000 examples."""
    prompts_per_step: PositiveInt = 64
    group_size: PositiveInt = 8
    """Trajectories a prompt (G)."""
    algorithm: Algorithm = Grpo()
    optimizer: OptimizerConfig = OptimizerConfig()
    batching: BatchingConfig = BatchingConfig()
    eval_every: PositiveInt = 20
    """Steps between greedy evaluations on the validation examples."""
    checkpoint_every: PositiveInt = 20
    """Steps between checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept; the best by validation accuracy is kept besides."""
    kl_every: PositiveInt = 5
    """Steps between measurements of the KL to the start; each costs one more forward pass."""
    sample_every: PositiveInt = 10
    """Steps between samples of trajectories in trajectories.jsonl."""
    env_workers: PositiveInt = 8
    """Threads that wait for environments."""
