"""The settings of a whole job, composed of the packages' own; read from YAML and overrides."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PositiveInt, ValidationError

from launch import rules
from minirl.config import ModelSource, SamplerConfig, SftConfig, TrainConfig
from rewards.config import JudgeConfig, PaperAtr, ProgressiveConfig, RewardConfig
from sqlenv.config import (
    DataConfig,
    DemoConfig,
    DiagnosedConfig,
    EnvConfig,
    ExecutorConfig,
    Settings,
)
from sqlenv.errors import UserError
from sqlenv.prompts import PromptStyle
from sqlenv.schema_text import Style


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
    validation: DataConfig
    test: DataConfig


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
    (`sqlenv.mistakes`)."""
    repair_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the demonstrations that mend such a mistake after its diagnosis, in a second turn;
    the mistake itself is learnt only with `learn_prompt`."""
    examples: PositiveInt | None = None
    """How many training questions are demonstrated, sampled by seed; None for all."""


class EvalConfig(Settings):
    """How accuracy is measured."""

    questions: PositiveInt | None = None
    """Test questions, sampled by seed; None for all."""
    validation_questions: PositiveInt = 200
    """Validation questions, sampled by seed."""
    episode: Literal["single_turn", "agentic"] = "single_turn"
    """What answers a question: one reply, or the tool-calling episode of `env`."""
    vote_temperature: float = Field(default=0.8, gt=0)
    """Sampling temperature of vote@n."""
    resamples: PositiveInt = 10_000
    """Bootstrap resamples of the confidence intervals."""


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


class JobConfig(Settings):
    """Everything that decides a run."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of data, weights, order and sampling."""
    run: RunConfig = RunConfig()
    data: DataSection
    prompt: PromptConfig = PromptConfig()
    model: ModelSource
    warm_start: WarmStartConfig | None = None
    env: EnvConfig = DiagnosedConfig()
    reward: RewardConfig = ProgressiveConfig()
    executor: ExecutorConfig = ExecutorConfig()
    sampler: SamplerConfig = SamplerConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvalConfig = EvalConfig()
    verbal: VerbalConfig = VerbalConfig()

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return self.run.dir or Path("runs") / f"{self.run.name}-seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Decode:
    """How a question is answered: greedily, or by the majority of n samples' results."""

    samples: int
    temperature: float

    @property
    def name(self) -> str:
        """Write it as it is given on the command line."""
        return f"vote@{self.samples}" if self.temperature else "greedy"

    @classmethod
    def parse(cls, text: str, *, vote_temperature: float) -> Decode:
        """Read `greedy` or `vote@n`."""
        if text == "greedy":
            return cls(1, 0.0)
        kind, _, count = text.partition("@")
        if kind == "vote" and count.isdigit() and int(count) >= 1:
            return cls(int(count), vote_temperature)
        raise UserError(f"--decode {text}: write greedy or vote@n, for example vote@8")


Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_PACKAGED = resources.files("launch") / "configs"


def packaged() -> list[str]:
    """List the names of the configs that come with the project."""
    return sorted(entry.name for entry in _PACKAGED.iterdir() if entry.name.endswith(".yaml"))


def load_config(name: str, overrides: Sequence[str]) -> JobConfig:
    """Read a config by path or packaged name, apply `key.sub=value` overrides, and check it.

    Raises:
        UserError: The file is not there or not YAML; a key is unknown, of a wrong type, or
            contradicts another one.
    """
    raw = _read(name)
    for override in overrides:
        _override(raw, override)
    _name_kinds(raw)
    try:
        config = JobConfig.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{name}: {_explain(error)}") from None
    _refuse_booleans(raw, config.model_dump(), name)
    check(config)
    return config


def check(config: JobConfig) -> None:
    """Refuse settings that contradict one another."""
    for is_wrong, message in rules.contradictions(config):
        if is_wrong:
            raise UserError(message)


def dump(config: JobConfig) -> str:
    """Write a resolved config as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)


def _read(name: str) -> dict[str, Any]:
    path = Path(name)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{name}: cannot be read as text ({error})") from None
    elif name in packaged():
        text = (_PACKAGED / name).read_text(encoding="utf-8")
    else:
        raise UserError(f"--cfg {name}: no such file, and not one of {', '.join(packaged())}")
    try:
        raw = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{name}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{name}: a config is a mapping of keys to values")
    return raw


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice; PyYAML takes the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        keys = [key.value for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                mark = node.value[number][0].start_mark
                raise yaml.YAMLError(f"line {mark.line + 1}: {key} is there twice")
        return super().construct_mapping(node, deep)


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
    node: Any = raw
    for key in parents:
        node = _child(node, key, override)
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    else:
        node[last] = value


def _refuse_booleans(raw: Any, read: Any, name: str, path: tuple[Any, ...] = ()) -> None:
    """Refuse true and false where a number is meant; pydantic takes them for 1 and 0."""
    if isinstance(raw, bool) and not isinstance(read, bool):
        where = ".".join(map(str, path))
        raise UserError(f"{name}: {where}: should be a number, not {str(raw).lower()}")
    if isinstance(raw, dict | list):
        for key, value in raw.items() if isinstance(raw, dict) else enumerate(raw):
            _refuse_booleans(value, read[key], name, (*path, key))


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


def _explain(error: ValidationError) -> str:
    """Say the first error in a line, with the key's path and what to write instead."""
    first, *others = _mistakes(error)
    where = ".".join(str(part) for part in first["loc"] if part not in _UNION_TAGS)
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "extra_forbidden":
        parent, _, word = where.rpartition(".")
        hint = _closest(word, _keys_beside(first["loc"]), parent=parent)
        return f"{where}: unknown key{hint}{more}"
    if first["type"] == "missing":
        return f"{where}: has to be set{more}"
    if first["type"] == "union_tag_invalid":
        context = first.get("ctx", {})
        return f"{where}.kind: should be {context['expected_tags']}, not {context['tag']!r}{more}"
    words = first["msg"][:1].lower() + first["msg"][1:]
    wanted = _PLAIN_WORDS.get(first["type"], words)
    return f"{where}: {wanted}, not {first['input']!r:.60}{more}"


def _mistakes(error: ValidationError) -> list[Any]:
    """List the errors, without those that only follow from another."""
    errors = error.errors()
    unknown = [one["loc"] for one in errors if one["type"] == "extra_forbidden"]

    def follows(one: Any) -> bool:
        place = one["loc"]
        if one["type"] == "too_short":  # items with mistakes do not count
            return any(place == other["loc"][: len(place)] != other["loc"] for other in errors)
        beside = [str(key) for *parents, key in unknown if parents == [*place[:-1]]]
        return one["type"] == "missing" and bool(difflib.get_close_matches(place[-1], beside))

    return [one for one in errors if not follows(one)]


_PLAIN_WORDS = {
    "model_type": "should have keys below it",
    "model_attributes_type": "should have keys below it",
    "path_type": "should be a path",
    "too_short": "should have at least one item",
}
_DEFAULT_KINDS = {
    ("env",): DiagnosedConfig().kind,
    ("reward",): ProgressiveConfig().kind,
    ("reward", "atr"): PaperAtr().kind,
    ("train", "algorithm"): TrainConfig().algorithm.kind,
}
_ALGORITHMS = {"grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "rloo", "reinforce_pp", "expo"}
_UNION_TAGS = {
    *("diagnosed", "single_turn", "agentic"),
    *("progressive", "one_shot", "expo", "paverl", "astra", "paper", "fig2"),
    *_ALGORITHMS,
}


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
