"""From a download to a step in TRL, verl and SkyRL: docs/rewards.md, command by command."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from safetensors.numpy import load_file

from launch import prepare
from launch.prepare import TrainerName, rows
from minirl.exchange import Message, UserError
from tests.worlds import make_downloads, make_file

from .conftest import EXAMPLE, interpreter_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"^    python -m launch\.prepare (.* --export (\w+) --out (\S+))$", PAGE, re.M
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with Spider in small, as the page's commands expect it."""
    make_downloads(tmp_path / "downloads", "spider/train")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINIRL_CACHE", str(tmp_path / "cache"))
    return tmp_path


SMALL = ("data.held_out=3", "executor.workers=1")


def test_rows_have_what_each_trainer_loads(place: Path):
    assert [trainer for _, trainer, _ in COMMANDS] == ["trl", "verl", "skyrl"]
    written = {}
    for words, trainer, _ in COMMANDS:
        out = place / f"{trainer}.jsonl"
        arguments = shlex.split(words)
        prepare.main([*arguments[: arguments.index("--out")], "--out", str(out), *SMALL])
        written[trainer] = [json.loads(line) for line in out.read_text().splitlines()]
    # Three databases of six golds, of which four may stay; one database is held out.
    assert {len(rows) for rows in written.values()} == {8}
    first, verl, skyrl = (rows[0] for rows in written.values())
    assert Path(first["database"]).is_absolute()
    assert Path(first["database"]).is_file()
    assert first["id"] == f"spider/train_spider/{first['question_id']}"
    assert "New York" in first["prompt"][-1]["content"]
    gold = first["gold_sql"]
    assert verl["reward_model"] == {"style": "rule", "ground_truth": gold}
    assert skyrl["reward_spec"] == {"method": "rule", "ground_truth": gold}
    assert first["prompt"] == verl["prompt"] == skyrl["prompt"]
    assert verl["extra_info"]["database"] == skyrl["database"] == first["database"]


def test_a_folder_with_the_configs_own_file_alone_is_enough(place: Path):
    for own in [*Path("downloads").rglob("train_spider.json")]:
        own.rename(own.with_name("mine.json"))
    words = shlex.split(COMMANDS[0][0].partition("--out")[0])
    with pytest.raises(UserError, match=r"^data\.train\.sources\.0: .*no train_spider\.json"):
        prepare.main([*words, *SMALL])
    prepare.main([*words, *SMALL, "data.train.sources.0.file=mine.json"])
    assert len(Path("trl.jsonl").read_text().splitlines()) == 4


def test_a_set_that_is_named_is_written_whole(place: Path):
    """With the databases that a job would hold out."""
    words = ("--cfg", "plain.yaml", "--data-root", "downloads", "--data", "spider-train")
    prepare.main([*words, "--export", "trl", *SMALL])
    assert len(Path("trl.jsonl").read_text().splitlines()) == 3 * 4


@pytest.mark.parametrize("trainer", get_args(TrainerName))
def test_marks_of_turns_in_a_prompt_are_text_for_any_tokenizer(trainer: TrainerName):
    prompt = (Message("user", "Paris<|im_end|>[/INST]"),)
    (row,) = rows(trainer, [EXAMPLE], lambda _: prompt)
    assert row["prompt"][0]["content"] == "Paris<\u200b|im_end|>[\u200b/INST]"


def test_other_golds_are_a_column_of_all_rows_or_of_none():
    """As in a Parquet file."""
    more = replace(EXAMPLE, alternatives=("SELECT 2",))
    for examples, golds in ([EXAMPLE], [None]), ([EXAMPLE, more], [[], ["SELECT 2"]]):
        written = rows("trl", examples, lambda _: ())
        assert [row.get("alternatives") for row in written] == golds


# The tiny policy's rows, model and step on a CPU, beside what the page says.
FEW = {
    "verl": """
        data.train_batch_size=2 data.max_response_length=40 data.dataloader_num_workers=0
        actor_rollout_ref.model.path=model actor_rollout_ref.model.use_remove_padding=false
        +actor_rollout_ref.model.override_config.attn_implementation=sdpa
        actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
        actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.optim.lr=1e-3
        actor_rollout_ref.actor.fsdp_config.use_torch_compile=false
        actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]
        actor_rollout_ref.rollout.name=tiny actor_rollout_ref.rollout.tensor_model_parallel_size=1
        actor_rollout_ref.rollout.agent.num_workers=1 reward.num_workers=1
        trainer.device=cpu trainer.n_gpus_per_node=1 trainer.total_training_steps=1
        trainer.val_before_train=true trainer.test_freq=-1 trainer.save_freq=1
        trainer.default_local_dir=trained trainer.logger=[file]
        transfer_queue.backend.SimpleStorage.num_data_storage_units=1
        ray_kwargs.ray_init.num_cpus=8 +ray_kwargs.ray_init.num_gpus=1
        +ray_kwargs.ray_init.include_dashboard=false
    """,
    "skyrl": """
        data.val_data=[] data.dataloader.num_workers=0
        trainer.policy.model.path=model trainer.policy.optimizer_config.lr=1e-3
        trainer.flash_attn=false trainer.remove_microbatch_padding=false
        trainer.algorithm.use_kl_loss=false trainer.train_batch_size=2
        trainer.policy_mini_batch_size=2 trainer.micro_forward_batch_size_per_gpu=16
        trainer.micro_train_batch_size_per_gpu=16 generator.sampling_params.max_generate_length=40
        generator.inference_engine.num_engines=1 trainer.placement.colocate_all=false
        trainer.placement.policy_num_gpus_per_node=1 trainer.placement.ref_num_gpus_per_node=1
        trainer.max_training_steps=1 trainer.eval_interval=-1 trainer.ckpt_interval=-1
        trainer.hf_save_interval=1 trainer.export_path=trained trainer.ckpt_path=checkpoints
        trainer.log_path=logs
    """,
}
ADAPTERS = ROOT / "tests" / "rewards" / "adapters"
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ADAPTERS))),
    "HF_HUB_OFFLINE": "1",
    "XLA_FLAGS": "",  # those of these tests are our JAX's
    "RAY_USAGE_STATS_ENABLED": "0",
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_FILE_LOGGER_PATH": "verl.log",
}


# How the sentences before them end.
SCRIPTS = {
    "trl": "so are tool calls",
    "verl": "A response is one turn",
    "skyrl": "registers (`train_sql.py`)",
    "gym": "alone",
}


def lines_of(words: str) -> str:
    """Return the page's lines after a sentence that ends with these words; a command is one."""
    block = re.search(rf"{re.escape(words)}:\n\n((?:(?: {{4}}.*)?\n)+)", PAGE)
    assert block
    return textwrap.dedent(block[1]).replace("\\\n", "")


def test_the_page_has_the_lines_that_the_libraries_are_run_with():
    for name, words in SCRIPTS.items():
        assert name in lines_of(words)
    assert "train_sql.py" in lines_of("and runs with")


def run(trainer: str, *line: str) -> str:
    done = subprocess.run(
        [interpreter_of(trainer), *line], env=os.environ | ENVIRONMENT, capture_output=True,
        text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def take_step(trainer: str) -> float:
    """Take a step in the working folder; return the mean reward of its replies."""
    if trainer == "trl":
        script = str(ADAPTERS / "trl_step.py")
        logged = json.loads(
            run(trainer, script, "model", lines_of(SCRIPTS["trl"])).splitlines()[-1]
        )
        assert logged["rewards/sql_execution/mean"] == logged["sql/correct"] == logged["reward"]
        return logged["reward"]
    if trainer == "verl":
        command = shlex.split(lines_of(SCRIPTS["verl"]))[1:]
        run(trainer, *command, *FEW["verl"].split())
        begin, end = (
            json.loads(line)["data"] for line in Path("verl.log").read_text().splitlines()
        )
        assert begin["val-core/sql/acc/mean@1"] == begin["val-aux/sql/reward/execution/mean@1"]
        assert begin["val-aux/sql/sql_found/mean@1"] > 0
        return end["critic/rewards/mean"]
    Path("train_sql.py").write_text(lines_of(SCRIPTS["skyrl"]))
    _, script, *settings = shlex.split(lines_of("and runs with"))
    on_cpu = f"import runpy, skyrl_cpu; runpy.run_path({script!r}, run_name='__main__')"
    run(trainer, "-c", on_cpu, *settings, *FEW["skyrl"].split())
    logged = json.loads(Path("skyrl.log").read_text())
    assert logged["environment/correct"] == logged["reward/avg_raw_reward"]
    return logged["reward/avg_raw_reward"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("trainer", get_args(TrainerName))
def test_the_real_library_takes_a_step_with_them(place: Path, trainer: str):
    """Rows, replies, our reward, advantages, loss, optimizer: the library's own trainer."""
    interpreter_of(trainer)
    ((words, _, out),) = (one for one in COMMANDS if one[1] == trainer)
    run(trainer, "-m", "launch.prepare", *shlex.split(words), *SMALL)
    run(trainer, str(ADAPTERS / "tiny_policy.py"), out, "model")
    # Groups with right and wrong replies.
    assert 0 < take_step(trainer) < 1
    (trained,) = Path("trained").rglob("model.safetensors")
    before, after = (load_file(path) for path in (Path("model/model.safetensors"), trained))
    moved = [float(abs(after[name] - weight).max()) for name, weight in before.items()]
    # One step of AdamW moves by the learning rate where there is a gradient.
    assert max(moved) == pytest.approx(1e-3, rel=0.1)


def test_the_real_gym_plays_an_episode_of_two_turns(place: Path):
    database = make_file(place / "a.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES (1), (2)")
    gold = "SELECT a FROM t WHERE a > 1"
    row = {"database": str(database), "reward_spec": {"ground_truth": gold}, "max_turns": 3}
    replies = [f"<think></think><sql>{sql}</sql>" for sql in ("SELECT a FROM t", gold)]
    play = f"print(json.dumps([env.step(reply) for reply in {replies}]))"
    lines = ("import json", f"row = {row}", lines_of(SCRIPTS["gym"]), play)
    first, last = json.loads(run("skyrl", "-c", "\n".join(lines)).splitlines()[-1])
    assert (first["done"], last["done"]) == (False, True)
    assert "WHERE_ERROR" in first["observations"][0]["content"]
    assert last["metadata"]["correct"]
