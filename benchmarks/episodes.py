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
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._scripted_server import scripted
from launch.build import SqlSide
from launch.config import JobConfig, load_config
from minirl.config import SglangConfig, TinyConfig, TrainConfig
from minirl.model import huggingface
from minirl.model.lora import split
from minirl.model.tiny import make_tiny
from minirl.model.tokenizer import ChatTokenizer
from minirl.sample.rollout import rollout
from minirl.sglang.sampler import Servers
from minirl.train.rollouts import make_sampler
from minirl.types import Trajectory
from sqlenv.config import ExecutorConfig
from sqlenv.types import Episode, Example, Message, Observation, Table

TURNS, GROUP, SERVERS = 4, 8, 2
FIRST_WARM = 10**6
WORD = " the"
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
    slow: set[str] = field(default_factory=set)
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

    def step(self, episode: tuple[Episode, bool], reply: str) -> tuple[Any, Observation | None]:
        state, is_slow = episode
        if is_slow and not state.attempts:
            reply = f"<sql>{SLOW_QUERY}</sql>"
        state, messages = self.inner.step(state, reply)
        if messages is None:
            with self.lock:
                (self.slow_ended if is_slow else self.ended).append(time.perf_counter())
        return (state, is_slow), messages


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


@dataclass
class Bench:
    """All that plays episodes of a case.

    Attributes:
        examples: One for each group.
        environment: Where they are played.
        servers: In use.
        play: Plays groups; takes their examples and the number of the first episode.
    """

    examples: Sequence[Example]
    environment: Watched
    servers: Servers
    play: Callable[[Sequence[Example], int], list[list[Trajectory]]]


def settings(options: argparse.Namespace, folder: Path) -> JobConfig:
    given = {
        "data.demo.train_databases": 8,
        "data.demo.validation_databases": 1,
        "data.demo.test_databases": 1,
        "env.turns": TURNS,
        "executor.isolation": "process",
        "executor.workers": options.workers,
        "executor.timeout_s": TIME_LIMIT_S,
        "executor.max_steps": 2**31 - 1,
        "sampler.max_prompt_tokens": 8000,
        "sampler.max_response_tokens": 4000,
        "sampler.max_reply_tokens": 512,
        "run.dir": folder,
    }
    return load_config("progress-demo.yaml", [f"{key}={value}" for key, value in given.items()])


@contextmanager
def bench(name: str, options: argparse.Namespace, folder: Path) -> Generator[Bench]:
    """Make data, a model and servers."""
    case, config = CASES[name], settings(options, folder)
    with SqlSide(config, folder) as sql, ExitStack() as stack:
        examples = sql.examples("train")[: options.episodes // GROUP]
        texts = [sql.first_prompt(example)[-1].content for example in examples]
        make_tiny(folder / "model", [*texts, *[REPLY] * 50], TinyConfig(), 0)
        model, tokenizer = huggingface.load(folder / "model"), ChatTokenizer(folder / "model")
        reply = [*tokenizer.encode(REPLY), tokenizer.stop_ids[0]]
        urls = [stack.enter_context(scripted(options.answer_s, reply)) for _ in range(SERVERS)]
        servers = stack.enter_context(
            Servers(
                SglangConfig(urls=tuple(urls), tolerance=1e9),
                folder / "model",
                config.sampler,
                dtype="float32",
                seed=0,
                folder=folder,
            )
        )
        sampler = make_sampler(
            model, config.sampler, tokenizer, group_size=GROUP, seed=0, servers=servers
        )
        sampler.set_weights(split(model)[1], version=0)
        filler = WORD * round(case["prompt"] / len(tokenizer.encode(WORD * 100)) * 100)
        environment = Watched(sql.environment(), filler)
        # What a run has once is there: worker processes, gold results, prompts, connections.
        sql.executor.start()
        sql.executor.gold_many([(example.database, example.gold_sql) for example in examples])

        def play(chosen: Sequence[Example], first_episode: int) -> list[list[Trajectory]]:
            return rollout(
                sampler,
                tokenizer,
                environment,
                chosen,
                config=config.sampler,
                group_size=GROUP,
                first_episode=first_episode,
                max_turns=TURNS,
                env_workers=options.env_workers,
            )

        play(examples[:4], FIRST_WARM)
        environment.ended.clear()
        if case["slow"]:
            environment.slow = {e.id for e in examples[: case["slow"]]}
        yield Bench(examples, environment, servers, play)


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Play a case, and say what it took."""
    with bench(name, options, folder) as case:
        ticker, before = Ticker(), memory()
        ticking = case.servers.start(ticker.run())
        time.sleep(0.2)
        cpu_s, own_s, begun = time.process_time(), time.thread_time(), time.perf_counter()
        groups = case.play(case.examples, 0)
        wall_s = time.perf_counter() - begun
        cpu_s, own_s = time.process_time() - cpu_s, time.thread_time() - own_s
        ticking.cancel()
        case.servers.run(asyncio.sleep(0.1))
    episodes = [episode for group in groups for episode in group]
    requests = sum(len(episode.turns) for episode in episodes)
    late_ms = 1000 * np.array(ticker.late_s)
    ends_s = np.array(case.environment.ended) - begun
    rows = [attempt.result for episode in episodes for attempt in episode.episode[0].attempts]
    return {
        "episodes": len(episodes),
        "requests": requests,
        "queries_that_ran": sum(isinstance(result, Table) for result in rows),
        "prompt_ids": len(episodes[0].turns[0].observation_ids),
        "reply_ids": len(episodes[0].turns[0].reply.ids),
        "wall_s": round(wall_s, 2),
        "ideal_s": TURNS * options.answer_s,
        "cpu_ms_per_request": round(1000 * cpu_s / requests, 3),
        "of_it_event_loop": round(1000 * ticker.loop_s / requests, 3),
        "of_it_rollout": round(1000 * own_s / requests, 3),
        "loop_delay_ms": percentiles(late_ms),
        "memory_mb": {"before": round(before / 1e6, 1), "peak": round(ticker.most_bytes / 1e6, 1)},
        "memory_kb_per_episode": round((ticker.most_bytes - before) / len(episodes) / 1e3, 1),
        "ended_s": percentiles(ends_s),
        "slow_ended_s": [round(end - begun, 2) for end in case.environment.slow_ended],
    }


def percentiles(values: np.ndarray) -> dict[str, float]:
    shares = {"p50": 50, "p99": 99, "max": 100}
    return {name: round(float(np.percentile(values, at)), 2) for name, at in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--answer-s", type=float, default=0.05)
    parser.add_argument("--env-workers", type=int, default=TrainConfig().env_workers)
    parser.add_argument("--workers", type=int, default=ExecutorConfig().workers)
    parser.add_argument("--case", choices=CASES)
    options = parser.parse_args()
    if options.case:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(options.case, options, Path(folder))))
        return
    found: dict[str, Any] = {}
    for case in CASES:
        line = [sys.executable, __file__, *sys.argv[1:], "--case", case]
        done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
        found[case] = json.loads(done.stdout)
    print(json.dumps(found | {"cpu_count": os.cpu_count(), "load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
