"""Kill a run over several processes at random moments; compare its end with an undisturbed one's.

    python benchmarks/kill.py --kills 10 --out killed

Half of the kills are of one process (the others have to end by themselves), half of all. After them
comes one SIGTERM. Prints a JSON object; exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# The demo in small: every phase in some ten seconds.
SETTINGS = (
    "data.demo.train_databases=2",
    "data.demo.validation_databases=1",
    "data.demo.test_databases=1",
    "data.demo.questions_per_database=12",
    "model.tiny={vocab_size: 600, hidden_size: 32, intermediate_size: 64, layers: 1, heads: 2}",
    "model.tiny.kv_heads=1",
    "warm_start.steps=4",
    "warm_start.groups_per_step=4",
    "warm_start.checkpoint_every=1",
    "sampler.slots=8",
    "sampler.max_prompt_tokens=900",
    "sampler.max_response_tokens=160",
    "sampler.max_reply_tokens=16",
    "train.steps=12",
    "train.prompts_per_step=4",
    "train.group_size=2",
    "train.eval_every=4",
    "train.checkpoint_every=2",
    "evaluation.questions=6",
    "evaluation.validation_questions=4",
)
# Longest wait for a process whose neighbour was killed: JAX's heartbeat takes a minute.
SURVIVOR_S = 120


def start(folder: Path, processes: int, devices: int) -> list[subprocess.Popen[bytes]]:
    """Start the processes of a life."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = (
        f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    line = [sys.executable, "-m", "launch.train", "--cfg", "progress-demo.yaml", *SETTINGS]
    line += [f"run.dir={folder}", "--coordinator", address, "--processes", str(processes)]
    with folder.with_suffix(".log").open("ab") as log:
        return [
            subprocess.Popen([*line, "--process", str(p)], env=environment, stdout=log, stderr=log)
            for p in range(processes)
        ]


def wait(alive: list[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Wait until all have ended; tell whether they have."""
    until = time.monotonic() + seconds
    while any(one.poll() is None for one in alive) and time.monotonic() < until:
        time.sleep(0.1)
    return all(one.poll() is not None for one in alive)


def stop(alive: list[subprocess.Popen[bytes]], number: int) -> None:
    for one in alive:
        if one.poll() is None:
            one.send_signal(number)


def timeless(folder: Path) -> list[dict[str, Any]]:
    """Read all numbers of a run that do not depend on the clock."""
    lines = []
    for name in ("warm/metrics.jsonl", "metrics.jsonl"):
        for line in (folder / name).read_text().splitlines():
            record = json.loads(line)
            lines.append({k: v for k, v in record.items() if not k.startswith("time/")})
    return lines


def same(folder: Path, whole: Path) -> dict[str, bool]:
    """Compare what two runs left."""
    files = ("trajectories.jsonl", "before/predictions.jsonl", "after/predictions.jsonl")
    found = {name: (folder / name).read_bytes() == (whole / name).read_bytes() for name in files}
    results = [json.loads((run / "result.json").read_text()) for run in (folder, whole)]
    found["metrics"] = timeless(folder) == timeless(whole)
    found["result.json"] = results[0] | {"seconds": 0} == results[1] | {"seconds": 0}
    found["weights"] = weights(folder) == weights(whole)
    return found


def weights(folder: Path) -> dict[str, bytes]:
    """Read the last checkpoint's arrays."""
    import numpy as np
    import orbax.checkpoint as ocp

    names = [path.name for path in (folder / "checkpoints").iterdir()]
    newest = max(int(name) for name in names if name.isdigit())
    path = folder.absolute() / "checkpoints" / str(newest) / "tree"
    with ocp.PyTreeCheckpointer() as reader:
        stored = dict(reader.metadata(path).item_metadata)
        kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in stored}
        tree = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=kinds))
    return {name: array.tobytes() for name, array in tree.items()}


def life(
    folder: Path, options: argparse.Namespace, rng: random.Random, seconds: float
) -> dict[str, Any]:
    """Start all, and kill one or all at a random moment; tell what came of it."""
    alive = start(folder, options.processes, options.devices)
    delay = seconds * rng.uniform(0.15, 0.7)
    victims = [rng.choice(alive)] if rng.random() < 0.5 else alive
    if wait(alive, delay):
        return {"ended": True}
    stop(victims, signal.SIGKILL)
    killed_at = time.monotonic()
    is_over = wait(alive, SURVIVOR_S)
    took = time.monotonic() - killed_at
    stop(alive, signal.SIGKILL)
    wait(alive, 10)
    return {"ended": False, "delay": round(delay, 1), "victims": len(victims),
            "survivor_s": round(took, 1), "hung": not is_over}  # fmt: skip


def finish(folder: Path, options: argparse.Namespace) -> float:
    """Let a run go to its end; return the seconds."""
    begun = time.monotonic()
    alive = start(folder, options.processes, options.devices)
    if not wait(alive, 900) or any(one.returncode for one in alive):
        stop(alive, signal.SIGKILL)
        raise SystemExit(f"{folder}: did not end well; see {folder.with_suffix('.log')}")
    return time.monotonic() - begun


def terminate(folder: Path, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Send SIGTERM to one process in the middle of a run of its own."""
    alive = start(folder, options.processes, options.devices)
    wait(alive, 0.6 * seconds)
    alive[-1].terminate()
    begun = time.monotonic()
    is_over = wait(alive, SURVIVOR_S)
    codes = [one.returncode for one in alive]
    stop(alive, signal.SIGKILL)
    return {"seconds": round(time.monotonic() - begun, 1), "over": is_over, "codes": codes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2, help="of each process")
    parser.add_argument("--out", type=Path, default=Path("killed"))
    options = parser.parse_args()
    rng = random.Random(options.seed)
    if options.out.exists():
        raise SystemExit(f"--out {options.out}: is there already; name another")
    options.out.mkdir(parents=True)
    whole = options.out / "whole"
    finish(whole, options)
    # The second start finds all programs compiled.
    again = options.out / "again"
    seconds = finish(again, options)
    report: dict[str, Any] = {"whole_s": round(seconds, 1), "again": same(again, whole)}
    lives: list[dict[str, Any]] = []
    runs = [options.out / "run0"]
    while sum(not one["ended"] for one in lives) < options.kills:
        lives.append(life(runs[-1], options, rng, seconds))
        if lives[-1]["ended"]:
            runs.append(options.out / f"run{len(runs)}")
        print(json.dumps(lives[-1]), file=sys.stderr, flush=True)
    runs.append(options.out / "terminated")
    report["sigterm"] = terminate(runs[-1], options, seconds)
    for run in runs:
        if not (run / "result.json").exists():
            finish(run, options)
        report[run.name] = same(run, whole)
    report["lives"] = lives
    report["kills"] = sum(not one["ended"] for one in lives)
    print(json.dumps(report, indent=2))
    alike = all(all(report[run.name].values()) for run in [again, *runs])
    ended = report["sigterm"]["codes"] == [0] * options.processes
    sys.exit(not (alike and ended and not any(one.get("hung") for one in lives)))


if __name__ == "__main__":
    main()
