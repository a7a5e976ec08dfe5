"""A GGUF file becomes the Hugging Face folder that it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import pytest
from tokenizers import Tokenizer

from minirl.exchange import UserError
from minirl.model import gguf, huggingface
from minirl.model.config import read_config
from minirl.model.tokenizer import ChatTokenizer

from .gguf_files import CONTROL, RULES, TEXTS, Kind, make_folder, rope_freqs, write_gguf

# A width that quantised blocks of 32 divide.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 24},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"model_type": "llama", "tie_word_embeddings": True, "rope_scaling": LLAMA3},
}
FACTS = {
    "linear": {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 4.0},
}
RAW = {"llama3": {"rope_freqs.weight": (rope_freqs(500_000.0, 16, 8.0), Kind.F32)}}


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    return huggingface.tensor_shapes(huggingface.shapes_of(folder))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {
        name: make_folder(root / name, shapes_of, rule="qwen2", **SIZES | config)
        for name, config in CONFIGS.items()
    }


def described(file: Path, folder: Path) -> gguf.GgufFile:
    source = gguf.open_gguf(file)
    folder.mkdir()
    gguf.describe(source, folder)
    return source


def convert(file: Path, folder: Path) -> dict[str, np.ndarray]:
    source = described(file, folder)
    return dict(gguf.read_tensors(source, shapes_of(folder)))


def original(folder: Path) -> dict[str, np.ndarray]:
    return dict(huggingface.read_tensors(folder))


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_and_shape_are_those_of_the_folder(folders, tmp_path, name):
    file = write_gguf(
        tmp_path / "a.gguf", folders[name], rule="qwen2", facts=FACTS.get(name), raw=RAW.get(name)
    )
    found, expected = convert(file, tmp_path / "new"), original(folders[name])
    assert read_config(tmp_path / "new") == read_config(folders[name])
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)


@pytest.mark.parametrize(
    ("kind", "bound"),
    # Of 32 numbers, relative to the largest: half of a step of 1/127, or a whole one of 1/8 at one
    # end of the range; a scale in fp16 adds a little.
    [
        (Kind.F16, 2**-11),
        (Kind.BF16, 2**-8),
        (Kind.Q8_0, 0.5 / 127 + 1e-3),
        (Kind.Q4_0, 1 / 8 + 1e-3),
    ],
)
def test_quantised_weights_are_as_near_as_their_type(folders, tmp_path, kind, bound):
    file = write_gguf(tmp_path / "a.gguf", folders["llama"], rule="qwen2", kind=kind)
    found, expected = convert(file, tmp_path / "new"), original(folders["llama"])
    for key, array in expected.items():
        if array.ndim == 1:
            np.testing.assert_array_equal(found[key], array)
            continue
        largest = np.abs(array).reshape(len(array), -1, 32).max(-1)
        error = np.abs(found[key] - array).reshape(len(array), -1, 32).max(-1)
        assert (error <= bound * largest).all(), key
        assert error.max() > 0


def test_a_k_quantisation_gives_the_numbers_that_it_stands_for(tmp_path):
    """A block of Q4_K: 256 numbers, each scale 1 of 0.5, each minimum 0, each nibble its value."""
    config = SIZES | CONFIGS["qwen2"] | {"intermediate_size": 256}
    folder = make_folder(tmp_path / "folder", shapes_of, rule="qwen2", **config)
    half, none = np.array([0.5, 0.0], np.float16).view(np.uint8).reshape(2, 2)
    scales = np.array([1] * 4 + [0] * 4 + [1] * 4, np.uint8)
    nibbles = np.full(128, 0x73, np.uint8)  # low 3, high 7: 32 numbers each, by turns
    block = np.concatenate([half, none, scales, nibbles])
    raw = {"blk.1.ffn_down.weight": (np.tile(block, (64, 1)), Kind.Q4_K)}
    found = convert(
        write_gguf(tmp_path / "a.gguf", folder, rule="qwen2", raw=raw), tmp_path / "new"
    )
    row = np.tile(np.repeat([1.5, 3.5], 32), 4)
    np.testing.assert_array_equal(
        found["model.layers.1.mlp.down_proj.weight"], np.tile(row, (64, 1))
    )


def test_an_embedding_that_is_there_twice_is_one_and_the_finer_is_taken(folders, tmp_path):
    folder = folders["qwen2"]
    embedding = original(folder)["model.embed_tokens.weight"]
    finer = package.quants.quantize(embedding, Kind.Q8_0)
    file = write_gguf(
        tmp_path / "a.gguf",
        folder,
        rule="qwen2",
        kind=Kind.Q4_0,
        raw={"output.weight": (finer, Kind.Q8_0)},
    )
    found = convert(file, tmp_path / "new")
    assert read_config(tmp_path / "new").tie_word_embeddings
    expected = package.quants.dequantize(finer, Kind.Q8_0)
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], expected)


@pytest.mark.parametrize("rule", RULES)
def test_ids_are_those_of_the_tokenizer_that_it_was(tmp_path, rule):
    folder = make_folder(tmp_path / "folder", shapes_of, rule=rule, **SIZES | CONFIGS["qwen2"])
    described(write_gguf(tmp_path / "a.gguf", folder, rule=rule), tmp_path / "new")
    old, new = (
        Tokenizer.from_file(str(place / "tokenizer.json")) for place in (folder, tmp_path / "new")
    )
    chat = "<|im_start|>user\n<tool_call> 12 <|endoftext|><|im_end|>\n"
    for text in [*TEXTS, chat, "".join(reversed(TEXTS[3]))]:
        ids = old.encode(text).ids
        assert new.encode(text).ids == ids
        decoded = [one.decode(ids, skip_special_tokens=False) for one in (old, new)]
        assert decoded[0] == decoded[1]
    assert len(set(old.encode(chat).ids) & {old.token_to_id(token) for token in CONTROL}) == 3


def test_the_folder_has_template_and_stop_tokens(folders, tmp_path):
    described(write_gguf(tmp_path / "a.gguf", folders["llama"], rule="qwen2"), tmp_path / "new")
    tokenizer = ChatTokenizer(tmp_path / "new")
    end, other = (tokenizer._backend.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>"))
    assert (tokenizer.stop_ids, tokenizer.pad_id) == ((end, other), other)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (end, other)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "there is no such file"),
        (lambda file: file.write_bytes(b""), "cut short or not a GGUF file"),
        (lambda file: file.write_text("PK" * 5000), "cut short or not a GGUF file"),
        (cut, "cut short or not a GGUF file"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "cut short"),
        (lambda file: file.write_bytes(file.read_bytes()[:3000]), "cut short"),
        ({"facts": {"general.architecture": "phi3"}}, "architecture phi3; supported are qwen2"),
        ({"facts": {"split.count": 3}}, "is one of 3 parts"),
        ({"facts": {"tokenizer.ggml.pre": "poro-chat"}}, "tokenizer of kind gpt2 poro-chat"),
        ({"facts": {"tokenizer.ggml.model": "llama"}}, "tokenizer of kind llama"),
        ({"facts": {"tokenizer.ggml.tokens": None}}, "has no tokenizer.ggml.tokens"),
        ({"facts": {"tokenizer.ggml.merges": None}}, "has no tokenizer.ggml.merges"),
        ({"facts": {"tokenizer.chat_template": None}}, "has no tokenizer.chat_template"),
        ({"facts": {"ARCH.attention.head_count": 3}}, "does not divide"),
        ({"facts": {"ARCH.feed_forward_length": None}}, "intermediate_size is missing"),
        (
            {"facts": {"ARCH.feed_forward_length": 128}},
            "has shape (64, 96), the file's facts say (64, 128)",
        ),
        ({"facts": {"ARCH.rope.scaling.type": "yarn"}}, "rope_scaling.rope_type should be"),
        (
            {"raw": {"blk.1.attn_q.weight": (np.zeros((64, 9), np.int8), Kind.I8)}},
            "tensor blk.1.attn_q.weight is I8, which the package gguf cannot read",
        ),
        (
            {"raw": {"blk.1.ffn_gate_exps.weight": (np.zeros((2, 2), np.float32), Kind.F32)}},
            "tensor blk.1.ffn_gate_exps.weight is not of such a model",
        ),
        ({"facts": {"ARCH.block_count": 3}}, "tensor blk.2.attn_norm.weight is missing"),
        (
            {"raw": {"rope_freqs.weight": (np.array([1, 1, 2, 9] * 2, np.float32), Kind.F32)}},
            "stretches the rotary embedding otherwise",
        ),
    ],
)
def test_what_cannot_be_read_is_one_clear_line(folders, tmp_path, change, message):
    more = change if isinstance(change, dict) else {}
    file = write_gguf(tmp_path / "a.gguf", folders["llama"], rule="qwen2", **more)
    if callable(change):
        change(file)
    with pytest.raises(UserError) as caught:
        convert(file, tmp_path / "new")
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
