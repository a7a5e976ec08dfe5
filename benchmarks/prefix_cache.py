"""Measure how much of later turns' prompts servers have cached, with and without sticky sessions.

    python benchmarks/prefix_cache.py --python /opt/sglang/bin/python --out prefix.json

Two real SGLang servers on this machine's CPU; episodes of several turns with first prompts of some
hundred tokens that share nothing. Sticky: an episode stays at its server, as always. Not sticky:
each turn goes where least is asked (the pool is made to forget, for this measurement). Prints a
JSON object: for each the cached share of the prompt tokens of second and later turns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks._served import machine, make_parser
from minirl.config import SglangConfig
from minirl.sglang.pool import ServerPool
from tests.launch.sglang_rounds import TURNS, Served, make_models, questions, serving
from tests.launch.sglang_server import serve


class Forgetful(dict):
    """Homes of episodes that nobody finds again."""

    def get(self, key: Any, default: Any = None) -> Any:
        del key
        return default


@contextmanager
def counted(pool: ServerPool) -> Generator[Counter[str]]:
    """Add up prompt tokens of later turns, and those of them that were cached."""
    found: Counter[str] = Counter()
    turns: Counter[Any] = Counter()
    sample = pool.sample

    async def counting(episode: Any, request: Any, stop_ids: Any) -> Any:
        sampled = await sample(episode, request, stop_ids)
        turns[episode] += 1
        if turns[episode] > 1:
            found["tokens"] += len(request.ids)
            found["cached"] += sampled.cached
        return sampled

    pool.sample = counting
    yield found
    pool.sample = sample


def measure(served: Served, *, episodes: int, seed: int) -> dict[str, Any]:
    """Play a round with an empty cache."""
    served.push(0)
    begun = perf_counter()
    with counted(served.servers.pool) as found:
        served.play(questions(episodes, words=300, seed=seed))
    return {
        "cached_share": round(found["cached"] / found["tokens"], 4),
        "tokens_of_later_turns": found["tokens"],
        "computed_anew": found["tokens"] - found["cached"],
        "round_s": round(perf_counter() - begun, 1),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--episodes", type=int, default=24)
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        place = Path(folder)
        models = make_models(place, 1)
        urls = tuple(
            stack.enter_context(serve(options.python, models[0], place / f"{n}.log"))
            for n in range(2)
        )
        with serving(SglangConfig(urls=urls), models, place) as served:
            rows["sticky"] = measure(served, episodes=options.episodes, seed=1)
            served.servers.pool._homes = Forgetful()
            rows["not sticky"] = measure(served, episodes=options.episodes, seed=2)
    report = {**machine(), "episodes": options.episodes, "turns": TURNS, "rows": rows}
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
