"""Ask a database: a model writes a query, which is shown with its result.

    python -m launch.ask --checkpoint runs/progress-seed0 --db shop.sqlite "How many are sold out?"
    python -m launch.ask --checkpoint Qwen2.5-Coder-0.5B-Instruct --db shop.sqlite < questions.txt

A run is asked with its own prompt, form of a reply and limits, a Hugging Face folder with those of
plain.yaml, or with those of --cfg, for one greedy reply. Queries are read-only. Exit status 1: none
of them gave a table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from launch import cli, options
from launch.config import load_config
from launch.policy import PLAIN, WHERE, policy_in
from launch.tables import clean, result_view
from minirl.exchange import UserError
from sqlenv.executor import Executor
from sqlenv.executor.database import check_contents
from sqlenv.types import Example, Result, SqlError, Table


@options.command
def main(
    question: Annotated[str | None, Parameter(help="default: lines of standard input")] = None,
    /,
    *,
    checkpoint: Annotated[Path, Parameter(help=WHERE)],
    db: Annotated[Path, Parameter(help="a SQLite database")],
    cfg: options.OtherConfigOption = None,
    accel: options.AcceleratorOption = None,
) -> None:
    """Ask a database."""
    check_contents(db)
    cli.use_accelerator(accel)
    status = 1
    questions = cli.lines("question: ") if question is None else [question]
    for said, result in _answers(checkpoint, cfg, db, questions):
        cli.output.print(clean(said))
        cli.output.print(result_view(result), soft_wrap=False)
        status = 0 if isinstance(result, Table) else status
    sys.exit(status)


def _answers(
    where: Path, cfg: str | None, database: Path, questions: Iterable[str]
) -> Iterator[tuple[str, Result]]:
    """Yield the query for each question, or a reply without one, and what came of it."""
    from launch.build import load_model
    from launch.data.prompts import Prompts
    from launch.evaluation.answers import GREEDY
    from launch.evaluation.sampling import Evaluator, TakenAsTheyAre

    policy = policy_in(where)
    config = load_config(cfg, ()) if cfg else policy.run or load_config(PLAIN, ())
    # The mesh of a run may be that of another machine.
    config = config.model_copy(update={"mesh": "auto"})
    limits = config.executor.model_copy(update={"workers": 1, "now": None})
    env = TakenAsTheyAre(Prompts(config.prompt, config.env).single_turn, config.answer_wrapping)
    sampler = config.evaluation_sampler.model_copy(update={"slots": 1})
    with Executor(limits) as executor:
        with cli.console.status("reading the model"):
            model = load_model(config, policy.model, lora=policy.lora, checkpoint=policy.checkpoint)
            asked = Evaluator(*model, env, sampler, GREEDY, config)
        for question in questions:
            with cli.console.status("writing a query"):
                (found,) = asked.sample([Example("", question, "", database, "")], first=0)
            if found.outcomes.too_long:
                raise UserError(f"--db {database}: has more tables than this prompt has room for")
            if sql := found.queries[0].strip():
                yield sql, executor.execute(database, sql)
            else:
                yield found.replies[0].strip()[:500], SqlError("there is no query in this reply")


if __name__ == "__main__":
    cli.run(main)
