"""Inject faults into real SGLang servers while episodes are played; count what is lost.

    python benchmarks/failures.py --python /opt/sglang/bin/python --out failures.json
    python benchmarks/failures.py --python /opt/sglang/bin/python --lora 4

Two servers on this machine's CPU serve a tiny model, each behind a proxy. Each round plays a number
of episodes of several turns at temperature 0. In the middle of it one fault is injected: a signal
to a server's processes, or answers that the proxy corrupts for some seconds. Servers start with
other weights than those that are pushed, so that replies by old weights can be told apart; with
`--lora` adapters of this rank are pushed, and servers keep their weights. Every
trajectory is compared, token by token, with that of a round without a fault. Prints a JSON object,
and a line for each fault on standard error; exit status 1 if an episode was lost, counted twice or
changed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import jax

from benchmarks._faults import SPOILS, Proxy, Spoil, session
from minirl.config import LoraConfig
from minirl.sglang import process
from minirl.sglang.process import ChildServer
from minirl.types import Trajectory
from tests.launch.sglang_rounds import (
    TURNS,
    Served,
    Talk,
    launched,
    make_models,
    questions,
    serving,
    tokens,
)

_launch = process.launch
# Replies of a round before the fault, and how long answers are corrupted.
BEFORE, SPOILT_S = 20, 4.0
# Longest wait for a server to be taken back.
BACK_S = 300.0
OLD, NEW = 0, 1
# Numbers of the sampler that count no events.
MEASURED = {"sglang/servers", "sglang/probe_gap", "sglang/cached_share"}


class Told(logging.Handler):
    """Records the log messages of the server pool with their times."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((time.monotonic(), record.getMessage()))


class Machine:
    """The two servers, their proxies, and the faults that can be injected."""

    def __init__(self, others: Path) -> None:
        self.others = others
        self.children: list[ChildServer] = []
        self.addresses: list[str] = []
        self.proxies: list[Proxy] = []

    def launch(self, *arguments: Any, **settings: Any) -> list[ChildServer]:
        """Start servers as a job does, and put a proxy before each."""
        self.children = _launch(*arguments, **settings)
        for child in self.children:
            self.addresses.append(child.url)
            self.proxies.append(Proxy(child.url))
            child.url = self.proxies[-1].url
        return self.children

    def send(self, number: int, *, to: str, server: int = 0) -> None:
        """Send a signal to those processes of a server whose title has these words."""
        running = self.children[server]._process
        assert running is not None
        for pid, title in session(running.pid).items():
            if to in title:
                os.kill(pid, number)

    def restart(self) -> None:
        """Restart a server without the pool's knowledge."""
        self.children[0].start()

    def load_others(self) -> None:
        """Give a server other weights, as another run would."""
        body = {"model_path": str(self.others), "abort_all_requests": True}
        request = urllib.request.Request(
            f"{self.addresses[0]}/update_weights_from_disk",
            json.dumps(body | {"weight_version": "others"}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60):
            return

    def spoil(self, how: Spoil) -> None:
        self.proxies[0].spoil = how
        time.sleep(SPOILT_S)
        self.proxies[0].spoil = None

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()

    def faults(self) -> Mapping[str, Callable[[], None]]:
        """Return the faults by name."""
        scheduler = "sglang::scheduler"
        return {
            "nothing": lambda: None,
            **{name: lambda how=how: self.spoil(how) for name, how in SPOILS.items()},
            "its weights are changed by others": self.load_others,
            "hangs (SIGSTOP of the scheduler)": lambda: self.send(signal.SIGSTOP, to=scheduler),
            "dies (SIGKILL of the scheduler)": lambda: self.send(signal.SIGKILL, to=scheduler),
            "dies (SIGKILL of all its processes)": lambda: self.send(signal.SIGKILL, to=""),
            "restarts with old weights": self.restart,
            "both die": self.kill_both,
        }

    def kill_both(self) -> None:
        for server in range(2):
            self.send(signal.SIGKILL, to="", server=server)


def provoke(
    served: Served,
    told: Told,
    act: Callable[[], None],
    examples: Sequence[str],
    reference: Sequence[Trajectory],
) -> dict[str, Any]:
    """Play a round with a fault, and return the figures."""
    served.push(NEW)
    served.sampler.numbers()
    happened: list[float] = []

    def happen() -> None:
        happened.append(time.monotonic())
        act()

    fault = threading.Thread(target=happen)
    begun = time.monotonic()
    played = served.play(examples, Talk(at=(BEFORE, fault.start)))
    ended = time.monotonic()
    fault.join()
    events: Counter[str] = Counter()
    until = time.monotonic() + BACK_S
    while True:
        numbers = served.sampler.numbers()
        counts = {k: v for k, v in numbers.items() if k.startswith("sglang/") and v}
        events.update({name: int(counts[name]) for name in counts.keys() - MEASURED})
        if numbers["sglang/servers"] == 2 or time.monotonic() > until:
            break
        time.sleep(0.2)
    turns = sum(len(trajectory.turns) for trajectory in played)
    left_out = [at - happened[0] for at, said in told.said if "left out" in said]
    return {
        "round_s": round(ended - begun, 1),
        "left_out_after_s": [round(seconds, 1) for seconds in left_out if seconds > 0],
        "events": {name.removeprefix("sglang/"): value for name, value in events.items()},
        "episodes": len(played),
        "lost": sum(len(trajectory.turns) != TURNS for trajectory in played),
        "duplicates": events["sglang/requests"] - turns,
        "changed": sum(
            tokens(one) != tokens(other) for one, other in zip(played, reference, strict=True)
        ),
    }


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    installed = os.environ.get("MINIRL_SGLANG_PYTHON")
    parser.add_argument(
        "--python", default=installed, required=not installed, help="with SGLang installed"
    )
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--lora", type=int, metavar="RANK", help="push adapters alone")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORDS", help="faults whose names have these"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    told = Told()
    logging.getLogger("minirl.sglang.pool").addHandler(told)
    examples = questions(options.episodes, words=40)
    rows: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        place = Path(folder)
        models = make_models(place, 2)
        config = launched(options.python, timeout_s=60.0)
        lora = LoraConfig(rank=options.lora) if options.lora else None
        # Others than those that are pushed, or that adapters are pushed for.
        servers = Machine(models[NEW if lora else OLD])
        with (
            mock.patch.object(process, "launch", servers.launch),
            serving(config, models, place, lora) as served,
        ):
            served.push(OLD)
            old = served.play(examples)
            served.push(NEW)
            new = served.play(examples)
            differ = sum(tokens(a) != tokens(b) for a, b in zip(old, new, strict=True))
            for name, act in servers.faults().items():
                if any(words in name for words in options.only):
                    rows[name] = provoke(served, told, act, examples, new)
                    print(json.dumps({name: rows[name]}), file=sys.stderr, flush=True)
                for proxy in servers.proxies:
                    proxy.freed.set()
                    proxy.freed = threading.Event()
        servers.close()
    text = json.dumps({"differ_with_old_weights": differ, "rows": rows}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    sys.exit(any(row[key] for row in rows.values() for key in ("lost", "duplicates", "changed")))


if __name__ == "__main__":
    main()
