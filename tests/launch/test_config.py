"""Configs: which are read, how they are merged, what is refused with which key; paths in them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import options, report
from launch.config import SPLITS, JobConfig, dump, load_config
from launch.config_files import packaged
from launch.evaluation.answers import Decode
from launch.files import check_place, claimed
from minirl.sglang.server import TESTED, ServerInfo
from rewards.config import AstraConfig, AtrConfig, ExpoConfig, ProgressiveConfig
from sqlenv.config import SingleTurnConfig
from tests.vectors import read

from .conftest import ROOT, mistake

DEMO = "progress-demo.yaml"
CONFIGS = Path(__file__).parents[2] / "launch" / "configs"
CASES = read("settings")


def message(name: str | Path, *overrides: str) -> str:
    return mistake(load_config, str(name), overrides)


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
    head = (CONFIGS / name).read_text().split("\nrun:")[0]
    assert "arXiv:" in head or name in {"plain.yaml", "laptop.yaml", "h100.yaml"}  # of none
    assert f"--cfg {name}" in head


def check_values(config: JobConfig, values: Mapping[str, Any]) -> None:
    dumped = config.model_dump(mode="json")
    for key, wanted in values.items():
        found: Any = dumped
        for name in key.split("."):
            found = found[int(name) if isinstance(found, list) else name]
        assert found == wanted, key


@pytest.mark.parametrize("name", CASES["papers"])
def test_a_papers_run_has_the_papers_constants(name):
    check_values(load_config(name, []), CASES["papers"][name])


def test_a_second_stage_is_as_long_as_the_first():
    assert load_config("paverl.yaml", []).train.all_steps == 2 * 84


@pytest.mark.parametrize("case", CASES["overrides"], ids=lambda case: case["why"])
def test_an_override_changes_what_it_names(case):
    check_values(load_config(case["config"], case["settings"]), case["values"])


# Mistakes: the key's path.


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda case: case["settings"][-1])
def test_settings_that_are_wrong_or_do_not_go_together_are_named(case):
    """By the key, of a pair of sections with both values; an override that cannot be is quoted."""
    line = message(case["config"], *case["settings"]).removeprefix("command line: ")
    assert line.startswith(case["told"])


@pytest.mark.parametrize("case", CASES["accepted"], ids=lambda case: case["settings"][-1])
def test_what_goes_together_is_accepted(case):
    assert load_config(case["config"], case["settings"])


def test_a_key_of_an_earlier_version_is_looked_up_where_removals_are_listed(tmp_path):
    written = dump(load_config(DEMO, []))
    key = "feedback_exec_error"
    path = tmp_path / "config.yaml"
    path.write_text(written.replace("env:\n", f"env:\n  {key}: false\n"), encoding="utf-8")
    told = message(str(path))
    assert told.startswith(f"{path}: env.{key}: unknown key")
    assert "CHANGELOG.md" in told
    removed = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("### Removed")[1]
    assert f"`env.{key}`" in removed


# Files and their bases.


@pytest.mark.parametrize(
    "content",
    [
        *(b"train: [1", b"- 1", b"", b"\xff\xfe\x00", b"seed: 1", b"base: nowhere.yaml"),
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


def test_bases_lie_beside_the_file_or_are_packaged(written, tmp_path, monkeypatch):
    assert load_config(written("over.yaml", base=DEMO), []) == load_config(DEMO, [])
    assert load_config(written("mine.yaml", base="shared/demo.yaml"), []).model.tiny is not None
    written("a/first.yaml", base=DEMO, seed=1, run={"name": "first"}, train={"steps": 3})
    written("a/second.yaml", base="first.yaml", run={"name": "second"}, mesh={"data": 2})
    sources = [{"layout": "bird", "path": "."}]
    over = {"train": {"kl_every": 9}, "data": {"test": {"sources": sources}}, "warm_start": None}
    third = written("b/third.yaml", base="../a/second.yaml", **over)
    monkeypatch.chdir("/")
    config = load_config(third, [])
    assert (config.seed, config.run.name, config.warm_start) == (1, "second", None)
    assert (config.train.steps, config.train.kl_every) == (3, 9)
    # Lists replace, and a mapping replaces what is none.
    assert [source.split for source in config.data.test.sources] == ["train"]
    assert config.mesh != "auto"
    # A file goes before a packaged config of its name, also as a base, but not as its own.
    written(DEMO, base=DEMO, seed=77)
    monkeypatch.chdir(tmp_path)
    assert load_config(DEMO, []).seed == load_config("over.yaml", []).seed == 77
    written("one.yaml", base="two.yaml")
    written("two.yaml", base="one.yaml")
    assert "two.yaml: base: 'one.yaml'" in message("one.yaml")
    assert DEMO in message("none.yaml")
    assert "shared/demo.yaml" in message("shared/demo.yaml")


def test_of_rival_settings_the_later_layer_counts(written):
    spider = {"sources": [{"layout": "spider", "path": ".", "split": "dev"}]}
    own = written("own.yaml", base="progress.yaml", data={"validation": spider}, train={"steps": 5})
    config = load_config(own, [])
    assert (config.data.held_out, config.train.steps) == (None, 5)
    again = load_config(own, ["data.held_out=7", "train.epochs=2"])
    assert (again.data.validation, again.data.held_out) == (None, 7)
    assert again.train.steps == 2 * 20_000 // 64


def test_another_kind_does_not_clash_with_the_bases_settings(written):
    env = {"kind": "single_turn"}
    direct = {"algorithm": {"kind": "expo"}}
    expo = written("o.yaml", base=DEMO, env=env, reward={"kind": "expo"}, train=direct)
    config = load_config(expo, [])
    assert (config.env, config.reward) == (SingleTurnConfig(), ExpoConfig())
    # Settings of the same kind, and of the one that the base left to the default.
    for kind in ({}, {"kind": "progressive"}):
        expo = written("p.yaml", base=DEMO, reward={"decay": 1.0} | kind)
        assert load_config(expo, []).reward == ProgressiveConfig(decay=1.0)
    # A `kind` that decides on no keys.
    fig2 = {"kind": "astra", "atr": {"kind": "fig2"}}
    astra = written("q.yaml", base="astra.yaml", reward={"alpha": 0.5} | fig2)
    assert load_config(astra, []).reward == AstraConfig(alpha=0.5, atr=AtrConfig(kind="fig2"))
    optimizer = {"optimizer": {"kind": "adamw"}}
    merged = load_config(written("r.yaml", base=DEMO, warm_start=optimizer), []).warm_start
    assert merged is not None
    assert (merged.optimizer.kind, merged.optimizer.learning_rate) == ("adamw", 0.01)


def test_a_runs_config_takes_another_algorithm_as_the_file_that_it_was_made_of(written):
    for settings, kind in (({"kind": "dapo", "kl_coef": 0.1}, "gspo"), ({"max_rounds": 2}, "expo")):
        mine = written("mine.yaml", base=DEMO, train={"group_size": 2, "algorithm": settings})
        whole = written("whole.yaml", **yaml.safe_load(dump(load_config(mine, []))))
        change = [f"train.algorithm.kind={kind}"]
        assert load_config(whole, change) == load_config(mine, change)


def test_decoding_is_greedy_or_a_vote():
    plain = load_config(DEMO, [])
    assert Decode.parse("greedy", plain) == Decode(1, 0.0)
    assert Decode.parse("vote@8", plain) == Decode(8, 0.8)
    drawn = load_config(DEMO, ["evaluation.vote_temperature=0.6", "evaluation.top_p=0.95"])
    assert Decode.parse("pass@2", drawn) == Decode(2, 0.6, "pass", 0.95)
    for text in ("vote", "vote@0", "vote@-1", "vote@x", "Greedy", "beam@4", ""):
        assert "--decode" in mistake(Decode.parse, text, plain)


# Paths of any name: each means one folder, wherever it is written.

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


@pytest.mark.parametrize("paper", ["progress", "expo", "paverl", "astra"])
def test_episodes_of_a_papers_config_fit_servers_of_its_model(paper):
    facts = {"data": [{"max_model_len": 32768}], "max_req_input_len": 32762}  # as SGLang says
    limits = load_config(f"{paper}.yaml", []).evaluation_sampler
    longest = limits.max_prompt_tokens + limits.max_response_tokens
    info = ServerInfo.model_validate({"version": TESTED, **facts})
    info.check("", context=longest, has_adapters=False)
