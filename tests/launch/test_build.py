"""The parts of a job work together: what one family's reward says reaches the metrics."""

from pathlib import Path

import pytest

from launch.build import SqlSide
from launch.config import load_config
from launch.data.preflight import check_inputs
from minirl.exchange import UserError
from rewards.expo.reward import ExpoReward
from sqlenv.sql.extraction import tables_of
from sqlenv.types import Table

REFERENCE = Path(__file__).parents[1] / "data" / "reference"


def test_clause_level_reward_reaches_score_and_metrics(tiny, tmp_path):
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
            score = sql.reward(episode)
            assert "".join(reply[span.start : span.end] for span in score.spans) == query
            numbers = sql.describe(episode)
            # Other families' numbers would cost as much as their rewards.
            assert not any(name.startswith(("columns/", "tag/", "align/")) for name in numbers)
            assert "rollout/calls" not in numbers  # this episode has no tool
            assert numbers[f"case/{case}"] == 1.0
            blamed = [name for name in numbers if name.startswith("blamed/")]
            assert len(blamed) == (0 if case == "correct" else 9)
            assert all(name.startswith(f"blamed/{case}/") for name in blamed)


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


@pytest.mark.parametrize(
    ("folder", "warm_start", "is_refused"),
    [("qwen35_text", "null", True), ("qwen35", "{steps: 1}", True), ("qwen35", "null", False)],
)
def test_adapters_that_sglang_knows_no_sizes_of_are_refused_at_once(folder, warm_start, is_refused):
    """Those of a Qwen3.5 without its vision tower, which a warm start leaves out."""
    overrides = [f"model={{path: {REFERENCE / folder}}}", f"warm_start={warm_start}"]
    overrides += ["train.lora.rank=2", "rollout.sglang.urls=[http://127.0.0.1:1]"]
    config = load_config("progress-demo.yaml", overrides)
    told = pytest.raises(UserError, match="only for a folder with the vision tower")
    # What comes next of the folder: it has no tokenizer.
    with told if is_refused else pytest.raises(UserError, match=r"tokenizer\.json"):
        check_inputs(config)
