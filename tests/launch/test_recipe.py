"""README's recipe on small downloads side by side: prepare, dry run, train, eval."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

from .conftest import json_lines

SETTINGS = (
    "data.demo=null", "data.root=downloads", "data.validation=null", "data.held_out=3",
    "data.train.sources=[{layout: bird, split: train}, {layout: spider, split: train}]",
    "data.train.total=50", "data.test.sources=[{layout: bird, split: dev}]", "train.steps=2",
    "prompt={style: short, schema_style: omnisql}", "sampler.max_prompt_tokens=1400",
    "warm_start=null", "env={kind: single_turn, wrapping: any}", "reward={kind: execution}",
    "model.tiny.vocab_size=700", "run.dir=run",
)  # fmt: skip


def test_the_recipe_asks_the_same_in_training_and_in_evaluation(
    command, tiny, downloads, tmp_path: Path
):
    (tmp_path / "downloads").symlink_to(downloads)

    def run(*words: str | Path) -> str:
        done = command(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    def prompts(folder: str) -> dict[str, Any]:
        lines = json_lines(tmp_path / folder / "trajectories.jsonl")
        return {one["id"]: one["prompt"] for one in lines if "prompt" in one}

    sheets: dict[str, Any] = {}
    run("launch.prepare", "--cfg", tiny, "--data-root", "downloads", *SETTINGS)
    told = run("launch.train", "--cfg", tiny, "--dry-run", *SETTINGS)
    assert "24 questions, not the 50 that train.steps=2 is for" in " ".join(told.split())
    run("launch.train", "--cfg", tiny, *SETTINGS)
    for data in ("bird-dev", "test"):
        where = ["--out", data, "--json", f"{data}.json"]
        run("launch.eval", "--checkpoint", "run", "--data", data, *where)
        sheets[data] = json.loads((tmp_path / f"{data}.json").read_text())
    # A published set is judged by its official rule, and its prompts are those of the run's tests.
    assert list(sheets["bird-dev"]["measures"]) == ["bird_ex"]
    assert prompts("test").items() <= prompts("bird-dev").items()
    # A question to learn from is asked in an evaluation as it was in training.
    every = ["--out", "asked", "evaluation.questions=null"]
    run("launch.eval", "--checkpoint", "run", "--data", "train", *every)
    asked = prompts("asked")
    learned = [one for one in json_lines(tmp_path / "run/trajectories.jsonl") if "prompt" in one]
    assert learned
    # A run records what the template and the tokenizer, which sets blanks, make of it.
    squeezed = [
        "".join(text.split()) for one in learned for text in (asked[one["id"]], one["prompt"])
    ]
    assert all(map(operator.contains, squeezed[1::2], squeezed[::2]))
    assert any("'New York'" in one["prompt"] for one in learned)
