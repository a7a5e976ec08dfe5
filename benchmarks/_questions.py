"""What the scoring benchmarks run on: questions, and predictions for them."""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from sqlenv.config import DemoConfig, Layout, SourceConfig
from sqlenv.data.loading import read_all
from sqlenv.demo import generate
from sqlenv.types import Dialect, Example


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make a parser with the options that name questions and predictions."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data-root", type=Path, help="a data set's folder")
    parser.add_argument("--layout", default="spider", choices=get_args(Layout))
    parser.add_argument("--dialect", default="sqlite", choices=get_args(Dialect))
    parser.add_argument("--data", type=Path, default=Path("dev.json"), help="in --data-root")
    parser.add_argument("--predictions", nargs="*", type=Path, default=[])
    return parser


@contextmanager
def open_questions(options: argparse.Namespace) -> Generator[tuple[Example, ...]]:
    """Load the questions that the options name; without a folder, make those of the demo."""
    with tempfile.TemporaryDirectory() as folder:
        source = SourceConfig(
            layout=options.layout,
            path=options.data_root or Path(folder) / "demo",
            file=str(options.data),
            dialect=options.dialect,
        )
        if options.data_root is None:
            generate(source.path, DemoConfig())
            source = source.model_copy(update={"file": "train_spider.json"})
        yield read_all(source)


def damage(sql: str, rng: random.Random) -> str:
    """Lose a word of a query, or put another of its words in its place."""
    words = sql.split()
    at = rng.randrange(1, len(words))
    words[at : at + 1] = [] if rng.random() < 0.3 else [rng.choice(words)]
    return " ".join(words)
