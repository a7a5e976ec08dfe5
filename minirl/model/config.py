"""A model's folder as Hugging Face has it: its files, and its shape in `config.json`; no JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BaseModel, Field, model_validator

from exchange import UserError
from minirl.run.files import check, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NEEDED = ("config.json", "tokenizer.json")
_COPY = "copy all files of the model again"
_ADVICE = "set model.path to a Hugging Face folder of Qwen2, Qwen2.5, Qwen3, Llama or Mistral"
_Size = Annotated[int, Field(gt=0, lt=2**31)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Rope(BaseModel, frozen=True):
    """How the rotary embedding is stretched to a longer context, under Hugging Face's names.

    `linear` divides every frequency by `factor`. `llama3` divides low ones, which turn fewer than
    `low_freq_factor` times within the original context; those that turn less than
    `high_freq_factor` times in part; others not at all.
    """

    rope_type: Literal["default", "linear", "llama3"] = Field(
        "default", validation_alias=AliasChoices("rope_type", "type")
    )
    factor: _Positive = 1.0
    low_freq_factor: _Positive = 1.0
    high_freq_factor: _Positive = 4.0
    original_max_position_embeddings: _Size = 8192


_NOT_STRETCHED = Rope()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder, under Hugging Face's names where they exist."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    rope: Rope = _NOT_STRETCHED


class _Rope(Rope, frozen=True):
    """Rotary embedding, as newer files have it."""

    rope_theta: _Positive | None = None


class _File(BaseModel):
    """The keys of a `config.json` that decide what is computed, and their supported values."""

    model_type: Literal["qwen2", "qwen3", "llama", "mistral"]
    hidden_act: Literal["silu"] = "silu"
    use_sliding_window: Literal[False] | None = None
    # Of Mistral alone; what transformers takes where the file does not say.
    sliding_window: _Size | None = 4096
    max_position_embeddings: _Size = 2**31 - 1
    mlp_bias: Literal[False] | None = None
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    rope_theta: _Positive = 10_000.0
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    rope: Rope = _NOT_STRETCHED
    rms_norm_eps: _Positive = 1e-6
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None

    @model_validator(mode="after")
    def _fill_in(self) -> Self:
        """Fill in what follows from other keys."""
        heads, width = self.num_attention_heads, self.hidden_size
        self.num_key_value_heads = kv_heads = self.num_key_value_heads or heads
        if heads % kv_heads:
            raise ValueError(f"num_key_value_heads = {kv_heads} does not divide {heads} heads")
        if self.head_dim is None and width % heads:
            raise ValueError(f"num_attention_heads = {heads} does not divide hidden_size = {width}")
        self.head_dim = size = self.head_dim or width // heads
        if size % 2:
            raise ValueError(f"head_dim = {size} is odd; the rotary embedding turns pairs")
        rope = self.rope_parameters or self.rope_scaling or _Rope()
        self.rope_theta = rope.rope_theta or self.rope_theta
        self.rope = Rope(**rope.model_dump(exclude={"rope_theta"}))
        self.tie_word_embeddings = bool(self.tie_word_embeddings)
        self.attention_bias = self.model_type == "qwen2" or bool(self.attention_bias)
        window, longest = self.sliding_window, self.max_position_embeddings
        if self.model_type == "mistral" and window is not None and window < longest:
            raise ValueError(f"sliding_window = {window} is shorter than {longest} positions")
        if self.model_type in ("llama", "mistral") and self.attention_bias:
            raise ValueError("attention_bias = true, and this decoder has none on the output")
        return self

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3"


def read_config(folder: Path) -> ModelConfig:
    """Read the shape of a model from the `config.json` of its folder.

    Raises:
        UserError: The file is missing or not JSON, or asks for something this decoder does not do.
    """
    path = folder / "config.json"
    return parse_config(read_json(path, dict[str, Any], advice=_ADVICE), where=str(path))


def parse_config(raw: dict[str, Any], *, where: str) -> ModelConfig:
    """Turn the content of a `config.json` into a `ModelConfig`; `where` names it in errors."""
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"{where}: the weights are quantised (quantization_config: {method}); set model.path "
            "to the folder of the same model in bf16, fp16 or fp32"
        )
    read = check(_File, raw, where=where, advice=_ADVICE)
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    return ModelConfig(**{name: getattr(read, name) for name in names})


class _Index(BaseModel):
    weight_map: dict[str, str]


def check_folder(folder: Path) -> None:
    """Raise a `UserError` unless everything that a policy is read from is there."""
    for name in _NEEDED:
        if not (folder / name).is_file():
            raise UserError(f"no {name} in {folder.absolute()}")
    weight_files(folder)


def weight_files(folder: Path) -> list[Path]:
    """List the files of weights: one, or those that the index names.

    Raises:
        UserError: One is not there, or the index is broken.
    """
    if (folder / SINGLE).exists():  # which transformers takes too, whatever index lies beside it
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.exists():
        raise UserError(
            f"no {SINGLE} nor {INDEX} in {folder.absolute()}; "
            "give a Hugging Face model folder with safetensors files"
        )
    names = set(read_json(index, _Index, advice=_COPY).weight_map.values())
    for path in (files := [folder / name for name in sorted(names)]):
        if not path.is_file():
            raise UserError(f"{path}: not there; {_COPY}")
    return files
