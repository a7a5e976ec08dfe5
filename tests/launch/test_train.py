"""Whole runs of the smallest job, as a user starts them: results, stops, evaluation; README's
recipe.
"""

import json
import operator
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch import eval as evaluation
from launch import train
from launch.config import load_config
from launch.policy import policy_in
from tests.minirl.toy import metrics_of

from .conftest import FINISHED, LEFT_OUT, json_lines, loaded, mistake, parsed, succeed, told_by
from .report_cases import opened, write_page


def test_a_run_leaves_what_was_promised(place):
    folder = place / "finished"
    result = json.loads((folder / "result.json").read_text())
    assert {*result["gains"]["run"]} == {*result["accuracy"]["after"]}
    data = json.loads((folder / "data.json").read_text())
    assert [data[split]["questions"] for split in ("train", "validation", "test")] == [24, 4, 6]
    assert (folder / "versions.json").is_file()
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"2", "3"}


def test_every_step_has_its_metrics(place):
    metrics = json_lines(place / "finished" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    promised = {
        *("reward/total", "reward/format", "reward/execution", "reward/latency"),
        *("reward/alignment", "rollout/accuracy_first", "rollout/accuracy", "rollout/turns"),
        *("rollout/reply_tokens", "rollout/response_tokens", "rollout/invalid_share"),
        *("tag/JOIN_MISSING", "tag/WHERE_ERROR", "tag/EXTRA_SUBQUERY_OR_CTE"),
        *("update/entropy", "update/kl", "update/clip_fraction", "mismatch/gap_max"),
        *("time/rollout_tokens_per_s", "time/update_tokens_per_s", "time/rollout_s"),
    }
    for line in metrics:
        assert promised <= line.keys()
        # fp32 without dropout: sampler and learner see the same probabilities.
        assert 0 <= line["mismatch/gap_max"] < 1e-4
        assert line["update/entropy"] > 0
        assert 1 <= line["rollout/turns"] <= 2
        parts = [value for name, value in line.items() if name.startswith("reward/")]
        assert 2 * line["reward/total"] == pytest.approx(sum(parts), abs=1e-5)
    # At the first step the policy is the start; weight decay and the KL term then move it.
    assert metrics[0]["update/kl"] == 0
    assert metrics[2]["update/kl"] > metrics[1]["update/kl"] > 0
    assert ["validation/accuracy" in line for line in metrics] == [False, True, True]


def test_episodes_are_recorded(place):
    folder = place / "finished"
    head, *groups = json_lines(folder / "trajectories.jsonl")
    assert head == {"step": 0, "version": 2}
    places = [(group["step"], group["group"]) for group in groups]
    assert places == [(step, number) for step in (1, 2, 3) for number in (0, 1)]
    for group in groups:
        assert group["question"] in group["prompt"]
        assert len(group["trajectories"]) == 2
        # Of a group's advantages, normalised, the mean is 0; they are in the order of the rewards.
        pairs = [(one["reward"], one["advantage"]) for one in group["trajectories"]]
        assert sum(advantage for _, advantage in pairs) == pytest.approx(0, abs=1e-4)
        assert [a for _, a in sorted(pairs)] == sorted(a for _, a in pairs)
        for sample in group["trajectories"]:
            keys = {"reward", "parts", "correct", "advantage", "ended", "versions", "turns"}
            assert set(sample) == keys
            assert sample["versions"] == [group["step"] - 1] * 2
            for turn in sample["turns"]:
                assert {"reply", "sql", "result", "correct", "tags"} <= turn.keys()
            assert all(turn["observation"] for turn in sample["turns"][1:])
    for phase in ("before", "after"):
        verdicts = json_lines(folder / phase / "predictions.jsonl")
        _, *answers = json_lines(folder / phase / "trajectories.jsonl")
        said = [(one["id"], one["trajectories"][0]["turns"][-1]["sql"]) for one in answers]
        assert said == [(verdict["id"], verdict["sql"]) for verdict in verdicts]
        for answer, verdict in zip(answers, verdicts, strict=True):
            (earned,) = answer["trajectories"]
            if not verdict["outcomes"]["too_long"]:
                assert sum(earned["parts"].values()) == pytest.approx(earned["reward"], abs=1e-5)
            assert earned.get("advantage") is None


def test_a_question_with_too_long_a_prompt_is_wrong_and_counted(place, tmp_path):
    """In both evaluations, greedily and by samples; the others are answered as ever."""
    run = place / "finished"
    result = json.loads((run / "result.json").read_text())
    for phase in ("before", "after"):
        for folder, replies in ((run / phase, 6), (run / phase / "samples", 12)):
            outcomes = loaded(folder)["outcomes"]
            assert (outcomes["replies"], outcomes["too_long"]) == (replies, replies * LEFT_OUT // 6)
        assert result["outcomes"][phase] == loaded(run / phase)["outcomes"]
        verdicts = json_lines(run / phase / "predictions.jsonl")
        lost = [one for one in verdicts if one["outcomes"]["too_long"]]
        assert [(one["sql"], one["scores"]) for one in lost] == [("", {"set": 0.0})] * LEFT_OUT
    assert [*result["accuracy"]["after"]] == ["set", "mean@2", "pass@2"]
    # The page says so of each place.
    [shown] = opened(write_page(run, out=tmp_path / "page.html"))["overview"]["runs"]
    assert f"{LEFT_OUT} with too long a prompt" in shown["replies"]["before"]
    assert shown["replies"].keys() == {"before", "after"}


def test_output_is_for_people_and_a_complete_run_is_left_alone(command, place, tiny):
    shown = (place / "stdout.txt").read_text()
    assert "launch.report finished" in shown.splitlines()[-1]
    assert re.search(r"learned: .[\d.]+ points \[.*\], from [\d.]+ to [\d.]+ % of 6 que", shown)
    log = (place / "stderr.txt").read_text()
    for phase in ("warm start: 3/3", "accuracy before: 6/6", "learning: 3/3", "accuracy after"):
        assert phase in log
    assert "Warning" not in log
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    line = ["launch.train", "--cfg", str(tiny), *FINISHED, "run.dir=finished"]
    (status, out, _), (other, _, err) = told_by(command, line, [*line, "seed=4"], cwd=place)
    assert (status, other) == (0, 2)
    assert "finished/result.json" in out
    assert shown in out  # what was learned, and how to look at the run
    assert "seed" in err.splitlines()[-1]
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


def test_a_native_run_imports_neither_servers_clients_nor_other_platforms_kernels(
    command, tmp_path
):
    """Of kernels the modules are private ones of JAX: a rename would break every platform."""
    modules = "launch.train, launch.job, launch.evaluation.sampling, minirl.sample.sampler"
    absent = {"aiohttp", "minirl.model.cudnn", "minirl.model.splash"}
    absent |= {"minirl.sample.gpu_attention", "jax.experimental.pallas"}
    done = command(cwd=tmp_path, code=f"import sys, {modules}; print({absent} & {{*sys.modules}})")
    assert done.stdout == "set()\n", done.stderr


STOPPED = """
import os, signal
from minirl.run.checkpoint import Checkpoints
from minirl.sample.sampler import NativeSampler
from launch import cli
from launch.train import main

def before(kind, name, do):
    real = getattr(kind, name)
    def called(*args, **kwargs):
        do(*args)
        return real(*args, **kwargs)
    setattr(kind, name, called)
"""
# In the warm start, where the second step's checkpoint is not yet begun.
KILLED = """
before(Checkpoints, "save", lambda self, step, *_: step == 2 and os.kill(os.getpid(), 9))
"""
# A cluster's notice in a rollout: known when the call goes on (after os.kill Python 3.11 may run
# the handler later).
NOTICED = """
before(NativeSampler, "advance", lambda *_: signal.raise_signal(signal.SIGTERM))
"""


@pytest.mark.timeout(400)
def test_a_run_that_was_stopped_twice_equals_one_that_was_not(command, place, tiny, tmp_path):
    """The other moments of a stop are those of tests/minirl/test_trainer.py, and of a full disk of
    test_checkpoint.py.
    """
    folder, finished = tmp_path / "stopped", place / "finished"
    line = ["--cfg", tiny, *FINISHED, "run.dir=stopped"]
    for how, status in ((KILLED, -9), (NOTICED, 0)):
        more = ["--only", "warm-start"] if how is KILLED else []
        done = command(*line, *more, cwd=tmp_path, code=f"{STOPPED}{how}cli.run(main)")
        assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
        assert not (folder / "result.json").exists()
    assert "SIGTERM" in done.stderr.splitlines()[-1]
    # As if it had come further, and gone back from there.
    shutil.copytree(finished / "before", folder / "after")
    assert command("launch.train", *line, cwd=tmp_path).returncode == 0
    for place in ("", "warm"):
        assert metrics_of(folder / place) == metrics_of(finished / place)
    for name in ("trajectories.jsonl", "before/predictions.jsonl", "after/trajectories.jsonl"):
        assert (folder / name).read_bytes() == (finished / name).read_bytes()
    ours, theirs = (json.loads((run / "result.json").read_text()) for run in (folder, finished))
    assert ours | {"seconds": 0} == theirs | {"seconds": 0}


# Evaluation.


def test_evaluation_agrees_with_training(command, place, tmp_path):
    """Without a config, and from another folder: the replies are those at the end of training."""
    out, finished = tmp_path / "after", place / "finished"
    line = ["--checkpoint", finished, "--out", out]
    done = command("launch.eval", *line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    name = "predictions.jsonl"
    assert (out / name).read_bytes() == (place / "finished" / "after" / name).read_bytes()
    result = loaded(out)
    trained = json.loads((place / "finished" / "result.json").read_text())
    said = result["settings"]
    assert result["measures"]["set"] == trained["accuracy"]["after"]["set"]
    assert (result["outcomes"], said["questions"]) == (trained["outcomes"]["after"], 6)
    assert f"{LEFT_OUT} with too long a prompt" in done.stdout + done.stderr
    assert (said["model"]["reward"], said["model"]["base"]) == ("progressive", "tiny")
    assert said["model"]["checkpoint"] == str(finished / f"checkpoints/{trained['best_step']}")
    assert sum(part["questions"] for part in result["parts"]["difficulty"].values()) == 6
    # The same answers by other measures, on data that the run has made.
    done = command("launch.eval", *line, "--comparators", "bird_ex,csmr", cwd=tmp_path)
    assert [*loaded(out)["measures"]] == ["bird_ex", "csmr"], done.stderr


def test_policies_are_found_by_any_of_their_folders(place):
    run = place / "finished"
    step = policy_in(run / "checkpoints" / "3")
    assert (step.name, step.checkpoint) == ("finished-step3", run / "checkpoints" / "3")
    best = policy_in(run).checkpoint
    assert best
    assert best.parent == run / "checkpoints"
    exported = policy_in(run / "model")
    assert (exported.model, exported.checkpoint) == (run / "model", None)
    gone = (Path("/nowhere"), run / "checkpoints" / "99")
    advice = "give a run folder (its best checkpoint), one of"
    for wrong in (run / "before", run / "checkpoints", place, *gone):
        assert advice in mistake(policy_in, wrong)
        # Nor by the settings of plain.yaml, whose data may not be there.
        assert advice in mistake(evaluation.job_of, evaluation.EvalOptions(checkpoint=wrong), ())


def test_settings_of_the_command_line_change_those_of_the_run(place, tmp_path):
    run, drawn = evaluation.EvalOptions(checkpoint=place / "finished"), "evaluation.top_p=0.5"
    config: Any = evaluation.job_of(run, ("seed=7", drawn, "mesh={data: 1}"))
    assert (config.seed, config.evaluation.top_p, config.mesh.data) == (7, 0.5, 1)
    assert evaluation.job_of(run, ()).mesh == "auto"
    # Devices and servers are those of this machine: nothing of the run's own is left.
    text = (place / "finished" / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("urls: []", "urls: [http://gpu:1]"))
    given = ("mesh.data=1", "rollout.sglang.launch=1")
    here: Any = evaluation.job_of(evaluation.EvalOptions(checkpoint=tmp_path), given)
    assert (here.mesh.data, here.rollout.sglang.urls) == (1, ())


def test_a_job_of_few_questions_says_so_in_its_settings(tiny):
    line = ["--cfg", str(tiny), "--limit", "5", "evaluation.questions=null", "data.held_out=9"]
    given = parsed("train", *line)
    cfg, settings = given["cfg"], given["overrides"]
    config = train._limited(load_config(cfg, settings), cfg, settings, given["limit"])
    asked = config.evaluation
    assert (config.data.train.total, asked.questions, asked.validation_questions) == (5, 5, 4)
    assert config.data.held_out == 5


def test_a_prompt_is_shown_as_the_model_is_asked_it(place, spider_root, tiny, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for command, line, limit in (
        (train, ["--cfg", str(tiny), *FINISHED, "run.dir=finished"], 700),
        (evaluation, ["--checkpoint", "finished"], 186),
    ):
        command.main([*line, "--show-prompt"])
        told = capsys.readouterr().out
        assert told.startswith("<|im_start|>")
        assert f"tokens of {limit}" in told.splitlines()[-1]
        assert "CREATE TABLE" in told or "(id" in told
    question = loaded(place / "finished" / "after")["questions"][0]["question"]
    assert question in told  # of the last command
    named = ["--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--data", "spider-dev"]
    evaluation.main([*named, "--data-root", str(spider_root), "--show-prompt"])
    told = capsys.readouterr().out
    assert "[user]\nCREATE TABLE pet" in told
    assert "about " in told.splitlines()[-1]


# README's recipe.

SETTINGS = (
    "data.demo=null", "data.root=downloads", "data.validation=null", "data.held_out=3",
    "data.train.sources=[{layout: bird, split: train}, {layout: spider, split: train}]",
    "data.train.total=50", "data.test.sources=[{layout: bird, split: dev}]", "train.steps=2",
    "prompt={style: short, schema_style: omnisql}", "sampler.max_prompt_tokens=1400",
    "warm_start=null", "env={kind: single_turn, wrapping: any}", "reward={kind: execution}",
    "model.tiny.vocab_size=700", "run.dir=run",
)  # fmt: skip
EVALUATE = ("launch.eval", "--checkpoint", "run", "--data")


def test_the_recipe_asks_the_same_in_training_and_in_evaluation(command, tiny, downloads, tmp_path):
    """README's, on small downloads side by side: prepare, train, eval."""
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
