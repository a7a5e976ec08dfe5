"""How commands of several processes end, together, and find the programs that they compiled."""

from __future__ import annotations

import signal

import jax
import numpy as np
import pytest

from minirl.run import preemption
from tests.minirl import toy_run
from tests.minirl.conftest import TOY
from tests.minirl.processes import LIMIT_S, ends, start

# `ends` kills what hangs, and tells what it said, before pytest ends the test.
pytestmark = pytest.mark.timeout(2 * LIMIT_S + 120)
# The toy run as a command.
RUN = """
from tests.minirl import toy_run
from launch import cli
cli.run(lambda arguments: toy_run.main(*arguments))
"""
# A process that ends, and with it the other.
LEAVES = """
import sys
from minirl.run import distributed
coordinator, process = sys.argv[1], int(sys.argv[3])
distributed.join(distributed.ProcessConfig(coordinator, 2, process, heartbeat_s=10))
from launch import cli
from minirl.exchange import UserError

def main(arguments):
    if process == 1:
        raise UserError("only here")
    distributed.check()

cli.run(main)
"""
# Compiles a program of all devices and says whether all were read; the cache of the host is gone.
COMPILES = """
import os, sys
folder, coordinator, process = sys.argv[1], sys.argv[2], int(sys.argv[4])
os.environ["MINIRL_CACHE"] = f"{folder}/{process}-{os.getpid()}"
del os.environ["JAX_COMPILATION_CACHE_DIR"]  # that of the tests
from pathlib import Path
from launch import cli
cli.use_accelerator("cpu", (coordinator, 2, process), folder=Path(folder, "run"))
import jax
from minirl.model.sharding import make_mesh
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
told = []
jax.monitoring.register_event_listener(lambda event, **_: told.append(event))
spread = jax.NamedSharding(make_mesh({"fsdp": 4}), jax.P("fsdp"))
array = jax.make_array_from_callback((8,), spread, lambda index: jax.numpy.ones(8)[index])
jax.block_until_ready(jax.jit(lambda x: jax.numpy.sin(x).sum() + 3)(array))
asked, read = (
    told.count("/jax/compilation_cache/" + event)
    for event in ("compile_requests_use_cache", "cache_hits")
)
print(asked == read > 0)
"""


def test_every_process_finds_the_programs_that_it_compiled(copies, tmp_path):
    for is_read in (False, True):
        found = ends(start(copies, [tmp_path], code=COMPILES, count=2))
        assert [(status, said.split()[-1]) for status, said, _ in found] == [(0, str(is_read))] * 2


@pytest.mark.nightly
def test_a_process_that_leaves_alone_ends_the_others(copies, tmp_path):
    first, second = ends(start(copies, [], code=LEAVES, count=2, cwd=tmp_path))
    assert second[0] == 2
    assert first[0] not in (0, -signal.SIGKILL)  # with which `ends` ends what hangs
    assert "another task died" in first[2] or "another process" in first[2]


# The gap between sampler and learner is all rounding, of which linear attention has more; beside it
# a hybrid has the layers of all models.
@pytest.mark.parametrize(
    ("course", "rounding"),
    [pytest.param("short", 1e-5, marks=pytest.mark.nightly), ("hybrid", 5e-5)],
)
def test_two_processes_of_which_one_is_killed_run_as_one_device_does(
    copies, tmp_path, course, rounding
):
    """One device begins and is stopped, two processes go on, and one device ends the run."""
    one, folder = toy_run.take_course(TOY, tmp_path / "one", course), tmp_path / "run"
    one.run(lambda *_: None)
    first = toy_run.take_course(TOY, folder, course)
    toy_run.arm(first, "advance", 2, toy_run.be_told)
    with preemption.watched(), pytest.raises(preemption.Preempted):
        first.run(lambda *_: None)
    assert first.steps_done == 1
    survivor, killed = ends(start(copies, [folder, course, "advance", 4], code=RUN, count=2))
    assert killed[0] == -signal.SIGKILL, killed[2]
    assert survivor[0] not in (0, -signal.SIGKILL)
    assert "a peer process" in survivor[2] or "another task died" in survivor[2], survivor[2]
    last = toy_run.take_course(TOY, folder, course)
    assert last.steps_done in (2, 3)  # what was still being written is lost
    last.run(lambda *_: None)
    ours, theirs = toy_run.metrics_of(folder), toy_run.metrics_of(tmp_path / "one")
    assert len(ours) == len(theirs) == 4
    for line, twin in zip(ours, theirs, strict=True):
        for numbers in (line, twin):  # of the mesh
            assert numbers.pop("update/padding") > 0
        assert line == pytest.approx(twin, rel=1e-5, abs=rounding)
    sampled = (folder / toy_run.SAMPLED).read_bytes()
    assert sampled == (tmp_path / "one" / toy_run.SAMPLED).read_bytes()
    for leaf, twin in zip(*map(jax.tree.leaves, (last.params, one.params)), strict=True):
        np.testing.assert_allclose(leaf, twin, rtol=0, atol=1e-4 * np.abs(twin).max())
