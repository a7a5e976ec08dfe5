"""Rewards as TRL, verl and SkyRL call them, without those libraries."""

from __future__ import annotations

import json
import math
import pickle
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pytest

from launch.prepare import TrainerName, rows
from minirl.exchange import Message, UserError
from rewards import score
from rewards.adapters import scoring
from rewards.adapters.scoring import AdapterConfig, example_of, read_settings
from rewards.adapters.skyrl import SqlEnv
from rewards.adapters.trl import SqlReward, replies_of
from rewards.adapters.verl import compute_score
from sqlenv.config import ExecutorConfig, SingleTurnConfig
from sqlenv.types import Example
from tests.vectors import read

CASES = read("adapters")
GOLD = CASES["gold"]
GOOD = f"<think>…</think><sql>{GOLD}</sql>"
ALL = "<think>…</think><sql>SELECT name FROM singer</sql>"
ONE_SHOT = {"reward": {"kind": "one_shot"}, "executor": {"workers": 1}}


@pytest.fixture(scope="module")
def database(make_database) -> Path:
    return make_database([CASES["tables"]])


def columns(database: Path, count: int, gold: str = GOLD) -> dict[str, Any]:
    return {"database": [str(database)] * count, "gold_sql": [gold] * count}


# An episode, from its row and replies to the score and what explains it.


def by_trl(settings: Any, row: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    logged, shown = dict[str, float](), dict[str, list[Any]]()
    (total,) = SqlReward(settings)(
        [[{"role": "assistant", "content": reply} for reply in case["replies"]]],
        log_metric=logged.__setitem__,
        log_extra=shown.__setitem__,
        **{name: [cell] for name, cell in row.items()},
    )
    parts = {name.removeprefix("sql/"): value for name, value in logged.items()}
    return {"total": total, **parts, **{name: text for name, (text,) in shown.items()}}


def by_verl(settings: Any, row: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    (reply,) = case["replies"]
    found = compute_score(
        data_source=row["data_source"],
        solution_str=reply,
        ground_truth=row["reward_model"]["ground_truth"],
        extra_info=row["extra_info"],
        settings=settings,
    )
    named = {name.removeprefix("reward/"): value for name, value in found.items()}
    return {"total": named.pop("score"), "correct": named.pop("acc"), **named}


def by_skyrl(settings: Any, row: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    env = SqlEnv(settings, {**row, "max_turns": 3}, settings={"reward": {"kind": "paverl"}})
    assert env.init(row["prompt"]) == (row["prompt"], {})
    *before, last = (env.step(reply) for reply in case["replies"])
    for step, words in zip(before, case.get("told", ()), strict=True):
        assert (step["reward"], step["done"], step["metadata"]) == (0, False, {"correct": False})
        (message,) = step["observations"]
        assert message["role"] == "user"
        assert words in message["content"]
    assert (last["done"], last["observations"]) == (True, [])
    metrics = {name.removeprefix("reward/"): one for name, one in env.get_metrics().items()}
    assert metrics.pop("turns") == len(case["replies"])
    return {"total": last["reward"], **metrics, **last["metadata"]}


TRAINERS: dict[TrainerName, Callable[..., dict[str, Any]]] = {
    "trl": by_trl,
    "verl": by_verl,
    "skyrl": by_skyrl,
}


@pytest.mark.parametrize(
    ("trainer", "case"),
    [(one, case) for case in CASES["episodes"] for one in case.get("trainers", TRAINERS)],
    ids=lambda one: one if isinstance(one, str) else one["why"],
)
def test_each_trainer_gets_the_score_of_an_episode_and_why(database, trainer, case):
    example = Example("1", "?", "d", database, GOLD, **case.get("question", {}))
    (row,) = rows(trainer, [example], lambda _: (Message("user", "Who?"),))
    # Trainers read their settings with libraries that have mappings of their own.
    settings = MappingProxyType(case["settings"] | {"executor": {"workers": 1}})
    found = TRAINERS[trainer](settings, row, case)
    why = {name: case[name] for name in ("correct", "status", "sql")}
    total = pytest.approx(sum(case["parts"].values()))
    parts = {name: pytest.approx(part) for name, part in case["parts"].items()}
    assert found == {"total": total, **parts, **why, "sql_found": bool(case["sql"])}


def test_trl_scores_a_batch_in_order_and_logs_means(database):
    reward = pickle.loads(pickle.dumps(SqlReward(ONE_SHOT)))
    assert reward.__name__ == "sql_one_shot"
    logged, shown = dict[str, float](), dict[str, list[Any]]()
    completions = [GOOD, ALL, [{"role": "assistant", "content": GOOD}], "no idea"]
    found = reward(
        completions=completions,
        prompts=["?"] * 4,
        completion_ids=[[1]] * 4,
        trainer_state=None,
        log_metric=logged.__setitem__,
        log_extra=shown.__setitem__,
        **columns(database, 4),
    )
    assert found == [3.0, 1.0, 3.0, 0.0]
    shares = {"sql/match": 1.0, "sql/executable": 3 / 8, "sql/format": 3 / 8, "sql/correct": 0.5}
    assert logged == shares | {"sql/sql_found": 3 / 4}
    assert shown["status"] == ["ok", "ok", "ok", "no_sql"]


@pytest.mark.parametrize("case", CASES["completions"], ids=range(len(CASES["completions"])))
def test_replies_are_the_assistants_messages_with_their_thoughts_and_calls(case):
    assert replies_of(case["completion"]) == case["replies"]


@pytest.mark.parametrize("case", CASES["mistakes"], ids=lambda case: case["told"])
def test_mistakes_are_told_in_a_line(case):
    with pytest.raises(UserError) as caught:
        # It reads settings and rows as all adapters do, and has a mistake of its own.
        compute_score("sql", GOOD, "", case.get("row"), settings=case.get("settings"))
    assert case["told"] in str(caught.value)
    assert "\n" not in str(caught.value)


# Cells as data frames have them: missing ones of every kind, and scalars and lists of libraries.
MISSING = [None, math.nan, np.float32("nan"), np.datetime64("NaT"), pd.NaT, pd.NA]
OPTIONAL = ("id", "dialect", "alternatives", "grading_method")
MORE = "SELECT name FROM singer WHERE age >= 20"


class Arrow:
    """Gives its value as Arrow's scalars do."""

    def as_py(self):
        return [MORE, None]


LISTS: list[Any] = [
    Arrow(),
    np.array([MORE], object),
    pd.array([MORE]),
    [np.str_(MORE), None, math.nan],
    *(MORE, json.dumps([MORE]), MORE.encode(), np.bytes_(MORE), {MORE}, deque([MORE])),
]


@pytest.mark.parametrize("missing", MISSING, ids=str)
def test_a_missing_cell_of_any_kind_is_none(database, missing):
    row: dict[str, Any] = {"database": str(database), **dict.fromkeys(OPTIONAL, missing)}
    plain = example_of({"database": str(database)}, gold_sql=GOLD)
    assert example_of(row, gold_sql=GOLD) == plain
    extras = {**row, "reward_spec": {"ground_truth": GOLD}, "max_turns": missing}
    assert SqlEnv(ONE_SHOT, extras).step(GOOD)["reward"] == 3.0
    for needed in ("database", "gold_sql"):
        with pytest.raises(UserError, match=f"{needed}: Field required; give database"):
            example_of({"database": str(database), "gold_sql": GOLD, needed: missing})
    with pytest.raises(UserError, match="gold_sql: Field required"):
        SqlEnv(ONE_SHOT, {"database": str(database), "reward_spec": missing})


@pytest.mark.parametrize("written", LISTS, ids=lambda one: type(one).__name__)
def test_scalars_and_lists_of_libraries_are_read(database, written):
    frame = pd.DataFrame({"database": [str(database)], "gold_sql": [GOLD], "id": [np.int64(7)]})
    frame = frame.astype({"database": "string", "gold_sql": "string"})
    row = {**frame.to_dict("records")[0], "alternatives": written, "dialect": np.str_("sqlite")}
    found = example_of(row)
    assert (found.id, found.gold_sql, found.alternatives) == ("7", GOLD, (MORE,))
    assert {type(one) for one in (found.id, found.gold_sql, *found.alternatives)} <= {str, np.str_}


def test_rows_columns_and_completions_of_any_kind_are_read(database):
    frame = pd.DataFrame(columns(database, 3), index=[7, 3, 5])
    parts: Any = [{"type": "text", "text": GOOD}]
    message: Any = {"role": "assistant", "content": parts, "tool_calls": math.nan}
    completions: Any = [[message], message, np.array([message], object)]
    assert SqlReward(ONE_SHOT)(completions, **frame.to_dict("series")) == [3.0, 3.0, 3.0]
    spec, info = json.dumps({"ground_truth": GOLD}), json.dumps({"database": str(database)})
    assert SqlEnv(ONE_SHOT, {"database": str(database), "reward_spec": spec}).step(GOOD)["done"]
    assert compute_score("d", parts, GOLD, info, settings=ONE_SHOT)["score"] == 3.0
    assert example_of(info.encode(), gold_sql=GOLD) == example_of(info, gold_sql=GOLD)


def test_a_gold_query_that_does_not_run_is_named_once(database, caplog, monkeypatch):
    reward: Any = SqlReward(ONE_SHOT)
    asked = columns(database, 2, "SELECT nope")
    reward([GOOD, GOOD], **asked)
    # Whoever asks again waits again, where it runs into the limit of time.
    monkeypatch.setattr("rewards.adapters.scoring.run_in_dialect", None)
    reward([GOOD, GOOD], **asked)
    monkeypatch.undo()
    other = columns(database, 1, "SELECT no") | {"alternatives": [[GOLD]]}
    assert reward([GOOD], **other) == [3.0]
    (record,) = caplog.records
    assert "'SELECT nope' does not run on" in record.message
    assert "no such column: nope" in record.message


def test_sql_in_another_form_than_is_asked_for_is_told_once(database, caplog):
    scoring._scorer.cache_clear()  # a scorer remembers what it has told
    for wrapping, told in (("fence", 0), ("sql_tag", 1)):
        env = {"kind": "single_turn", "wrapping": wrapping}
        SqlReward({**ONE_SHOT, "env": env})([f"```sql\n{GOLD}\n```"] * 3, **columns(database, 3))
        assert caplog.text.count("a reply has its SQL in a fence, which env.wrapping=") == told


def test_one_call_scores_a_reply_beside_a_gold_query(database):
    """In Python: total, parts, correct, credit, feedback, and how the query ended."""
    one = {"executor": ONE_SHOT["executor"]}
    wrong = score(database, GOLD, ALL, reward="expo", **one)
    # Only WHERE can be to blame, which is not there: SELECT and FROM share it.
    assert (wrong.total, wrong.correct, wrong.status) == (-0.5, False, "ok")
    assert wrong.parts["incorrect"] == -0.5
    assert [(ALL[c.start : c.end], c.value) for c in wrong.credit] == [
        ("SELECT name ", -0.5),
        ("FROM singer", -0.5),
    ]
    assert "WHERE_ERROR" in wrong.feedback
    right = score(database, GOLD, GOLD, reward={"kind": "expo"}, **one)
    assert (right.total, right.correct, right.feedback) == (1.5, True, "")
    turns = score(database, GOLD, [ALL, GOOD], **one)
    assert turns.total == pytest.approx(2.3557143)
    assert score(database, GOLD, "?", reward="execution", **one).status == "no_sql"


def test_settings_may_be_objects_as_well_as_mappings():
    config = AdapterConfig(env=SingleTurnConfig(wrapping="any"))
    assert read_settings(config) == read_settings({"env": config.env}) == config
    assert read_settings({"env": {"kind": "single_turn", "wrapping": "any"}}) == config


def test_threads_that_ask_first_share_one_scorer(monkeypatch):
    made = []

    def make(config):
        made.append(config)
        time.sleep(0.05)
        return object()

    monkeypatch.setattr(scoring, "Scorer", make)
    config = AdapterConfig(executor=ExecutorConfig(workers=3))
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: scoring.scorer_of(config), range(8)))
    assert len(made) == len(found) == 1
    scoring._scorer.cache_clear()
