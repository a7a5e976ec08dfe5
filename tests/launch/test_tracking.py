"""A tracker gets each step's numbers, in the run's own name."""

import sys
from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launch.config import load_config
from launch.data.preflight import check_inputs
from launch.job import tracked
from minirl.exchange import UserError


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, tuple, dict[str, Any]]]:
    """Record what modules in the places of the trackers are told."""
    found: list[tuple[str, tuple, dict[str, Any]]] = []

    def take(kind: str, *words: Any, **more: Any) -> Any:
        found.append((kind, words, more))
        board = SimpleNamespace(add_scalar=partial(take, "add_scalar"))
        return nullcontext(board) if kind == "SummaryWriter" else None

    for name in ("tensorboardX", "wandb", "trackio"):
        module = ModuleType(name)
        for kind in ("init", "log", "finish", "SummaryWriter"):
            setattr(module, kind, partial(take, kind))
        monkeypatch.setitem(sys.modules, name, module)
    return found


def track(tracker: str | None, tmp_path: Any) -> Any:
    settings = [] if tracker is None else [f"run.tracker={tracker}"]
    settings += [f"run.dir={tmp_path}", "seed=3", "train.steps=7"]
    with tracked(load_config("progress-demo.yaml", settings)) as log:
        if log is not None:
            log(1, {"reward/total": 0.5, "time/step_s": 2.0})
    return log


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_each_step_is_logged_in_the_project_of_the_run(calls, tracker, tmp_path):
    track(tracker, tmp_path)
    (init, _, named), *rest = calls
    assert init == "init"
    assert [named.get(key) for key in ("project", "name", "resume", "id")] == [
        *("progress-demo", "progress-demo-seed3", "allow"),
        "progress-demo-seed3" if tracker == "wandb" else None,
    ]
    assert named["config"]["train.steps"] == 7
    numbers = {"reward/total": 0.5, "time/step_s": 2.0}
    assert rest == [("log", (numbers,), {"step": 1}), ("finish", (), {})]


def test_each_number_is_a_scalar_of_tensorboard(calls, tmp_path):
    track("tensorboard", tmp_path)
    assert [call[:2] for call in calls] == [
        ("SummaryWriter", (str(tmp_path / "tensorboard"),)),
        ("add_scalar", ("reward/total", 0.5, 1)),
        ("add_scalar", ("time/step_s", 2.0, 1)),
    ]


def test_without_the_setting_nothing_is_asked(calls, tmp_path):
    assert track(None, tmp_path) is None
    assert not calls


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_told_before_anything_is_made(monkeypatch, tracker):
    monkeypatch.setattr("launch.data.preflight.find_spec", lambda _name: None)
    with pytest.raises(UserError, match=rf"run\.tracker: .*pip install {tracker}"):
        check_inputs(load_config("progress-demo.yaml", [f"run.tracker={tracker}"]))
