"""Paths of any name: each means one folder, wherever it is written."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from launch import options, report
from launch.config import SPLITS, dump, load_config
from launch.files import check_place, claimed
from minirl.run.checkpoint import Checkpoints, best_step, read_params
from minirl.train.update import TrainState

# What people call folders; none of it is a pattern, a comment, a home or a value of YAML.
NAMES = ["r[1]", "a*b?", "lr=1e-5", "a b", "Zürich", "it's", 'say "x"', "a #2", "#2", "@x", "%d"]
NAMES += ["a, b", "&x", "!x", "a:b", "2026-11-28", "null.d", "x[b]y[/b]", "a/b[c]/d e", "(a)"]
NAMES += ["2026", "1:30", "0x10", "1_000", "- a", "a: b", "[x]y", "'x", ".inf", "yes or no"]


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_is_the_path_that_was_written(tiny, tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(str(tiny), [f"run.dir={name}", "data.demo=null", f"data.root=~/{name}"])
    assert str(config.folder) == name
    assert config.data.root == tmp_path.home() / name
    check_place(config.folder, key="run.dir")
    with claimed(config.folder, dump(config)) as folder:
        assert load_config(str(folder), []) == config
        (folder / "result.json").write_text("{}")
    assert report._split_name(f"m={name}") == ("m", config.folder)
    assert report._split_name(name) == ("", config.folder)


@pytest.mark.parametrize("name", ["r[1]", "a*b", "p[x]/r 1", "ü?"])
def test_checkpoints_come_back_from_a_folder_of_any_name(tmp_path, name):
    weights: Any = {"w": jnp.arange(3.0)}
    folder = tmp_path / name / "checkpoints"
    checkpoints = Checkpoints(folder)
    checkpoints.save(2, TrainState(weights, {"m": jnp.ones(2)}), {"seen": 5}, score=0.5)
    checkpoints.close()
    checkpoints = Checkpoints(folder)
    state, facts = checkpoints.restore_newest(TrainState(weights, {"m": jnp.zeros(2)}), dict)
    checkpoints.close()
    assert facts == {"seen": 5}
    moved = (tmp_path / name).rename(tmp_path / "plain") / "checkpoints"
    assert best_step(moved) == 2
    for found in (state.params, read_params(moved / "2", weights)):
        np.testing.assert_array_equal(found["w"], np.arange(3.0))


def test_a_home_is_the_same_in_files_settings_and_options(tiny, tmp_path):
    raw = yaml.safe_load(tiny.read_text())
    raw["run"]["dir"], raw["model"] = "~/r", {"path": "~/m"}
    raw["data"] |= {"demo": None, "root": "~/d"}
    source = {"layout": "spider", "path": "~/p", "file": "~/f.json", "corrections": "~/c.json"}
    raw["data"] |= {split: {"sources": [source]} for split in SPLITS}
    (path := tmp_path / "job.yaml").write_text(yaml.safe_dump(raw))
    config, home = load_config(str(path), []), tmp_path.home()
    (found,) = config.data.test.sources
    places = [config.folder, config.model.path, config.data.root, found.path]
    assert [*map(str, places), found.file, found.corrections] == [
        f"{home}/{name}" for name in ("r", "m", "d", "p", "f.json", "c.json")
    ]
    words = options.with_home(["--out=~/o", "m=~/r", "data.validation=~", "a~/b", "--n=5"])
    assert words == [f"--out={home}/o", f"m={home}/r", "data.validation=~", "a~/b", "--n=5"]
