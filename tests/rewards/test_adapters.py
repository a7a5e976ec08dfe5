"""Rewards as TRL, verl and SkyRL call them: without those libraries, then with the real ones."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import subprocess
import textwrap
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from minirl.exchange import UserError
from rewards import score
from rewards.adapters import scoring
from rewards.adapters.scoring import AdapterConfig, example_of, read_settings
from rewards.adapters.skyrl import SqlEnv
from rewards.adapters.trl import SqlReward, replies_of
from rewards.adapters.verl import compute_score
from sqlenv.config import ExecutorConfig, SingleTurnConfig

from .conftest import interpreter_of

ROOT = Path(__file__).parents[2]
GOLD = "SELECT name FROM singer WHERE age > 20"
GOOD = f"<think>…</think><sql>{GOLD}</sql>"
ALL = "<think>…</think><sql>SELECT name FROM singer</sql>"
ONE_SHOT = {"reward": {"kind": "one_shot"}, "executor": {"workers": 2}}
PROGRESSIVE = {**ONE_SHOT, "reward": {"kind": "progressive"}}
AGENTIC = {**ONE_SHOT, "reward": {"kind": "astra"}, "env": {"kind": "agentic", "tool": "run_sql"}}
SEARCH = "SELECT age FROM singer"


@pytest.fixture(scope="module")
def database(make_database) -> Path:
    return make_database(
        ["CREATE TABLE singer (name, age)", "INSERT INTO singer VALUES ('Ada', 19), ('Bo', 30)"]
    )


def rows(database: Path, count: int) -> dict[str, Any]:
    return {"database": [str(database)] * count, "gold_sql": [GOLD] * count}


def test_trl_scores_texts_and_conversations_in_order_and_logs_means(database):
    reward = pickle.loads(pickle.dumps(SqlReward(ONE_SHOT)))
    assert reward.__name__ == "sql_one_shot"
    logged: dict[str, float] = {}
    user = {"role": "user", "content": "Feedback"}
    said = [{"role": "assistant", "content": text} for text in (ALL, GOOD)]
    completions = [GOOD, ALL, "no idea", [said[1]], [said[0], user, said[1]], [user], [], GOOD]
    found = reward(
        completions=completions,
        prompts=["?"] * len(completions),
        completion_ids=[[1]] * len(completions),
        trainer_state=None,
        log_metric=logged.__setitem__,
        **rows(database, len(completions)),
    )
    assert found == [3.0, 1.0, 0.0, 3.0, 3.0, 0.0, 0.0, 3.0]
    shares = {"sql/match": 1.0, "sql/executable": 5 / 16, "sql/format": 5 / 16, "sql/correct": 0.5}
    assert logged == shares | {"sql/sql_found": 5 / 8}


# Cells as data frames have them: missing ones of every kind, and scalars and lists of libraries.
MISSING = [None, math.nan, np.float32("nan"), np.datetime64("NaT"), pd.NaT, pd.NA]
OPTIONAL = ("id", "dialect", "alternatives", "grading_method")
MORE = "SELECT name FROM singer WHERE age >= 20"


class Arrow(list):
    """As Arrow's scalars give their value."""

    def as_py(self):
        return [*self]


LISTS: list[Any] = [
    Arrow([MORE, None]),
    np.array([MORE], object),
    pd.array([MORE]),
    [np.str_(MORE), None, math.nan],
    MORE,
]

LISTS += [json.dumps([MORE]), MORE.encode(), np.bytes_(MORE), {MORE}, deque([MORE])]


@pytest.mark.parametrize("missing", MISSING, ids=str)
def test_a_missing_cell_of_any_kind_is_none(database, missing):
    row: dict[str, Any] = {"database": str(database), **dict.fromkeys(OPTIONAL, missing)}
    plain = example_of({"database": str(database)}, gold_sql=GOLD)
    assert example_of(row, gold_sql=GOLD) == plain
    assert compute_score("d", GOOD, GOLD, row, settings=ONE_SHOT)["score"] == 3.0
    columns: Any = {"gold_sql": [GOLD], **{name: [one] for name, one in row.items()}}
    assert SqlReward(ONE_SHOT)([GOOD], **columns) == [3.0]
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


def test_columns_and_completions_of_any_kind_are_read(database):
    frame = pd.DataFrame(rows(database, 3), index=[7, 3, 5])
    parts: Any = [{"type": "text", "text": GOOD}]
    message: Any = {"role": "assistant", "content": parts, "tool_calls": math.nan}
    completions: Any = [[message], message, np.array([message], object)]
    assert SqlReward(ONE_SHOT)(completions, **frame.to_dict("series")) == [3.0, 3.0, 3.0]
    spec = json.dumps({"ground_truth": GOLD})
    assert SqlEnv(ONE_SHOT, {"database": str(database), "reward_spec": spec}).step(GOOD)["done"]
    assert compute_score("d", parts, GOLD, {"database": str(database)}, settings=ONE_SHOT)["acc"]
    for field in OPTIONAL:
        with pytest.raises(UserError, match=rf" {field}.*, not \{{'a': 1\}}; give"):
            example_of({"database": str(database), "gold_sql": GOLD, field: {"a": 1}})


def test_content_in_parts_is_a_reply():
    parts = [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": GOOD[16:]}]
    assert replies_of([{"role": "assistant", "content": parts}]) == [
        f"<think>\nso\n</think>\n\n{GOOD[16:]}"
    ]


def test_trl_shows_why_beside_each_completion(database):
    told: dict[str, list[Any]] = {}
    replies = [GOOD, "no idea", "<sql>SELECT nope</sql>", "<sql>DROP TABLE singer</sql>"]
    SqlReward(ONE_SHOT)(replies, log_extra=told.__setitem__, **rows(database, 4))
    assert told == {
        "status": ["ok", "no_sql", "error", "denied"],
        "sql": [GOLD, "", "SELECT nope", "DROP TABLE singer"],
    }


def test_a_gold_query_that_does_not_run_is_named_once(database, caplog, monkeypatch):
    reward: Any = SqlReward(ONE_SHOT)
    data = {**rows(database, 2), "gold_sql": ["SELECT nope"] * 2}
    reward([GOOD, GOOD], **data)
    # Whoever asks again waits again, where it runs into the limit of time.
    monkeypatch.setattr("rewards.adapters.scoring.gold_result", None)
    reward([GOOD, GOOD], **data)
    (record,) = caplog.records
    assert "'SELECT nope' does not run on" in record.message
    assert "no such column: nope" in record.message


@pytest.mark.parametrize(
    ("reply", "wrapping", "paid"),
    [
        (f"<think>…</think>\n```sql\n{GOLD}\n```", "fence", 3.0),
        (f"```sqlite\n{GOLD}\n```", "fence", 2.5),
        (f"…</think><sql>{GOLD}</sql>", "any", 3.0),
        (GOLD, "any", 2.5),
        (GOLD, "fence", 0.0),
        (f"<think>draft <sql>{GOLD}</sql></think> I give up", "sql_tag", 0.0),
    ],
)
def test_a_match_is_paid_2_that_it_runs_and_its_form_a_half_each(database, reply, wrapping, paid):
    env = {"kind": "single_turn", "wrapping": wrapping}
    assert SqlReward({**ONE_SHOT, "env": env})([reply], **rows(database, 1)) == [paid]


def call(sql: str) -> dict[str, Any]:
    """Call the tool, as TRL writes it once it has read a reply."""
    function = {"name": "run_sql", "arguments": {"query": sql}}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


def test_sql_in_another_form_than_is_asked_for_is_told_once(database, caplog):
    fenced = [f"```sql\n{GOLD}\n```"] * 3
    in_fences = SqlReward({**ONE_SHOT, "env": {"kind": "single_turn", "wrapping": "fence"}})
    assert min(in_fences(fenced, **rows(database, 3))) > 2
    assert not caplog.records
    # Settings that no other test has: a scorer is kept for each.
    reward = SqlReward({**ONE_SHOT, "env": {"kind": "diagnosed", "turns": 7}})
    assert max(reward(fenced, **rows(database, 3))) == 0
    (record,) = caplog.records
    assert "env.wrapping" in record.getMessage()


def test_calls_that_trl_has_read_are_calls(database):
    tool = {"role": "tool", "name": "run_sql", "content": "[[19], [30]]"}
    answer = {"role": "assistant", "content": f"```sql\n{GOLD}\n```", "reasoning_content": "So."}
    many = [call(GOLD), tool] * 5
    found = SqlReward(AGENTIC)(
        [[call(SEARCH), tool, answer], [answer], [call(GOLD)], [call("SELECT")], [*many, answer]],
        **rows(database, 5),
    )
    # A rise from 0 to 1, less the cost of a step; right at once; a fall without an answer; nothing;
    # more calls than our own environment runs, which TRL does not limit by itself.
    assert found == pytest.approx([0.9999, 1.0, 1 - 1.5001, -0.0001, 0.9996])


def test_verl_gets_a_score_accuracy_and_parts(database):
    info = {"database": str(database), "num_turns": None, "rollout_reward_scores": {}}
    parts = {"reward/match": 2.0, "reward/executable": 0.5, "reward/format": 0.5}
    right, wrong = (
        compute_score("spider", reply, GOLD, info, settings=ONE_SHOT) for reply in (GOOD, ALL)
    )
    why = {"status": "ok", "sql": GOLD, "sql_found": 1.0}
    assert right == {"score": 3.0, "acc": 1.0, **parts, **why}
    why["sql"] = "SELECT name FROM singer"
    assert wrong == {"score": 1.0, "acc": 0.0, **parts, "reward/match": 0.0, **why}
    # Also with a row as JSON text; by name, as verl's managers call it.
    row = json.dumps({"database": str(database)})
    named = {"data_source": "spider", "solution_str": ALL, "ground_truth": GOLD, "extra_info": row}
    assert compute_score(**named, settings=ONE_SHOT) == wrong
    none = compute_score(**named | {"solution_str": "no idea"}, settings=ONE_SHOT)
    assert (none["score"], none["status"], none["sql_found"]) == (0.0, "no_sql", 0.0)
    with pytest.raises(UserError, match=r"'\[1\]' is no row: give a mapping with `database`"):
        compute_score("spider", GOOD, GOLD, "[1]", settings=ONE_SHOT)
    # Calls and answer of one text cannot be told apart.
    with pytest.raises(UserError, match=r"env\.kind"):
        compute_score("spider", GOOD, GOLD, info, settings=AGENTIC)


def test_skyrl_answers_with_the_diagnosis_until_the_match(database):
    row = {"database": database, "reward_spec": {"ground_truth": GOLD}, "max_turns": 3}
    env = SqlEnv(env_config={}, extras=row, settings=PROGRESSIVE)
    prompt = [{"role": "user", "content": "Who is over 20?"}]
    assert env.init(prompt) == (prompt, {})
    first, last = env.step(ALL), env.step(GOOD)
    assert (first["reward"], first["done"]) == (0.0, False)
    (message,) = first["observations"]
    assert message["role"] == "user"
    assert "WHERE_ERROR" in message["content"]
    assert (last["observations"], last["done"]) == ([], True)
    assert last["reward"] == pytest.approx(2.3557143)
    assert env.get_metrics()["correct"] == 1.0
    assert env.get_metrics()["turns"] == 2.0
    assert first["metadata"] == {"correct": False}
    why = {"status": "ok", "sql": GOLD, "sql_found": 1.0}
    assert last["metadata"] == {"correct": True, **why}


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
    # EXPO-SQL knows order and duplicates, as in its paper.
    doubled = f"{GOLD} UNION ALL {GOLD}"
    paid = [score(database, GOLD, doubled, name, **one).correct for name in ("expo", "paverl")]
    assert paid == [False, True]
    with pytest.raises(UserError, match="'expo'"):
        score(database, GOLD, GOLD, reward="exposql")


def test_skyrl_plays_the_tool_and_shows_its_rows(database):
    row = {"database": database, "reward_spec": {"ground_truth": GOLD}, "max_turns": 3}
    env = SqlEnv(extras=row, settings=AGENTIC)
    calls = [text for sql in (SEARCH, "SELECT a FROM b") for text in replies_of([call(sql)])]
    first, second, last = (env.step(reply) for reply in (*calls, f"```sql\n{GOLD}\n```"))
    assert "[[19], [30]]" in first["observations"][0]["content"]
    assert "error: no such table" in second["observations"][0]["content"]
    assert [step["done"] for step in (first, second, last)] == [False, False, True]
    assert last["reward"] == pytest.approx(1 - 2 * 0.0001)
    assert env.get_metrics() == {"turns": 3.0, "correct": 1.0, "reward/atr": last["reward"]}


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


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rewards": {}}, "rewards: "),
        ({"reward": {"kind": "one_shot", "decay": 1}}, "decay"),
        ({"env": {"kind": "agentic"}}, "reward.kind=progressive and env.kind=agentic: "),
        ({"reward": {"kind": "expo"}, "env": {"kind": "agentic"}}, "use reward.kind=astra"),
        ({"env": {"kind": "chess"}}, "'single_turn', 'diagnosed', 'agentic'"),
        ("expo", r'reward: Input should be .*; settings are \{"reward": \{"kind": …, …\}, "env": '),
        ({"env": {"wrapping": "any"}}, "env: "),
    ],
)
def test_wrong_settings_are_one_line(settings, words):
    with pytest.raises(UserError, match=words):
        read_settings(settings)


def test_skyrl_makes_and_plays_every_environment(database):
    """In the real SkyRL-gym; all three real trainers take a step in test_exported_rows.py."""
    text = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^SkyRL-gym .*:\n\n((?: {4}.*\n)+)", text, re.MULTILINE)
    script = Path(__file__).parent / "adapters" / "skyrl_gym_envs.py"
    run = subprocess.run(
        [interpreter_of("skyrl"), str(script), str(database), textwrap.dedent(block)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    first, last = found.pop("page")
    assert (first["done"], last["done"]) == (False, True)
    played = {"single_turn": 1.5, "diagnosed": 2.3557143, "agentic": 0.9999}
    rewards = {kind: one["steps"][-1]["reward"] for kind, one in found.items()}
    assert rewards == pytest.approx(played)
    assert last["reward"] == rewards["diagnosed"]
    for one in found.values():
        *before, last = one["steps"]
        assert one["is_env"]
        assert [s["done"] for s in one["steps"]] == [False] * len(before) + [True]
        assert [s["reward"] for s in before] == [0.0] * len(before)
        assert [s["observations"] == [] for s in one["steps"]] == [False] * len(before) + [True]
        assert one["metrics"]["correct"] == 1.0
        assert last["metadata"]["correct"] is True


@pytest.mark.parametrize(
    "row",
    [
        {"gold_sql": GOLD},
        {"database": "music.sqlite"},
        {"database": "music.sqlite", "gold_sql": " "},
        {"database": None, "gold_sql": GOLD},
        b"music.sqlite",
        ["music.sqlite"],
    ],
)
def test_rows_without_what_is_needed_are_refused(row):
    with pytest.raises(UserError):
        example_of(row)


@pytest.mark.parametrize("more", ["SELECT 1", ["SELECT 1"]])
def test_one_more_gold_query_needs_no_list(more):
    row = {"database": "music.sqlite", "gold_sql": GOLD, "alternatives": more}
    assert example_of(json.dumps(row).encode()).alternatives == ("SELECT 1",)
