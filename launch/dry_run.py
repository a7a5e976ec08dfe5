"""What `launch.train --dry-run` looks at and says: everything but the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from launch.config import JobConfig
from launch.data.preflight import check_questions, describe_passes
from launch.data.prompts import Prompts
from launch.evaluation.testsets import Split
from sqlenv.data.loading import LoadedData
from sqlenv.demo import generate
from sqlenv.types import Observation

# Characters of the example prompt that are shown, half of them from its end.
_SHOWN = 120


def describe_run(config: JobConfig) -> dict[str, str]:
    """Check the model's files and all questions, and say in five lines what the run would be.

    Raises:
        UserError: The run would miss something.
    """
    from launch.plan import describe_memory, model_shape

    if config.model.path is not None:
        from minirl.model.huggingface import check_files

        check_files(config.model.path)
    with TemporaryDirectory() as scratch:
        root = config.data.root
        if config.data.demo is not None:
            generate(root := Path(scratch) / "data", config.data.demo)
        loaded = check_questions(config, root)
        return {
            **_course(config, {split: len(data.examples) for split, data in loaded.items()}),
            "memory": describe_memory(config, model_shape(config, None)),
            "prompt": _prompt(config, _first_prompt(config, loaded["train"])),
        }


def _course(config: JobConfig, found: Mapping[Split, int]) -> dict[str, str]:
    train, limits = config.train, config.evaluation
    validation = min(found["validation"], limits.validation_questions or found["validation"])
    test = min(found["test"], limits.questions or found["test"])
    warm = f"after {config.warm_start.steps:,} of the warm start, " if config.warm_start else ""
    return {
        "questions": f"{found['train']:,} to learn from, {validation:,} of {found['validation']:,} "
        f"to choose checkpoints by, {test:,} of {found['test']:,} to test on",
        "passes": describe_passes(config, found["train"]),
        "steps": f"{warm}{train.all_steps:,} of {train.prompts_per_step} prompts x "
        f"{train.group_size} answers",
    }


def _first_prompt(config: JobConfig, train: LoadedData) -> Observation:
    prompts = Prompts(config.prompt, config.env)
    prompts.describe(train.descriptions)
    return prompts.training(train.examples[0])


def _prompt(config: JobConfig, prompt: Observation) -> str:
    """Show a prompt's beginning and end; its length in tokens where there is a tokenizer."""
    if config.model.path is None:
        whole = "\n".join(message.content for message in prompt)
        size = f"{len(whole):,} characters"
    else:
        from minirl.model.tokenizer import ChatTokenizer

        tokenizer = ChatTokenizer(config.model.path)
        ids = tokenizer.encode_chat(prompt)
        whole, size = tokenizer.decode(ids), f"{len(ids):,} tokens"
    words = " ".join(whole.split())
    half = _SHOWN // 2
    short = words if len(words) <= _SHOWN else f"{words[:half]} ... {words[-half:]}"
    return f"{size}, the first: {short}"
