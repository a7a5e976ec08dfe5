"""What the benchmarks of real SGLang servers share."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import jax


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with what all these benchmarks take; the learner is on the CPU too."""
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python",
        default=os.environ.get("MINIRL_SGLANG_PYTHON"),
        required="MINIRL_SGLANG_PYTHON" not in os.environ,
        help="interpreter of an environment with SGLang",
    )
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser


def machine() -> dict[str, Any]:
    """Say where and when."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "jax": jax.__version__,
    }
