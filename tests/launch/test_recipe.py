"""README's recipe on small downloads side by side: prepare, dry run, train, eval."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import json_lines
from .downloads import make_bird, make_spider

SETTINGS = (
    "data.demo=null", "data.root=downloads", "data.validation=null", "data.held_out=3",
    "data.train.sources=[{layout: bird, split: train}, {layout: spider, split: train}]",
    "data.train.total=50", "data.test.sources=[{layout: bird, split: dev}]", "train.steps=2",
    "prompt={style: short, schema_style: omnisql}", "sampler.max_prompt_tokens=1400",
    "warm_start=null", "env={kind: single_turn, wrapping: any}", "reward={kind: execution}",
    "model.tiny.vocab_size=700", "run.dir=run",
)  # fmt: skip


def test_the_recipe_asks_the_same_in_training_and_in_evaluation(command, tiny, tmp_path: Path):
    make_bird(tmp_path / "downloads" / "bird_2026")
    make_spider(tmp_path / "downloads" / "spider_data")

    def run(*words: str | Path) -> str:
        done = command(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    run("launch.prepare", "--cfg", tiny, "--data-root", "downloads", *SETTINGS)
    told = run("launch.train", "--cfg", tiny, "--dry-run", *SETTINGS)
    assert "24 questions, not the 50 that train.steps=2 is for" in " ".join(told.split())
    told = run("launch.train", "--cfg", tiny, *SETTINGS)
    assert "passes: " in told
    run("launch.eval", "--checkpoint", "run", "--data", "bird-dev", "--json", "out.json")
    sheet = json.loads((tmp_path / "out.json").read_text())
    # A published set is judged by its official rule, and its prompts are those of the run's tests.
    assert list(sheet["measures"]) == ["bird_ex"]
    run("launch.eval", "--checkpoint", "run", "--data", "test", "--json", "own.json")
    own = json.loads((tmp_path / "own.json").read_text())
    assert own["settings"]["prompt"] == sheet["settings"]["prompt"]
    # A question to learn from is asked in an evaluation as it was in training.
    run("launch.eval", "--checkpoint", "run", "--data", "train", "--out", "asked")
    asked = {one["id"]: one["prompt"] for one in json_lines(tmp_path / "asked/trajectories.jsonl")}
    learned = [one for one in json_lines(tmp_path / "run/trajectories.jsonl") if "prompt" in one]
    assert learned
    assert all(asked[one["id"]] == one["prompt"] for one in learned)
    assert any("'New York'" in one["prompt"] for one in learned)
