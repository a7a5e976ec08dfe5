"""Settings of the learner and its sampler. Defaults are Progress-SQL's (appendix B, table 4)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

Estimator = Literal["group_normalised", "group_centred", "leave_one_out", "direct"]
TokenCredit = Literal["own", "return_to_go"]
RatioLevel = Literal["token", "sequence", "sequence_token"]
Aggregation = Literal["sequence_mean", "response_mean", "token_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward", "credit"]
Correction = Literal["none", "truncated", "masked"]
Remat = Literal["none", "dots", "full"]
Matrix = Literal["q", "k", "v", "o", "gate", "up", "down"]

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Of a tiny model's tokenizer."""
MARKS = ("<think>", "</think>", "<sql>", "</sql>")
"""Written by the policy and read by SQL environments: single tokens, but text like any other."""


class Settings(BaseModel):
    """Base of all settings here: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


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
    """What activations are computed in; what is trained and its optimizer state stay in float32."""
    remat: Remat = "none"
    """What the backward pass computes again of each layer. none: nothing; dots: all but the matrix
    products with weights, so attention and what is cheap; full: everything, which needs the least
    memory and a third more work."""


class SamplerConfig(Settings):
    """How episodes are sampled; slots and cache are the native sampler's."""

    slots: PositiveInt = 64
    """Episodes decoded side by side."""
    max_prompt_tokens: PositiveInt = 6000
    """Longest first observation."""
    max_response_tokens: PositiveInt = 8192
    """Longest rest of an episode: every reply and every later observation."""
    max_reply_tokens: PositiveInt | None = None
    """Longest single reply; None for what is left of the response."""
    cache_gb: float | None = Field(default=None, gt=0)
    """Memory of each device for keys and values, in 10^9 bytes; when it is full, episodes wait.
    None: what all slots take at their longest, but at most a quarter of the device's memory."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: draw from the likeliest tokens that together reach this probability."""
    logprobs: Literal["full", "nucleus"] = "full"
    """Whose log-probabilities the importance ratio compares where `top_p` is below 1: those of the
    whole distribution, as ASTRA and others train; or those of what is drawn from, in sampler and
    learner, so that the gradient is that of the policy which sampled."""

    @property
    def ratio_top_p(self) -> float:
        """Return the `top_p` of the learner's log-probabilities."""
        return self.top_p if self.logprobs == "nucleus" else 1.0


SGLANG_PYTHON = "MINIRL_SGLANG_PYTHON"
"""Environment variable that names the interpreter where `rollout.sglang.python` does not."""


class SglangConfig(Settings):
    """SGLang servers (written for 0.5.23), given by `urls` or launched."""

    urls: tuple[str, ...] = ()
    """Servers that run already: http://HOST:PORT each."""
    launch: int = Field(default=0, ge=0)
    """Servers that each process of the run starts on its own host, and stops when it ends."""
    python: str | None = None
    """Interpreter of an environment that has SGLang, for `launch`; None for that of the environment
    variable MINIRL_SGLANG_PYTHON, or else the one that runs this."""
    arguments: dict[str, bool | int | float | str] = {}
    """Of launched servers, by name without dashes: {mem-fraction-static: 0.8}; true for those that
    take no value."""
    variables: dict[str, str] = {}
    """Environment variables of launched servers, besides those of the run."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each launched server, for example ["0,1", "2,3"]; none for that of
    the run."""
    push: Literal["disk", "nccl"] = "disk"
    """How new weights come to servers: by a folder that they see, or by broadcasts of PyTorch (NCCL
    from GPUs, else Gloo; the extra `torch`) to servers that reach this host."""
    weights: Path | None = None
    """Of push=disk: folder that servers read new weights from, at the same path as here; None for
    `weights` in the run folder. A model in model.dtype has to fit twice."""
    parallel: PositiveInt = 256
    """Requests under way at a server; others wait here."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait for a reply; the server is left out after it, and another one asked."""
    health_s: PositiveFloat = 30.0
    """A server that has not answered a health check for so long is taken for hung."""
    start_s: PositiveFloat = 600.0
    """Longest wait for a server to be ready at the start of the run."""
    push_s: PositiveFloat = 600.0
    """Longest wait for a server to take new weights, or each part of them."""
    wait_s: PositiveFloat = 600.0
    """Longest wait for any server to come back when none is left; then the run is saved and
    stops."""
    tolerance: PositiveFloat | None = None
    """Largest mean difference of a probe's log-probabilities between a server and the learner,
    checked with every new weights; None for 0.001 in float32 and 0.2 in bfloat16."""

    @property
    def interpreter(self) -> str:
        """Return the program that launched servers run in."""
        return self.python or os.environ.get(SGLANG_PYTHON) or sys.executable


class RolloutConfig(Settings):
    """Who samples: the training episodes, and what accuracy is measured with."""

    backend: Literal["native", "sglang"] = "native"
    sglang: SglangConfig = SglangConfig()
    lag: int = Field(default=0, ge=0)
    """Rounds of episodes that servers sample ahead of the step that trains on them, while the
    learner updates: 0 for none, so that every step trains on its own weights' episodes."""
    slow_share: float = Field(default=0.0, ge=0, lt=1)
    """Part of a round's groups, the slowest, that its step does not wait for. They join a later
    step, if they are not too old for it; long episodes are then rarer among those trained on."""
    max_age: int | None = Field(default=None, ge=0)
    """Steps that the weights with which a group began may lie behind those of the step that trains
    on it; older groups are cut, and counted. None for `lag`: what a step with `slow_share` did not
    wait for is then too old for the next one, but at the start of a run."""

    @property
    def is_ahead(self) -> bool:
        """Tell whether any episodes are played while the learner updates."""
        return bool(self.lag or self.slow_share)

    @property
    def oldest(self) -> int:
        """Return `max_age`, or what stands for it."""
        return self.lag if self.max_age is None else self.max_age


class AlgorithmConfig(Settings):
    """The one objective; presets differ in their defaults only."""

    estimator: Estimator = "group_normalised"
    """How rewards become advantages: against the trajectory's group, or `direct`: every token gets
    the value of the credit span that it lies in, and the total where the reward has no spans."""
    adv_std_ddof: Literal[0, 1] = 1
    """1: divide a variance by its count less 1; 0: by the count."""
    token_credit: TokenCredit = "own"
    """A token's advantage: its own credit, or the sum from it to the end of its trajectory."""
    whiten: bool = False
    """Standardise advantages over all sampled tokens of the batch."""
    ratio_level: RatioLevel = "token"
    """Importance ratio of each token, of the whole row (GSPO), or of the whole row with the
    gradient of each token (GSPO-token), which advantages that differ within a row need."""
    clip_low: float = Field(default=0.2, ge=0)
    """Largest fall of the ratio below 1 that still gets a gradient."""
    clip_high: float = Field(default=0.2, ge=0)
    """Largest rise of the ratio above 1 that still gets a gradient."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Ratio beyond which a negative advantage counts no more; None for no such bound."""
    aggregation: Aggregation = "sequence_mean"
    """Mean over rows of the mean over their sampled tokens; the same sum divided by all tokens of
    the response, observations too; mean over all sampled tokens; or mean over rows of the sum over
    their tokens, divided by a constant."""
    aggregation_divisor: PositiveInt | None = None
    """That constant; None for sampler.max_response_tokens."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference; 0 for none, as in the paper."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of that KL."""
    kl_in: KlPlace = "loss"
    """Where it counts: a term of the loss, taken from a trajectory's reward before its advantage,
    or taken from each token's credit. Only in the loss does it have a gradient."""
    correction: Correction = "none"
    """Importance correction of the gap between sampler and learner: none (the clipped ratio spans
    it), each token's ratio cut at `correction_high`, or 0 outside of the two bounds. Both are at
    the weights that sampled, so it is for episodes of the step's own weights alone."""
    correction_low: float = Field(default=0.5, gt=0, le=1)
    """Lower bound, of `masked` alone."""
    correction_high: float = Field(default=2.0, ge=1)
    """Upper bound."""
    equal_groups: Literal["keep", "drop"] = "keep"
    """Groups of equal rewards: count them in the means (no pull), or leave them out."""
    correctness_filter: Literal["none", "mixed"] = "none"
    """`mixed` trains only on groups with both correct and wrong trajectories."""
    max_rounds: PositiveInt = 1
    """Dynamic sampling: rollouts of a step at most, each of prompts_per_step prompts, until as many
    groups are left by the filters."""
    overlong_tokens: int = Field(default=0, ge=0)
    """Last tokens of sampler.max_response_tokens over which a penalty grows to 1; 0 for none."""


class Grpo(AlgorithmConfig):
    """GRPO (arXiv:2402.03300) as Progress-SQL uses it (appendix E.6)."""

    kind: Literal["grpo"] = "grpo"


class DrGrpo(AlgorithmConfig):
    """Dr.GRPO (arXiv:2503.20783, section 3.2): no division by the std nor by a row's length."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    estimator: Estimator = "group_centred"
    aggregation: Aggregation = "constant"


class Dapo(AlgorithmConfig):
    """DAPO (arXiv:2503.14476): Eq. 8's token mean, Eq. 10's higher bound, Eq. 11's dynamic sampling
    (by execution match, not by the shaped reward), Eq. 13's penalty with the paper's 4096 tokens.
    """

    kind: Literal["dapo"] = "dapo"
    clip_high: float = Field(default=0.28, ge=0)
    aggregation: Aggregation = "token_mean"
    correctness_filter: Literal["none", "mixed"] = "mixed"
    max_rounds: PositiveInt = 10
    overlong_tokens: int = Field(default=4096, ge=0)


class Gspo(AlgorithmConfig):
    """GSPO (arXiv:2507.18071) as Progress-SQL uses it: sequence ratio, the same clip bounds."""

    kind: Literal["gspo"] = "gspo"
    ratio_level: RatioLevel = "sequence"


class GspoToken(AlgorithmConfig):
    """GSPO-token (arXiv:2507.18071, Eqs. 13 and 14): GSPO's ratio, advantages of each token."""

    kind: Literal["gspo_token"] = "gspo_token"
    ratio_level: RatioLevel = "sequence_token"


class Rloo(AlgorithmConfig):
    """RLOO (arXiv:2402.14740, section 2.2): the others' mean as baseline, whole rows as actions.

    A KL is taken from the reward, as log p - log r of the whole row.
    """

    kind: Literal["rloo"] = "rloo"
    estimator: Estimator = "leave_one_out"
    aggregation: Aggregation = "constant"
    aggregation_divisor: PositiveInt | None = 1
    kl_estimator: KlEstimator = "k1"
    kl_in: KlPlace = "reward"


class ReinforcePlusPlus(AlgorithmConfig):
    """REINFORCE++ (arXiv:2501.03262): no group; KL in the tokens' return; whitened over the batch.

    A_t = R - kl_coef * sum over i >= t of k1_i, then less the batch's mean and over its std.
    """

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    estimator: Estimator = "direct"
    token_credit: TokenCredit = "return_to_go"
    whiten: bool = True
    aggregation: Aggregation = "token_mean"
    kl_estimator: KlEstimator = "k1"
    kl_in: KlPlace = "credit"


class Expo(AlgorithmConfig):
    """EXPO-SQL (Eq. 4): REINFORCE++'s clause-level form, own credit less a KL, summed."""

    kind: Literal["expo"] = "expo"
    estimator: Estimator = "direct"
    aggregation: Aggregation = "constant"
    aggregation_divisor: PositiveInt | None = 1
    kl_coef: float = Field(default=0.01, ge=0)
    kl_estimator: KlEstimator = "k1"
    kl_in: KlPlace = "credit"


Algorithm = Annotated[
    Grpo | DrGrpo | Dapo | Gspo | GspoToken | Rloo | ReinforcePlusPlus | Expo,
    Field(discriminator="kind"),
]


class OptimizerConfig(Settings):
    """The optimizer and the course of its learning rate."""

    kind: Literal["adamw", "muon"] = "adamw"
    """AdamW; or Muon (arXiv:2502.16982) for the layers' matrices and Nesterov's AdamW for the rest,
    at one learning rate: a model that starts from nothing learns in half the steps."""
    learning_rate: PositiveFloat = 1e-6
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear rise to the learning rate."""
    schedule: Literal["constant", "cosine", "ramp_cosine"] = "constant"
    """`ramp_cosine` is PaVeRL-SQL's first stage: flat and low, a linear rise, a cosine; it counts
    its phases in shares of the run, without `warmup_steps`."""
    flat_share: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps at the low rate, of `ramp_cosine`."""
    ramp_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the steps after which `ramp_cosine` is at the learning rate."""
    lr_ramp: Literal["continuous", "code"] = "continuous"
    """That rise: from the low rate where the flat part ends, or as PaVeRL-SQL's code, which counts
    it from step 0 and so jumps there."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the learning rate that a cosine ends at, and a flat start begins with."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's; Muon's own momentum is 0.95."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    moments: Literal["float32", "bfloat16"] = "float32"
    """What the running moments are kept in; the sums are always made in float32. bfloat16 takes 4
    bytes a parameter off, and rounds at random so that the second moment still falls."""
    weight_decay: float = Field(default=0.01, ge=0)
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""


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

    groups_per_batch: PositiveInt = 1
    """Units of one micro-batch, for each of the mesh's data x fsdp parts: a group (prompt) each, or
    more where they are packed."""
    answers_per_batch: PositiveInt | None = None
    """Trajectories of a group in one micro-batch; None for all of them. Fewer need less memory and
    compute the prompt once for each part of the group."""
    pack: bool = False
    """Put several groups into a unit, and several answers into a row, where there is room: pays
    where lengths differ much."""
    prompt_multiple: PositiveInt = 256
    """Granularity of the padded lengths of prompts: larger compiles fewer shapes and pads more."""
    answer_multiple: PositiveInt = 128
    """The same of what comes after the prompt."""


class GuardConfig(Settings):
    """Which updates are skipped: weights and optimizer state stay as they are. One whose loss or
    gradient is not finite always is."""

    max_spike: PositiveFloat | None = 20.0
    """A gradient is also skipped if its norm is over so many times the median of the last ones, and
    of `max_grad_norm`, to which gradients are scaled down anyway; None for no such limit."""
    window: PositiveInt = 16
    """Norms that the median is taken of; before there are so many, none is too large."""
    max_skipped: PositiveInt = 5
    """Updates skipped in a row that end the run; the last one's batch is saved as skipped.npz."""


class SftConfig(Settings):
    """Supervised training on demonstrations: the warm start."""

    steps: PositiveInt = 500
    groups_per_step: PositiveInt = 32
    group_size: PositiveInt = 1
    """Demonstrations side by side that share the beginning of their prompts (one database)."""
    learn_prompt: bool = False
    """Also learn to predict what stands before the last reply and is not shared by the group (the
    question, earlier replies, feedback): a model that is new to language learns to copy names."""
    lora: LoraConfig | None = None
    """Train adapters alone; the model it leaves has them merged. None for all weights."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, schedule="cosine")
    batching: BatchingConfig = BatchingConfig(groups_per_batch=8)
    guard: GuardConfig = GuardConfig()
    checkpoint_every: PositiveInt = 100
    """Steps between checkpoints."""


class SecondStage(Settings):
    """A restart from the best checkpoint with a second cosine (PaVeRL-SQL, section III-C)."""

    steps: PositiveInt | None = None
    """Steps of the second stage; None for as many as the first has."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of its first learning rate that the cosine ends at."""
    alpha: float = Field(default=0.05, gt=0, lt=1)
    """Level of the test for a rise of the first stage's accuracies (`schedule.rise_p_value`)."""


class TrainConfig(Settings):
    """The course of reinforcement learning."""

    steps: PositiveInt = 312
    """Steps (of the first stage); 312 batches of 64 prompts pass once over 20,000 examples."""
    second_stage: SecondStage | None = None
    """What follows the first stage; None for nothing."""
    prompts_per_step: PositiveInt = 64
    group_size: PositiveInt = 8
    """Trajectories a prompt (G)."""
    mini_batches: PositiveInt = 1
    """Parts that a step's groups are shared out to, in order and as evenly as possible, with an
    update each: from the second on the importance ratio is away from 1. All updates of a step have
    the learning rate of that step; but where filters leave fewer groups than parts, there are fewer
    updates, and the learning rate, which is found by counting them, falls behind."""
    algorithm: Algorithm = Grpo()
    lora: LoraConfig | None = None
    """Train adapters alone, on weights that are kept in model.dtype; None for all weights."""
    optimizer: OptimizerConfig = OptimizerConfig()
    batching: BatchingConfig = BatchingConfig()
    guard: GuardConfig = GuardConfig()
    eval_every: PositiveInt = 20
    """Steps between greedy evaluations on the validation examples."""
    checkpoint_every: PositiveInt = 20
    """Steps between checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept; the best by validation accuracy is kept besides."""
    kl_every: PositiveInt | None = None
    """Steps between measurements of the KL to the start where `algorithm.kl_coef` is 0; each costs
    one more forward pass, and all of them a copy of the start weights in model.dtype. None for no
    measurements, and no copy."""
    sample_every: PositiveInt = 10
    """Steps between those whose groups are written to trajectories.jsonl (docs/reports.md)."""
    sample_tokens: bool = False
    """Whether each token of them has its advantage and log-probabilities there: a forward pass more
    for every sampled step."""
    env_workers: PositiveInt = 32
    """Threads that wait for environments: with a sampler that does not wait for them in turn, fewer
    slow queries than this at a time delay their own episodes alone."""

    @property
    def has_reference(self) -> bool:
        """Tell whether a KL to the start weights is wanted, and so a copy of them."""
        return self.algorithm.kl_coef > 0 or self.kl_every is not None

    @property
    def all_steps(self) -> int:
        """Return the steps of all stages."""
        return self.steps + self.second_steps

    @property
    def second_steps(self) -> int:
        """Return the steps of the second stage."""
        if self.second_stage is None:
            return 0
        return self.second_stage.steps or self.steps
