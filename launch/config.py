"""The settings of a job: composed of the packages' own, and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator
from pydantic_core import PydanticCustomError

import rewards.config
from launch import config_files
from minirl.config import (
    MeshConfig,
    ModelSource,
    RolloutConfig,
    SamplerConfig,
    SftConfig,
    TrainConfig,
)
from minirl.exchange import UserError
from minirl.exchange.settings import Place, Settings, contradiction
from minirl.model.config import PERIOD
from rewards.config import Clash, JudgeConfig, ProgressiveConfig, RewardConfig
from sqlenv.config import DataConfig, DemoConfig, DiagnosedConfig, EnvConfig, ExecutorConfig
from sqlenv.prompts import ASKED_FOR, PromptStyle
from sqlenv.schema.rendering import SchemaStyle
from sqlenv.types import Wrapping

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
"""The splits of a job's data."""
Share = Annotated[float, Field(ge=0, le=1)]


class TinyConfig(Settings):
    """Shape of a tiny model with its own tokenizer."""

    kind: Literal["qwen2", "qwen3.5"] = "qwen2"
    """`qwen3.5` has three layers of linear attention before each one of attention."""
    vocab_size: PositiveInt = 2048
    """Entries of the tokenizer and the embedding."""
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 384
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    rope_theta: PositiveFloat = 10_000.0

    @model_validator(mode="after")
    def _check(self) -> TinyConfig:
        if self.heads % self.kv_heads:
            raise contradiction("kv_heads", f"{self.kv_heads} does not divide heads = {self.heads}")
        if self.kind == "qwen3.5" and self.layers % PERIOD:
            raise contradiction("layers", f"{self.layers} is not a multiple of {PERIOD}")
        if self.hidden_size % (2 * self.heads):
            raise contradiction(
                "hidden_size",
                f"{self.hidden_size} is not a multiple of 2 x heads = {2 * self.heads}",
            )
        return self


class ModelSection(ModelSource):
    """The policy."""

    tiny: TinyConfig | None = None
    """Make a tiny model in the run folder instead."""


class RunConfig(Settings):
    """Where a run lives."""

    name: str = "run"
    """Name of the run."""
    dir: Place | None = None
    """Run folder; None for runs/<name>-seed<seed>."""
    tracker: Literal["tensorboard", "wandb", "trackio"] | None = None
    """Also log each step to `tensorboard` (a folder in the run folder), or to `wandb` or `trackio`
    (a project of the run's name); the package must be installed."""


class TrainData(DataConfig):
    """The questions to learn from."""

    pass_rate: tuple[Share, Share] | None = None
    """Keep the questions of which between these shares of the sampled answers are right, both
    included (`screen`); None for all."""

    @model_validator(mode="after")
    def _check(self) -> TrainData:
        if self.pass_rate is not None and self.pass_rate[0] > self.pass_rate[1]:
            raise contradiction("pass_rate", "give the lower share first")
        return self


class ScreenConfig(Settings):
    """Which questions can teach this policy: `train.group_size` answers of each are sampled as
    training does, by the model that the warm start begins with if it learns from them
    (`warm_start.answers`), else by the one that it leaves.
    """

    questions: PositiveInt | None = None
    """Training questions to ask, spread over all databases; None for all."""


class DataSection(Settings):
    """Questions to learn from, to choose checkpoints by, and to test on."""

    root: Place | None = None
    """Folder of the data; None for the run's own demo data."""
    demo: DemoConfig | None = None
    """Generate demo data into the run folder instead of reading `root`."""
    train: TrainData
    validation: DataConfig | None = None
    """Questions to choose checkpoints by; None for `held_out`."""
    held_out: PositiveInt | None = None
    """Number of questions to hold out of `train` to choose checkpoints by (docs/data.md)."""
    test: DataConfig
    overlap: Literal["refuse", "tell"] = "refuse"
    """Refuse or report contamination (docs/data.md)."""

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        if (self.demo is None) == (self.root is None):
            raise contradiction(
                "demo", "give this (generated) or data.root (a folder); set the other to null"
            )
        if (self.validation is None) == (self.held_out is None):
            raise contradiction(
                "validation",
                "give this (questions of their own) or data.held_out (a number of questions of "
                "training databases); set the other to null",
            )
        return self

    def of(self, split: Split, root: Path | None = None) -> DataConfig:
        """Return the settings of a split, its sources below a root; what is held out is drawn from
        `train`.
        """
        held = self.validation or self.train.model_copy(update={"total": self.held_out})
        found = {"train": self.train, "validation": held, "test": self.test}[split]
        if root is None:
            return found
        sources = (one.model_copy(update={"path": root / one.path}) for one in found.sources)
        return found.model_copy(update={"sources": tuple(sources)})


class PromptConfig(Settings):
    """How questions are asked."""

    style: PromptStyle = "progress"
    """Wording."""
    schema_style: SchemaStyle = "omnisql"
    """Form of the schema: OmniSQL's, PaVeRL-SQL's (`profile`), or names and references (`bare`)."""
    example_values: int = Field(default=2, ge=0)
    """Example values of a column."""
    value_matches: bool = True
    """Put values that the question names first (`schema_style: omnisql` only)."""
    template: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments of the model's chat template, such as `{enable_thinking: false}` for Qwen3.5; an
    endpoint gets them as `chat_template_kwargs`."""


class WarmStartConfig(SftConfig):
    """Supervised training before reinforcement learning."""

    answers: Literal["gold", "own", "own_or_gold"] = "gold"
    """What it learns: `gold` queries; the policy's `own` right answers of the screening, at most
    two different queries a question; `own_or_gold`, gold queries where none of its own is right."""
    mistake_share: float = Field(default=0.0, ge=0, le=1)
    """Share of answers with a mistake, as from a weak annotator (`sqlenv.data.corruptions`)."""
    repair_share: float = Field(default=0.0, ge=0, le=1)
    """Share of demonstrations that repair such a mistake in a second turn."""
    examples: PositiveInt | None = None
    """Training questions to demonstrate, sampled by seed; None for all."""

    @model_validator(mode="after")
    def _check_answers(self) -> WarmStartConfig:
        if self.answers != "gold" and (self.mistake_share or self.repair_share):
            raise contradiction(
                "answers", "mistakes are made of gold queries alone; use gold, or shares of 0"
            )
        return self


class EvalConfig(Settings):
    """How accuracy is measured."""

    questions: PositiveInt | None = None
    """Test questions, the same ones for all seeds; None for all."""
    validation_questions: PositiveInt | None = 200
    """Validation questions, sampled by seed; None for all."""
    samples: int | None = Field(default=None, ge=2)
    """Samples of a test question at the training temperature, beside its greedy answer, in a run's
    `before/`, `between/` and `after/`."""
    wrapping: Wrapping | None = None
    """Where the query of a reply is; None for `env.wrapping` of trained models, and `any` for
    others."""
    episode: Literal["single_turn", "agentic"] = "single_turn"
    """Answer in one reply, or in an episode with tool calls (`agentic`)."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt; longer ones are wrong, and counted. None for `sampler.max_prompt_tokens`."""
    max_response_tokens: PositiveInt | None = None
    """Longest response; None for the limits of `sampler`."""
    vote_temperature: float = Field(default=0.8, gt=0)
    """Sampling temperature of vote@n and pass@n."""
    validation_temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of validations; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling of vote@n, pass@n and sampled validations."""

    def of(self, split: Split) -> int | None:
        """Return how many questions of a split are asked; None for all."""
        return self.validation_questions if split == "validation" else self.questions


class EndpointConfig(JudgeConfig):
    """Calls of an endpoint, and its verbal RL (`judge@K`)."""

    temperature: float | None = Field(default=0.8, ge=0)
    """Sampling temperature of `judge@K`; None, with any `--decode`, for the endpoint's own."""
    max_tokens: PositiveInt = 4096
    """Longest answer, reasoning included."""
    send_seed: bool = True
    """Send a seed with requests, which a few services refuse."""
    parallel: PositiveInt = 16
    """Concurrent calls."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for an answer, in seconds."""
    retries: int = Field(default=6, ge=0)
    """Retries of a failed call (429, 5xx, no connection), with growing pauses."""


class SecondStage(Settings):
    """Restart from the best checkpoint with a second cosine (PaVeRL-SQL, section III-C)."""

    steps: PositiveInt | None = None
    """Steps of the stage; None for as many as the first."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the learning rate at the end of the cosine."""
    alpha: float = Field(default=0.05, gt=0, lt=1)
    """Level of the test for a rise of the first stage's accuracies."""


class CourseConfig(TrainConfig):
    """The course of reinforcement learning."""

    epochs: PositiveInt | None = None
    """Passes over the `data.train.total` questions, instead of `steps`."""
    second_stage: SecondStage | None = None
    """Settings of a second stage, if any."""

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

    @model_validator(mode="after")
    def _check_length(self) -> CourseConfig:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise contradiction("steps", "give this or train.epochs, and leave the other out")
        return self


class JobConfig(Settings):
    """Everything that decides a run."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of data, weights, order and sampling."""
    run: RunConfig = RunConfig()
    data: DataSection
    prompt: PromptConfig = PromptConfig()
    model: ModelSection
    mesh: Literal["auto"] | MeshConfig = "auto"
    """Shape of the device mesh (docs/scaling.md)."""
    screen: ScreenConfig = ScreenConfig()
    warm_start: WarmStartConfig | None = None
    env: EnvConfig = DiagnosedConfig()
    reward: RewardConfig = ProgressiveConfig()
    executor: ExecutorConfig = ExecutorConfig()
    sampler: SamplerConfig = SamplerConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: CourseConfig = CourseConfig()
    evaluation: EvalConfig = EvalConfig()
    endpoint: EndpointConfig = EndpointConfig()

    @model_validator(mode="after")
    def _check(self) -> JobConfig:
        for clash in clashes(self):
            if clash.is_there:
                told = {"message": clash.told(self)}
                raise PydanticCustomError("contradiction", "{message}", told)
        return self

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return self.run.dir or Path("runs") / f"{self.run.name}-seed{self.seed}"

    @property
    def learns_own(self) -> bool:
        """Return whether the warm start learns the policy's own answers."""
        return self.warm_start is not None and self.warm_start.answers != "gold"

    @property
    def has_base(self) -> bool:
        """Return whether the warm start begins with a trained model, which is measured too."""
        return self.warm_start is not None and self.model.path is not None

    @property
    def answer_wrapping(self) -> Wrapping:
        """Return where the SQL of an answer is when accuracy is measured."""
        return self.evaluation.wrapping or self.env.wrapping

    def for_untrained(self) -> JobConfig:
        """Return the settings to measure a model that no run of ours has taught its form."""
        wrapping = self.evaluation.wrapping or "any"
        evaluation = self.evaluation.model_copy(update={"wrapping": wrapping})
        return self.model_copy(update={"evaluation": evaluation})

    @property
    def evaluation_sampler(self) -> SamplerConfig:
        """Return the sampler's settings with the token limits of evaluations."""
        own, changed = self.evaluation, dict[str, Any]()
        if own.max_prompt_tokens is not None:
            changed["max_prompt_tokens"] = own.max_prompt_tokens
        if own.max_response_tokens is not None:
            changed |= {"max_response_tokens": own.max_response_tokens, "max_reply_tokens": None}
        return self.sampler.model_copy(update=changed)


def load_config(name: str, overrides: Sequence[str]) -> JobConfig:
    """Read a config by path or packaged name, apply `key.sub=value` overrides, and check it.

    Raises:
        UserError: The file is not there or not YAML; a key is unknown, of a wrong type, or
            contradicts another one.
    """
    config, mistake = _validated(config_files.read(name, overrides))
    if config is None:
        is_own = not overrides or mistake == _validated(config_files.read(name, ()))[1]
        raise UserError(f"{name if is_own else 'command line'}: {mistake}")
    train, total = config.train, config.data.train.total
    if train.epochs is None or total is None:
        return config
    # Epochs, to the nearest step: a last batch is filled from the next one.
    steps = max(1, round(train.epochs * total / train.prompts_per_step))
    course = train.model_copy(update={"steps": steps, "epochs": None})
    return config.model_copy(update={"train": course})


def _validated(raw: Any) -> tuple[JobConfig | None, str]:
    try:
        return JobConfig.model_validate(raw), ""
    except ValidationError as error:
        return None, config_files.explain(error, raw, JobConfig)


def dump(config: JobConfig) -> str:
    """Write a resolved config as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with its path, such as `train.steps`."""
    if not isinstance(value, dict | list):
        yield path, value
        return
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield from flat(child, f"{path}.{key}" if path else str(key))


def clashes(config: JobConfig) -> list[Clash]:
    """List the pairs of settings that may not go together, and whether they do not here."""
    data, model, train = config.data, config.model, config.train
    env, reward, style = config.env, config.reward, config.prompt.style
    asked, is_agentic = ASKED_FOR[style], env.kind == "agentic"
    (low, high), size = data.train.pass_rate or (0.0, 1.0), train.group_size
    prompts = train.prompts_per_step
    # Clauses or turns of one trajectory that have rewards of their own.
    spans = {
        "expo": ("reward.gap_scale", reward.kind == "expo" and reward.gap_scale > 0),
        "astra": ("reward.aggregate", reward.kind == "astra" and reward.aggregate == "steps"),
    }
    paid_apart, is_apart = spans.get(reward.kind, ("reward.kind", False))
    return [
        Clash(
            ("train.epochs", "data.train.total"),
            train.epochs is not None and data.train.total is None,
            "epochs are passes over that many questions; set it, or train.steps",
        ),
        Clash(
            ("model.path", "model.tiny"),
            (model.path is None) == (model.tiny is None),
            "give one of them (a folder, or a model made on the spot); set the other to null",
        ),
        Clash(
            ("sampler.temperature", "train.algorithm.kind"),
            config.sampler.temperature == 0,
            "0 is greedy, and reinforcement learning learns from samples; use 1.0",
        ),
        Clash(
            ("prompt.style", "env.wrapping"),
            env.wrapping not in ("any", asked or env.wrapping),
            f"the prompt asks for another form, which is not read; use env.wrapping={asked}",
        ),
        Clash(
            ("prompt.style", "env.kind"),
            style == "progress" and is_agentic,
            "the prompt asks for one reply and not for calls of a tool; use prompt.style=omnisql",
        ),
        Clash(
            ("evaluation.episode", "env.kind"),
            config.evaluation.episode == "agentic" and not is_agentic,
            "agentic measures tool-calling episodes; use env.kind=agentic, or single_turn",
        ),
        Clash(
            ("warm_start.answers", "model.path"),
            config.learns_own and model.path is None,
            "an untrained model has no answers of its own; use gold",
        ),
        Clash(
            ("data.train.pass_rate", "train.group_size"),
            data.train.pass_rate is not None
            and (size == 1 or not any(low <= right / size <= high for right in range(size + 1))),
            "no number of right answers is such a share; widen it, or ask more answers",
        ),
        Clash(
            ("screen.questions", "train.prompts_per_step"),
            data.train.pass_rate is not None and (config.screen.questions or prompts) < prompts,
            "a step asks more questions than are screened; screen more",
        ),
        *rewards.config.clashes(reward, env),
        Clash(
            (paid_apart, "train.algorithm.estimator"),
            is_apart and train.algorithm.estimator != "direct",
            "rewards of parts of a reply would be lost; use train.algorithm.kind=expo, or "
            "train.algorithm.estimator=direct",
        ),
        Clash(
            (paid_apart, "train.algorithm.token_credit"),
            is_apart and train.algorithm.token_credit != "own",
            "a part would be paid for those after it; use train.algorithm.token_credit=own",
        ),
    ]
