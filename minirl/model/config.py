"""A model's folder as Hugging Face has it: its files, and its shape in `config.json`; no JAX."""

from __future__ import annotations

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
    """The rotary embedding, and how it is stretched to a longer context.

    `linear` divides every frequency by `factor`. `llama3` divides low ones, which turn fewer than
    `low_freq_factor` times within the original context; those that turn less than
    `high_freq_factor` times in part; others not at all. Newer files have here what older ones have
    beside it: `rope_theta` and `partial_rotary_factor`.
    """

    rope_type: Literal["default", "linear", "llama3"] = Field(
        "default", validation_alias=AliasChoices("rope_type", "type")
    )
    factor: _Positive = 1.0
    low_freq_factor: _Positive = 1.0
    high_freq_factor: _Positive = 4.0
    original_max_position_embeddings: _Size = 8192
    rope_theta: _Positive | None = None
    partial_rotary_factor: float | None = Field(default=None, gt=0, le=1)


# Keys that stand beside `text_config` or inside of it.
_OF_BOTH = (
    *("quantization_config", "tie_word_embeddings", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# Keys of which null is as good as nothing.
_OPEN = (
    *("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias"),
    *("use_sliding_window", "full_attention_interval", "attn_output_gate", "output_gate_type"),
)
LAYER_TYPES = [*["linear_attention"] * 3, "full_attention"]
"""Layers of a hybrid from one with full attention to the next."""
PERIOD = len(LAYER_TYPES)


class ModelConfig(BaseModel, frozen=True):
    """The keys of a `config.json` that decide what a decoder computes, and the values that this one
    supports.
    """

    model_type: Literal["qwen2", "qwen3", "qwen3_5_text", "llama", "mistral"]
    hidden_act: Literal["silu"] = "silu"
    use_sliding_window: Literal[False] = False
    # Of Mistral alone; what transformers takes where the file does not say.
    sliding_window: _Size | None = 4096
    max_position_embeddings: _Size = 2**31 - 1
    mlp_bias: Literal[False] = False
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size = Field(
        default_factory=lambda known: known.get("num_attention_heads", 1)
    )
    head_dim: _Size = Field(
        default_factory=lambda known: (
            known.get("hidden_size", 1) // known.get("num_attention_heads", 1)
        )
    )
    rope_theta: _Positive = 10_000.0
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    rms_norm_eps: _Positive = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        heads, width, size = self.num_attention_heads, self.hidden_size, self.head_dim
        if heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads = {self.num_key_value_heads} does not divide {heads} heads"
            )
        if self.hybrid is None and "head_dim" not in self.model_fields_set and width % heads:
            raise ValueError(f"num_attention_heads = {heads} does not divide hidden_size = {width}")
        if size % 2:
            raise ValueError(f"head_dim = {size} is odd; the rotary embedding turns pairs")
        window, longest = self.sliding_window, self.max_position_embeddings
        if self.model_type == "mistral" and window is not None and window < longest:
            raise ValueError(f"sliding_window = {window} is shorter than {longest} positions")
        if self.model_type not in ("qwen2", "qwen3") and self.attention_bias:
            raise ValueError("attention_bias = true, and this decoder has none on the output")
        return self

    @property
    def qkv_bias(self) -> bool:
        """Return whether queries, keys and values have biases."""
        return self.model_type == "qwen2" or self.attention_bias

    @property
    def qk_norm(self) -> bool:
        """Return whether queries and keys have norms."""
        return self.model_type in ("qwen3", "qwen3_5_text")

    @property
    def rope(self) -> Rope:
        """Return how the rotary embedding is stretched: newer files and older ones name it."""
        return self.rope_parameters or self.rope_scaling or Rope()

    @property
    def rotary_size(self) -> int:
        """Return how many numbers of a head the rotary embedding turns."""
        return self.head_dim

    @property
    def hybrid(self) -> HybridConfig | None:
        """Return the shape of what Qwen3.5 has and others have not."""
        return None

    @property
    def full_layers(self) -> int:
        """Return the number of layers with full attention."""
        return self.num_hidden_layers // (PERIOD if self.hybrid else 1)

    def is_full(self, layer: int) -> bool:
        """Tell whether a layer has full attention."""
        return self.hybrid is None or layer % PERIOD == PERIOD - 1


class HybridConfig(ModelConfig, frozen=True):
    """The keys of Qwen3.5, of its decoder alone; what transformers takes where a file is silent.

    Every fourth layer is full attention, with a gate on its output and a rotary embedding of a part
    of each head; the others are linear attention (`minirl.model.linear_attention`). All norms but
    that inside of linear attention multiply by 1 + weight.
    """

    head_dim: _Size = 256
    linear_num_key_heads: _Size = 16
    linear_num_value_heads: _Size = 32
    linear_key_head_dim: _Size = 128
    linear_value_head_dim: _Size = 128
    linear_conv_kernel_dim: Annotated[int, Field(gt=1, lt=2**31)] = 4
    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1)
    full_attention_interval: Literal[4] = 4
    layer_types: tuple[str, ...] | None = None
    attn_output_gate: Literal[True] = True
    output_gate_type: Literal["swish", "silu"] = "swish"

    @model_validator(mode="after")
    def _check_hybrid(self) -> Self:
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise ValueError(f"linear_num_key_heads = {keys} does not divide {values} value heads")
        depth = self.num_hidden_layers
        types = (*LAYER_TYPES * (depth // PERIOD),)
        if depth % PERIOD or self.layer_types not in (None, types):
            raise ValueError(
                f"layer_types of {depth} layers are not three times linear_attention before each "
                "full_attention"
            )
        if (size := self.head_dim * self._rotary_share) % 2:
            raise ValueError(
                f"the rotary embedding turns pairs, and not {size:g} numbers of a head"
            )
        return self

    @property
    def _rotary_share(self) -> float:
        return self.rope.partial_rotary_factor or self.partial_rotary_factor

    @property
    def rotary_size(self) -> int:
        """Return how many numbers of a head the rotary embedding turns."""
        return int(self.head_dim * self._rotary_share)

    @property
    def hybrid(self) -> HybridConfig:
        """Return this, which has it."""
        return self


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
    kind = HybridConfig if raw.get("model_type") == "qwen3_5_text" else ModelConfig
    given = {key: value for key, value in raw.items() if value is not None or key not in _OPEN}
    return check(kind, given, where=where, advice=_ADVICE)


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
