"""Work on all cores: lots in order, and processes that end when nobody waits for them."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.data.checks import process_pool
from sqlenv.config import ExecutorConfig
from tests.waiting import is_alive, wait_until

from .conftest import ROOT

TWO = ExecutorConfig(
    workers=2,
)


@contextmanager
def make_square(config: ExecutorConfig) -> Generator[Callable[[int], tuple[int, int]]]:
    assert config.threads == 1
    yield lambda number: (number * number, os.getpid())


def test_lots_come_in_order_from_the_same_processes():
    with process_pool(make_square, TWO, most=200) as do:
        found = [answer for start in (0, 100) for answer in do(range(start, start + 100))]
    assert [square for square, _ in found] == [number**2 for number in range(200)]
    assert os.getpid() not in {pid for _, pid in found}
    assert len({pid for _, pid in found}) <= 2


def test_few_jobs_stay_in_this_process():
    with process_pool(make_square, TWO, most=10) as do:
        assert {pid for _, pid in do(range(10))} == {os.getpid()}


def fail(pids: list[int]) -> None:
    with process_pool(make_square, TWO, most=200) as do:
        pids += {pid for _, pid in do(range(100))}
        raise KeyboardInterrupt


def test_a_pool_that_fails_ends_its_own_processes_alone():
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            fail(pids := [])
        wait_until(lambda: not any(map(is_alive, pids)))
        assert other.is_alive()
    finally:
        other.kill()
        other.join()


SLEEPERS = """
import os, sys, time
from contextlib import contextmanager
from pathlib import Path
from launch.data.checks import process_pool
from sqlenv.config import ExecutorConfig

@contextmanager
def make_sleeper(config):
    def sleep(path):
        (path / str(os.getpid())).touch()
        time.sleep(600)
    yield sleep

if __name__ == "__main__":
    with process_pool(make_sleeper, ExecutorConfig(workers=2), most=200) as do:
        list(do([Path(sys.argv[1])] * 32))
"""


def test_processes_end_with_the_one_that_started_them(tmp_path: Path):
    """Also where it is killed, and can tell them nothing."""
    told = tmp_path / "told"
    told.mkdir()
    script = tmp_path / "sleepers.py"
    script.write_text(SLEEPERS)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, script, told], env=env, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len([*told.iterdir()]) == 2)
        process.kill()
        process.wait(120)
        wait_until(lambda: not any(is_alive(path.name) for path in told.iterdir()))
    finally:
        process.kill()
        process.wait()
