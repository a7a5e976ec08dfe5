"""A model's folder as Hugging Face has it: its files, and its shape in `config.json`; no JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BaseModel, Field, model_validator

from minirl.exchange import UserError
from minirl.run.files import check, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTERS = "adapter_config.json"
_NEEDED = ("config.json", "tokenizer.json")
_COPY = "copy all files of the model again"
_ADVICE = (
    "set model.path to a Hugging Face folder of Qwen2, Qwen2.5, Qwen3, dense Qwen3.5, Llama or "
    "Mistral"
)
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
# Keys that stand beside `text_config` or inside of it.
_OF_BOTH = (
    *("quantization_config", "tie_word_embeddings", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The shape of what Qwen3.5 has and Qwen3 has not, under Hugging Face's names.

    Every fourth layer is full attention, with a gate on its output and a rotary embedding of a part
    of each head; the others are linear attention (`minirl.model.linear_attention`). All norms but
    that inside of linear attention multiply by 1 + weight.
    """

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    partial_rotary_factor: float


LAYER_TYPES = [*["linear_attention"] * 3, "full_attention"]
"""Layers of a `Hybrid` from one with full attention to the next."""
PERIOD = len(LAYER_TYPES)


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
    hybrid: Hybrid | None = None

    @property
    def rotary_size(self) -> int:
        """Return how many numbers of a head the rotary embedding turns."""
        return int(self.head_dim * (self.hybrid.partial_rotary_factor if self.hybrid else 1.0))

    @property
    def full_layers(self) -> int:
        """Return the number of layers with full attention."""
        return self.num_hidden_layers // (PERIOD if self.hybrid else 1)

    def is_full(self, layer: int) -> bool:
        """Tell whether a layer has full attention."""
        return self.hybrid is None or layer % PERIOD == PERIOD - 1


class _Rope(Rope, frozen=True):
    """Rotary embedding, as newer files have it."""

    rope_theta: _Positive | None = None
    partial_rotary_factor: float | None = Field(default=None, gt=0, le=1)


class _File(BaseModel):
    """The keys of a `config.json` that decide what is computed, and their supported values."""

    model_type: Literal["qwen2", "qwen3", "qwen3_5_text", "llama", "mistral"]
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
        self.rope = Rope(**rope.model_dump(exclude={"rope_theta", "partial_rotary_factor"}))
        self.tie_word_embeddings = bool(self.tie_word_embeddings)
        self.attention_bias = self.model_type == "qwen2" or bool(self.attention_bias)
        window, longest = self.sliding_window, self.max_position_embeddings
        if self.model_type == "mistral" and window is not None and window < longest:
            raise ValueError(f"sliding_window = {window} is shorter than {longest} positions")
        if self.model_type not in ("qwen2", "qwen3") and self.attention_bias:
            raise ValueError("attention_bias = true, and this decoder has none on the output")
        return self

    @property
    def qk_norm(self) -> bool:
        return self.model_type in ("qwen3", "qwen3_5_text")

    @property
    def hybrid(self) -> Hybrid | None:
        return None


class _HybridFile(_File):
    """The keys of Qwen3.5, of its decoder alone; what transformers takes where a file is silent."""

    head_dim: _Size | None = 256
    linear_num_key_heads: _Size = 16
    linear_num_value_heads: _Size = 32
    linear_key_head_dim: _Size = 128
    linear_value_head_dim: _Size = 128
    linear_conv_kernel_dim: Annotated[int, Field(gt=1, lt=2**31)] = 4
    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1)
    full_attention_interval: Literal[4] | None = None
    layer_types: list[str] | None = None
    attn_output_gate: Literal[True] | None = None
    output_gate_type: Literal["swish", "silu"] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise ValueError(f"linear_num_key_heads = {keys} does not divide {values} value heads")
        depth = self.num_hidden_layers
        if depth % PERIOD or self.layer_types not in (None, LAYER_TYPES * (depth // PERIOD)):
            raise ValueError(
                f"layer_types of {depth} layers are not three times linear_attention before each "
                "full_attention"
            )
        rope = self.rope_parameters or self.rope_scaling or _Rope()
        self.partial_rotary_factor = rope.partial_rotary_factor or self.partial_rotary_factor
        if (size := (self.head_dim or 0) * self.partial_rotary_factor) % 2:
            raise ValueError(
                f"the rotary embedding turns pairs, and not {size:g} numbers of a head"
            )
        return self

    @property
    def hybrid(self) -> Hybrid:
        return Hybrid(*(getattr(self, field.name) for field in dataclasses.fields(Hybrid)))


def read_config(folder: Path) -> ModelConfig:
    """Read the shape of a model from the `config.json` of its folder.

    Raises:
        UserError: The file is missing or not JSON, or asks for something this decoder does not do.
    """
    path = folder / "config.json"
    return parse_config(read_json(path, dict[str, Any], advice=_ADVICE), where=str(path))


def text_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a `config.json` for the decoder alone: Qwen3.5 with a vision tower has
    the decoder's keys inside, and ids of tokens beside them.
    """
    inner = raw.get("text_config")
    if not isinstance(inner, dict):
        return raw
    outer = {key: raw[key] for key in _OF_BOTH if raw.get(key) is not None}
    return outer | {key: value for key, value in inner.items() if value is not None}


def architecture(model_type: str) -> str:
    """Return transformers' and SGLang's name of a kind of decoder."""
    return {"qwen3_5_text": "Qwen3_5"}.get(model_type, model_type.capitalize()) + "ForCausalLM"


def parse_config(raw: dict[str, Any], *, where: str) -> ModelConfig:
    """Turn the content of a `config.json` into a `ModelConfig`; `where` names it in errors."""
    outer, raw = raw, text_keys(raw)
    tied, also = (keys.get("tie_word_embeddings") for keys in (raw, outer))
    if also not in (None, tied):
        raise UserError(
            f"{where}: tie_word_embeddings is {also}, and inside of text_config {tied}; "
            "write what the weights are"
        )
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"{where}: the weights are quantised (quantization_config: {method}); set model.path "
            "to the folder of the same model in bf16, fp16 or fp32"
        )
    kind = _HybridFile if raw.get("model_type") == "qwen3_5_text" else _File
    read = check(kind, raw, where=where, advice=_ADVICE)
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
        UserError: One is not there, the index is broken, or adapters lie beside them.
    """
    if (folder / _ADAPTERS).exists():  # transformers adds them where PEFT is installed
        raise UserError(
            f"{folder / _ADAPTERS}: adapters are not read, also not beside a whole model; merge "
            "them (PEFT's merge_and_unload), or move them away"
        )
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
