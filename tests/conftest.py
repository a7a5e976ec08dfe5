"""What every test shares: pretended CPU devices, shared data, how much property tests try."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sqlenv.types import Example
from tests.forked import Copy, copying
from tests.worlds import one_example

ROOT = Path(__file__).parents[1]
# What is cached for all runs is not the user's here, and tests do not see that of others.
_CACHE = tempfile.TemporaryDirectory()
os.environ["MINIRL_CACHE"] = _CACHE.name

# The SQL side is also tested where JAX is not installed. JAX reads these when it is imported.
if importlib.util.find_spec("jax") is not None:
    # XLA ends the process at a flag that it does not know: newer ones have no other emitters.
    emitters = ["--xla_cpu_use_fusion_emitters=false"]
    is_known = importlib.metadata.version("jaxlib").startswith("0.10.")
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_force_host_platform_device_count=8",
            # Tests compile far longer than they compute: these make it five to ten times quicker.
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            # A program in 32 parts, each for a core of its own, takes an eighth longer.
            "--xla_cpu_parallel_codegen_split_count=1",
            # What commands add (`launch.cli`): their programs, and those of tests that have called
            # one, are known by the same flags.
            "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
            *(emitters if is_known else []),
        ]
    ).strip()
    # What is compiled serves all tests and the processes that they start, this time and next; XLA
    # compiles for the processor at hand. `pytest --cache-clear` removes it.
    processor = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    flags = sorted(line for line in set(processor.splitlines()) if line.startswith("flags"))
    named = zlib.crc32("".join(flags).encode())
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / f".pytest_cache/d/jax-{named:08x}")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# The same examples every time, and few; or others each night, and many. A busy machine is slow to
# make examples, which says nothing of them.
_ANY_PACE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", _ANY_PACE, derandomize=True, max_examples=100)
settings.register_profile("nightly", _ANY_PACE, max_examples=2000, print_blob=True)
# `--hypothesis-profile` is read later, and decides.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_configure(config: pytest.Config) -> None:
    # What a test has killed may leave half an entry, which is compiled anew each time.
    config.addinivalue_line("filterwarnings", "ignore:Error .* persistent compilation cache")


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process of ours, which keeps what it compiles where these tests do."""
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "MINIRL_CACHE": str(tmp_path_factory.mktemp("cache")),
        # A user has one device.
        "XLA_FLAGS": re.sub(r"--xla_force_host_\S+", "", os.environ["XLA_FLAGS"]),
        "COLUMNS": "100",
        # Another process may be writing what this one reads.
        "PYTHONWARNINGS": "ignore:Error",
    }


@pytest.fixture(scope="session")
def copies(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Generator[Callable[..., Copy]]:
    """Return what starts copies of a process that has imported the libraries."""
    with copying(tmp_path_factory.mktemp("copies"), environment) as start:
        yield start


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """A question whose answer is one of two rows."""
    return one_example(tmp_path_factory.mktemp("databases"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real data (MINIRL_SHARED, else ../shared beside the checkout), or a skip."""
    named = os.environ.get("MINIRL_SHARED")
    folder = Path(named or ROOT.parent / "shared")
    if not folder.is_dir():
        # A folder that was asked for and is not there is a mistake, not an absence.
        stop = pytest.fail if named else pytest.skip
        stop(f"no shared data at {folder}: set MINIRL_SHARED")
    return folder
