"""What does it cost to keep a thousand episodes open against servers that answer in 50 ms?

    python benchmarks/episodes.py
    python benchmarks/episodes.py --case long --episodes 200

Prints one JSON object. Episodes of four turns of the diagnosed environment are played on generated
databases, with the executor's worker processes, by `rollout` and `SglangSampler`; the servers are
two processes that send canned bytes (`_scripted_server.py`). Each case has a process of its own:
short prompts, prompts of 6,000 ids, and short ones where some episodes run a query that ends at the
executor's time limit. `ideal_s` is what the servers' answers alone take, one after the other.
Processor seconds are those of this process, without the executor's workers. `loop_delay_ms` is how
late a timer of the client's event loop comes. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from launch.config import load_config
from launch.wiring import SqlSide
from minirl import weights
from minirl.config import SglangConfig, TinyConfig
from minirl.lora import split
from minirl.rollout import rollout
from minirl.sglang import Servers, SglangSampler
from minirl.tiny import make_tiny
from minirl.tokenizer import ChatTokenizer
from sqlenv.types import Episode, Example, Message, Observation

TURNS, GROUP = 4, 8
TICK_S = 0.01
TIME_LIMIT_S = 3.0
QUERY = (
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 500) SELECT sum(x) FROM c"
)
SLOW_QUERY = QUERY.replace("LIMIT 500", "LIMIT 900000000")
REPLY = f"<think>{' the rows are counted' * 8}</think><sql>{QUERY}</sql>"
CASES = {
    "short": {"prompt": 0, "slow": 0},
    "long": {"prompt": 6000, "slow": 0},
    "slow": {"prompt": 0, "slow": 4},
}


@dataclass
class Watched:
    """An environment whose prompts are made longer, and of which some episodes run a slow query.

    Attributes:
        inner: The environment.
        filler: What the first message ends with.
        slow: Questions whose first query is slow, in one episode each.
        ended: When each episode ended, apart from the slow ones.
    """

    inner: Any
    filler: str
    slow: set[str]
    ended: list[float] = field(default_factory=list)
    slow_ended: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self, example: Example) -> tuple[Any, Observation]:
        episode, messages = self.inner.reset(example)
        with self.lock:
            is_slow = example.id in self.slow
            self.slow.discard(example.id)
        if self.filler:
            *others, last = messages
            messages = (*others, Message(last.role, last.content + self.filler))
        return (episode, is_slow), messages

    def step(self, state: tuple[Episode, bool], reply: str) -> tuple[Any, Observation | None]:
        episode, is_slow = state
        if is_slow and not episode.attempts:
            reply = f"<sql>{SLOW_QUERY}</sql>"
        episode, messages = self.inner.step(episode, reply)
        if messages is None:
            with self.lock:
                (self.slow_ended if is_slow else self.ended).append(time.perf_counter())
        return (episode, is_slow), messages


class Ticker:
    """Measures how late timers of a loop come, and the memory of this process."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self.most_bytes = 0
        self.loop_s = 0.0

    async def run(self) -> None:
        begun_s = time.thread_time()
        try:
            while True:
                due_s = time.perf_counter() + TICK_S
                await asyncio.sleep(TICK_S)
                self.late_s.append(max(time.perf_counter() - due_s, 0.0))
                self.most_bytes = max(self.most_bytes, memory())
        finally:
            self.loop_s = time.thread_time() - begun_s


def memory() -> int:
    """Return the resident memory of this process, in bytes."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def scripted(answer_s: float, vocab: int, ids: list[int]) -> Generator[str]:
    """Serve a reply until the block ends; give the address."""
    script = str(Path(__file__).with_name("_scripted_server.py"))
    line = [sys.executable, script, str(answer_s), str(vocab), ",".join(map(str, ids))]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    case = CASES[name]
    config = load_config(
        "progress-demo.yaml",
        [
            "data.demo.train_databases=8", "data.demo.validation_databases=1",
            "data.demo.test_databases=1", f"env.turns={TURNS}", f"executor.isolation={options.isolation}",
            f"executor.workers={options.workers}",
            f"executor.timeout_s={TIME_LIMIT_S}", "executor.max_steps=2000000000",
            "sampler.max_prompt_tokens=8000", "sampler.max_response_tokens=4000",
            "sampler.max_reply_tokens=512", f"run.dir={folder}",
        ],
    )  # fmt: skip
    with ExitStack() as stack:
        sql = stack.enter_context(SqlSide(config, folder))
        count = options.episodes // GROUP
        examples = sql.examples("train")[:count]
        texts = [sql.first_prompt(example)[-1].content for example in examples]
        make_tiny(folder / "model", [*texts, *[REPLY, SLOW_QUERY] * 50], TinyConfig(), 0)
        model, tokenizer = weights.load(folder / "model"), ChatTokenizer(folder / "model")
        reply = [*tokenizer.encode(REPLY), tokenizer.stop_ids[0]]
        addresses = [stack.enter_context(scripted(options.answer_s, 2048, reply)) for _ in range(2)]
        sglang = SglangConfig(urls=tuple(addresses), tolerance=1e9, parallel=options.parallel)
        servers = stack.enter_context(
            Servers(
                sglang, folder / "model", config.sampler, dtype="float32", seed=0, folder=folder
            )
        )
        sampler = SglangSampler(
            model, tokenizer, servers,
            logprobs=lambda _, rows, __: [[np.full(len(row.ids), -1.0) for row in group] for group in rows],
        )  # fmt: skip
        sampler.set_weights(split(model)[1], version=0)
        word = " the"
        length = len(tokenizer.encode(word * 100)) / 100
        filler = word * round(case["prompt"] / length)
        step = max(count // max(case["slow"], 1), 1)
        slow = (
            {example.id for example in examples[::step][: case["slow"]]} if case["slow"] else set()
        )
        environment = Watched(sql.environment(), filler, slow)
        play = lambda chosen, first: rollout(  # noqa: E731
            sampler, tokenizer, environment, chosen, config=config.sampler, group_size=GROUP,
            first_episode=first, max_turns=TURNS, env_workers=options.env_workers,
        )  # fmt: skip
        sql.executor.start()
        sql.executor.gold_many([(e.database, e.gold_sql) for e in examples])
        environment.slow = set()
        play(examples[:2], 10**6)
        environment.slow, environment.ended = slow, []
        ticker = Ticker()
        before = memory()
        ticking = servers.start(ticker.run())
        time.sleep(0.2)
        if options.profile:
            import cProfile

            profiler = cProfile.Profile()
            if options.profile == "loop":

                async def on():
                    profiler.enable()

                servers.run(on())
            else:
                profiler.enable()
        cpu_s, own_s, begun = time.process_time(), time.thread_time(), time.perf_counter()
        groups = play(examples, 0)
        wall_s = time.perf_counter() - begun
        cpu_s, own_s = time.process_time() - cpu_s, time.thread_time() - own_s
        if options.profile:
            import pstats

            if options.profile == "loop":

                async def off():
                    profiler.disable()

                servers.run(off())
            else:
                profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
        ticking.cancel()
        time.sleep(0.1)
        turns = [len(episode.turns) for group in groups for episode in group]
        lengths = [len(turn.reply.ids) for group in groups for e in group for turn in e.turns]
        prompt = groups[0][0].turns[0].observation_ids
        requests = sum(turns)
    late_ms = 1000 * np.array(ticker.late_s)
    ends = np.array(environment.ended) - begun
    return {
        "case": name,
        "episodes": len(turns),
        "turns": float(np.mean(turns)),
        "prompt_ids": len(prompt),
        "reply_ids": float(np.mean(lengths)),
        "requests": requests,
        "wall_s": round(wall_s, 2),
        "ideal_s": round(max(turns) * options.answer_s, 2),
        "client_cpu_ms_per_request": round(1000 * cpu_s / requests, 3),
        "of_which_event_loop_ms": round(1000 * ticker.loop_s / requests, 3),
        "of_which_rollout_ms": round(1000 * own_s / requests, 3),
        "loop_delay_ms": {
            "p50": round(float(np.percentile(late_ms, 50)), 2),
            "p99": round(float(np.percentile(late_ms, 99)), 2),
            "max": round(float(late_ms.max()), 2),
        },
        "memory_mb": {"before": round(before / 1e6, 1), "peak": round(ticker.most_bytes / 1e6, 1)},
        "memory_kb_per_episode": round((ticker.most_bytes - before) / len(turns) / 1e3, 1),
        "ended_s": {
            "p50": round(float(np.percentile(ends, 50)), 2), "last": round(float(ends.max()), 2)
        },
        "slow_ended_s": [round(end - begun, 2) for end in environment.slow_ended],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--answer-s", type=float, default=0.05)
    parser.add_argument("--parallel", type=int, default=SglangConfig().parallel)
    parser.add_argument("--env-workers", type=int, default=8)
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16))
    parser.add_argument("--isolation", choices=["process", "thread"], default="process")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--profile", choices=["loop", "main"])
    options = parser.parse_args()
    if options.case:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(options.case, options, Path(folder))))
        return
    found = {}
    for case in CASES:
        line = [sys.executable, __file__, *sys.argv[1:], "--case", case]
        done = subprocess.run(line, check=True, capture_output=True, text=True)
        found[case] = json.loads(done.stdout)
    print(json.dumps(found | {"cpu_count": os.cpu_count(), "load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
