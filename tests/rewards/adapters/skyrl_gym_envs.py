"""Our environments, registered, made and played in the real SkyRL-gym.

    python tests/rewards/adapters/skyrl_gym_envs.py DATABASE LINES

LINES are those of docs/rewards.md, which make `env` out of `row`. Needs skyrl-gym.
Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import skyrl_gym
from omegaconf import OmegaConf
from skyrl_gym.metrics import aggregate_for_environment

GOLD = "SELECT name FROM singer WHERE age > 20"
WRONG = "SELECT name FROM singer"
CALL = f'{{"name": "run_sql_remote", "arguments": {{"query": "{WRONG}"}}}}'
REPLIES = {
    "single_turn": (f"<think></think><sql>{GOLD}</sql>",),
    "diagnosed": tuple(f"<think></think><sql>{sql}</sql>" for sql in (WRONG, GOLD)),
    "agentic": (f"<tool_call>\n{CALL}\n</tool_call>", f"```sql\n{GOLD}\n```"),
}
FAMILIES = {"single_turn": "expo", "diagnosed": "progressive", "agentic": "astra"}


def main(database: str, lines: str) -> None:
    skyrl_gym.register(id="minirl_sql", entry_point="rewards.adapters.skyrl:SqlEnv")
    spec = {"method": "rule", "ground_truth": GOLD}
    row: dict[str, Any] = {"database": database, "reward_spec": spec, "max_turns": 3}
    told: dict[str, Any] = {kind: play(row, kind, family) for kind, family in FAMILIES.items()}
    names: dict[str, Any] = {"row": row}
    exec(lines, names)  # noqa: S102  (the page's own lines)
    told["page"] = [names["env"].step(reply) for reply in REPLIES["diagnosed"]]
    sys.stdout.write(json.dumps(told) + "\n")


def play(row: dict, kind: str, family: str) -> dict:
    settings = {"reward": {"kind": family}, "env": {"kind": kind}, "executor": {"workers": 1}}
    env = skyrl_gym.make("minirl_sql", env_config=OmegaConf.create(settings), extras=row)
    env.init([{"role": "user", "content": "Who is over 20?"}])
    steps = [env.step(reply) for reply in REPLIES[kind]]
    metrics = aggregate_for_environment("minirl_sql", [env.get_metrics()])
    env.close()
    return {"is_env": isinstance(env, skyrl_gym.Env), "steps": steps, "metrics": metrics}


if __name__ == "__main__":
    main(*sys.argv[1:])
