"""What the scoring benchmarks run on: questions, and predictions for them."""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from sqlenv.config import DataConfig, DemoConfig, SourceConfig
from sqlenv.datasets import load
from sqlenv.demo import generate
from sqlenv.types import Example


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make a parser with the options that name questions and predictions."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data-root", type=Path, help="a folder in Spider's layout")
    parser.add_argument("--data", type=Path, default=Path("dev.json"), help="in --data-root")
    parser.add_argument("--predictions", nargs="*", type=Path, default=[])
    return parser


@contextmanager
def open_questions(options: argparse.Namespace) -> Generator[tuple[Example, ...]]:
    """Load the questions that the options name; without a folder, make those of the demo."""
    with tempfile.TemporaryDirectory() as folder:
        root, file = options.data_root, options.data
        if root is None:
            root, file = Path(folder) / "demo", Path("train_spider.json")
            generate(root, DemoConfig())
        source = SourceConfig(layout="spider", path=root, file=str(file))
        config = DataConfig(sources=(source,), drop_failing_gold=False, drop_empty_gold=False)
        yield load(config).examples


def damage(sql: str, rng: random.Random) -> str:
    """Lose a word of a query, or put another of its words in its place."""
    words = sql.split()
    at = rng.randrange(1, len(words))
    words[at : at + 1] = [] if rng.random() < 0.3 else [rng.choice(words)]
    return " ".join(words)
