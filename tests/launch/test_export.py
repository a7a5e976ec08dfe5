"""What is exported is the policy: for others to load, whole or not at all, in little memory."""

import filecmp
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from launch import export
from launch.config import TinyConfig, dump, load_config
from launch.tiny import make_tiny, train_tokenizer
from minirl.config import LoraConfig, OptimizerConfig
from minirl.model import huggingface
from minirl.model.config import parse_config, read_config
from minirl.model.lora import add_adapters, split, trained
from minirl.model.tokenizer import ChatTokenizer
from minirl.run.checkpoint import Checkpoints
from minirl.train.optimizer import make_optimizer
from minirl.train.update import TrainState
from tests import plain_model
from tests.plain_model import arrays, assert_same
from tests.vectors import read

from .conftest import ROOT, mistake

SHAPE = TinyConfig(
    vocab_size=512, hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1
)
LORA = LoraConfig(rank=3, alpha=6, targets=("q", "o", "up"))


def numbers(seed: int, like: Any) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), like)


def logits(model: Any) -> np.ndarray:
    return np.asarray(plain_model.logits(model, np.arange(5, 25)[None]))


def make_base(folder: Path) -> Path:
    """Make a Hugging Face folder with a tokenizer, and weights of which none is 0 or 1."""
    make_tiny(folder, ["select name from singer"], SHAPE, 0)
    changes = {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 24}
    config = json.loads((folder / "config.json").read_text()) | changes
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    graph, params = nnx.split(huggingface.init(parse_config(config, where=""), 0))
    huggingface.save(nnx.merge(graph, numbers(1, params)), folder, source=folder)
    return folder


def make_run(folder: Path, base: Path, *, lora: LoraConfig | None, dtype: str = "float32") -> Any:
    """Make a run folder with a checkpoint of a model that training has changed; return that."""
    settings = [
        *(f"run.dir={folder}", f"model={{path: {base}, dtype: {dtype}}}", "warm_start=null"),
        *("sampler.temperature=0.7", "sampler.top_p=0.9"),
        f"train.lora={lora.model_dump_json() if lora else 'null'}",
    ]
    folder.mkdir()
    text = dump(load_config(str(ROOT / "tests" / "data" / "tiny.yaml"), settings))
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    model = huggingface.load(base)
    if lora is not None:
        add_adapters(model, lora, seed=0)
    graph, params, frozen = split(model)
    params = numbers(2, params)
    state = TrainState(params, make_optimizer(OptimizerConfig()).init(params))
    with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        checkpoints.save(1, state, {}, score=0.0)
    return nnx.merge(graph, params, frozen)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A base model, and runs of all its weights and of adapters."""
    folder = tmp_path_factory.mktemp("place")
    base = make_base(folder / "base")
    runs = {"full": None, "lora": LORA}
    models = {name: make_run(folder / name, base, lora=lora) for name, lora in runs.items()}
    return SimpleNamespace(folder=folder, base=base, **models)


def write(source: Path, out: Path, *arguments: str) -> Path:
    export.main(["--checkpoint", str(source), "--out", str(out), *arguments])
    return out


def test_a_checkpoint_comes_back_bit_by_bit_with_all_that_others_need(place, tmp_path):
    out = write(place.folder / "full", tmp_path / "new" / "out")
    assert_same(nnx.state(huggingface.load(out)), nnx.state(place.full))
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (place.base / name).read_bytes()
    old, new = (json.loads((one / "config.json").read_text()) for one in (place.base, out))
    assert new == old | {"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    tokenizer = ChatTokenizer(out)
    assert json.loads((out / "generation_config.json").read_text()) == {
        "eos_token_id": list(tokenizer.stop_ids),
        "pad_token_id": tokenizer.pad_id,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    with safe_open(out / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert "lm_head.weight" in file.keys()  # noqa: SIM118


def test_adapters_are_merged(place, tmp_path):
    merged = huggingface.load(write(place.folder / "lora" / "checkpoints" / "1", tmp_path / "out"))
    expected = logits(place.lora)
    np.testing.assert_allclose(logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert np.abs(logits(huggingface.load(place.base)) - expected).max() > 1
    untouched = arrays(nnx.state(place.lora))["layers.down"]
    np.testing.assert_array_equal(arrays(nnx.state(merged))["layers.down"], untouched)


def test_adapters_alone_are_those_of_the_checkpoint(place, tmp_path):
    out = write(place.folder / "lora", tmp_path / "out", "--adapter")
    names = sorted(path.name for path in out.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    params = trained(place.lora)
    shapes, tensors = huggingface.tensor_shapes(params), huggingface.tensors(params)
    huggingface.write_adapter(tmp_path / "peft", shapes, tensors, LORA, base=str(place.base))
    assert filecmp.cmpfiles(out, tmp_path / "peft", names, shallow=False)[0] == names
    assert "adapters" in mistake(write, place.folder / "full", tmp_path / "x", "--adapter")


def test_types_are_as_asked_for(place, tmp_path):
    (tmp_path / "o").mkdir()  # an empty folder is nobody's
    out = write(place.folder / "full", tmp_path / "o", "--dtype", "bfloat16")
    expected = arrays(nnx.state(place.full))
    for name, array in arrays(nnx.state(huggingface.load(out))).items():
        rounded = expected[name].astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(array, rounded, err_msg=name)
    for folder in (out, write(out, tmp_path / "again")):  # in its own type
        held = load_file(folder / "model.safetensors")
        assert {str(array.dtype) for array in held.values()} == {"bfloat16"}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    # That of a model with a tower is its decoder's.
    content = {"model_type": "qwen3_5", "text_config": {"dtype": "bfloat16"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    source: Any = SimpleNamespace(run=None, model=tmp_path)
    assert export._own_dtype(source) == "bfloat16"


def test_an_export_that_does_not_end_leaves_nothing(place, tmp_path, monkeypatch):
    """And what a kill left is taken away by the next one."""
    for name, more in (("full", []), ("lora", ["--adapter"])):
        with monkeypatch.context() as patch:
            interrupted = Mock(side_effect=KeyboardInterrupt)
            patch.setattr("minirl.model.huggingface.np.ascontiguousarray", interrupted)
            with pytest.raises(KeyboardInterrupt):
                write(place.folder / name, tmp_path / "out", *more)
        assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out.123.new").mkdir()
    (tmp_path / ".out.123.new" / "model.safetensors").write_text("half")
    write(place.base, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# The tiny tokenizer makes a word the same token wherever it stands.


TEXTS = [
    "Table band: band_id integer, name text, age integer",
    "What is the name and the average age of every band?",
    "SELECT name, avg(age) FROM band AS t1 GROUP BY t1.band_id HAVING count(*) >= 12.5",
] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=512)


@pytest.mark.parametrize("case", read("tiny_tokens"), ids=lambda case: repr(case["text"]))
def test_tokens(tokenizer, case):
    ids = tokenizer.encode(case["text"]).ids
    assert [tokenizer.decode([i], skip_special_tokens=False) for i in ids] == case["tokens"]


def test_marks_are_text_and_spaces_do_not_change_what_sql_means(tokenizer):
    ids = tokenizer.encode("<think></think><sql></sql><|im_end|>").ids
    assert len(ids) == 5
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think></think><sql></sql>"
    # Encoding anew changes nothing.
    for text in (TEXTS[2], "  two  spaces ", "1.5", "(a)", "", ".", "é.é\n日"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    sql = "SELECT t1.x+avg(t1.x),(SELECT max(y)FROM band)FROM band AS t1 WHERE t1.x>=.5"
    with sqlite3.connect(":memory:") as db:
        db.execute("CREATE TABLE band (x, y)")
        db.execute("INSERT INTO band VALUES (1, 2), (3, 4)")
        written = tokenizer.decode(tokenizer.encode(sql).ids)
        assert written != sql
        assert db.execute(written).fetchall() == db.execute(sql).fetchall() != []
    db.close()


def test_the_folder_is_a_chat_model_of_the_same_bytes_by_the_same_seed(tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        make_tiny(folder, TEXTS, SHAPE, seed)
    names = sorted(path.name for path in folders[0].iterdir())
    assert len(names) == 5
    assert filecmp.cmpfiles(*folders[:2], names, shallow=False)[0] == names
    differ = filecmp.cmpfiles(folders[0], folders[2], names, shallow=False)[1]
    assert differ == ["model.safetensors"]
    chat = ChatTokenizer(folders[0])
    assert [chat.decode([i]) for i in chat.stop_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert chat.decode([chat.pad_id]) == "<|endoftext|>"
    config = json.loads((folders[0] / "config.json").read_text())
    assert config["vocab_size"] == 512


def test_a_tiny_qwen35_is_read_with_its_kinds_of_layers(tmp_path):
    hybrid = SHAPE.model_copy(update={"kind": "qwen3.5", "layers": 8})
    make_tiny(tmp_path / "model", TEXTS, hybrid, 0)
    shape = read_config(tmp_path / "model")
    assert [layer for layer in range(8) if shape.is_full(layer)] == [3, 7]
    known = arrays(nnx.state(huggingface.load(tmp_path / "model")))
    assert "layers.linear.in_qkv" in known
    assert (known["layers.linear.a_log"] < np.log(16)).all()
    # Beside adapters a run in bfloat16 rounds all but what files have in float32.
    make_run(tmp_path / "run", tmp_path / "model", lora=LORA, dtype="bfloat16")
    out = write(tmp_path / "run", tmp_path / "out", "--dtype", "float32")
    exported = arrays(nnx.state(huggingface.load(out)))
    for name, is_same in (("a_log", True), ("in_z", False)):
        name = f"layers.linear.{name}"
        assert (exported[name] == known[name]).all() == is_same
    # One of other layers, or without room for the bytes, is refused.
    for changes, told in (
        ({"layers": 6}, "layer_types of 6 layers"),
        ({"vocab_size": 262}, "vocab_size: 262 is too small; write 263 or more"),
    ):
        shape = hybrid.model_copy(update=changes)
        assert told in mistake(make_tiny, tmp_path / "no", TEXTS, shape, 0)
        assert not (tmp_path / "no").exists()
