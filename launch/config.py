"""The settings of a whole job, composed of the packages' own; read from YAML and overrides."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, PositiveInt, ValidationError, model_validator
from pydantic.fields import FieldInfo

from launch import rules
from launch.evaluation.testsets import Split
from launch.forms import Form
from launch.layers import Layer, drop_rivals, lay_over, origin, read_layers
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
    by, are those of a published test set below `root` or of `test` (`launch.overlap`)."""

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
    are more of them than prompts of an update, heads and inner widths over the rest (`tensor`)."""
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
        least = least_vocabulary(Form.of(self).marks)
        if tiny is not None and tiny.vocab_size < least:
            raise contradiction(
                "model.tiny.vocab_size", f"{tiny.vocab_size} is too small; write {least} or more"
            )
        return self

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return self.run.dir or Path("runs") / f"{self.run.name}-seed{self.seed}"


def load_config(name: str, overrides: Sequence[str]) -> JobConfig:
    """Read a config by path or packaged name, apply `key.sub=value` overrides, and check it.

    A config with `base: other.yaml` is laid over that one first (`layers.lay_over`).

    Raises:
        UserError: The file is not there or not YAML; a key is unknown, of a wrong type, or
            contradicts another one.
    """
    layers = read_layers(name)
    raw = lay_over(layers, _DEFAULT_KINDS)
    for override in overrides:
        _override(raw, override)
    _name_kinds(raw)
    try:
        config = JobConfig.model_validate(raw)
    except ValidationError as error:
        raise UserError(_explain(error, layers)) from None
    _refuse_booleans(raw, config.model_dump(), layers)
    check(config)
    return _count_steps(config)


def check(config: JobConfig) -> None:
    """Refuse settings that contradict one another."""
    for is_wrong, message in rules.contradictions(config):
        if is_wrong:
            raise UserError(message)


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


def dump(config: JobConfig) -> str:
    """Write a resolved config as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)


def _name_kinds(raw: dict[str, Any]) -> None:
    """Let settings of a kind that is not named be those of the default kind."""
    for path, kind in _DEFAULT_KINDS.items():
        node: Any = raw
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.setdefault("kind", kind)


def _override(raw: dict[str, Any], override: str) -> None:
    """Set `key.sub=value` in place; a value is read as YAML, a number in a key counts items."""
    dotted, separator, text = override.partition("=")
    if not separator or not dotted:
        raise UserError(f"{override!r}: an override has the form key.sub=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"{override!r}: the value is not YAML; quote it for the shell") from None
    *parents, last = dotted.split(".")
    if value is not None:
        drop_rivals(raw, (*parents, last))
    node: Any = raw
    for key in parents:
        node = _child(node, key, override)
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    else:
        node[last] = value


def _refuse_booleans(
    raw: Any, read: Any, layers: Sequence[Layer], path: tuple[Any, ...] = ()
) -> None:
    """Refuse true and false where a number is meant; pydantic takes them for 1 and 0."""
    if isinstance(raw, bool) and not isinstance(read, bool):
        where = ".".join(map(str, path))
        raise UserError(
            f"{origin(layers, path)}: {where}: should be a number, not {str(raw).lower()}"
        )
    if isinstance(raw, dict | list):
        for key, value in raw.items() if isinstance(raw, dict) else enumerate(raw):
            _refuse_booleans(value, read[key], layers, (*path, key))


def _child(node: Any, key: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, key, override)]
    if node.get(key) is None:
        node[key] = {}
    if not isinstance(node[key], dict | list):
        raise UserError(f"{override!r}: {key} is a value, and has no keys below it")
    return node[key]


def _index(node: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(node):
        raise UserError(f"{override!r}: {key} is not one of the {len(node)} items, from 0")
    return int(key)


def _explain(error: ValidationError, layers: Sequence[Layer]) -> str:
    """Say the first error in a line: the file, the key's path, and what to write instead."""
    first, *others = _mistakes(error)
    keys = tuple(part for part in first["loc"] if part not in _NO_KEYS)
    if first["type"] == "contradiction":
        keys += tuple(first["ctx"]["key"].split("."))
    where = ".".join(map(str, keys))
    more = f" (and {len(others)} more)" if others else ""
    return f"{origin(layers, keys)}: {where}{_said(first, where)}{more}"


def _said(mistake: Any, where: str) -> str:
    """Say what is wrong with the key that stands before it."""
    if mistake["type"] == "extra_forbidden":
        parent, _, word = where.rpartition(".")
        return f": unknown key{_closest(word, _keys_beside(mistake['loc']), parent=parent)}"
    if mistake["type"] == "missing":
        return ": has to be set"
    if mistake["type"] == "union_tag_invalid":
        context = mistake.get("ctx", {})
        return f".kind: should be {context['expected_tags']}, not {context['tag']!r}"
    if mistake["type"] == "contradiction":
        return f": {mistake['ctx']['message']}"
    words = mistake["msg"][:1].lower() + mistake["msg"][1:]
    wanted = _PLAIN_WORDS.get(mistake["type"], words)
    return f": {wanted}, not {mistake['input']!r:.60}"


def _mistakes(error: ValidationError) -> list[Any]:
    """List the errors without those that only follow from another, missing keys last."""
    errors = error.errors()
    unknown = [one["loc"] for one in errors if one["type"] == "extra_forbidden"]

    def follows(one: Any) -> bool:
        place = one["loc"]
        if one["type"] == "literal_error" and isinstance(one["input"], dict):  # not the word: keys
            return True
        if one["type"] == "too_short":  # items with mistakes do not count
            return any(place == other["loc"][: len(place)] != other["loc"] for other in errors)
        beside = [str(key) for *parents, key in unknown if parents == [*place[:-1]]]
        return one["type"] == "missing" and bool(difflib.get_close_matches(place[-1], beside))

    # What a person wrote goes first: much may be missing because of it.
    own = [one for one in errors if not follows(one)] or errors
    return sorted(own, key=lambda one: one["type"] == "missing")


_PLAIN_WORDS = {
    "model_type": "should have keys below it",
    "model_attributes_type": "should have keys below it",
    "path_type": "should be a path",
    "too_short": "should have at least one item",
}


def _unions(
    settings: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """List the fields whose keys depend on their `kind`, with their paths."""
    for name, field in settings.model_fields.items():
        if field.discriminator == "kind":
            yield (*path, name), field
        for member in get_args(field.annotation) or (field.annotation,):
            if isinstance(member, type) and issubclass(member, BaseModel):
                yield from _unions(member, (*path, name))


_DEFAULT_KINDS = {path: field.default.kind for path, field in _unions(JobConfig)}
_UNION_TAGS = {
    member.model_fields["kind"].default
    for _, field in _unions(JobConfig)
    for member in get_args(field.annotation)
}
# What pydantic puts among the keys to tell which member of a union it tried.
_NO_KEYS = {*_UNION_TAGS, "literal['auto']", MeshConfig.__name__}


def _keys_beside(location: Sequence[str | int]) -> list[str]:
    """List the keys that the settings class at a location has."""
    schema: Mapping[str, Any] = JobConfig.model_json_schema()
    definitions = schema["$defs"]
    nodes: list[Mapping[str, Any]] = [schema]
    for part in location[:-1]:
        nodes = [
            found
            for node in nodes
            for found in _resolve(node.get("properties", {}).get(part, node), definitions)
        ]
        if part in _UNION_TAGS:
            nodes = [n for n in nodes if n["properties"]["kind"].get("const") == part]
    return sorted({key for node in nodes for key in node.get("properties", {})})


def _resolve(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Follow references and alternatives to objects."""
    if "$ref" in node:
        return _resolve(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
    found: list[Mapping[str, Any]] = []
    for key in ("anyOf", "oneOf", "allOf"):
        for alternative in node.get(key, []):
            found += _resolve(alternative, definitions)
    if "items" in node:
        found += _resolve(node["items"], definitions)
    return found or [node]


def _closest(word: str, known: Sequence[str], *, parent: str) -> str:
    match = difflib.get_close_matches(word, known, n=1)
    if match:
        return f"; did you mean {parent}{'.' if parent else ''}{match[0]}?"
    return f"; known here: {', '.join(known)}" if known else ""
