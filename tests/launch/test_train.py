"""Whole runs of the smallest job, as processes of their own: results, kills, evaluation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flax import nnx

from minirl.errors import UserError
from minirl.model import huggingface
from minirl.run.checkpoint import read_params

from .test_cli import MANY

# Runs a command, and kills the process in the moment that the text in the middle describes.
KILLED = """
import os, signal, sys
from minirl.run import checkpoint
from minirl.run import metrics
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
{moment}
from launch.train import main
main(sys.argv[1:])
"""
# The second step's numbers are written, and its checkpoint is not.
IN_WARM_START = """
write = metrics.Metrics.write
def written(self, step, numbers):
    write(self, step, numbers)
    if step == 2:
        die()
metrics.Metrics.write = written
"""
# The second checkpoint is being written in the background.
INSIDE_A_CHECKPOINT = """
save = checkpoint.Checkpoints.save
def saved(self, step, *tree, **score):
    save(self, step, *tree, **score)
    if step == 2 and self._folder.parent.name == "stopped":
        die()
checkpoint.Checkpoints.save = saved
"""


@pytest.fixture(scope="module")
def place(command, tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder where the smallest job ran to its end, as `finished`."""
    place = tmp_path_factory.mktemp("place")
    done = command("launch.train", "--cfg", tiny, "run.dir=finished", cwd=place)
    assert done.returncode == 0, done.stderr
    (place / "stdout.txt").write_text(done.stdout)
    (place / "stderr.txt").write_text(done.stderr)
    return place


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def timeless(path: Path) -> list[dict[str, Any]]:
    """Read metrics without what depends on the clock; the order of keys counts."""
    return [
        {key: value for key, value in line.items() if not key.startswith("time/")}
        for line in lines(path)
    ]


def test_result_has_what_was_promised(place):
    result = json.loads((place / "finished" / "result.json").read_text())
    for name in ("ex_before", "ex_after"):
        assert 0 <= result[name] <= 1
    low, high = result["gain_ci95"]
    assert low <= result["gain"] <= high
    assert result["gain"] == pytest.approx(result["ex_after"] - result["ex_before"])
    assert result["questions"] == 6
    assert [step for step, _ in result["validation_curve"]] == [2, 3]
    assert 1 <= result["mean_turns"] <= 2
    assert result["seconds"] > 0
    parts = result["rewards"]
    assert parts["total"] == pytest.approx(sum(parts.values()) - parts["total"], abs=1e-5)


def test_metrics_have_what_was_promised(place):
    metrics = lines(place / "finished" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    promised = {
        *("reward/total", "reward/format", "reward/execution", "reward/latency"),
        *("reward/alignment", "rollout/accuracy_first", "rollout/accuracy", "rollout/turns"),
        *("rollout/reply_tokens", "rollout/response_tokens", "rollout/invalid_share"),
        *("tag/JOIN_MISSING", "tag/WHERE_ERROR", "tag/EXTRA_SUBQUERY_OR_CTE"),
        *("update/entropy", "update/kl", "update/clip_fraction", "update/logp_gap_max"),
        *("time/rollout_tokens_per_s", "time/update_tokens_per_s"),
        *("time/rollout_s", "time/score_s", "time/update_s"),
        "time/sampler_compilations",
    }
    for line in metrics:
        assert promised <= line.keys()
        # fp32 without dropout: sampler and learner see the same probabilities.
        assert 0 <= line["update/logp_gap_max"] < 1e-4
        assert line["update/entropy"] > 0
    # At the first step the policy is the start; weight decay and the KL term then move it.
    assert metrics[0]["update/kl"] == 0
    assert metrics[2]["update/kl"] > metrics[1]["update/kl"] > 0
    assert ["validation/accuracy" in line for line in metrics] == [False, True, True]


def test_run_folder_has_what_was_promised(place):
    folder = place / "finished"
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "versions.json", "data.json", "checkpoints", "tensorboard"} <= names
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"2", "3"}
    samples = lines(folder / "trajectories.jsonl")
    head, *groups = samples
    assert head == {"step": 0, "version": 2}
    assert [group["step"] for group in groups] == [1, 1, 2, 2, 3, 3]
    for group in groups:
        assert {"id", "db_id", "question", "gold", "gold_result", "prompt"} <= group.keys()
        assert group["question"] in group["prompt"]
        assert len(group["trajectories"]) == 2
        for sample in group["trajectories"]:
            assert 1 <= len(sample["turns"]) <= 2
            assert {"reward", "parts", "correct", "advantage"} <= sample.keys()
            for turn in sample["turns"]:
                assert {"reply", "sql", "result", "correct", "tags", "parts"} <= turn.keys()
                assert turn["result"]["status"] in ("ok", "error", "timeout", "too_large")
            assert all(turn["observation"] for turn in sample["turns"][1:])
    for phase in ("before", "after"):
        verdicts = lines(folder / phase / "predictions.jsonl")
        _, *answers = lines(folder / phase / "trajectories.jsonl")
        assert [answer["id"] for answer in answers] == [verdict["id"] for verdict in verdicts]
        said = [answer["trajectories"][0]["turns"][-1] for answer in answers]
        assert [one["sql"] for one in said] == [verdict["sql"] for verdict in verdicts]
    for phase in ("before", "after"):
        assert len(lines(folder / phase / "predictions.jsonl")) == 6
        assert len((folder / phase / "predictions.sql").read_text().splitlines()) == 6
    data = json.loads((folder / "data.json").read_text())
    assert [data[split]["questions"] for split in ("train", "validation", "test")] == [24, 4, 6]
    assert "sqlite" in json.loads((folder / "versions.json").read_text())


def test_output_is_for_people(place):
    printed, log = (place / "stdout.txt").read_text(), (place / "stderr.txt").read_text()
    assert "execution accuracy, 6 questions" in printed
    assert printed.splitlines()[-2:] == [
        "Run folder: finished",
        "To look at it: python -m launch.report finished",
    ]
    for phase in (
        "warm start: 0/3 compiling",
        "warm start: 3/3",
        "accuracy before: 6/6",
        "learning: 3/3",
        "accuracy after",
    ):
        assert phase in log
    assert "Warning" not in log


def test_the_same_command_again_says_that_the_run_is_complete(command, place, tiny):
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    done = command("launch.train", "--cfg", tiny, "run.dir=finished", cwd=place)
    assert done.returncode == 0
    assert done.stdout.startswith("This run is complete: finished/result.json\n")
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before
    other = command("launch.train", "--cfg", tiny, "run.dir=finished", "seed=4", cwd=place)
    assert other.returncode == 2
    assert "finished: holds results of other settings (seed is 0 there and 4 here)" in other.stderr


def assert_same_run(folder: Path, finished: Path) -> None:
    for name in ("metrics.jsonl", "warm/metrics.jsonl"):
        ours, theirs = timeless(folder / name), timeless(finished / name)
        assert [json.dumps(line) for line in ours] == [json.dumps(line) for line in theirs]
    names = ("trajectories.jsonl", "predictions.jsonl")
    for name in (names[0], *(f"{phase}/{name}" for phase in ("before", "after") for name in names)):
        assert (folder / name).read_bytes() == (finished / name).read_bytes()
    ours, theirs = (json.loads((run / "result.json").read_text()) for run in (folder, finished))
    assert ours | {"seconds": 0} == theirs | {"seconds": 0}


# A cluster's notice comes at a call of a function, and is known when the call goes on (after
# os.kill Python 3.11 may run the handler later).
NOTICED = """
import signal
from minirl.sample.sampler import NativeSampler
advance = NativeSampler.advance
def noticed(*args, **kwargs):
    signal.raise_signal(signal.SIGTERM)
    return advance(*args, **kwargs)
NativeSampler.advance = noticed
from launch import cli
from launch.train import main
cli.run(main)
"""
# Stands for a full disk, which takes the right to mount one: from the first checkpoint on no file
# may grow beyond this. How many files Orbax writes, and how large, depends on its threads.
LIMITED = """
import resource
from minirl.run.checkpoint import Checkpoints
save = Checkpoints.save
def limited(*args, **kwargs):
    resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.RLIM_INFINITY))
    return save(*args, **kwargs)
Checkpoints.save = limited
from launch import cli
from launch.train import main
cli.run(main)
"""


@pytest.mark.timeout(400)
def test_a_run_that_was_stopped_four_times_equals_one_that_was_not(command, place, tiny):
    """Killed in the warm start and in a checkpoint, a full disk, and a notice in a rollout."""
    folder, line = place / "stopped", ["--cfg", tiny, "run.dir=stopped"]
    model_bytes = (place / "finished" / "model" / "model.safetensors").stat().st_size
    killed, full = KILLED.format(moment=IN_WARM_START), LIMITED.format(size=model_bytes // 8)
    for code, more, status, words in (
        (killed, ["--only", "warm-start"], -9, ""),
        (full, [], 2, "no checkpoint can be written there"),
        (NOTICED, [], 0, "stopped by SIGTERM: "),
        (KILLED.format(moment=INSIDE_A_CHECKPOINT), [], -9, ""),
    ):
        done = command(*line, *more, cwd=place, code=code)
        assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
        assert words in done.stderr.splitlines()[-1]
        assert not (folder / "result.json").exists()
    assert len(lines(folder / "metrics.jsonl")) == 2
    done = command("launch.train", *line, cwd=place)
    assert done.returncode == 0, done.stderr
    assert_same_run(folder, place / "finished")


# Evaluation.


def test_evaluation_agrees_with_training(command, place, tiny):
    """The best checkpoint, measured as training measures it, gives the same replies."""
    line = ["--cfg", tiny, "run.dir=finished", "--checkpoint", "finished", "--out", "after"]
    done = command("launch.eval", *line, cwd=place)
    assert done.returncode == 0, done.stderr
    ours, theirs = place / "after", place / "finished" / "after"
    for name in ("predictions.jsonl", "predictions.sql", "predictions_bird.json"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    result = json.loads((ours / "verdicts.json").read_text())
    trained = json.loads((place / "finished" / "result.json").read_text())
    said = result["settings"]
    assert (result["measures"]["set"]["mean"], said["questions"]) == (trained["ex_after"], 6)
    assert said["model"]["checkpoint"] == f"finished/checkpoints/{trained['best_step']}"
    assert sum(part["questions"] for part in result["parts"]["difficulty"].values()) == 6
    # Another decoding does not go into the same folder.
    done = command("launch.eval", *line, "--decode", "vote@2", cwd=place)
    assert done.returncode == 2
    assert "decode is 'greedy' there and 'vote@2' here" in done.stderr
    assert json.loads((ours / "verdicts.json").read_text()) == result


def test_evaluation_on_a_test_set(command, place, tiny):
    """By its official rule: verdicts of every question, and what the numbers are of."""
    line = ["--cfg", tiny, "run.dir=finished", "--checkpoint", "finished", "--decode", "pass@2"]
    data = [
        "--data",
        "spider-dev",
        "--data-root",
        "finished/data",
        "--comparators",
        "spider_ex,csmr",
    ]
    done = command("launch.eval", *line, *data, "--out", "set", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "spider_ex" in done.stdout
    sheet = json.loads((place / "set" / "verdicts.json").read_text())
    said, questions = sheet["settings"], sheet["questions"]
    assert (said["data"], said["questions"], len(questions)) == ("spider-dev", 12, 12)
    assert (said["model"]["reward"], said["model"]["base"]) == ("progressive", "tiny")
    assert len(said["prompt"]) == 16
    assert {question["samples"] for question in questions} == {2}
    assert all(set(question["scores"]) == {"spider_ex", "csmr"} for question in questions)
    table = command("launch.report", "set", "--against", "set", "--markdown", "t.md", cwd=place)
    assert table.returncode == 0, table.stderr
    assert "| tiny | progressive | pass@2 |" in (place / "t.md").read_text()


# Reads many policies in one process; what libraries say late is said before it ends.
READING = """
import gc, json, sys
from pathlib import Path
from launch import cli
from launch.config import load_config
from launch.policy import find_policy, load_policy
config = load_config(sys.argv[1], [])
def main(arguments):
    load_policy(find_policy(config, Path(arguments[0])), config)
for name in sys.argv[2:]:
    sys.argv = ["", name]
    try:
        cli.run(main)
    except SystemExit as end:
        print(end.code)
    gc.collect()
"""


def test_damaged_checkpoints_are_told_in_one_line_each(command, place, tiny, tmp_path):
    """Nothing but our line: no traceback that Orbax, TensorStore or asyncio print beside it."""
    whole = place / "finished" / "checkpoints" / "3" / "tree"
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    assert len(files) > 5
    names = []
    for number, name in enumerate(files):
        for kind in ("missing", "empty", "rubbish", "half"):
            run = tmp_path / f"{kind}{number}"
            folder = run / "checkpoints" / "3"
            shutil.copytree(whole, folder / "tree")
            (run / "config.yaml").write_bytes((place / "finished" / "config.yaml").read_bytes())
            (run / "model").symlink_to(place / "finished" / "model")
            file = folder / "tree" / name
            content = file.read_bytes()
            damaged = {"empty": b"", "rubbish": b"x" * 99, "half": content[: len(content) // 2]}
            file.write_bytes(damaged[kind]) if kind in damaged else file.unlink()
            names.append(str(folder))
    done = command(tiny, *names, cwd=tmp_path, code=READING)
    codes = done.stdout.split()
    assert len(codes) == len(names), done.stderr
    # Reading needs not every file.
    assert codes.count("2") >= len(names) // 3
    said = done.stderr.splitlines()
    assert len(said) == codes.count("2"), done.stderr
    assert all("checkpoints/3: the checkpoint cannot be read" in line for line in said)


def test_an_evaluation_that_fails_leaves_no_folder(command, place, tiny, tmp_path):
    folder = tmp_path / "finished"
    shutil.copytree(place / "finished", folder)
    for path in (folder / "checkpoints").rglob("manifest.ocdbt"):
        path.write_bytes(path.read_bytes()[:10])
    line = ["--cfg", tiny, "run.dir=finished"]
    done = command("launch.eval", *line, "--checkpoint", "finished", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr
    # No prompt fits: found when questions are read.
    short = [*line, "--checkpoint", "finished/model", "sampler.max_prompt_tokens=5"]
    done = command("launch.eval", *short, cwd=tmp_path)
    assert done.returncode == 2
    assert "no test prompt fits 5 tokens" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "evals").exists()


@pytest.fixture
def policy(place) -> Callable[[Path | None], Any]:
    from launch.config import load_config
    from launch.policy import find_policy

    config = load_config(str(place / "finished" / "config.yaml"), [f"run.dir={place}/finished"])
    return lambda where: find_policy(config, where)


def test_policies_are_found_by_any_of_their_folders(place, policy):
    run = place / "finished"
    start = policy(None)
    assert (start.name, start.model, start.checkpoint) == ("tiny-start", run / "warm/model", None)
    step = policy(run / "checkpoints" / "3")
    assert (step.name, step.checkpoint) == ("finished-step3", run / "checkpoints" / "3")
    assert policy(run).checkpoint.parent == run / "checkpoints"
    hugging_face = policy(run / "model")
    assert (hugging_face.model, hugging_face.checkpoint) == (run / "model", None)
    for wrong in (run / "before", run / "checkpoints", place):
        with pytest.raises(UserError, match="give a run folder"):
            policy(wrong)


def test_a_checkpoint_that_is_truncated_or_of_another_model(place, tmp_path):
    model = huggingface.load(place / "finished" / "model")
    params = nnx.state(model)
    copy = tmp_path / "checkpoints" / "3"
    shutil.copytree(place / "finished" / "checkpoints" / "3", copy)
    read_params(copy, params)
    wider = {"another": params}
    with pytest.raises(UserError, match="a checkpoint of another model"):
        read_params(copy, wider)
    for path in (copy / "tree").rglob("*"):
        if path.is_file() and path.stat().st_size > 2_000:
            path.write_bytes(path.read_bytes()[:1_000])
    with pytest.raises(UserError, match=r"checkpoints/3: the checkpoint cannot be read"):
        read_params(copy, params)


def copy_of(place: Path, name: str) -> Path:
    """Copy the finished run, and let it be unfinished."""
    folder = place / name
    shutil.copytree(place / "finished", folder)
    (folder / "result.json").unlink()
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("dir: finished", f"dir: {name}"))
    return folder


DAMAGED = {
    "data.json": (b"{", "data.json: broken JSON"),
    "metrics.jsonl": (None, "metrics.jsonl: the numbers of step 3 are not there"),
    "checkpoints/3/metrics/metrics": (b"{}", "metrics/metrics: score is missing"),
    "checkpoints/3/facts/metadata": (b'{"curve": 5}', "checkpoints/3: facts: curve should be"),
    "before/predictions.jsonl": (b"[1]\n", "before/predictions.jsonl: line 1: should be"),
    "warm/model/config.json": (b"[]", "config.json: should be a valid dictionary"),
}


def test_damaged_files_of_a_run_are_told_in_a_line(command, place, tiny):
    cases = []
    for number, (path, (content, _)) in enumerate(DAMAGED.items()):
        file = copy_of(place, f"damaged{number}") / path
        assert file.is_file()
        file.unlink() if content is None else file.write_bytes(content)
        cases.append(["launch.train", "--cfg", str(tiny), f"run.dir=damaged{number}"])
    done = command(json.dumps(cases), cwd=place, code=MANY)
    assert done.returncode == 0, done.stderr
    for (status, _, err), (_, words) in zip(
        json.loads(done.stdout)[0], DAMAGED.values(), strict=True
    ):
        assert (status, "Traceback" in err) == (2, False), err
        assert err.splitlines()[-1].startswith("error: ")
        assert words in err.splitlines()[-1]
