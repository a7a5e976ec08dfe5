"""Our environment, registered, made and played in the real SkyRL-gym.

    python tests/rewards/adapters/skyrl_step.py FOLDER

Needs skyrl-gym (`pip install . skyrl-gym`). Prints one JSON object.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path

import skyrl_gym
from omegaconf import OmegaConf
from skyrl_gym.metrics import aggregate_for_environment

GOLD = "SELECT name FROM singer WHERE age > 20"
REPLIES = (
    "<think></think><sql>SELECT name FROM singer</sql>",
    f"<think></think><sql>{GOLD}</sql>",
)


def main(folder: Path) -> None:
    database = folder / "music.sqlite"
    with sqlite3.connect(database) as db:
        db.executescript(
            "CREATE TABLE singer (name, age); INSERT INTO singer VALUES ('Ada', 19), ('Bo', 30);"
        )
    skyrl_gym.register(id="minirl_sql", entry_point="rewards.adapters.skyrl:SqlEnv")
    row = {
        "database": str(database),
        "reward_spec": {"method": "rule", "ground_truth": GOLD},
        "max_turns": 3,
    }
    env = skyrl_gym.make(
        "minirl_sql",
        env_config=OmegaConf.create({"reward": {"kind": "progressive"}}),
        extras=row,
    )
    prompt, _ = env.init([{"role": "user", "content": "Who is over 20?"}])
    steps = [env.step(reply) for reply in REPLIES]
    metrics = aggregate_for_environment("minirl_sql", [env.get_metrics()])
    env.close()
    is_env = isinstance(env, skyrl_gym.Env)
    sys.stdout.write(
        json.dumps({"is_env": is_env, "prompt": prompt, "steps": steps, "metrics": metrics}) + "\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
