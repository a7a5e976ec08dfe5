"""Trackio gets each step's numbers, in the run's own name."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from launch.config import load_config
from launch.data.preflight import check_inputs
from launch.job import tracked
from minirl.exchange import UserError


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, tuple, dict[str, Any]]]:
    """Record what a module in the place of Trackio is told."""
    found: list[tuple[str, tuple, dict[str, Any]]] = []
    module = ModuleType("trackio")

    def take(_kind: str, *words: Any, **more: Any) -> None:
        found.append((_kind, words, more))

    for kind in ("init", "log", "finish"):
        setattr(module, kind, partial(take, kind))
    monkeypatch.setitem(sys.modules, "trackio", module)
    return found


def test_each_step_is_logged_in_the_project_that_is_named(calls):
    config = load_config("progress-demo.yaml", ["run.trackio=sql", "seed=3", "train.steps=7"])
    with tracked(config) as log:
        assert log is not None
        log(1, {"reward/total": 0.5})
    (init, _, named), *rest = calls
    assert init == "init"
    assert [named[key] for key in ("project", "name", "resume")] == [
        *("sql", "progress-demo-seed3", "allow")
    ]
    assert named["config"]["train.steps"] == 7
    assert rest == [("log", ({"reward/total": 0.5},), {"step": 1}), ("finish", (), {})]


def test_without_the_setting_nothing_is_asked(calls):
    with tracked(load_config("progress-demo.yaml", [])) as log:
        assert log is None
    assert not calls


def test_a_tracker_that_is_not_installed_is_told_before_anything_is_made(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setattr("launch.data.preflight.find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"run\.trackio: .*pip install trackio"):
        check_inputs(load_config("progress-demo.yaml", ["run.trackio=sql"]))
