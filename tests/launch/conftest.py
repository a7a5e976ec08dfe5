"""The smallest job that goes through every phase, a way to run commands as a user does, and a
database for single queries.
"""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sqlenv.config import DemoConfig
from sqlenv.demo import generate
from sqlenv.types import Example

ROOT = Path(__file__).parents[2]
# No reward can move a model this raw: weight decay and the KL term do, so that every step counts.
TINY: dict[str, Any] = {
    "run": {"name": "tiny"},
    "data": {
        "demo": {
            "train_databases": 2,
            "validation_databases": 1,
            "test_databases": 1,
            "questions_per_database": 12,
        },
        "train": {"sources": [{"layout": "spider", "path": ".", "split": "train"}]},
        "validation": {"sources": [{"layout": "spider", "path": ".", "split": "dev"}]},
        "test": {"sources": [{"layout": "spider", "path": ".", "split": "test"}]},
    },
    "prompt": {"style": "demo", "schema_style": "compact", "example_values": 0},
    "model": {
        "tiny": {
            "vocab_size": 600,
            "hidden_size": 32,
            "intermediate_size": 64,
            "layers": 1,
            "heads": 2,
            "kv_heads": 1,
        },
        "dtype": "float32",
    },
    "warm_start": {
        "steps": 3,
        "groups_per_step": 2,
        "repair_share": 0.25,
        "batching": {"groups_per_batch": 2},
        "checkpoint_every": 1,
    },
    "env": {"kind": "diagnosed", "turns": 2},
    "executor": {"isolation": "thread", "timeout_s": 2, "max_steps": 2_000_000},
    "sampler": {
        "slots": 8,
        "max_prompt_tokens": 700,
        "max_response_tokens": 160,
        "max_reply_tokens": 16,
    },
    "train": {
        "steps": 3,
        "prompts_per_step": 2,
        "group_size": 2,
        "algorithm": {"kl_coef": 0.1},
        "optimizer": {"learning_rate": 0.01, "weight_decay": 0.5},
        "eval_every": 2,
        "checkpoint_every": 1,
        "kl_every": 1,
        "sample_every": 1,
    },
    "evaluation": {"questions": 6, "validation_questions": 4},
}

TABLES = """
CREATE TABLE emp (name TEXT, dept TEXT, sal INT);
INSERT INTO emp VALUES ('ann','x',10), ('bob','x',20), ('cid','y',20), ('dee','y',30);
"""

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the config of the smallest job."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Return `command(module, *arguments, cwd=folder)`, run as `python -m module`."""
    # Programs so small run as quickly when they are hardly optimised, and compile in half the time.
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "MINIRL_CACHE": str(tmp_path_factory.mktemp("cache")),
        "XLA_FLAGS": quick,
        "COLUMNS": "100",
    }

    def run(*arguments: str | Path, cwd: Path, code: str = "") -> Any:
        start = ["-c", code] if code else ["-m"]
        line = [sys.executable, *start, *map(str, arguments)]
        return subprocess.run(
            line, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
        )

    return run


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """Return the interpreter of an environment with SGLang, or skip."""
    named = os.environ.get("MINIRL_SGLANG_PYTHON")
    if not named and importlib.util.find_spec("sglang") is None:
        pytest.skip(
            "sglang is not installed here: set MINIRL_SGLANG_PYTHON to the interpreter of an "
            "environment that has it"
        )
    return named or sys.executable


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("db") / "emp.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(TABLES)
    connection.close()
    return path


def verbal_folder(folder: Path, verbal: dict[str, Any], *, questions: int) -> Path:
    """Fill a folder with data, and `verbal.yaml` that asks some questions of it."""
    one = {"train_databases": 1, "validation_databases": 1, "test_databases": 1}
    generate(folder / "data", DemoConfig(**one, questions_per_database=12))
    config = {
        **TINY,
        "data": {**TINY["data"], "demo": None, "root": str(folder / "data")},
        "evaluation": {**TINY["evaluation"], "questions": questions},
        "verbal": verbal,
    }
    (folder / "verbal.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


def example(database: Path, gold: str, name: str = "1") -> Example:
    return Example(name, "", "emp", database, gold)
