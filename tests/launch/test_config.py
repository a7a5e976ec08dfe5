"""Configs: which are read, how they are merged, what is refused with which key."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import yaml

from launch.config import dump, load_config
from launch.config_merge import merge, packaged
from launch.evaluation.decoding import Decode
from rewards.config import AstraConfig, AtrConfig, ExpoConfig, ProgressiveConfig
from sqlenv.config import DiagnosedConfig, SingleTurnConfig
from sqlenv.errors import UserError

DEMO = "progress-demo.yaml"


def message(name: str | Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(str(name), overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def written(tmp_path: Path):
    """Return what writes a config and gives its path."""

    def write(name: str, **keys: object) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(keys), encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize("name", packaged())
def test_every_packaged_config_loads_and_reads_back_equal(name, tmp_path):
    config = load_config(name, [])
    path = tmp_path / "config.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load_config(str(path), []) == config
    head = (resources.files("launch") / "configs" / name).read_text().split("\nrun:")[0]
    assert "arXiv:" in head
    assert f"--cfg {name}" in head


def test_the_papers_run_has_the_papers_constants():
    config = load_config("progress.yaml", [])
    train, sampler, data = config.train, config.sampler, config.data
    assert (train.prompts_per_step, train.group_size) == (64, 8)
    assert config.env == DiagnosedConfig(turns=4)
    assert train.optimizer.learning_rate == 1e-6
    assert (train.algorithm.kind, train.algorithm.kl_coef) == ("grpo", 0)
    assert (train.algorithm.clip_low, train.algorithm.clip_high) == (0.2, 0.2)
    assert (sampler.max_prompt_tokens, sampler.max_response_tokens) == (6000, 8192)
    assert (sampler.temperature, config.warm_start) == (1, None)
    assert [source.layout for source in data.train.sources] == ["bird", "spider", "synsql"]
    # One pass over the data.
    assert (data.train.total, train.steps) == (20_000, 20_000 // 64)


# Mistakes: the key's path.


@pytest.mark.parametrize(
    "override",
    [
        *("train.stps=3", "trian=3", "data.test.sources.0.splt=dev", "base=expo-demo.yaml"),
        *("reward.tree.empty_chld=one", "mesh.rows=2", "mesh.fsdp=0", "train.steps=many"),
        *("seed=99999999999999999999", "train=3", "data.test.sources=[]"),
    ],
)
def test_a_wrong_setting_is_named_with_its_path(override):
    key = override.partition("=")[0]
    assert message(DEMO, override).startswith(f"{DEMO}: {key}: ")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "env.kind=single_turn",
            "env.turns: belongs to kind diagnosed, not to single_turn; set all of it: "
            "'env={kind: single_turn}'",
        ),
        ("train.stps=3", "train.stps: unknown key; did you mean steps?"),
        (
            "steps=3",
            "steps: unknown key; did you mean warm_start.steps or train.steps or "
            "train.second_stage.steps?",
        ),
        ("train=5", "train: should be a mapping of keys to values, not 5"),
        ("reward=expo", "reward: should be a mapping of keys to values, not 'expo'"),
        (
            "env={kind: double}",
            "env: kind should be one of 'single_turn', 'diagnosed', 'agentic', not 'double'",
        ),
        ("train.steps=many", "train.steps: should be a whole number, not 'many'"),
        ("train.steps=0", "train.steps: should be greater than 0, not 0"),
        ("data.train.sources=5", "data.train.sources: should be a list, not 5"),
    ],
)
def test_a_mistake_is_told_in_the_words_of_the_configs(override, told):
    """Not in those of pydantic, which knows our classes and not our keys."""
    assert message(DEMO, override) == f"{DEMO}: {told}"


SERVED = {"backend": "sglang", "sglang": {"launch": 2}}


def rollout(**changes: object) -> str:
    return f"rollout={yaml.safe_dump(SERVED | changes, width=999)}"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("env.kind=single_turn", "env.turns"),
        ("train.algorithm.kind=ppo", "train.algorithm"),
        ("model={path: null, tiny: null}", "model"),
        ("data.root=x", "data"),
        ("sampler.temperature=0", "sampler.temperature"),
        ("train.group_size=1", "train.group_size"),
        ("train.algorithm.kind=dapo", "train.algorithm.overlong_tokens"),
        ("sampler.max_reply_tokens=9999", "sampler.max_response_tokens"),
        ("env.wrapping=fence", "env.wrapping"),
        ("evaluation.episode=agentic", "evaluation.episode"),
        ("warm_start.optimizer.schedule=ramp_cosine", "warm_start.optimizer.warmup_steps"),
        ("train.mini_batches=17", "train.mini_batches"),
        ("model.tiny.heads=5", "model.tiny.kv_heads"),
        ("model.tiny.hidden_size=129", "model.tiny.hidden_size"),
        ("model.tiny.vocab_size=10", "model.tiny.vocab_size"),
        (rollout(sglang={}), "rollout.sglang"),
        (rollout(sglang={"launch": 1, "urls": ["http://a:1"]}), "rollout.sglang"),
        (rollout(backend="native", lag=1), "rollout"),
        (rollout(lag=2, max_age=1), "rollout.max_age"),
        (rollout(sglang={"urls": ["http://a:1", "http://a:1/"]}), "rollout.sglang.urls"),
        (rollout(sglang={"launch": 1, "arguments": {"port": 5}}), "rollout.sglang.arguments"),
        (rollout(sglang={"launch": 2, "devices": ["0"]}), "rollout.sglang.devices"),
        *(
            (rollout(sglang={"urls": [address]}), "rollout.sglang.urls")
            for address in (
                *("gpu1:30000", "ftp://gpu1:30000", "http://:30000", "http://gpu1:30000/v1"),
                *("http://gpu1:30000?v=1", "http://gpu1..local:30000", "http://gpu 1:30000"),
                *("http://gpu1:99999", f"http://{'g' * 64}:30000"),
            )
        ),
    ],
)
def test_contradictions_are_refused(override, key):
    assert key in message(DEMO, override).removeprefix(f"{DEMO}: ")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("prompt.style=progress",), "prompt.style"),
        (
            ("reward.aggregate=steps", "train.algorithm.estimator=group_normalised"),
            "reward.aggregate",
        ),
    ],
)
def test_contradictions_of_episodes_with_a_tool_are_refused(overrides, key):
    assert message("astra.yaml", *overrides).startswith(f"astra.yaml: {key}: ")


def test_addresses_of_any_kind_are_taken():
    urls = [
        "http://gpu1:30000",
        "https://gpu1",
        "http://10.0.0.1:1/",
        "http://[fe80::1]:1",
        "http://a.b.:1",
    ]
    config = load_config(DEMO, [rollout(sglang={"urls": urls})])
    assert list(config.rollout.sglang.urls) == urls


@pytest.mark.parametrize("ahead", [{"lag": 1}, {"slow_share": 0.1, "max_age": 1}])
def test_no_correction_of_episodes_that_older_weights_sampled(ahead):
    chosen = "train.algorithm.correction=truncated"
    assert "train.algorithm.correction" in message(DEMO, rollout(**ahead), chosen)
    load_config(DEMO, [rollout(**ahead)])  # each alone is taken
    load_config(DEMO, [rollout(), chosen])


def test_servers_tell_no_log_probabilities_of_a_nucleus():
    over = ["sampler.top_p=0.9", "sampler.logprobs=nucleus", "train.kl_every=null"]
    load_config(DEMO, over)
    assert "sampler.logprobs: " in message(DEMO, *over, rollout())


# Overrides.


@pytest.mark.parametrize(
    "override",
    ["train.steps", "=3", "train.steps=[", "train.steps.x=1", "data.test.sources.3.split=dev"],
)
def test_an_override_that_cannot_be_is_quoted(override):
    assert repr(override) in message(DEMO, override)


def test_overrides_reach_items_optional_groups_and_null():
    config = load_config(
        DEMO,
        [
            *("data.test.sources.0.file=a b.json", "train.algorithm.kl_coef=1e-3"),
            *("evaluation.questions=null", "warm_start.optimizer={learning_rate: 0.5}"),
            *("run.name=a=b", "seed=1", "seed=2"),
        ],
    )
    assert config.data.test.sources[0].file == "a b.json"
    assert (config.train.algorithm.kind, config.train.algorithm.kl_coef) == ("grpo", 1e-3)
    assert config.evaluation.questions is None
    assert config.warm_start is not None
    assert config.warm_start.optimizer.learning_rate == 0.5
    # What was not named is the default again: the value replaced the whole group.
    assert config.warm_start.optimizer.warmup_steps == 0
    assert (config.run.name, config.seed) == ("a=b", 2)


# Files and their bases.


@pytest.mark.parametrize(
    "content",
    [
        *(b"train: [1", b"- 1", b"", b"\xff\xfe\x00", b"seed: 1"),
        b"train: {}\nseed: 1\ntrain: {}\n",
    ],
)
def test_files_that_are_no_configs(tmp_path, content):
    (tmp_path / "c.yaml").write_bytes(content)
    assert "c.yaml" in message(tmp_path / "c.yaml")


def test_a_misspelt_section_is_named_before_what_is_missing(written):
    raw = yaml.safe_load(dump(load_config(DEMO, [])))
    raw["modle"] = raw.pop("model")
    path = written("run.yaml", **raw)
    assert message(path).startswith(f"{path}: modle: ")


KIND = {"kind": "agentic", "calls": 2}


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        # Lists and single values replace; so does null, and a mapping what is none.
        ({"a": {"x": [1], "y": 2}, "b": 1}, {"a": {"x": [3]}}, {"a": {"x": [3], "y": 2}, "b": 1}),
        ({"a": {"x": 1}, "b": None}, {"a": None, "b": {}}, {"a": None, "b": {}}),
        # Another kind: nothing of the base's section is left. The same kind, or none named: it is.
        ({"env": KIND}, {"env": {"kind": "single_turn"}}, {"env": {"kind": "single_turn"}}),
        ({"env": {"turns": 2}}, {"env": {"kind": "agentic"}}, {"env": {"kind": "agentic"}}),
        ({"env": KIND}, {"env": {"calls": 3}}, {"env": KIND | {"calls": 3}}),
        # Kinds within kinds; and a `kind` that decides on no keys.
        (
            {"reward": {"kind": "astra", "alpha": 0.6, "atr": {"turn_cost": 0.5}}},
            {"reward": {"atr": {"kind": "fig2"}}},
            {"reward": {"kind": "astra", "alpha": 0.6, "atr": {"kind": "fig2"}}},
        ),
        (
            {"optimizer": {"beta2": 0.9}},
            {"optimizer": {"kind": "muon"}},
            {"optimizer": {"kind": "muon", "beta2": 0.9}},
        ),
        # Of two settings that exclude one another the upper one is left.
        ({"train": {"epochs": 3}}, {"train": {"steps": 9}}, {"train": {"steps": 9}}),
    ],
)
def test_one_config_over_another(base, over, expected):
    kinds = {("env",): "diagnosed", ("reward",): "progressive", ("reward", "atr"): "paper"}
    assert merge(base, over, kinds) == expected


def test_bases_lie_beside_the_file_or_are_packaged(written, tmp_path, monkeypatch):
    assert load_config(written("over.yaml", base=DEMO), []) == load_config(DEMO, [])
    assert load_config(written("mine.yaml", base="shared/demo.yaml"), []).model.tiny is not None
    written("a/first.yaml", base=DEMO, seed=1, run={"name": "first"}, train={"steps": 3})
    written("a/second.yaml", base="first.yaml", run={"name": "second"})
    over = written("b/third.yaml", base="../a/second.yaml", train={"kl_every": 9})
    monkeypatch.chdir("/")
    config = load_config(over, [])
    assert (config.seed, config.run.name) == (1, "second")
    assert (config.train.steps, config.train.kl_every) == (3, 9)
    assert "base" not in yaml.safe_load(dump(config))
    # A file goes before a packaged config of its name, also as a base.
    raw = yaml.safe_load(dump(load_config(DEMO, ["seed=77"])))
    written(DEMO, **raw)
    monkeypatch.chdir(tmp_path)
    assert load_config(DEMO, []).seed == load_config("over.yaml", []).seed == 77


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


def test_circles_and_bases_that_are_not_there(written):
    assert ": base: " in message(written("self.yaml", base="self.yaml"))
    written("one.yaml", base="two.yaml")
    written("two.yaml", base="three.yaml")
    assert ": base: " in message(written("three.yaml", base="one.yaml"))
    for wrong in (3, None, ["a.yaml"], "", "nowhere.yaml"):
        assert ": base: " in message(written("wrong.yaml", base=wrong))
    assert DEMO in message("none.yaml")
    assert "shared/demo.yaml" in message("shared/demo.yaml")


def test_decoding_is_greedy_or_a_vote():
    assert Decode.parse("greedy", vote_temperature=0.8) == Decode(1, 0.0)
    assert Decode.parse("vote@8", vote_temperature=0.8) == Decode(8, 0.8)
    assert Decode.parse("pass@2", vote_temperature=0.6, top_p=0.95) == Decode(2, 0.6, "pass", 0.95)
    for text in ("vote", "vote@", "vote@0", "vote@-1", "vote@x", "Greedy", "beam@4", ""):
        with pytest.raises(UserError, match="--decode"):
            Decode.parse(text, vote_temperature=0.8)
