"""Qwen3.5 against what transformers computes, and its folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from minirl.model import huggingface, linear_attention
from minirl.model.config import read_config
from minirl.model.sharding import make_mesh
from minirl.types import Decoding, Request
from tests.plain_model import assert_close, assert_same, logits, plain_attention

from .test_weights import change_config, change_tensors, check_line

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
LENGTHS = (1, 63, 64, 65, 130, 1000)
# Of `make_reference.py`.
DIRECTIONS = 4


def whole(inputs, kernels, cache):
    """Run linear attention over whole rows, in chunks."""
    start = linear_attention.no_state(inputs, kernels)
    length_B = jnp.full(len(inputs.g_BTH), inputs.g_BTH.shape[1])
    return linear_attention.run(inputs, kernels, start, length_B)[0], cache


@nnx.jit
def loss_and_logits(model, ids_T):
    positions_BT = jnp.arange(len(ids_T) - 1)[None]
    hidden, _ = model(ids_T[None, :-1], positions_BT, plain_attention, recur=whole)
    logits_TV = model.logits(hidden)[0]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_TV, ids_T[1:])
    return losses.mean(), logits_TV


def projections(array):
    flat = array.astype(np.float64).ravel()
    directions = np.random.default_rng(flat.size).standard_normal((DIRECTIONS, flat.size))
    return [np.linalg.norm(flat), *(directions @ flat)]


@pytest.mark.parametrize(
    ("name", "length"), [*(("qwen35", length) for length in LENGTHS), ("qwen35_text", 130)]
)
def test_logits_and_gradients_are_those_of_transformers(name, length):
    """Of every weight, in the form of chunks; the equations token by token give the longest row's
    logits too.
    """
    expected = np.load(REFERENCE / name / "reference.npz")
    model, ids_T = huggingface.load(REFERENCE / name), expected["ids_T"][: length + 1]
    (_, found_TV), gradient = nnx.jit(nnx.value_and_grad(loss_and_logits, has_aux=True))(
        model, ids_T
    )
    expected_TV = expected[f"logits_{length}"]
    assert np.ptp(expected_TV) > 1
    both = [found_TV]
    if length == LENGTHS[-1]:
        both.append(logits(model, ids_T[None, :-1])[0])
    for array_TV in both:
        difference = np.abs(np.asarray(array_TV)[-len(expected_TV) :] - expected_TV).max()
        assert difference < 1e-4 * np.abs(expected_TV).max()
    names = expected["names"].tolist()
    gradients = dict(huggingface.tensors(gradient))
    assert gradients.keys() == set(names)
    largest = expected[f"gradient_{length}"][:, 0].max()
    for tensor, (norm, *products) in zip(names, expected[f"gradient_{length}"], strict=True):
        # A query alone with itself has a gradient of 0, but for rounding.
        size = max(norm, 1e-3 * largest)
        assert abs(np.linalg.norm(gradients[tensor]) - norm) < 1e-4 * size, tensor
        found = projections(gradients[tensor])[1:]
        np.testing.assert_allclose(found, products, rtol=0, atol=3e-4 * size, err_msg=tensor)


@pytest.mark.parametrize("name", ["qwen35", "qwen35_text"])
def test_greedy_replies_are_those_of_transformers(toy, name):
    """Of two episodes side by side, and in a later turn of a third."""
    expected, model = (
        np.load(REFERENCE / name / "reference.npz"),
        huggingface.load(REFERENCE / name),
    )
    prompt, reply = tuple(expected["ids_T"][:70].tolist()), tuple(expected["greedy"].tolist())
    sampler = toy.sampler(
        model, group_size=2, stop_ids=(96,), max_prompt_tokens=128, max_response_tokens=96
    )
    greedy = Decoding(temperature=0.0)
    requests = [Request(e, prompt, 48 - 9 * e, greedy) for e in range(2)]
    replies = toy.run(sampler, requests)
    assert [replies[e].ids for e in range(2)] == [reply, reply[:39]]
    # The first turn ends in the prompt's middle, whatever it says: the second shows the rest of it.
    sampler.submit(Request(2, prompt[:40], 3, greedy))
    ((_, first),) = sampler.advance(max_steps=32)
    assert len(first.ids) == 3
    sampler.submit(Request(2, prompt[:40] + first.ids + prompt[43:], 20, greedy))
    ((_, second),) = sampler.advance(max_steps=32)
    follows = toy.next_logprobs(model, prompt[:40] + first.ids + prompt[43:] + second.ids)
    assert second.ids == tuple(follows[69:-1].argmax(axis=1).tolist())


def test_what_is_written_is_the_decoder_alone_with_the_types_of_the_files(tmp_path):
    """As transformers does, and with what SGLang alone reads; A_log and gated norms in float32."""
    model = huggingface.load(REFERENCE / "qwen35_text", param_dtype=ml_dtypes.bfloat16)
    kinds = {model.layers.linear.a_log[...].dtype, model.layers.linear.out_norm[...].dtype}
    assert kinds == {np.dtype("float32")}
    source = REFERENCE / "qwen35_text"
    huggingface.save(model, tmp_path / "text", source=source)
    written = load_file(tmp_path / "text" / "model.safetensors")
    original = load_file(source / "model.safetensors")
    assert written.keys() == original.keys()
    for key, array in original.items():
        assert written[key].dtype == array.dtype, key
        np.testing.assert_array_equal(written[key], array, err_msg=key)
    config = json.loads((source / "config.json").read_text())
    assert "full_attention_interval" not in config
    config["full_attention_interval"] = 4
    assert json.loads((tmp_path / "text" / "config.json").read_text()) == config


def test_a_vision_tower_is_left_out(tmp_path, caplog):
    source = REFERENCE / "qwen35"
    with caplog.at_level("INFO"):
        model = huggingface.load(source)
    assert "tensors of the vision tower and of the prediction of several tokens" in caplog.text
    huggingface.save(model, tmp_path / "new", source=source)
    written = load_file(tmp_path / "new" / "model.safetensors")
    original = load_file(source / "model.safetensors")
    assert {key.replace("model.", "model.language_model.", 1) for key in written} == {
        key for key in original if not key.startswith(("model.visual.", "mtp."))
    }
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert (config["model_type"], config["eos_token_id"]) == ("qwen3_5_text", 2)
    assert read_config(tmp_path / "new") == read_config(source)
    assert_same(nnx.state(huggingface.load(tmp_path / "new")), nnx.state(model))


def test_each_device_holds_its_part_and_fresh_weights_depend_on_the_seed_alone():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    model = huggingface.load(REFERENCE / "qwen35", mesh=mesh)
    assert_same(nnx.state(model), nnx.state(huggingface.load(REFERENCE / "qwen35")))
    mixed = model.layers.linear.in_qkv[...]
    assert mixed.shape[:2] == (2, 3)
    assert mixed.addressable_shards[0].data.size == mixed.size // 4
    config = read_config(REFERENCE / "qwen35")
    drawn = huggingface.init(config, 0)
    assert_close(nnx.state(huggingface.init(config, 0, mesh=mesh)), nnx.state(drawn))
    assert (drawn.layers.linear.a_log[...] < np.log(16)).all()


@pytest.fixture
def folder(tmp_path):
    """A copy of the folder with a vision tower that a test may break."""
    ignore = shutil.ignore_patterns("*.npz")
    return Path(shutil.copytree(REFERENCE / "qwen35", tmp_path / "model", ignore=ignore))


def set_decoder(**changes):
    """Change keys of the decoder."""
    return change_config(lambda config: config["text_config"].update(changes))


def fuse(tensors):
    """Write the projections of layer 0 as Qwen3-Next has them."""
    start = "model.language_model.layers.0.linear_attn.in_proj_"
    parts = [tensors.pop(f"{start}{name}.weight") for name in ("qkv", "z")]
    tensors[f"{start}qkvz.weight"] = np.concatenate(parts)


FULL = ["full_attention"] * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_tensors(lambda t: t.pop("model.language_model.layers.4.linear_attn.dt_bias")),
         "tensor model.layers.4.linear_attn.dt_bias missing"),
        (change_tensors(fuse), "layers.0.linear_attn.in_proj_qkv.weight (and 1 more) missing"),
        (change_config(lambda c: c.pop("text_config")), "model_type should be"),
        (set_decoder(model_type="qwen3_5_moe_text"), "not 'qwen3_5_moe_text'"),
        (change_config(lambda c: c.update(quantization_config={"quant_method": "fp8"})), "quanti"),
        (set_decoder(layer_types=FULL), "layer_types of 8 layers are not three times linear"),
        (set_decoder(num_hidden_layers=6, layer_types=None), "layer_types of 6 layers"),
        (set_decoder(full_attention_interval=2), "full_attention_interval should be 4"),
        (set_decoder(attn_output_gate=False), "attn_output_gate should be True"),
        (set_decoder(output_gate_type="sigmoid"), "output_gate_type should be 'swish' or 'silu'"),
        (set_decoder(linear_num_value_heads=3), "linear_num_key_heads = 2 does not divide 3"),
        (set_decoder(tie_word_embeddings=False), "tie_word_embeddings is True, and inside of"),
        (set_decoder(head_dim=20), "turns pairs, and not 5 numbers"),
    ],
)  # fmt: skip
def test_a_broken_folder_is_one_clear_line(folder, change, message):
    check_line(huggingface.check_files, folder, change, message)
