"""Checkpoints of transformers give transformers' logits; what is saved is what was loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from minirl.exchange import UserError
from minirl.model import huggingface
from minirl.model.config import read_config
from minirl.model.decoder import Decoder
from minirl.model.sharding import make_mesh
from tests.plain_model import arrays, assert_close, assert_same, logits

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
MODELS = ("qwen2", "qwen2_tied", "qwen3")
MESHES = ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}, {"tensor": 8})


def params(model: Decoder) -> dict[str, np.ndarray]:
    return arrays(nnx.state(model))


def same(model: Decoder, other: Decoder) -> None:
    assert_same(nnx.state(model), nnx.state(other))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the untied Qwen2 that a test may break."""
    ignore = shutil.ignore_patterns("*.npz")
    return Path(shutil.copytree(REFERENCE / "qwen2", tmp_path / "model", ignore=ignore))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    expected = np.load(REFERENCE / name / "reference.npz")
    found_BTV = np.asarray(logits(huggingface.load(REFERENCE / name), expected["ids_BT"]))
    assert expected["lengths_B"].size > 0
    for b, length in enumerate(expected["lengths_B"]):
        difference = np.abs(found_BTV[b, :length] - expected["logits_BTV"][b, :length]).max()
        assert difference < 1e-4
        assert np.ptp(expected["logits_BTV"][b, :length]) > 1


@pytest.mark.parametrize(("name", "shape"), [*zip(MODELS, MESHES, strict=True)], ids=str)
def test_each_device_holds_its_part_of_the_same_weights(name, shape):
    model = huggingface.load(REFERENCE / name, mesh=make_mesh(shape))
    same(model, huggingface.load(REFERENCE / name))
    gate = model.layers.gate[...]
    parts = shape.get("fsdp", 1) * shape.get("tensor", 1)
    assert gate.addressable_shards[0].data.size == gate.size // parts


@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_is_what_transformers_wrote(name, tmp_path):
    model = huggingface.load(REFERENCE / name)
    huggingface.save(model, tmp_path / "new", source=REFERENCE / name)
    written = load_file(tmp_path / "new" / "model.safetensors")
    original = load_file(REFERENCE / name / "model.safetensors")
    assert written.keys() == original.keys()
    for key, array in original.items():
        np.testing.assert_array_equal(written[key], array, err_msg=key)
    same(huggingface.load(tmp_path / "new"), model)
    assert read_config(tmp_path / "new") == read_config(REFERENCE / name)


def test_shards_of_bounded_size(tmp_path, monkeypatch):
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    model = huggingface.load(REFERENCE / "qwen2", mesh=mesh)
    new = tmp_path / "new"
    monkeypatch.setattr(huggingface, "MAX_SHARD_BYTES", 150_000)
    huggingface.save(model, new, source=REFERENCE / "qwen2")
    path = new / "model.safetensors.index.json"
    index, mode = json.loads(path.read_text()), path.stat().st_mode
    total = 0
    for path in new.glob("*.safetensors"):
        sizes = [array.nbytes for array in load_file(path).values()]
        assert sum(sizes) <= 150_000
        # Servers of another user may read them.
        assert path.stat().st_mode == mode
        total += sum(sizes)
        assert {key for key, file in index["weight_map"].items() if file == path.name} == set(
            load_file(path)
        )
    assert total == index["metadata"]["total_size"]
    same(huggingface.load(new, mesh=mesh), model)


def test_half_precision_in_and_out(tmp_path):
    kind = ml_dtypes.bfloat16
    model = huggingface.load(REFERENCE / "qwen3")
    kept = huggingface.load(REFERENCE / "qwen3", param_dtype=kind)
    huggingface.save(kept, tmp_path / "half", source=REFERENCE / "qwen3")
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["dtype"] == np.dtype(kind).name
    half = params(huggingface.load(tmp_path / "half"))
    for name, array in params(model).items():
        np.testing.assert_array_equal(half[name], array.astype(kind).astype(np.float32))
    kept = huggingface.load(tmp_path / "half", param_dtype=kind)
    assert {array.dtype for array in params(kept).values()} == {np.dtype(kind)}


def test_saving_replaces_a_model_and_nothing_else(folder):
    model = huggingface.init(read_config(folder), 3)
    huggingface.save(model, folder, source=folder)
    same(huggingface.load(folder), model)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt: would be lost"):
        huggingface.save(model, folder, source=folder)
    assert (folder / "notes.txt").exists()


def test_fresh_weights_depend_on_the_seed_and_not_on_the_mesh():
    config = read_config(REFERENCE / "qwen2")
    model = huggingface.init(config, 0)
    on_mesh = huggingface.init(config, 0, mesh=make_mesh({"fsdp": 4, "tensor": 2}))
    assert_close(nnx.state(on_mesh), nnx.state(model))
    other = huggingface.init(config, 1)
    assert (params(model)["layers.q"] != params(other)["layers.q"]).any()


def test_tied_models_may_carry_an_output_projection(tmp_path):
    folder = Path(shutil.copytree(REFERENCE / "qwen2_tied", tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    same(huggingface.load(folder), huggingface.load(REFERENCE / "qwen2_tied"))


def test_buffers_of_the_rotary_embedding_are_passed_over(folder):
    # As the files of Llama 2 have them.
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(tensors, folder / "model.safetensors")
    same(huggingface.load(folder), huggingface.load(REFERENCE / "qwen2"))


def test_one_file_goes_before_an_index_beside_it(folder):
    (folder / INDEX).write_text('{"weight_map": {"a": "x.safetensors"}}')
    same(huggingface.load(folder), huggingface.load(REFERENCE / "qwen2"))


def change_tensors(change):
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def change_config(change):
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return apply


def set_config(**changes):
    return change_config(lambda config: config.update(changes))


def set_text(text: str, name: str = "config.json"):
    return lambda folder: (folder / name).write_text(text)


def only_index(text: str):
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / INDEX).write_text(text)

    return apply


NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"
INDEX = "model.safetensors.index.json"


def check_line(read, folder: Path, change, message: str) -> None:
    """Break a folder; check that whoever reads it then is told so in a line."""
    change(folder)
    with pytest.raises(UserError) as caught:
        read(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors nor"),
        (cut, "model.safetensors: cut short"),
        (only_index('{"weight_map": {"a": "x.safetensors"}}'), "x.safetensors: not there"),
        (change_tensors(lambda t: t.pop(NORM)), f"tensor {NORM} missing"),
        (change_tensors(lambda t: t.update(wpe=t[NORM])), "tensor wpe not of the model"),
        (
            change_tensors(lambda t: t.update({GATE: t[GATE].T.copy()})),
            f"tensor {GATE} has shape (64, 56), config.json says (56, 64)",
        ),
        (
            change_tensors(lambda t: t.update({GATE: t[GATE].astype(np.int8)})),
            f"tensor {GATE} is I8",
        ),
        (set_config(model_type="gpt2"), "'llama' or 'mistral', not 'gpt2'"),
        (
            set_config(rope_scaling={"type": "yarn"}),
            "rope_scaling.type should be 'default', 'linear' or",
        ),
        (set_config(num_key_value_heads=3), "num_key_value_heads = 3 does not divide 4 heads; set"),
        (set_config(head_dim=None, hidden_size=66), "does not divide hidden_size = 66"),
        (set_config(head_dim=15), "head_dim = 15 is odd"),
        (set_text("{"), "config.json: broken JSON"),
        (set_text("{}", "adapter_config.json"), "adapter_config.json: adapters are not read"),
    ],
)
def test_a_broken_folder_is_one_clear_line(folder, change, message):
    check_line(huggingface.load, folder, change, message)


MEASURE = """
import sys
from pathlib import Path
import jax
from flax import nnx
from minirl.model import huggingface
from minirl.model.sharding import make_mesh
from tests.memory import peak_bytes

jax.block_until_ready(jax.numpy.ones(8) + 1)
before = peak_bytes()
for mesh in (None, make_mesh({"fsdp": 8})):
    model = huggingface.load(Path(sys.argv[1]), mesh=mesh)
    jax.block_until_ready(nnx.state(model))
    del model
print(peak_bytes() - before)
"""


def test_loading_holds_the_model_once(copies, tmp_path):
    config = json.loads((REFERENCE / "qwen2" / "config.json").read_text())
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    shapes = huggingface.tensor_shapes(huggingface.shapes_of(tmp_path))
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(arrays, tmp_path / "model.safetensors")
    model_bytes = sum(array.nbytes for array in arrays.values())
    assert model_bytes > 100e6
    done = copies(tmp_path, cwd=tmp_path, code=MEASURE, XLA_FLAGS=os.environ["XLA_FLAGS"]).end()
    assert 0.8 * model_bytes < int(done.stdout) < 1.5 * model_bytes, done.stderr
