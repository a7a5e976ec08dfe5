"""README's recipe on small downloads side by side: prepare, train, eval."""

import json
import operator
from pathlib import Path
from typing import Any

from .conftest import json_lines, succeed

SETTINGS = (
    "data.demo=null", "data.root=downloads", "data.validation=null", "data.held_out=3",
    "data.train.sources=[{layout: bird, split: train}, {layout: spider, split: train}]",
    "data.train.total=50", "data.test.sources=[{layout: bird, split: dev}]", "train.steps=2",
    "prompt={style: short, schema_style: omnisql}", "sampler.max_prompt_tokens=1400",
    "warm_start=null", "env={kind: single_turn, wrapping: any}", "reward={kind: execution}",
    "model.tiny.vocab_size=700", "run.dir=run",
)  # fmt: skip
EVALUATE = ("launch.eval", "--checkpoint", "run", "--data")


def test_the_recipe_asks_the_same_in_training_and_in_evaluation(
    command, tiny, downloads, tmp_path: Path
):
    (tmp_path / "downloads").symlink_to(downloads)

    def prompts(folder: str) -> dict[str, Any]:
        lines = json_lines(tmp_path / folder / "trajectories.jsonl")
        return {one["id"]: one["prompt"] for one in lines if "prompt" in one}

    succeed(
        command,
        ["launch.prepare", "--cfg", tiny, "--data-root", "downloads", *SETTINGS],
        ["launch.train", "--cfg", tiny, *SETTINGS],
        [*EVALUATE, "bird-dev", "--out", "bird-dev", "--json", "bird-dev.json"],
        [*EVALUATE, "train", "--out", "asked", "evaluation.questions=null"],
        cwd=tmp_path,
    )
    # A published set is judged by its official rule, and its prompts are those of the run's tests.
    assert [*json.loads((tmp_path / "bird-dev.json").read_text())["measures"]] == ["bird_ex"]
    assert prompts("run/before").items() <= prompts("bird-dev").items()
    # A question to learn from is asked in an evaluation as it was in training.
    asked = prompts("asked")
    learned = [one for one in json_lines(tmp_path / "run/trajectories.jsonl") if "prompt" in one]
    assert learned
    # A run records what the template and the tokenizer, which sets blanks, make of it.
    squeezed = [
        "".join(text.split()) for one in learned for text in (asked[one["id"]], one["prompt"])
    ]
    assert all(map(operator.contains, squeezed[1::2], squeezed[::2]))
    assert any("'New York'" in one["prompt"] for one in learned)
