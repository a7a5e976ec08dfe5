"""Rows for the trainers that load data themselves: TRL, verl, SkyRL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from exchange import UserError
from minirl.run.files import whole_file
from sqlenv.types import Example, Observation

Trainer = Literal["trl", "verl", "skyrl"]
Row = dict[str, Any]


def rows(
    trainer: Trainer, examples: Iterable[Example], prompt: Callable[[Example], Observation]
) -> list[Row]:
    """Write questions with their prompts, as messages, in the form that a trainer loads.

    The rewards of `rewards.adapters` find there what they need: the gold query and the path of the
    database.
    """
    form = _FORMS[trainer]
    return [
        form(
            [{"role": one.role, "content": one.content} for one in prompt(example)],
            example.gold_sql,
            _facts(example),
        )
        for example in examples
    ]


def _facts(example: Example) -> Row:
    return {
        "id": example.id,
        "question_id": example.question_id,
        "database": str(example.database.resolve()),
        "db_id": example.db_id,
        "question": example.question,
        "evidence": example.evidence,
        "dialect": example.dialect,
    }


def _trl(prompt: Sequence[Row], gold_sql: str, facts: Row) -> Row:
    return {"prompt": prompt, "gold_sql": gold_sql, **facts}


def _verl(prompt: Sequence[Row], gold_sql: str, facts: Row) -> Row:
    reward = {"style": "rule", "ground_truth": gold_sql}
    name = {"data_source": "sql", "ability": "sql"}
    return {**name, "prompt": prompt, "reward_model": reward, "extra_info": facts}


def _skyrl(prompt: Sequence[Row], gold_sql: str, facts: Row) -> Row:
    reward = {"method": "rule", "ground_truth": gold_sql}
    return {"prompt": prompt, "env_class": "sql", "reward_spec": reward, **facts}


_FORMS: Mapping[Trainer, Callable[[Sequence[Row], str, Row], Row]] = {
    "trl": _trl,
    "verl": _verl,
    "skyrl": _skyrl,
}


def write_rows(path: Path, written: Sequence[Row]) -> None:
    """Write rows as Parquet (.parquet) or as JSON lines (.jsonl), whole or not at all.

    Raises:
        UserError: The file is to be of another kind, or Parquet cannot be written here.
    """
    if path.suffix == ".parquet":
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise UserError(
                f"--out {path}: Parquet needs pyarrow, which TRL and verl bring along: "
                "pip install pyarrow, or name a .jsonl file"
            ) from None
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(list(written)), path)
    elif path.suffix == ".jsonl":
        with whole_file(path) as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in written)
    else:
        raise UserError(f"--out {path}: name a .parquet or a .jsonl file")
