"""How commands of several processes end, together."""

import signal

import pytest

from minirl.run import preemption
from tests.minirl import toy
from tests.minirl.toy import LIMIT_S, ends, processes
from tests.plain_model import assert_near

# `ends` kills what hangs, and tells what it said, before pytest ends the test.
pytestmark = pytest.mark.timeout(2 * LIMIT_S + 120)
# The toy run as a command.
RUN = """
from tests.minirl import toy
from launch import cli
cli.run(lambda arguments: toy.main(*arguments))
"""


# What linear attention adds on a mesh, an update and a sampler, is in tests/minirl/test_mesh.py and
# test_sampler.py.
def test_two_processes_of_which_one_is_killed_run_as_one_device_does(copies, tmp_path):
    """One device begins and is stopped, two processes go on, and one device ends the run."""
    one, folder, course = toy.take_course(tmp_path / "one", "short"), tmp_path / "run", "short"
    toy.run_course(one, course)
    first = toy.take_course(folder, course)
    toy.arm(first, "advance", 2, toy.be_told)
    with preemption.watched(), pytest.raises(preemption.Preempted):
        first.run(toy.ignore)
    assert first.steps_done == 1
    survivor, killed = ends(processes(copies, [folder, course, "advance", 4], code=RUN))
    assert killed[0] == -signal.SIGKILL, killed[2]
    assert survivor[0] not in (0, -signal.SIGKILL)
    assert "a peer process" in survivor[2] or "another task died" in survivor[2], survivor[2]
    last = toy.take_course(folder, course)
    assert last.steps_done in (2, 3)  # what was still being written is lost
    toy.run_course(last, course)
    ours, theirs = toy.metrics_of(folder), toy.metrics_of(tmp_path / "one")
    assert len(ours) == len(theirs) == 4
    for line, twin in zip(ours, theirs, strict=True):
        for numbers in (line, twin):  # of the mesh
            assert numbers.pop("update/padding") > 0
        assert line == pytest.approx(twin, rel=1e-5, abs=1e-5)
    sampled = (folder / toy.SAMPLED).read_bytes()
    assert sampled == (tmp_path / "one" / toy.SAMPLED).read_bytes()
    assert_near(last.params, one.params, rtol=1e-4)
