"""The parts of a job work together: what one family's reward says reaches the metrics."""

from __future__ import annotations

import pytest
import yaml

from launch.build import SqlSide
from launch.config import load_config
from rewards.expo.reward import ExpoReward


@pytest.mark.parametrize("wrapping", ["sql_tag", "fence"])
def test_clause_level_reward_reaches_score_and_metrics(tiny, tmp_path, wrapping):
    settings = yaml.safe_load(tiny.read_text(encoding="utf-8"))
    settings |= {
        "reward": {"kind": "expo"},
        "env": {"kind": "single_turn", "wrapping": wrapping},
    }
    path = tmp_path / "expo.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    config = load_config(str(path), [])
    opening, closing = {"sql_tag": ("<sql>", "</sql>"), "fence": ("```sql\n", "\n```")}[wrapping]
    with SqlSide(config, tmp_path) as sql:
        assert isinstance(sql.reward, ExpoReward)
        example = sql.examples("train")[0]
        environment = sql.environment()
        for query, case in (
            (example.gold_sql, "correct"),
            ("SELECT 'no such thing'", "incorrect"),
            ("SELECT nothing", "error"),
        ):
            reply = f"So: {opening}{query}{closing}"
            episode, _ = environment.step(environment.reset(example)[0], reply)
            score = sql.reward(episode)
            assert "".join(reply[span.start : span.end] for span in score.spans) == reply
            numbers = sql.describe(episode)
            assert numbers[f"case/{case}"] == 1.0
            blamed = [name for name in numbers if name.startswith("blamed/")]
            assert len(blamed) == (0 if case == "correct" else 9)
            assert all(name.startswith(f"blamed/{case}/") for name in blamed)


def test_columns_are_compared_whatever_the_reward(tiny, tmp_path):
    settings = yaml.safe_load(tiny.read_text(encoding="utf-8"))
    settings |= {"reward": {"kind": "paverl"}, "env": {"kind": "single_turn", "wrapping": "fence"}}
    path = tmp_path / "paverl.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with SqlSide(load_config(str(path), []), tmp_path) as sql:
        example = sql.examples("train")[0]
        environment = sql.environment()
        reply = f"```sql\n{example.gold_sql}\n```"
        episode, _ = environment.step(environment.reset(example)[0], reply)
        assert {"columns", "executed"} <= sql.reward(episode).parts.keys()
        numbers = sql.describe(episode)
    assert (numbers["columns/ex_f"], numbers["columns/csmr"]) == (1, 1)
    assert "rollout/calls" not in numbers
