"""Ask a database: a model writes a query, which is shown with its result.

    python -m launch.ask --checkpoint runs/progress-seed0 --db shop.sqlite "How many are sold out?"
    python -m launch.ask --checkpoint Qwen2.5-Coder-0.5B-Instruct --db shop.sqlite < questions.txt

A run is asked with its own prompt, form of a reply and limits, a Hugging Face folder with those of
plain.yaml, or with those of --cfg, for one greedy reply. Queries are read-only. Exit status 1: none
of them gave a table.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from launch import cli, options
from launch.config import load_config
from launch.data.prompts import Prompts
from launch.evaluation.answers import GREEDY
from launch.policy import PLAIN, WHERE, policy_in
from launch.tables import clean, result_view
from minirl.exchange import UserError
from sqlenv.executor import Executor
from sqlenv.executor.database import check_contents
from sqlenv.types import Example, SqlError, Table


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
    # JAX takes seconds to import, and nothing above needs it.
    from launch.evaluation.sampling import Evaluator, TakenAsTheyAre
    from launch.learner import load_model

    policy = policy_in(checkpoint)
    config = load_config(cfg, ()) if cfg else policy.run or load_config(PLAIN, ())
    # The mesh of a run may be that of another machine.
    config = config.model_copy(update={"mesh": "auto"})
    limits = config.executor.model_copy(update={"workers": 1, "now": None})
    env = TakenAsTheyAre(Prompts(config.prompt, config.env).single_turn, config.answer_wrapping)
    sampler = config.evaluation_sampler.model_copy(update={"slots": 1})
    status = 1
    with Executor(limits) as executor:
        with cli.console.status("reading the model"):
            model = load_model(config, policy.model, lora=policy.lora, checkpoint=policy.checkpoint)
            asked = Evaluator(*model, env, sampler, config)
        for text in cli.lines("question: ") if question is None else [question]:
            with cli.console.status("writing a query"):
                (found,) = asked.sample([Example("", text, "", db, "")], GREEDY, first=0)
            if found.outcomes.too_long:
                raise UserError(f"--db {db}: has more tables than this prompt has room for")
            sql = found.queries[0].strip()
            result = SqlError("there is no query in this reply")
            if sql:
                result = executor.execute(db, sql)
                status = 0 if isinstance(result, Table) else status
            cli.output.print(clean(sql or found.replies[0].strip()[:500]))
            cli.output.print(result_view(result), soft_wrap=False)
    sys.exit(status)


if __name__ == "__main__":
    cli.run(main)
