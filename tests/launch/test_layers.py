"""Configs laid over others: what is merged, what is dropped, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launch.config import dump, load_config
from launch.layers import Layer, lay_over
from rewards.config import AstraConfig, AtrConfig, ExpoConfig, ProgressiveConfig
from sqlenv.config import DiagnosedConfig, SingleTurnConfig
from sqlenv.errors import UserError

DEMO = "progress-demo.yaml"
KINDS = {("env",): "diagnosed", ("reward",): "progressive", ("reward", "atr"): "paper"}


@pytest.fixture
def written(tmp_path: Path):
    """Return what writes a config and gives its path."""

    def write(name: str, **keys: object) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(keys), encoding="utf-8")
        return str(path)

    return write


def message(name: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(name, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4}}, {"a": {"x": 1, "y": 4}, "b": 3}),
        # Lists and single values replace; so does null, and a mapping what is none.
        ({"a": [1, 2], "b": 1}, {"a": [3], "b": None}, {"a": [3], "b": None}),
        ({"a": {"x": 1}}, {"a": None}, {"a": None}),
        ({"a": None}, {"a": {"x": 1}}, {"a": {"x": 1}}),
        # Another kind: nothing of the base's section is left. The same kind: it is.
        (
            {"env": {"kind": "agentic", "calls": 2}},
            {"env": {"kind": "single_turn"}},
            {"env": {"kind": "single_turn"}},
        ),
        (
            {"env": {"kind": "agentic", "calls": 2}},
            {"env": {"kind": "agentic", "tool": "sql"}},
            {"env": {"kind": "agentic", "calls": 2, "tool": "sql"}},
        ),
        # A kind that is not named is the default one, or the base's.
        ({"env": {"turns": 2}}, {"env": {"kind": "agentic"}}, {"env": {"kind": "agentic"}}),
        (
            {"env": {"turns": 2}},
            {"env": {"kind": "diagnosed"}},
            {"env": {"kind": "diagnosed", "turns": 2}},
        ),
        (
            {"env": {"kind": "agentic", "calls": 2}},
            {"env": {"calls": 3}},
            {"env": {"kind": "agentic", "calls": 3}},
        ),
        # Kinds within kinds.
        (
            {"reward": {"kind": "astra", "alpha": 0.6, "atr": {"turn_cost": 0.5}}},
            {"reward": {"atr": {"kind": "fig2"}}},
            {"reward": {"kind": "astra", "alpha": 0.6, "atr": {"kind": "fig2"}}},
        ),
        # A `kind` that decides on no keys is a value like any other.
        (
            {"optimizer": {"kind": "muon", "beta2": 0.9}},
            {"optimizer": {"kind": "adamw"}},
            {"optimizer": {"kind": "adamw", "beta2": 0.9}},
        ),
    ],
)
def test_one_config_over_another(base, over, expected):
    layers = [Layer("over", over), Layer("base", base)]
    assert lay_over(layers, KINDS) == expected


def test_what_is_read_may_be_changed_without_changing_the_layers():
    layer = Layer("one", {"a": {"b": [1]}})
    lay_over([layer], KINDS)["a"]["b"].append(2)
    assert layer.raw == {"a": {"b": [1]}}


def test_a_base_beside_the_file_goes_before_a_packaged_one(written):
    assert load_config(written("over.yaml", base=DEMO), []) == load_config(DEMO, [])
    ours = yaml.safe_load(dump(load_config(DEMO, ["seed=77"])))
    written(DEMO, **ours)
    over = written("over.yaml", base=DEMO, train={"steps": 3})
    config = load_config(over, ["train.group_size=4"])
    assert (config.seed, config.train.steps, config.train.group_size) == (77, 3, 4)


def test_bases_have_bases_and_paths_are_beside_the_file_that_names_them(
    written, tmp_path, monkeypatch
):
    written("a/first.yaml", base=DEMO, seed=1, run={"name": "first"}, train={"steps": 3})
    written("a/second.yaml", base="first.yaml", run={"name": "second"})
    over = written("b/third.yaml", base="../a/second.yaml", train={"kl_every": 9})
    monkeypatch.chdir("/")
    config = load_config(over, [])
    assert (config.seed, config.run.name) == (1, "second")
    assert (config.train.steps, config.train.kl_every) == (3, 9)
    assert config.env == DiagnosedConfig(turns=2)
    assert load_config(written("c.yaml", base=str(tmp_path / "b" / "third.yaml")), []) == config


def test_another_kind_does_not_clash_with_the_bases_settings(written):
    env = {"kind": "single_turn"}
    config = load_config(written("o.yaml", base=DEMO, env=env, reward={"kind": "expo"}), [])
    assert (config.env, config.reward) == (SingleTurnConfig(), ExpoConfig())
    # Settings of the kind that the base left to the default.
    expo = written("p.yaml", base=DEMO, reward={"decay": 1.0})
    assert load_config(expo, []).reward == ProgressiveConfig(decay=1.0)
    fig2 = {"kind": "astra", "atr": {"kind": "fig2"}}
    astra = written("q.yaml", base="astra.yaml", reward={"alpha": 0.5} | fig2)
    assert load_config(astra, []).reward == AstraConfig(alpha=0.5, atr=AtrConfig(kind="fig2"))


def test_what_a_run_leaves_has_no_base(written):
    over = written("over.yaml", base=DEMO, seed=3)
    resolved = dump(load_config(over, []))
    assert "base" not in yaml.safe_load(resolved)
    alone = written("alone.yaml", **yaml.safe_load(resolved))
    assert load_config(alone, []) == load_config(over, [])


def test_circles_and_bases_that_are_not_there(written):
    self = written("self.yaml", base="self.yaml")
    assert message(self) == (
        f"{self}: base: goes in a circle ({self}, self.yaml); name another config"
    )
    written("one.yaml", base="two.yaml")
    written("two.yaml", base="three.yaml")
    three = written("three.yaml", base="one.yaml")
    assert "two.yaml: base: goes in a circle" in message(three)
    assert "one.yaml, two.yaml, three.yaml)" in message(three)
    away = written("away.yaml", base="nowhere.yaml")
    assert f"{away}: base: there is no nowhere.yaml beside it" in message(away)
    assert DEMO in message(away)
    for wrong in (3, None, ["a.yaml"], ""):
        assert ": base: " in message(written("wrong.yaml", base=wrong))
    written("list.yaml")
    broken = Path(written("broken.yaml"))
    broken.write_text("train: [1")
    assert message(written("o.yaml", base="broken.yaml")).startswith("broken.yaml: not YAML")


def test_a_mistake_is_told_of_the_file_that_has_it(written):
    written("low.yaml", base=DEMO, train={"stps": 3})
    high = written("high.yaml", base="low.yaml", seed=1)
    words = "low.yaml: train.stps: unknown key; did you mean train.steps?"
    assert words in message(high)
    mine = written("high.yaml", base=DEMO, train={"stps": 3})
    assert message(mine).startswith(f"{mine}: train.stps: ")
    written("low.yaml", base=DEMO, train={"steps": True})
    high = written("high.yaml", base="low.yaml")
    assert message(high) == "low.yaml: train.steps: should be a number, not true"
    # Nobody's but the command line's.
    assert message(DEMO, "train.stps=1").startswith(f"{DEMO}: train.stps: ")


def test_a_base_is_named_in_a_file_only():
    assert "base: unknown key" in message(DEMO, "base=expo-demo.yaml")


def test_demos_share_a_file_that_is_not_offered_as_a_run(written):
    assert load_config(written("mine.yaml", base="shared/demo.yaml"), []).model.tiny is not None
    assert "no such file" in message("shared/demo.yaml")
