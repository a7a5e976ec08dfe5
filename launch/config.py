"""The settings of a job: composed of the packages' own, and checked."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, PositiveInt, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

import rewards.config
from launch import config_merge
from launch.data.reply_format import ReplyFormat
from launch.evaluation.testsets import SPLITS as SPLITS
from launch.evaluation.testsets import Split
from minirl.config import (
    MeshConfig,
    ModelSource,
    RolloutConfig,
    SamplerConfig,
    SftConfig,
    TrainConfig,
    check_together,
    contradiction,
    least_vocabulary,
)
from minirl.errors import describe
from rewards.config import JudgeConfig, ProgressiveConfig, RewardConfig
from sqlenv.config import (
    DataConfig,
    DemoConfig,
    DiagnosedConfig,
    EnvConfig,
    ExecutorConfig,
    Settings,
)
from sqlenv.data.held_out import validation_of
from sqlenv.errors import UserError
from sqlenv.prompts import PromptStyle
from sqlenv.schema.rendering import Style


class RunConfig(Settings):
    """Where a run lives."""

    name: str = "run"
    """Name of the run, and of its folder."""
    dir: Path | None = None
    """Run folder; None for runs/<name>-seed<seed>."""


class DataSection(Settings):
    """Questions to learn from, to choose checkpoints by, and to test on."""

    root: Path | None = None
    """Folder that the paths of the sources are relative to; None for the run's own demo data."""
    demo: DemoConfig | None = None
    """Generate this demo data into the run folder in place of reading a root."""
    train: DataConfig
    validation: DataConfig | None = None
    """Questions to choose checkpoints by; None for `held_out`."""
    held_out: PositiveInt | None = None
    """Questions to choose checkpoints by, of databases of `train` that are set aside for them: none
    of these databases is learned from. They are drawn by `train.seed`, by the sources' weights."""
    test: DataConfig
    overlap: Literal["refuse", "tell"] = "refuse"
    """What becomes of a run whose questions or databases to learn from, or to choose checkpoints
    by, are those of a published test set below `root` or of `test`."""

    def of(self, split: Split) -> DataConfig:
        """Return the settings of a split; what is held out is drawn from `train`."""
        if split == "validation" and self.validation is None:
            return validation_of(self.train, self.held_out or 1)
        found = {"train": self.train, "validation": self.validation, "test": self.test}[split]
        assert found is not None
        return found


class PromptConfig(Settings):
    """How a question is put."""

    style: PromptStyle = "progress"
    """Whose wording."""
    schema_style: Style = "omnisql"
    """How tables are written."""
    example_values: int = Field(default=2, ge=0)
    """Example values of a column."""


class WarmStartConfig(SftConfig):
    """Supervised training before reinforcement learning."""

    mistake_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the answers, repairs apart, that have a mistake, as of a weak annotator
    (`sqlenv.data.corruptions`)."""
    repair_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the demonstrations that mend such a mistake after its diagnosis, in a second turn;
    the mistake itself is learnt only with `learn_prompt`."""
    examples: PositiveInt | None = None
    """How many training questions are demonstrated, sampled by seed; None for all."""


class EvalConfig(Settings):
    """How accuracy is measured."""

    questions: PositiveInt | None = None
    """Test questions, sampled by seed; None for all."""
    validation_questions: PositiveInt | None = 200
    """Validation questions, sampled by seed; None for all."""
    episode: Literal["single_turn", "agentic"] = "single_turn"
    """What answers a question: one reply, or the tool-calling episode of `env`."""
    vote_temperature: float = Field(default=0.8, gt=0)
    """Sampling temperature of vote@n and pass@n."""
    validation_temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the validations of a training run; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Replies of vote@n, pass@n and sampled validations are drawn from the likeliest tokens that
    together reach this probability."""


class VerbalConfig(JudgeConfig):
    """Verbal RL: how many candidates and judgements, and how a model is asked for them."""

    temperature: float | None = Field(default=0.8, ge=0)
    """Sampling temperature of queries and judgements; None for the endpoint's own, which some
    models insist on (the native sampler takes 1.0)."""
    max_tokens: PositiveInt = 4096
    """Longest answer, thinking included."""
    send_seed: bool = True
    """Whether requests carry a seed; a few services refuse it."""
    parallel: PositiveInt = 16
    """Calls under way at a time."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for one answer of an endpoint, in seconds."""
    retries: int = Field(default=6, ge=0)
    """How often a call that failed (429, 5xx, no connection, nonsense) is repeated, with growing
    pauses, before the command stops."""


class CourseConfig(TrainConfig):
    """The course of reinforcement learning, also in passes over the data."""

    epochs: PositiveInt | None = None
    """Passes over the `data.train.total` questions, in place of `steps`, which are counted from
    it when a config is read; None where `steps` is given."""


class JobConfig(Settings):
    """Everything that decides a run."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of data, weights, order and sampling."""
    run: RunConfig = RunConfig()
    data: DataSection
    prompt: PromptConfig = PromptConfig()
    model: ModelSource
    mesh: Literal["auto"] | MeshConfig = "auto"
    """How devices are arranged; auto splits everything over all of them (`fsdp`), and where there
    are more of them than prompts of an update, heads and inner widths over the rest (`tensor`).
    Where they do not divide the model's width, copies lie beside one another (`data`)."""
    warm_start: WarmStartConfig | None = None
    env: EnvConfig = DiagnosedConfig()
    reward: RewardConfig = ProgressiveConfig()
    executor: ExecutorConfig = ExecutorConfig()
    sampler: SamplerConfig = SamplerConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: CourseConfig = CourseConfig()
    evaluation: EvalConfig = EvalConfig()
    verbal: VerbalConfig = VerbalConfig()

    @model_validator(mode="after")
    def _check(self) -> JobConfig:
        check_together(self.train, self.sampler, self.rollout)
        tiny = self.model.tiny
        least = least_vocabulary(ReplyFormat.of(self).marks)
        if tiny is not None and tiny.vocab_size < least:
            raise contradiction(
                "model.tiny.vocab_size", f"{tiny.vocab_size} is too small; write {least} or more"
            )
        for is_wrong, message in _contradictions(self):
            if is_wrong:
                raise PydanticCustomError("rule", "{message}", {"message": message})
        return self

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return self.run.dir or Path("runs") / f"{self.run.name}-seed{self.seed}"


def _contradictions(config: JobConfig) -> Iterator[tuple[bool, str]]:
    """List rules between settings of different parts: whether one is broken, and what to write."""
    data, model, train, sampler = config.data, config.model, config.train, config.sampler
    env, reward = config.env, config.reward
    null = "set the other to null"
    one = f"data: give one of data.demo (generated) and data.root (a folder); {null}"
    yield (data.demo is None) == (data.root is None), one
    one = (
        "data: give one of data.validation (questions of their own) and data.held_out (a number of "
        f"questions of training databases); {null}"
    )
    yield (data.validation is None) == (data.held_out is None), one
    if train.epochs is not None:
        passes = "train.epochs: counts passes over data.train.total questions; set that, or "
        yield data.train.total is None, f"{passes}train.steps=N"
        one = "train: give one of train.steps and train.epochs"
        yield "steps" in train.model_fields_set, one
    one = f"model: give one of model.path (a folder) and model.tiny (made on the spot); {null}"
    yield (model.path is None) == (model.tiny is None), one
    greedy = "sampler.temperature: 0 is greedy, and GRPO learns from samples; use 1.0"
    yield sampler.temperature == 0, greedy
    longer = "sampler.max_reply_tokens: larger than sampler.max_response_tokens"
    yield (sampler.max_reply_tokens or 0) > sampler.max_response_tokens, longer
    yield from rewards.config.contradictions(reward, env)
    if reward.kind == "astra" and reward.aggregate == "steps":
        scores = "reward.aggregate: the scores of steps are advantages as they are; set "
        is_direct = train.algorithm.estimator == "direct"
        yield not is_direct, f"{scores}train.algorithm.estimator=direct"
    if env.kind == "agentic":
        tags = "prompt.style: progress asks for one reply in <sql> tags; with env.kind=agentic use "
        yield config.prompt.style == "progress", f"{tags}omnisql"
    else:
        calls = "evaluation.episode: agentic measures tool-calling episodes; set env.kind=agentic, "
        yield config.evaluation.episode == "agentic", f"{calls}or use single_turn"


def load_config(name: str, overrides: Sequence[str]) -> JobConfig:
    """Read a config by path or packaged name, apply `key.sub=value` overrides, and check it.

    Raises:
        UserError: The file is not there or not YAML; a key is unknown, of a wrong type, or
            contradicts another one.
    """
    raw = config_merge.read(name, overrides, _DEFAULT_KINDS)
    try:
        config = JobConfig.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{name}: {_explain(error)}") from None
    return _count_steps(config)


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


def _count_steps(config: JobConfig) -> JobConfig:
    """Turn epochs into steps, to the nearest; a last batch is filled from the next epoch."""
    train, data = config.train, config.data.train
    if train.epochs is None or data.total is None:
        return config
    limits = [data.total if source.limit is None else source.limit for source in data.sources]
    size = min(data.total, sum(limits))
    steps = max(1, round(train.epochs * size / train.prompts_per_step))
    course = train.model_copy(update={"steps": steps, "epochs": None})
    return config.model_copy(update={"train": course})


def _fields(
    settings: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """List the settings of a section and of those below it, each by its path without numbers."""
    for name, field in settings.model_fields.items():
        yield (*path, name), field
        for member in get_args(field.annotation) or (field.annotation,):
            if isinstance(member, type) and issubclass(member, BaseModel):
                yield from _fields(member, (*path, name))


_FIELDS = dict(_fields(JobConfig))
_KINDS: Mapping[tuple[str, ...], Mapping[str, type[BaseModel]]] = {
    path: {member.model_fields["kind"].default: member for member in get_args(field.annotation)}
    for path, field in _FIELDS.items()
    if field.discriminator == "kind"
}
"""Sections whose keys depend on their `kind`."""
_NAMED = 3  # keys that may be meant
_DEFAULT_KINDS = {path: _FIELDS[path].default.kind for path in _KINDS}
# What pydantic puts among the keys of a location: the member of a union that it tried.
_NO_KEYS = {
    "literal['auto']",
    MeshConfig.__name__,
    *(kind for one in _KINDS.values() for kind in one),
}


def _explain(error: ValidationError) -> str:
    """Say the first mistake in a line; what a person wrote goes before what is missing."""

    def order(one: Any) -> tuple[bool, bool, int]:
        return one["type"] != "extra_forbidden", one["type"] == "missing", -len(one["loc"])

    first = min(error.errors(), key=order)
    path = ".".join(str(part) for part in first["loc"] if part not in _NO_KEYS)
    if first["type"] == "extra_forbidden":
        return f"{path}: {_of_unknown(first['loc'])}"
    if first["type"] in ("contradiction", "rule"):
        return ".".join(filter(None, (path, first["msg"])))
    return f"{path}: {describe(first)}"


def _of_unknown(location: tuple[int | str, ...]) -> str:
    """Say what a key that is none here belongs to, or which key may be meant."""
    *above, key = (str(part) for part in location if not isinstance(part, int))
    section = tuple(part for part in above if part not in _NO_KEYS)
    kinds = _KINDS.get(section, {})
    if owners := [kind for kind, settings in kinds.items() if key in settings.model_fields]:
        whole = f"'{'.'.join(section)}={{kind: {above[-1]}}}'"
        return f"belongs to kind {' or '.join(owners)}, not to {above[-1]}; set all of it: {whole}"
    beside = {path[-1] for path in _FIELDS if path[:-1] == section}
    names = {path[-1] for path in _FIELDS}
    near = difflib.get_close_matches(key, beside, 1) or difflib.get_close_matches(key, names, 1)
    if not near:
        return "unknown key"
    elsewhere = [".".join(path) for path in _FIELDS if path[-1] == near[0]]
    meant = near if near[0] in beside else elsewhere[:_NAMED]
    return f"unknown key; did you mean {' or '.join(meant)}?"
