"""SGLang's own router before two real servers: it chooses who answers, and is left when one is not
well."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack

import pytest

from minirl.config import SglangConfig

from .sglang_rounds import TURNS, make_models, questions, serving, tokens
from .sglang_server import route, scheduler_of, serve

EPISODES = 6


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.timeout(900)
def test_a_router_passes_on_and_is_left_while_a_server_behind_it_hangs(sglang_python, tmp_path):
    models, asked = make_models(tmp_path, 2), questions(EPISODES, words=30)
    with ExitStack() as stack:
        urls = [
            stack.enter_context(serve(sglang_python, models[0], tmp_path / f"{n}.log"))
            for n in range(2)
        ]
        router = stack.enter_context(route(sglang_python, urls, tmp_path / "router.log"))
        config = SglangConfig(router=router, health_s=5, timeout_s=120)
        served = stack.enter_context(serving(config, models, tmp_path))
        seen: Counter[str] = Counter()

        def now() -> dict[str, float]:
            told = served.sampler.numbers()
            seen.update({name: int(value) for name, value in told.items()})
            return told

        played = []
        for number in range(2):
            served.push(number)
            played.append([tokens(episode) for episode in served.play(asked)])
            told = now()
            assert told["sglang/requests"] == EPISODES * TURNS
            assert (told["sglang/router"], told["sglang/servers"]) == (1, 2)
            assert told["sglang/probe_gap"] < 1e-4
            assert told["sglang/cached_share"] > 0.5
        # Nothing is drawn: other tokens are of other weights, and equal ones of the same.
        assert played[0] != played[1]

        hung = scheduler_of(urls[0])
        os.kill(hung, signal.SIGSTOP)
        try:
            again = [tokens(episode) for episode in served.play(asked)]
            assert again == played[1]
            assert now()["sglang/router"] == 0
        finally:
            os.kill(hung, signal.SIGCONT)
        end = time.monotonic() + 120
        while now()["sglang/router"] == 0:
            assert time.monotonic() < end
            time.sleep(0.5)
        assert [tokens(episode) for episode in served.play(asked)] == played[1]
        assert now()["sglang/router"] == 1
        assert seen["sglang/requests"] == 4 * EPISODES * TURNS
        assert seen["sglang/left_out"] == seen["sglang/taken_back"] >= 1
