"""Servers that are children of a run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minirl.config import SGLANG_PYTHON, SglangConfig
from minirl.exchange import UserError
from minirl.sglang import process
from minirl.sglang.process import ChildServer, close, free_ports, launch
from tests.waiting import is_alive, wait_until

ROOT = Path(__file__).parents[2]


PARENT = """
import sys, time
from pathlib import Path
from minirl.sglang.process import ChildServer
line = [sys.executable, "-c", sys.argv[2]]
child = ChildServer(line, {"WORD": "x"}, 1, Path(sys.argv[1]) / "log")
print("up", flush=True)
if sys.argv[3] == "close":
    while not (Path(sys.argv[1]) / "pids").exists(): time.sleep(0.02)
    child.close()
else:
    time.sleep(60)
"""
# A server with a process of its own, which ends with it as SGLang's do; neither takes notice of a
# polite end.
SERVER = """
import os, pathlib, signal, subprocess, sys, time
from minirl.sglang.process import _TIED
signal.signal(signal.SIGTERM, signal.SIG_IGN)
line = [sys.executable, "-c", "import time; time.sleep(60)"]
worker = subprocess.Popen([sys.executable, "-c", _TIED, str(os.getpid()), *line])
path = pathlib.Path(FOLDER) / "part"
path.write_text(f"{os.getpid()} {worker.pid} {os.environ['WORD']}")
path.rename(path.with_name("pids"))
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("end", ["close", "SIGKILL"])
def test_children_end_with_the_run_however_it_ends(tmp_path, end):
    server = SERVER.replace("FOLDER", repr(str(tmp_path)))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), server, end],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    pids = tmp_path / "pids"
    wait_until(pids.exists)
    one, other, word = pids.read_text().split()
    assert word == "x"
    if end == "SIGKILL":
        parent.kill()
    parent.communicate(timeout=30)
    wait_until(lambda: not is_alive(one) and not is_alive(other))


def test_children_are_ended_side_by_side(tmp_path):
    """Each of these takes the whole grace period."""
    sleep = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('end', flush=True); time.sleep(99)"
    )
    logs = [tmp_path / f"{n}.log" for n in range(4)]
    children = [ChildServer([sys.executable, "-c", sleep], {}, 1, log) for log in logs]
    for log in logs:
        said(log)
    begun = time.monotonic()
    close(children)
    assert time.monotonic() - begun < 4 * process._GRACE_S
    assert not any(child.is_running for child in children)


def interpreter(folder):
    """A stand-in that says what it was started as and with, and stays."""
    folder.mkdir()
    path = folder / "python"
    path.write_text('#!/bin/sh\necho "$0 $PATH $CUDA_VISIBLE_DEVICES $1 $2 end"\nexec sleep 60\n')
    path.chmod(0o755)
    return path


def said(log):
    wait_until(lambda: log.read_text().endswith("end\n"))
    return log.read_text().split()[:-1]


def test_launched_servers_have_their_interpreter_and_their_devices(tmp_path, monkeypatch):
    named, default = interpreter(tmp_path / "named"), interpreter(tmp_path / "default")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # the learner's
    monkeypatch.setenv(SGLANG_PYTHON, str(default))
    for given, expected in ((str(named), named), (None, default)):
        config = SglangConfig(python=given, launch=2, devices=("4,5", "6,7"))
        logs = tmp_path / f"{expected.parent.name}-logs"
        path = f"{expected.parent}:{os.environ['PATH']}"
        children = launch(config, tmp_path, dtype="float32", seed=0, logs=logs)
        try:
            assert [said(logs / f"sglang-{number}.log") for number in (0, 1)] == [
                [str(expected), path, devices, "-m", "sglang.launch_server"]
                for devices in ("4,5", "6,7")
            ]
        finally:
            for child in children:
                child.close()
    monkeypatch.setenv(SGLANG_PYTHON, "no-such-python")
    with pytest.raises(UserError, match=r"python \(or MINIRL_SGLANG_PYTHON\): .* no-such-python"):
        SglangConfig(launch=1).find_python()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_connection_takes_a_port_before_its_server_listens():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= port <= last for port in ports)
