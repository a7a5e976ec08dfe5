"""What a run would be, in a few lines, with all that it needs looked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from launch.build import SqlSide
from launch.config import JobConfig, Split
from launch.data.preflight import check_questions, describe_passes, describe_sampler
from launch.data.prompts import Prompts, measure, read_tokenizer
from launch.plan import describe_memory, model_shape
from launch.warm_start import make_lessons
from minirl.model.huggingface import check_files
from sqlenv.demo import generate


def describe_run(config: JobConfig, accelerator: str) -> dict[str, str]:
    """Check the model's files and all questions, and say in six lines what the run would be.

    Raises:
        UserError: The run would miss something.
    """
    tokenizer = lessons = None
    if config.model.path is not None:
        check_files(config.model.path)
        tokenizer = read_tokenizer(config, config.model.path)
    with TemporaryDirectory() as scratch:
        root = config.data.root
        if config.data.demo is not None:
            generate(root := Path(scratch) / "data", config.data.demo)
        loaded = check_questions(config, root)
        prompts = Prompts(config.prompt, config.env)
        prompts.describe(loaded["train"].descriptions)
        first = prompts.training(loaded["train"].examples[0])
        limit = config.sampler.max_prompt_tokens
        if config.has_base and not config.learns_own:
            assert tokenizer is not None
            with SqlSide(config, Path(scratch)) as sql:
                sql.prompts.describe(loaded["train"].descriptions)
                lessons = make_lessons(config, sql, tokenizer, loaded["train"].examples, ())
        return {
            **_course(config, {split: len(data.examples) for split, data in loaded.items()}),
            "sampler": describe_sampler(config, accelerator),
            "memory": describe_memory(config, model_shape(config, None), lessons),
            "prompt": f"{measure(first, tokenizer, limit=limit)[1]} (--show-prompt prints it)",
        }


def _course(config: JobConfig, found: Mapping[Split, int]) -> dict[str, str]:
    train, limits = config.train, config.evaluation
    validation = min(found["validation"], limits.validation_questions or found["validation"])
    test = min(found["test"], limits.questions or found["test"])
    warm = ""
    if config.warm_start:
        steps = config.warm_start.steps
        warm = f"after {f'{steps:,}' if steps else 'one pass'} of the warm start, "
    return {
        "questions": f"{found['train']:,} to learn from, {validation:,} of {found['validation']:,} "
        f"to choose checkpoints by, {test:,} of {found['test']:,} to test on",
        "passes": describe_passes(config, found["train"]),
        "steps": f"{warm}{train.all_steps:,} of {train.prompts_per_step} prompts x "
        f"{train.group_size} answers",
    }
