"""The parts of a job work together: what one family's reward says reaches the metrics, and these a
tracker.
"""

import re
import sys
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import Mock, call

import pytest

from launch.build import SqlSide
from launch.config import load_config
from launch.data.preflight import check_inputs
from launch.data.prompts import Prompts
from launch.job import tracked
from minirl.exchange import LostError
from rewards.expo.reward import ExpoReward
from sqlenv.schema.rendering import SchemaStyle
from sqlenv.sql.extraction import tables_of
from sqlenv.types import Example, Table
from tests.worlds import make_file

from .conftest import mistake


def test_what_a_reward_tells_reaches_the_metrics(tiny, tmp_path):
    env = "env={kind: single_turn, wrapping: fence}"
    expo = ("reward={kind: expo}", "train.algorithm={kind: expo}")
    config = load_config(str(tiny), [env, *expo])
    with SqlSide(config, tmp_path) as sql:
        assert isinstance(sql.reward, ExpoReward)
        example = sql.examples("train")[0]
        environment = sql.environment()
        for query, case in (
            (example.gold_sql, "correct"),
            ("SELECT 'no such thing'", "incorrect"),
            ("SELECT nothing", "error"),
        ):
            reply = f"So: ```sql\n{query}\n```"
            episode, _ = environment.step(environment.reset(example)[0], reply)
            numbers = sql.describe(episode)
            # Other families' numbers would cost as much as their rewards.
            assert not any(name.startswith(("columns/", "tag/", "align/")) for name in numbers)
            assert "rollout/calls" not in numbers  # this episode has no tool
            assert numbers[f"case/{case}"] == 1.0


def test_the_demo_data_of_a_run_is_not_replaced_from_elsewhere(tiny, tmp_path):
    """As by an evaluation with other settings, while the run reads it."""
    at = f"run.dir={tmp_path / 'run'}"
    config = load_config(str(tiny), [at])
    with SqlSide(config, config.folder) as sql:
        own = sql.root
    with SqlSide(config, tmp_path / "out") as sql:
        assert sql.root == own
    before = (own / "demo.json").read_bytes()
    with SqlSide(load_config(str(tiny), [at, "data.demo.seed=7"]), tmp_path / "out") as sql:
        assert sql.root == tmp_path / "out" / "data"
    assert (own / "demo.json").read_bytes() == before


@pytest.mark.parametrize(("dialect", "name"), [("mysql", '`a "b`'), ("postgres", '"a ""b"')])
@pytest.mark.parametrize("style", get_args(SchemaStyle))
def test_a_prompt_quotes_names_as_the_engine_does_and_values_stay(tmp_path, style, dialect, name):
    """A value of PostgreSQL's, O`Neil, was shown as O"Neil; one prompt after the other is asked."""
    database = make_file(tmp_path / "t.sqlite", """CREATE TABLE t ("a ""b" TEXT);
        INSERT INTO t VALUES ('O`Neil');""")  # fmt: skip
    config = load_config("plain.yaml", [f"prompt.schema_style={style}"])
    prompts, example = Prompts(config.prompt, config.env), Example("1", "Who?", "t", database, "")
    for each in ("sqlite", dialect):
        (message,) = prompts.single_turn(replace(example, dialect=each))
    assert name in message.content
    assert ("O`Neil" in message.content) == (style != "bare")


def test_an_answer_that_is_right_by_luck_is_counted(tiny, tmp_path):
    env = "env={kind: single_turn, wrapping: any, witnesses: 4}"
    config = load_config(str(tiny), [env, "reward={kind: execution}"])
    with SqlSide(config, tmp_path) as sql:
        counted = [e for e in sql.examples("train") if e.gold_sql.startswith("SELECT COUNT(*)")]
        example = counted[0]
        result = sql.executor.gold(example.database, example.gold_sql)
        assert isinstance(result, Table)
        environment = sql.environment()
        for query, refuted in ((example.gold_sql, 0.0), (f"SELECT {result.rows[0][0]}", 1.0)):
            episode, _ = environment.step(environment.reset(example)[0], query)
            assert sql.describe(episode)["rollout/refuted_share"] == refuted
            assert sql.reward(episode).total == 1.0 - refuted
            assert ("witness" in sql.record(episode)["turns"][-1]) == bool(refuted)
        wrong, _ = environment.step(environment.reset(example)[0], "SELECT 'x'")
        assert "rollout/refuted_share" not in sql.describe(wrong)  # it does not look right
        witness = sql.record(episode)["turns"][-1]["witness"]
        assert witness["number"] >= 1
        assert witness["result"]["rows"] == [[result.rows[0][0]]] != witness["gold_result"]["rows"]
        assert [*witness["tables"]] == [*tables_of(example.gold_sql)]


# A tracker gets each step's numbers, in the run's own name.


@pytest.fixture
def trackers(monkeypatch) -> dict[str, Mock]:
    """Modules in the places of the trackers, which record what they are told."""
    modules = {name: Mock() for name in ("tensorboardX", "wandb", "trackio")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def track(tracker: str | None, tmp_path: Any) -> None:
    settings = [] if tracker is None else [f"run.tracker={tracker}"]
    settings += [f"run.dir={tmp_path}", "seed=3", "train.steps=7"]
    with tracked(load_config("progress-demo.yaml", settings)) as log:
        log(1, {"reward/total": 0.5, "time/step_s": 2.0})


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_each_step_is_logged_in_the_project_of_the_run(trackers, tracker, tmp_path):
    track(tracker, tmp_path)
    told = trackers[tracker]
    named = told.init.call_args.kwargs
    assert (named["project"], named["resume"]) == ("progress-demo", "allow")
    assert re.fullmatch("progress-demo-seed3-[0-9a-f]{6}", named["name"])
    assert named.get("id") == (named["name"] if tracker == "wandb" else None)
    assert named["config"]["train.steps"] == 7
    numbers = {"reward/total": 0.5, "time/step_s": 2.0}
    assert told.mock_calls == [call.init(**named), call.log(numbers, step=1), call.finish()]
    # A resumed run goes on in the same one, and no other run of its name and seed.
    track(tracker, tmp_path)
    assert told.init.call_args.kwargs == named
    track(tracker, tmp_path / "other")
    assert told.init.call_args.kwargs["name"] != named["name"]


def test_each_number_is_a_scalar_of_tensorboard(trackers, tmp_path):
    track(None, tmp_path)
    assert not any(one.mock_calls for one in trackers.values())
    track("tensorboard", tmp_path)
    writer = call.SummaryWriter(str(tmp_path / "tensorboard"))
    scalars = [("reward/total", 0.5, 1), ("time/step_s", 2.0, 1)]
    added = [call.SummaryWriter().add_scalar(*one) for one in scalars]
    told = trackers["tensorboardX"].mock_calls
    assert told == [writer, *added, call.SummaryWriter().close()]


def test_a_tracker_that_fails_lets_the_run_save_its_steps(trackers, tmp_path):
    trackers["wandb"].log.side_effect = BrokenPipeError("it ended")
    with pytest.raises(LostError, match=r"run\.tracker=wandb has failed: .*it ended"):
        track("wandb", tmp_path)
    assert trackers["wandb"].finish.called


def test_a_tracker_that_knows_no_user_is_told_in_one_line(trackers, tmp_path):
    trackers["wandb"].init.side_effect = ValueError("api_key not configured")
    told = mistake(track, "wandb", tmp_path)
    assert told == "run.tracker=wandb cannot begin: api_key not configured"
    assert not trackers["wandb"].finish.called


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_told_before_anything_is_made(monkeypatch, tracker):
    monkeypatch.setattr("launch.data.preflight.find_spec", lambda _name: None)
    told = mistake(check_inputs, load_config("progress-demo.yaml", [f"run.tracker={tracker}"]))
    assert "run.tracker: " in told
    assert f"pip install {tracker}" in told
