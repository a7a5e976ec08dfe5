"""Models as Hugging Face folders: those of transformers give transformers' logits, and what is
written is what was read.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from minirl.exchange import UserError
from minirl.model import huggingface
from minirl.model.config import parse_config, read_config
from minirl.model.decoder import rotary_frequencies
from minirl.model.lora import described
from minirl.model.sharding import make_mesh
from tests.plain_model import assert_same, logits, plain_attention, whole
from tests.vectors import read

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
MODELS = ("qwen2", "qwen2_tied", "qwen3")
MESHES = ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}, {"tensor": 8})
INDEX = "model.safetensors.index.json"


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def copied(name, tmp_path):
    """Copy a folder that a test may break."""
    ignore = shutil.ignore_patterns("*.npz")
    return Path(shutil.copytree(REFERENCE / name, tmp_path / "model", ignore=ignore))


def check_logits(model, folder: Path) -> None:
    """Compare a model's logits with those that lie in a folder."""
    expected = np.load(folder / "reference.npz")
    found_BTV = np.asarray(logits(model, expected["ids_BT"]))
    assert expected["lengths_B"].size > 0
    for b, length in enumerate(expected["lengths_B"]):
        wanted_TV = expected["logits_BTV"][b, :length]
        assert np.abs(found_BTV[b, :length] - wanted_TV).max() < 1e-4
        assert np.ptp(wanted_TV) > 1


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    check_logits(huggingface.load(REFERENCE / name), REFERENCE / name)


@pytest.mark.parametrize(
    ("name", "shape"), [*zip(MODELS, MESHES, strict=True), ("qwen35", MESHES[0])], ids=str
)
def test_each_device_holds_its_part_of_the_same_weights(name, shape):
    model = huggingface.load(REFERENCE / name, mesh=make_mesh(shape))
    assert_same(model, huggingface.load(REFERENCE / name))
    parts = shape.get("fsdp", 1) * shape.get("tensor", 1)
    mixed = model.layers.linear.in_qkv if name == "qwen35" else model.layers.gate
    assert mixed[...].addressable_shards[0].data.size == mixed[...].size // parts


# A Qwen3.5 is the decoder alone, in the types of its files, and with what SGLang alone reads.
@pytest.mark.parametrize(
    ("name", "kind", "added"),
    [
        *((name, jnp.float32, {}) for name in MODELS),
        ("qwen35_text", jnp.bfloat16, {"full_attention_interval": 4}),
    ],
)
def test_what_is_saved_is_what_transformers_wrote(name, kind, added, tmp_path):
    source, new = REFERENCE / name, tmp_path / "new"
    model = huggingface.load(source, param_dtype=kind)
    huggingface.save(model, new, source=source)
    written, original = (load_file(one / "model.safetensors") for one in (new, source))
    assert written.keys() == original.keys()
    assert_same(written, original)
    assert_same(huggingface.load(new, param_dtype=kind), model)
    assert not added.keys() & config_of(source).keys()
    assert config_of(new) == config_of(source) | added
    assert read_config(new) == read_config(source)


def test_shards_of_bounded_size(tmp_path, monkeypatch):
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    model = huggingface.load(REFERENCE / "qwen2", mesh=mesh)
    new = tmp_path / "new"
    monkeypatch.setattr(huggingface, "MAX_SHARD_BYTES", 150_000)
    huggingface.save(model, new, source=REFERENCE / "qwen2")
    index, mode = json.loads((new / INDEX).read_text()), (new / INDEX).stat().st_mode
    total = 0
    for path in new.glob("*.safetensors"):
        held = load_file(path)
        size = sum(array.nbytes for array in held.values())
        assert size <= 150_000
        assert path.stat().st_mode == mode  # servers of another user may read them
        total += size
        assert {key for key, file in index["weight_map"].items() if file == path.name} == {*held}
    assert total == index["metadata"]["total_size"]
    assert_same(huggingface.load(new, mesh=mesh), model)


def test_saving_replaces_a_model_and_nothing_else(tmp_path):
    folder = copied("qwen2", tmp_path)
    model = huggingface.init(read_config(folder), 3)
    huggingface.save(model, folder, source=folder)
    assert_same(huggingface.load(folder), model)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt: would be lost"):
        huggingface.save(model, folder, source=folder)
    assert (folder / "notes.txt").exists()


def change_tensors(change):
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


# A tied model may carry an output projection; as the files of Llama 2 have them, buffers of the
# rotary embedding are passed over; one file goes before an index beside it.
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
ROTARY = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen2_tied", change_tensors(lambda t: t.update({HEAD: t[EMBED].copy()}))),
        ("qwen2", change_tensors(lambda t: t.update(dict.fromkeys(ROTARY, np.ones(8, "f4"))))),
        ("qwen2", lambda f: (f / INDEX).write_text('{"weight_map": {"a": "x.safetensors"}}')),
    ],
)
def test_what_lies_beside_the_weights_changes_nothing(name, change, tmp_path):
    folder = copied(name, tmp_path)
    change(folder)
    assert_same(huggingface.load(folder), huggingface.load(REFERENCE / name))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def only_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text('{"weight_map": {"a": "x.safetensors"}}')


def fuse(tensors):
    """Write the projections of layer 0 as Qwen3-Next has them."""
    start = "model.language_model.layers.0.linear_attn.in_proj_"
    parts = [tensors.pop(f"{start}{name}.weight") for name in ("qkv", "z")]
    tensors[f"{start}qkvz.weight"] = np.concatenate(parts)


NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"
BIAS = "model.language_model.layers.4.linear_attn.dt_bias"


def check_line(read, folder: Path, change, message: str) -> None:
    """Break a folder; check that whoever reads it then is told so in a line."""
    change(folder)
    with pytest.raises(UserError) as caught:
        read(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen2", lambda f: (f / "model.safetensors").unlink(), "no model.safetensors nor"),
        ("qwen2", cut, "model.safetensors: cut short"),
        ("qwen2", only_index, "x.safetensors: not there"),
        (
            *("qwen2", change_tensors(lambda t: t.pop(NORM))),
            f"tensor {NORM} is missing, config.json says (64,)",
        ),
        (
            *("qwen2", change_tensors(lambda t: t.update(wpe=t[NORM]))),
            "tensor wpe is F32 of shape (64,), config.json says none",
        ),
        (
            *("qwen2", change_tensors(lambda t: t.update({GATE: t[GATE].T.copy()}))),
            f"tensor {GATE} is F32 of shape (64, 56), config.json says (56, 64)",
        ),
        (
            *("qwen2", change_tensors(lambda t: t.update({GATE: t[GATE].astype(np.int8)}))),
            f"tensor {GATE} is I8",
        ),
        ("qwen2", lambda f: (f / "config.json").write_text("{"), "config.json: broken JSON"),
        (
            *("qwen2", lambda f: (f / "adapter_config.json").write_text("{}")),
            "adapter_config.json: adapters are not read",
        ),
        (
            *("qwen35", change_tensors(lambda t: t.pop(BIAS))),
            "tensor model.layers.4.linear_attn.dt_bias is missing",
        ),
        ("qwen35", change_tensors(fuse), "layers.0.linear_attn.in_proj_qkv.weight is missing"),
    ],
)
def test_a_broken_folder_is_one_clear_line(tmp_path, name, change, message):
    check_line(huggingface.load, copied(name, tmp_path), change, message)


def test_heads_of_a_qwen35_have_the_size_that_transformers_takes_where_a_file_is_silent():
    keys = config_of(REFERENCE / "qwen35")["text_config"] | {"head_dim": None, "hidden_size": 66}
    assert parse_config(keys, where="config.json").head_dim == 256


@pytest.mark.parametrize(("name", "changes", "message"), read("model_configs"), ids=str)
def test_what_would_be_computed_otherwise_is_refused(name, changes, message):
    config = SHAPE if name == "llama" else config_of(REFERENCE / name)
    config = json.loads(json.dumps(config))
    for key, value in changes.items():
        *section, last = key.split(".")
        (config[section[0]] if section else config)[last] = value
    with pytest.raises(UserError) as caught:
        parse_config(config, where="config.json")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# How much a process takes to read a model, on a device and over four, and to write it for servers.
MEASURE = """
import sys
from pathlib import Path
import jax
from flax import nnx
from minirl.model import huggingface
from minirl.model.sharding import make_mesh
from minirl.sglang import transfer
from tests.memory import peak_bytes

folder = Path(sys.argv[1])
jax.block_until_ready(jax.numpy.ones(8) + 1)
before = peak_bytes()
for mesh in (None, make_mesh({"fsdp": 2, "tensor": 2})):
    model = None
    model = huggingface.load(folder, mesh=mesh)
    jax.block_until_ready(nnx.state(model))
print(peak_bytes() - before)
params = nnx.state(model, nnx.Param)
next(transfer.whole_tensors(params, "float32"))
transfer._FILE_BYTES = 2**25
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = peak_bytes()
transfer.write_version(folder / "w", "x", params, dtype="float32")
print(peak_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_reading_holds_a_model_once_and_writing_one_of_its_files(copies, tmp_path):
    config = config_of(REFERENCE / "qwen2")
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    shapes = huggingface.shapes_of(tmp_path)
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(arrays, tmp_path / "model.safetensors")
    model_bytes = sum(array.nbytes for array in arrays.values())
    assert model_bytes > 200e6
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    done = copies(tmp_path, cwd=tmp_path, code=MEASURE, XLA_FLAGS=flags).end()
    read_bytes, written_bytes = map(int, done.stdout.split())
    assert 0.8 * model_bytes < read_bytes < 1.5 * model_bytes, done.stderr
    assert written_bytes < 0.6 * model_bytes


# Llama and Mistral.

SHAPE, CASES = (read("llama")[name] for name in ("shape", "cases"))


@pytest.mark.parametrize(
    ("changes", "kv_heads", "size", "is_tied", "frequencies"), CASES.values(), ids=CASES
)
def test_a_llama_is_a_qwen2_without_biases_whose_rotation_is_stretched(
    changes, kv_heads, size, is_tied, frequencies
):
    config, qwen2 = (
        parse_config(SHAPE | changes | kind, where="config.json")
        for kind in ({}, {"model_type": "qwen2"})
    )
    assert (config.num_key_value_heads, config.head_dim) == (kv_heads, size)
    ours, theirs = (huggingface.tensor_shapes(nnx.state(described(one))) for one in (config, qwen2))
    assert ours == {name: theirs[name] for name in theirs if not name.endswith("bias")}
    assert (HEAD in ours) != is_tied
    np.testing.assert_allclose(rotary_frequencies(config), frequencies, rtol=1e-5)


def test_a_llamas_folder_is_written_as_it_was_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | CASES["llama3"][0]))
    config = read_config(tmp_path)
    model = huggingface.init(config, 0)
    huggingface.save(model, tmp_path / "new", source=tmp_path)
    assert read_config(tmp_path / "new") == config
    assert config_of(tmp_path / "new")["architectures"] == ["LlamaForCausalLM"]
    assert_same(huggingface.load(tmp_path / "new"), model)


# Qwen3.5.

# A chunk of linear attention that is cut, and many (others: test_linear_attention.py).
LENGTHS = (1, 1000)
# Of `make_reference.py`.
DIRECTIONS = 4


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
    """Of every weight, in the form of chunks."""
    expected = np.load(REFERENCE / name / "reference.npz")
    model, ids_T = huggingface.load(REFERENCE / name), expected["ids_T"][: length + 1]
    (_, found_TV), gradient = nnx.jit(nnx.value_and_grad(loss_and_logits, has_aux=True))(
        model, ids_T
    )
    expected_TV = expected[f"logits_{length}"]
    assert np.ptp(expected_TV) > 1
    difference = np.abs(np.asarray(found_TV)[-len(expected_TV) :] - expected_TV).max()
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


def test_a_vision_tower_is_left_out(tmp_path, caplog):
    source, new = REFERENCE / "qwen35", tmp_path / "new"
    with caplog.at_level("INFO"):
        model = huggingface.load(source)
    assert "tensors of the vision tower and of the prediction of several tokens" in caplog.text
    huggingface.save(model, new, source=source)
    written, original = (load_file(one / "model.safetensors") for one in (new, source))
    assert {key.replace("model.", "model.language_model.", 1) for key in written} == {
        key for key in original if not key.startswith(("model.visual.", "mtp."))
    }
    config = config_of(new)
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert (config["model_type"], config["eos_token_id"]) == ("qwen3_5_text", 2)
    assert read_config(new) == read_config(source)
    assert_same(huggingface.load(new), model)
