"""Our environments, registered, made and played in the real SkyRL-gym, with every reward family.

    python tests/rewards/adapters/skyrl_step.py FOLDER LINES

LINES are those of docs/rewards.md, which make `env` out of `row`. Needs skyrl-gym.
Prints one JSON object.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import skyrl_gym
from omegaconf import OmegaConf
from skyrl_gym.metrics import aggregate_for_environment

GOLD = "SELECT name FROM singer WHERE age > 20"
WRONG = "SELECT name FROM singer"
CALL = '<tool_call>\n{{"name": "run_sql_remote", "arguments": {{"query": "{}"}}}}\n</tool_call>'


def tagged(sql: str) -> str:
    return f"<think></think><sql>{sql}</sql>"


REPLIES = {
    "single_turn": (tagged(GOLD),),
    "diagnosed": (tagged(WRONG), tagged(GOLD)),
    "agentic": (CALL.format(WRONG), f"```sql\n{GOLD}\n```"),
}
# The progressive reward judges the <sql> tag, and clauses are credited in answers.
FAMILIES = {
    "single_turn": ("progressive", "one_shot", "expo", "paverl", "astra"),
    "diagnosed": ("progressive", "one_shot", "expo", "paverl", "astra"),
    "agentic": ("one_shot", "paverl", "astra"),
}


def main(folder: Path, lines: str) -> None:
    database = folder / "music.sqlite"
    with sqlite3.connect(database) as db:
        db.executescript(
            "CREATE TABLE singer (name, age); INSERT INTO singer VALUES ('Ada', 19), ('Bo', 30);"
        )
    db.close()
    skyrl_gym.register(id="minirl_sql", entry_point="rewards.adapters.skyrl:SqlEnv")
    told: dict[str, Any] = {
        f"{kind} {family}": play(database, kind, family)
        for kind, families in FAMILIES.items()
        for family in families
    }
    names: dict[str, Any] = {"row": row_of(database)}
    exec(lines, names)  # noqa: S102  (the page's own lines)
    told["readme"] = [names["env"].step(reply) for reply in REPLIES["diagnosed"]]
    sys.stdout.write(json.dumps(told) + "\n")


def row_of(database: Path) -> dict:
    return {
        "database": str(database),
        "reward_spec": {"method": "rule", "ground_truth": GOLD},
        "max_turns": 3,
    }


def play(database: Path, kind: str, family: str) -> dict:
    settings = {"reward": {"kind": family}, "env": {"kind": kind}, "executor": {"workers": 1}}
    env = skyrl_gym.make(
        "minirl_sql", env_config=OmegaConf.create(settings), extras=row_of(database)
    )
    prompt, _ = env.init([{"role": "user", "content": "Who is over 20?"}])
    steps = [env.step(reply) for reply in REPLIES[kind]]
    metrics = aggregate_for_environment("minirl_sql", [env.get_metrics()])
    env.close()
    return {
        "is_env": isinstance(env, skyrl_gym.Env),
        "prompt": prompt,
        "steps": steps,
        "metrics": metrics,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
