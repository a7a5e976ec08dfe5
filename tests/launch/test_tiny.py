"""The tiny tokenizer makes a word the same token wherever it stands."""

from __future__ import annotations

import filecmp
import json
import sqlite3

import pytest
from flax import nnx

from launch.config import TinyConfig
from launch.tiny import make_tiny, train_tokenizer
from minirl.exchange import UserError
from minirl.model import huggingface
from minirl.model.config import read_config
from minirl.model.tokenizer import ChatTokenizer
from tests.plain_model import arrays

TEXTS = [
    "Table band: band_id integer, name text, age integer",
    "What is the name and the average age of every band?",
    "SELECT name, avg(age) FROM band AS t1 GROUP BY t1.band_id HAVING count(*) >= 12.5",
] * 3
SHAPE = TinyConfig(
    vocab_size=512, hidden_size=16, intermediate_size=24, layers=1, heads=2, kv_heads=1
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=512)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name", [" name"]),
        (" name", [" name"]),
        ("t1.name", [" t", "1", ".", " name"]),
        ("avg(name)", [" avg", "(", " name", ")"]),
        ("a\nname", [" a", "\n", " name"]),
        ("\n\nname", ["\n", "\n", " name"]),
        ("band_id", [" band_id"]),
        ("<sql>name</sql>", ["<sql>", " name", "</sql>"]),
        ("<think>age</think>\n", ["<think>", " age", "</think>", "\n"]),
        ("<|im_start|>name", ["<|im_start|>", " name"]),
        ("12.5", ["1", "2", ".", "5"]),
        ("),", [")", ","]),
    ],
)
def test_tokens(tokenizer, text, expected):
    shown = [tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.encode(text).ids]
    assert shown == expected


def test_marks_are_text_and_control_tokens_are_not(tokenizer):
    ids = tokenizer.encode("<think></think><sql></sql><|im_end|>").ids
    assert len(ids) == 5
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think></think><sql></sql>"


@pytest.mark.parametrize(
    "text", ["SELECT t1.name FROM band AS t1", "  two  spaces ", "1.5", "(a)", "", ".", "é.é\n日"]
)
def test_encoding_anew_changes_nothing(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids


def test_spaces_do_not_change_what_sql_means(tokenizer):
    sql = "SELECT t1.x+avg(t1.x),(SELECT max(y)FROM band)FROM band AS t1 WHERE t1.x>=.5"
    with sqlite3.connect(":memory:") as db:
        db.execute("CREATE TABLE band (x, y)")
        db.execute("INSERT INTO band VALUES (1, 2), (3, 4)")
        written = tokenizer.decode(tokenizer.encode(sql).ids)
        assert written != sql
        assert db.execute(written).fetchall() == db.execute(sql).fetchall() != []
    db.close()


def test_same_seed_same_bytes(tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        make_tiny(folder, TEXTS, SHAPE, seed)
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert filecmp.cmpfiles(*folders[:2], names, shallow=False)[0] == names
    differ = filecmp.cmpfiles(folders[0], folders[2], names, shallow=False)[1]
    assert differ == ["model.safetensors"]


def test_the_folder_is_a_chat_model(tmp_path):
    make_tiny(tmp_path / "model", TEXTS, SHAPE, 0)
    chat = ChatTokenizer(tmp_path / "model")
    assert [chat.decode([i]) for i in chat.stop_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert chat.decode([chat.pad_id]) == "<|endoftext|>"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert chat.vocab_size <= config["vocab_size"] == 512


def test_a_tiny_qwen35_is_read_with_its_kinds_of_layers(tmp_path):
    hybrid = SHAPE.model_copy(update={"kind": "qwen3.5", "layers": 8})
    make_tiny(tmp_path / "model", TEXTS, hybrid, 0)
    shape = read_config(tmp_path / "model")
    assert [layer for layer in range(8) if shape.is_full(layer)] == [3, 7]
    assert "layers.linear.in_qkv" in arrays(nnx.state(huggingface.load(tmp_path / "model")))
    with pytest.raises(UserError, match="layer_types of 6 layers"):
        make_tiny(tmp_path / "no", TEXTS, hybrid.model_copy(update={"layers": 6}), 0)


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path):
    with pytest.raises(UserError, match="vocab_size: 262 is too small; write 263 or more"):
        make_tiny(tmp_path / "model", TEXTS, SHAPE.model_copy(update={"vocab_size": 262}), 0)
    assert not (tmp_path / "model").exists()
