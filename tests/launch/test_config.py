"""Reading configs: what is refused, in which words, and what comes out."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import yaml

from launch.config import dump, load_config
from launch.evaluation.decoding import Decode
from launch.layers import packaged
from sqlenv.config import DiagnosedConfig
from sqlenv.errors import UserError

DEMO = "progress-demo.yaml"


def message(name: str | Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(str(name), overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", packaged())
def test_every_packaged_config_loads_and_reads_back_equal(name, tmp_path):
    config = load_config(name, [])
    path = tmp_path / "config.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load_config(str(path), []) == config


def test_the_papers_run_has_the_papers_constants():
    config = load_config("progress.yaml", [])
    train, sampler = config.train, config.sampler
    assert (train.prompts_per_step, train.group_size) == (64, 8)
    assert config.env == DiagnosedConfig(turns=4)
    assert train.optimizer.learning_rate == 1e-6
    assert (train.algorithm.kind, train.algorithm.kl_coef) == ("grpo", 0)
    assert (train.algorithm.clip_low, train.algorithm.clip_high) == (0.2, 0.2)
    assert (sampler.max_prompt_tokens, sampler.max_response_tokens) == (6000, 8192)
    assert sampler.temperature == 1
    assert config.warm_start is None
    data = config.data
    assert data.train.total == 20_000
    assert [source.layout for source in data.train.sources] == ["bird", "spider", "synsql"]
    assert str(config.model.path) == "models/Qwen2.5-Coder-7B-Instruct"
    # One pass over the data.
    assert train.steps == 20_000 // 64


def test_a_packaged_config_opens_with_its_paper_and_command():
    for name in packaged():
        head = (resources.files("launch") / "configs" / name).read_text().split("\nrun:")[0]
        assert "arXiv:" in head
        assert f"--cfg {name}" in head


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stps=3", "train.stps: unknown key; did you mean train.steps?"),
        ("trian.steps=3", "trian: unknown key; did you mean train?"),
        ("data.test.sources.0.splt=dev", "did you mean data.test.sources.0.split?"),
        ("train.algorithm.clip_hgh=1", "did you mean train.algorithm.clip_high?"),
        ("reward.tree.empty_chld=one", "did you mean reward.tree.empty_child?"),
        # The keys of the chosen kind, not of its siblings.
        (
            "env.kind=single_turn",
            "env.turns: unknown key; known here: kind, match, nondeterministic, wrapping",
        ),
        ("mesh={rows: 2}", "mesh.rows: unknown key; known here: data, fsdp, tensor"),
        ("mesh.fsdpp=2", "mesh.fsdpp: unknown key; did you mean mesh.fsdp?"),
        ("mesh.fsdp=0", "mesh.fsdp: input should be greater than 0, not 0"),
        ("mesh=cpu", "mesh: input should be 'auto', not 'cpu'"),
        ("model.remat={deep: 1}", "model.remat: input should be 'none', 'dots' or 'full'"),
        ("train.algorithm.kind=ppo", "train.algorithm.kind: should be 'grpo', 'dr_grpo', 'dapo', "),
        ("train.steps=many", "train.steps: input should be a valid integer"),
        ("train.steps=true", "train.steps: should be a number, not true"),
        ("warm_start.optimizer.beta1=false", "optimizer.beta1: should be a number, not false"),
        ("sampler.temperature=false", "sampler.temperature: should be a number, not false"),
        ("seed=99999999999999999999", "seed: input should be less than 4294967296"),
        ("seed=-1", "seed: input should be greater than or equal to 0"),
        ("train.steps=0", "train.steps: input should be greater than 0, not 0"),
        ("train=3", "train: should have keys below it, not 3"),
        ("model.dtype=float16", "model.dtype: input should be 'float32' or 'bfloat16'"),
        ("data.test.sources=[]", "data.test.sources: should have at least one item"),
    ],
)
def test_a_wrong_setting_is_named_with_its_path(override, words):
    assert words in message(DEMO, override)


def test_only_mistakes_of_their_own_are_counted(tmp_path):
    """A list without its wrong item is not too short, nor is a key missing that is misspelt."""
    raw = yaml.safe_load(dump(load_config(DEMO, [])))
    source = raw["data"]["test"]["sources"][0]
    cases = [
        ({"splt": "dev"}, "did you mean data.test.sources.0.split?"),
        ({"layout": "spyder"}, "not 'spyder'"),
        ({"splt": "dev", "layout": "spyder"}, "not 'spyder' (and 1 more)"),
        ({"path": ..., "pth": "."}, "did you mean data.test.sources.0.path?"),
        # What a person wrote goes before what is missing, perhaps because of it.
        (
            {"path": ..., "rubbish": "."},
            "known here: comments, dialect, exclude_styles, file, layout, levels, limit, path, "
            "split, weight (and 1 more)",
        ),
    ]
    for changes, words in cases:
        changed = {key: value for key, value in (source | changes).items() if value is not ...}
        raw["data"]["test"]["sources"] = [changed]
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
        assert message(tmp_path / "run.yaml").endswith(words)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.path=x", "model: give one of model.path"),
        ("data.root=x", "data: give one of data.demo"),
        ("sampler.temperature=0", "sampler.temperature: 0 is greedy"),
        ("train.group_size=1", "train.group_size: a group of one"),
        ("train.algorithm.kind=dapo", "train.algorithm.overlong_tokens: 4096 is not below"),
        ("sampler.max_reply_tokens=9999", "larger than sampler.max_response_tokens"),
        ("env.wrapping=fence", "env.wrapping: the progressive reward judges the <sql> tag"),
        (
            "warm_start.optimizer.schedule=ramp_cosine",
            "warm_start.optimizer.warmup_steps: schedule=ramp_cosine rises for ramp_share",
        ),
        ("warm_start.optimizer.lr_ramp=code", "warm_start.optimizer.lr_ramp: code is the rise"),
        ("train.mini_batches=17", "train.mini_batches: 17 are more than train.prompts_per_step"),
        ("model.tiny.heads=5", "model.tiny.kv_heads: 4 does not divide heads = 5"),
        (
            "model.tiny.hidden_size=129",
            "model.tiny.hidden_size: 129 is not a multiple of 2 x heads",
        ),
        ("model.tiny.vocab_size=10", "model.tiny.vocab_size: 10 is too small; write 263 or more"),
    ],
)
def test_contradictions_are_refused(override, words):
    assert words in message(DEMO, override)


SERVED = {"backend": "sglang", "sglang": {"launch": 2}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sglang": {}}, "rollout.sglang: give either urls"),
        ({"sglang": {"launch": 1, "urls": ["http://a:1"]}}, "rollout.sglang: give either urls"),
        ({"backend": "native", "lag": 1}, "the native sampler takes turns with the learner"),
        ({"backend": "native", "slow_share": 0.1}, "the native sampler takes turns"),
        ({"lag": 2, "max_age": 1}, "rollout.max_age: 1 would cut every group"),
        ({"sglang": {"urls": ["http://a:1", "http://a:1/"]}}, "a server is named twice"),
        ({"sglang": {"launch": 1, "arguments": {"port": 5}}}, "leave them out"),
        ({"sglang": {"launch": 2, "devices": ["0"]}}, "rollout.sglang.devices: 1 for launch = 2"),
    ],
)
def test_contradictions_of_rollouts_are_refused(changes, words):
    assert words in message(DEMO, f"rollout={yaml.safe_dump(SERVED | changes, width=999)}")


@pytest.mark.parametrize("ahead", [{"lag": 1}, {"slow_share": 0.1, "max_age": 1}])
@pytest.mark.parametrize("correction", ["truncated", "masked"])
def test_no_correction_of_episodes_that_older_weights_sampled(ahead, correction):
    served = f"rollout={yaml.safe_dump(SERVED | ahead, width=999)}"
    chosen = f"train.algorithm.correction={correction}"
    found = message(DEMO, served, chosen)
    assert f"train.algorithm.correction: {correction} needs the weights that sampled" in found
    assert "set it to none" in found
    assert "rollout.lag=0 and rollout.slow_share=0" in found
    # Each alone is taken.
    load_config(DEMO, [served])
    load_config(DEMO, [f"rollout={yaml.safe_dump(SERVED, width=999)}", chosen])


def test_servers_tell_no_log_probabilities_of_a_nucleus():
    over = ["sampler.top_p=0.9", "sampler.logprobs=nucleus", "train.kl_every=null"]
    load_config(DEMO, over)
    found = message(DEMO, *over, f"rollout={yaml.safe_dump(SERVED, width=999)}")
    assert "sampler.logprobs: SGLang reports log-probabilities of the whole distribution" in found


@pytest.mark.parametrize(
    "address",
    [
        *("gpu1", "gpu1:30000", "ftp://gpu1:30000", "http://:30000", "http://gpu1:99999"),
        *("http://gpu1:30000/v1", "http://gpu1:30000?v=1", "http://gpu1:30000#v1"),
        *("http://gpu1..local:30000", f"http://{'g' * 64}:30000", "http://gpu 1:30000"),
    ],
)
def test_what_is_no_address_is_refused(address):
    raw = SERVED | {"sglang": {"urls": [address]}}
    found = message(DEMO, f"rollout={yaml.safe_dump(raw, width=999)}")
    assert f"rollout.sglang.urls: [{address!r}] is not http://HOST:PORT" in found


def test_addresses_of_any_kind_are_taken():
    urls = ["http://gpu1:30000", "https://gpu1", "http://10.0.0.1:1/", "http://[fe80::1]:1"]
    raw = SERVED | {"sglang": {"urls": urls}}
    config = load_config(DEMO, [f"rollout={yaml.safe_dump(raw, width=999)}"])
    assert list(config.rollout.sglang.urls) == urls


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps", "has the form key.sub=value"),
        ("=3", "has the form key.sub=value"),
        ("train.steps=[", "the value is not YAML"),
        ("train.steps.x=1", "steps is a value, and has no keys below it"),
        ("data.test.sources.3.split=dev", "3 is not one of the 1 items, from 0"),
    ],
)
def test_an_override_that_cannot_be_is_quoted(override, words):
    text = message(DEMO, override)
    assert words in text
    assert repr(override) in text


def test_overrides_reach_items_optional_groups_and_null():
    config = load_config(
        DEMO,
        [
            "data.test.sources.0.file=a b.json",
            "train.algorithm.kl_coef=1e-3",
            "evaluation.questions=null",
            "warm_start.optimizer={learning_rate: 0.5}",
            "run.name=a=b",
        ],
    )
    assert config.data.test.sources[0].file == "a b.json"
    assert (config.train.algorithm.kind, config.train.algorithm.kl_coef) == ("grpo", 1e-3)
    assert config.evaluation.questions is None
    assert config.warm_start is not None
    assert config.warm_start.optimizer.learning_rate == 0.5
    # What was not named is the default again: the value replaced the whole group.
    assert config.warm_start.optimizer.warmup_steps == 0
    assert config.run.name == "a=b"


def test_of_two_overrides_the_last_counts():
    assert load_config(DEMO, ["seed=1", "seed=2"]).seed == 2


def test_files_that_are_no_configs(tmp_path):
    def written(content: bytes) -> Path:
        path = tmp_path / "c.yaml"
        path.write_bytes(content)
        return path

    assert "not YAML" in message(written(b"train: [1"))
    assert "is a mapping" in message(written(b"- 1"))
    assert "is a mapping" in message(written(b""))
    assert "cannot be read as text" in message(written(b"\xff\xfe\x00"))
    assert "line 3: train is there twice" in message(written(b"train: {}\nseed: 1\ntrain: {}\n"))
    assert "data: has to be set (and 1 more)" in message(written(b"seed: 1"))
    assert DEMO in message(tmp_path / "none.yaml")


def test_a_misspelt_section_is_named_before_what_is_missing(tmp_path):
    raw = yaml.safe_load(dump(load_config(DEMO, [])))
    for section, words in (
        ("data", "dta: unknown key; did you mean data?"),
        ("data", "questions: unknown key; known here: data, "),
        ("model", "modle: unknown key; did you mean model?"),
    ):
        misspelt = words.split(":")[0]
        changed = {misspelt if key == section else key: value for key, value in raw.items()}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(changed))
        assert message(tmp_path / "run.yaml").startswith(f"{tmp_path / 'run.yaml'}: {words}")


def test_a_file_goes_before_a_packaged_config(tmp_path, monkeypatch):
    raw = yaml.safe_load(dump(load_config(DEMO, [])))
    (tmp_path / DEMO).write_text(yaml.safe_dump(raw | {"seed": 77}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_config(DEMO, []).seed == 77


def test_decoding_is_greedy_or_a_vote():
    assert Decode.parse("greedy", vote_temperature=0.8) == Decode(1, 0.0)
    assert Decode.parse("vote@8", vote_temperature=0.8) == Decode(8, 0.8)
    assert Decode.parse("vote@8", vote_temperature=0.8).name == "vote@8"
    assert Decode.parse("pass@2", vote_temperature=0.6, top_p=0.95) == Decode(2, 0.6, "pass", 0.95)
    for text in ("vote", "vote@", "vote@0", "vote@-1", "vote@x", "Greedy", "beam@4", ""):
        with pytest.raises(UserError, match="write greedy or vote@n"):
            Decode.parse(text, vote_temperature=0.8)
