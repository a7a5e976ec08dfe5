"""Metrics across kills and resumes, files whole or not at all, and the time of the compiler."""

import errno
import json
import math
import os
import re
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from minirl.exchange import Score, UserError
from minirl.run import activity, memory
from minirl.run.files import appearing, whole_file
from minirl.run.metrics import JsonLines, Metrics, Stopwatch
from minirl.sample.rollout import flatten
from minirl.train.advice import advice
from minirl.train.rollouts import Episodes, ScoredEpisode
from minirl.train.summary import mismatch, over_updates, status, summarise
from minirl.types import Reply, Trajectory, Turn


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path, steps, *, resume_step):
    lines = JsonLines(path, resume_step=resume_step)
    for step in steps:
        lines.write(step, {"run": resume_step})


@pytest.mark.parametrize("half", ["", '{"st', '{"step": 6, "run": 0}'])
def test_lines_after_the_checkpoint_are_taken_away_and_half_ones(tmp_path, half):
    path = tmp_path / "new" / "metrics.jsonl"
    write(path, [1, 2, 3, 4, 5], resume_step=0)
    with path.open("a") as file:
        file.write(half)  # left by a kill
    write(path, [4, 5, 6], resume_step=3)
    assert [(line["step"], line["run"]) for line in lines_of(path)] == [
        (1, 0), (2, 0), (3, 0), (4, 3), (5, 3), (6, 3)
    ]  # fmt: skip
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]
    write(path, [1], resume_step=0)
    assert [line["step"] for line in lines_of(path)] == [1]


def test_numbers_and_texts_come_back_and_what_is_not_finite_is_null(tmp_path):
    path = tmp_path / "lines.jsonl"
    record = {"text": "Größe, 東京 ", "x": 0.1 + 0.2, "e": 0, "f": "nan"}
    odd = {"a": math.nan, "b": math.inf, "parts": {"c": [1.0, -math.inf]}}
    JsonLines(path, resume_step=0).write(1, record | odd)
    before = path.read_bytes()
    JsonLines(path, resume_step=1)
    assert path.read_bytes() == before
    nulls = {"a": None, "b": None, "parts": {"c": [1.0, None]}}
    assert lines_of(path) == [{"step": 1} | record | nulls]


LOST = "the numbers of step 2 are not there"


@pytest.mark.parametrize(
    ("content", "step", "words"),
    [
        (b"{\n", 1, "line 1: broken JSON"),
        (b'{"step": 1}\n\xff\xfe\n', 1, "line 2: broken JSON"),
        (b'{"step": "x"}\n', 1, "line 1: step should be a whole number"),
        (b'{"step": 1, "a": "x"}\n', 1, "line 1: a should be a number"),
        *((content, 2, LOST) for content in (None, b"", b'{"step": 1, "a": null}\n')),
    ],
)
def test_numbers_that_are_damaged_or_lost_stop_a_resume_and_are_kept(
    tmp_path, content, step, words
):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path}: {words}"):
        Metrics(tmp_path, resume_step=step)
    assert content is None or path.read_bytes() == content


def test_metrics_are_sorted_and_a_full_disk_names_the_file(tmp_path, monkeypatch):
    synced: list[Path] = []
    monkeypatch.setattr("minirl.run.metrics.sync", synced.append)
    metrics, path = Metrics(tmp_path, resume_step=0), tmp_path / "metrics.jsonl"
    metrics.write(1, {"b": 2.0, "a": 1.0})
    assert synced == [path]
    assert path.read_text() == '{"step": 1, "a": 1.0, "b": 2.0}\n'
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        metrics.write(2, {"a": 1.0})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))


def test_stopwatch_adds_up():
    watch = Stopwatch()
    for _ in range(2):
        with watch.phase("rollout"):
            sum(range(1000))
    with pytest.raises(KeyError), watch.phase("update"):
        raise KeyError
    numbers = watch.numbers()
    assert set(numbers) == {"time/rollout_s", "time/update_s", "time/step_s"}
    assert numbers["time/step_s"] >= numbers["time/rollout_s"] + numbers["time/update_s"]
    assert all(seconds > 0 for seconds in numbers.values())


def test_a_number_of_some_episodes_is_averaged_over_these_and_skips_are_counted():
    turn = Turn((9,), Reply((1, 2), (0.0, 0.0), "ab", "stop", (0, 0)))
    numbers = [{"all": 1.0, "some": 1.0}, {"all": 0.0}, {"all": 0.0, "some": 0.0}, {"all": 1.0}]
    scored = [ScoredEpisode(Score(1.0, number < 1), found) for number, found in enumerate(numbers)]
    means = summarise(Episodes([[Trajectory((turn,), one, "done")] for one in scored]))
    assert (means["all"], means["some"], means["rollout/accuracy"]) == (0.5, 0.5, 0.25)
    assert summarise(Episodes(too_long=2)) == {"groups/too_long": 2.0, "groups/failed": 0.0}
    found = over_updates([{"loss": 1.0, "skipped": 1.0}, {"loss": 2.0, "skipped": 1.0}])
    assert found == {"update/loss": 1.5, "update/skipped": 2.0}
    assert over_updates([]) == {}


def sampled(logprobs, learner):
    """Return the row of a reply after a prompt of one id."""
    reply = Reply((1, 2), tuple(np.log(logprobs)), "", "stop", (0, 0))
    row = flatten(Trajectory((Turn((9,), reply),), None, "done"))
    return replace(row, old_logprobs=np.log([1.0, *learner]).astype(np.float32))


def test_the_gap_of_sampler_and_learner_by_hand():
    """For p = (.5, .3) and q = (.6, .3): log(5 / 6) = -.18232, and 5 / 6 - 1 + .18232 = .015655."""
    rows = [sampled([0.6, 0.3], (0.5, 0.3)), sampled([0.2, 0.4], (0.2, 0.4))]
    expected = {
        "gap_mean": 0.18232 / 4, "gap_p99": 0.97 * 0.18232, "gap_max": 0.18232,
        "kl": 0.015655 / 4, "far_share": 0.5,
    }  # fmt: skip
    found = mismatch([rows])
    assert found == pytest.approx({f"mismatch/{n}": x for n, x in expected.items()}, abs=1e-5)
    assert mismatch([[replace(rows[0], is_action=np.zeros(3, bool))]]) == {}


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ([0.25] * 10, "only 25 % of the groups of 10 steps teach"),
        ([0.9] * 20 + [0.3, None] * 10, "only 30 % "),
        ([0.0] * 9, ""),  # too early to say
        ([0.0] * 20 + [1 / 3] * 10, ""),  # no longer
        ([], ""),
    ],
)
def test_what_helps_is_said_where_few_groups_of_ten_steps_are_live(shares, told):
    said = advice(shares)
    assert said.startswith(told)
    assert bool(said) == bool(told)
    helps = ["data.train.pass_rate", "sampler.temperature", "train.group_size", "learning_rate"]
    places = [said.find(name) for name in helps]
    assert places == (sorted(places) if told else [-1] * 4)


def test_a_share_of_nothing_is_not_told():
    """No answer looked right in a step: of those, none is right by luck, nor 0 % of them."""
    numbers = {"reward/total": 0.0, "rollout/accuracy": 0.0, "rollout/turns": 1.0}
    shares = {"rollout/refuted_share": "right by luck"}
    assert status(numbers, shares) == "reward 0.00, accuracy 0.00, turns 1.0"
    told = status({**numbers, "rollout/refuted_share": 0.0}, shares)
    assert told.endswith("turns 1.0, right by luck 0 %")


# Files.


def test_the_old_file_stays_until_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    path = tmp_path / "new" / "result.json"
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def told(handle):
        place = Path(f"/proc/self/fd/{handle}").readlink()
        synced.append((place.suffix or place.name, path.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", told)
    with whole_file(path) as file:
        file.write("one")
    assert synced == [(".part", False), ("new", True)]
    with suppress(KeyboardInterrupt), whole_file(path) as file:
        file.write("two")
        assert path.read_text() == "one"
        raise KeyboardInterrupt
    assert path.read_text() == "one"
    # Nor is it that of another process, such as a second launch.prepare.
    with whole_file(path) as file:
        file.write("three")
        with whole_file(path) as other:
            other.write("a longer one")
        assert path.read_text() == "a longer one"
    assert path.read_text() == "three"
    assert [found.name for found in path.parent.iterdir()] == ["result.json"]


def test_a_link_stays_a_link_and_a_pipe_a_pipe_and_an_error_names_what_was_asked_for(
    tmp_path, monkeypatch
):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with whole_file(tmp_path / "link") as file:
        file.write("text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    with whole_file(tmp_path / "pipe") as file:
        file.write("text")
    reader.join()
    assert read == ["text"]
    assert (tmp_path / "pipe").is_fifo()
    for path in (Path("/dev/full"), tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r".") as caught, whole_file(path) as file:
            file.write("text")
        assert str(caught.value.filename).startswith(str(path.parent))
    # A disk in a network may say so only then.
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    lines = JsonLines(tmp_path / "lines", resume_step=0)
    with pytest.raises(OSError, match="No space") as caught:
        lines.write(1, {})
    assert caught.value.filename == str(tmp_path / "lines")


def test_a_folder_appears_when_its_files_are_on_the_disk(tmp_path, monkeypatch):
    synced: list[str] = []
    monkeypatch.setattr("minirl.run.files.sync", lambda path: synced.append(path.name))
    with appearing(tmp_path / "model") as new:
        (new / "config.json").write_text("{}")
        assert not synced
    assert synced == ["config.json", new.name, tmp_path.name]
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    with suppress(KeyboardInterrupt), appearing(tmp_path / "model") as new:
        (new / "config.json").write_text("half")
        raise KeyboardInterrupt
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    # A kill came when the new one had the name, or before.
    for left in (".model.1.new", ".model.1.old", ".model.2.old"):
        (tmp_path / left).mkdir()
    with appearing(tmp_path / "model"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_control_groups_limit_memory_and_their_files_that_are_not_in_use_are_free(
    tmp_path, monkeypatch
):
    device, groups = jax.devices("cpu")[0], tmp_path / "groups"
    (job := tmp_path / "memory" / "job" / "step").mkdir(parents=True)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", groups)
    groups.write_text("0::/absent/here\n4:memory:/job/step\n1:name=systemd:/a:b\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory.free_bytes(device) == 100
    assert memory.capacity_bytes(device) == 1000
    (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 600\n")
    assert memory.free_bytes(device) == 700
    # That of the job, of the first version, above its step, which has none.
    (job.parent / "memory.usage_in_bytes").write_text("100\n")
    (job.parent / "memory.limit_in_bytes").write_text("500\n")
    assert memory.free_bytes(device) == 400
    assert memory.capacity_bytes(device) == 500
    groups.unlink()
    assert memory.free_bytes(device) > 1e6
    assert memory.capacity_bytes(device) > 1e6


# What a process says while it compiles.


def test_a_long_compilation_is_told_while_it_lasts_and_what_it_freed_given_back(monkeypatch):
    activity.watch_compiler()
    seen: list[str] = []
    monkeypatch.setattr(activity, "trim", lambda: seen.append("trimmed"))

    def ask():
        asker = threading.Thread(target=lambda: seen.append(activity.status()))
        asker.start()
        asker.join()

    def slow(x):
        # Tracing what lies inside of this ends before this ends.
        x = jax.jit(lambda x: x + 1)(x)
        time.sleep(1.1)
        ask()
        jax.debug.callback(seen.append, "runs")
        return x

    jax.jit(lambda x: (ask(), x)[1])(1.0)
    jax.block_until_ready(jax.jit(slow)(1.0))
    jax.effects_barrier()
    short, long, *_ = seen
    assert (short, seen[2], seen[-1]) == ("", "trimmed", "runs")
    assert re.fullmatch("compiling for [1-9][0-9]* s", long)
    # What failed is not compiling either.
    monkeypatch.setattr(activity, "_LEAST_S", 0.0)
    with pytest.raises(ZeroDivisionError):
        jax.jit(lambda x: x / (0 // 0))(1.0)
    assert activity.status() == ""
