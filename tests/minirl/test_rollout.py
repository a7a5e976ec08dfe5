"""Playing episodes: the mask, the budget, appended ids, and that a run can be repeated."""

import logging
import random
import sqlite3
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from minirl.config import SamplerConfig
from minirl.exchange import Message
from minirl.sample.rollout import Rollout, flatten
from minirl.types import Reply

from . import toy


class Script:
    """A sampler that gives every episode the same replies, each cut to its limit."""

    is_repeatable = True

    def __init__(self, replies, *, stop_ids=toy.STOP_IDS, text=""):
        self.replies, self.stop_ids, self.text = replies, stop_ids, text
        self.requests, self.waiting, self.released, self.given = [], [], [], Counter()

    def submit(self, request):
        self.requests.append(request)
        self.waiting.append(request)

    def advance(self, *, max_steps):
        waiting, self.waiting = self.waiting, []
        return [(request.episode, self._reply(request)) for request in waiting]

    def wake(self): ...

    def release(self, episode):
        self.released.append(episode)
        self.given[episode] = 0

    def _reply(self, request):
        ids = self.replies[self.given[request.episode]][: request.max_tokens]
        self.given[request.episode] += 1
        finish = "stop" if ids[-1] in self.stop_ids else "length"
        return Reply(tuple(ids), tuple(-i / 10 for i in ids), self.text, finish, (4,) * len(ids))


class Turns:
    """Gives the same observation for some turns; an episode is the tuple of replies so far."""

    def __init__(self, turns, *, delay_s=0.0):
        self.turns, self.delay_s = turns, delay_s
        self.lock, self.random = threading.Lock(), random.Random(0)

    def reset(self, example):
        return (), [Message("user", example)]

    def step(self, episode, reply):
        with self.lock:
            wait_s = self.random.uniform(0, self.delay_s)
        time.sleep(wait_s)
        episode = (*episode, reply)
        return episode, None if len(episode) == self.turns else [Message("user", "GO")]


def play(
    sampler, environment, examples, *, group_size=1, limits=None, tokenizer=None, **options
) -> Any:
    sizes = {"slots": 4, "max_prompt_tokens": 48, "max_response_tokens": 48, **(limits or {})}
    return Rollout(
        sampler, tokenizer or toy.Tokenizer(), environment, examples, config=SamplerConfig(**sizes),
        group_size=group_size, first_episode=0, **options,
    ).play()  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "reply", "finish", "heard"),
    [
        ("<think>\n", "a <sql>b</sql>", "length", "<think>\na <sql>b</sql>"),
        ("<think>", "a</think><sql>b", "length", "a</think><sql>b"),
        ("<think>\n", "<sql>b</sql>", "stop", "<sql>b</sql>"),
        ("<think>\n\n</think>\n\n", "a", "length", "a"),
        ("", "a", "length", "a"),
    ],
)
def test_a_thought_that_the_prompt_opened_says_nothing_if_cut_off(prompt, reply, finish, heard):
    """The environment is told that it is one, for the reply alone does not."""

    class Texts(toy.Tokenizer):
        """Id 50 is the end of the prompt."""

        def decode(self, ids):
            return "".join(prompt if i == 50 else "?" for i in ids)

        def encode_chat(self, messages):
            return [2, 4, 50]

    sampler = Script([[7, 1] if finish == "stop" else [7]], text=reply)
    ((trajectory,),) = play(sampler, Turns(1), ["A"], tokenizer=Texts())
    assert trajectory.turns[0].reply.text == heard
    assert trajectory.episode == (heard,)


# A is 4, B is 5, G is 10, O is 18. A reply's own stop token (1) is not repeated; where it has none,
# the template puts one that is not the policy's.
@pytest.mark.parametrize(
    ("first", "said", "glue"), [((7, 8, 1), (7, 8, 1), ()), ((7, 8, 7, 7), (7, 8, 7), (1,))]
)
def test_history_is_only_appended_to_and_glue_closes_a_reply_that_did_not_stop(first, said, glue):
    sampler = Script([first, (9, 1)])
    limits = {"max_reply_tokens": 3, "temperature": 0.0, "top_p": 0.9}
    ((trajectory,),) = play(sampler, Turns(2), ["AB"], limits=limits)
    prompt, observed = (2, 4, 5, 3), (*glue, 2, 10, 18, 3)
    later = (*prompt, *said, *observed)
    assert [request.ids for request in sampler.requests] == [prompt, later]
    assert {(one.temperature, one.top_p) for one in sampler.requests} == {(0.0, 0.9)}
    assert [turn.observation_ids for turn in trajectory.turns] == [prompt, observed]
    flat = flatten(trajectory)
    assert flat.ids.tolist() == [*later, 9, 1]
    assert flat.ids[flat.is_action].tolist() == [*said, 9, 1]
    np.testing.assert_allclose(flat.logprobs, np.where(flat.is_action, -flat.ids / 10, 0), 1e-6)
    assert flat.prompt_length == len(prompt)
    assert (trajectory.ended, trajectory.episode, sampler.released) == ("done", ("", ""), [0])


@pytest.mark.parametrize(
    ("budget", "turns", "ended"),
    [
        (12, 3, "done"),  # 2 + 4 + 1 + 4 + 1: all of it fits
        (7, 2, "budget"),  # only the second reply still fits
        (6, 1, "budget"),  # the second observation would fit, but no reply to it
        (1, 1, "budget"),  # the first reply is cut
    ],
)
def test_an_episode_ends_when_the_next_reply_has_no_room(budget, turns, ended):
    """However it ends, what is kept of its final state is made once, in an environment's thread."""
    sampler, finished = Script([[7, 1], [1], [1]]), []

    def finish(episode):
        finished.append(threading.current_thread())
        return len(episode)

    limits = {"max_response_tokens": budget}
    ((trajectory,),) = play(sampler, Turns(3), ["AB"], limits=limits, finish=finish)
    assert (len(trajectory.turns), trajectory.ended) == (turns, ended)
    assert trajectory.is_cut_off == (ended == "budget")
    # The environment has seen every reply, whatever the budget.
    assert trajectory.episode == turns
    assert len(finished) == 1
    assert threading.main_thread() not in finished
    assert len(flatten(trajectory).ids) - 4 <= budget
    assert sampler.released == [0]


def test_the_last_turn_gives_its_place_back_before_it_is_judged():
    sampler = Script([[7, 1]])
    play(sampler, Turns(1), ["A"], max_turns=1)
    assert sampler.released == [0]
    with pytest.raises(RuntimeError, match="max_turns = 1"):
        play(sampler, Turns(2), ["A"], max_turns=1)


class Failing(Turns):
    """Fails at the reset of L, and when some episodes of K wait for a second reply; an episode
    begins with its example.
    """

    steps = 0

    def reset(self, example):
        if example == "L":
            raise OSError("a lost disk")
        return (example,), super().reset(example)[1]

    def step(self, episode, reply):
        with self.lock:
            self.steps += episode[0] == "K"
            if episode[0] == "K" and self.steps == 2:
                raise sqlite3.OperationalError("database is locked")
        return super().step(episode, reply)


def test_a_prompt_that_is_too_long_leaves_its_group_empty(caplog):
    """Also where the environment of the last group has failed."""
    limits, examples = {"max_prompt_tokens": 4}, ["AB", "ABC", "A", "ABCD", "L"]
    with caplog.at_level(logging.WARNING):
        groups = play(
            Script([[1]]), Failing(2), examples, group_size=2, limits=limits,
            failed=lambda *_: None,
        )  # fmt: skip
    assert [len(group) for group in groups] == [2, 0, 2, 0, 0]
    (warning,) = caplog.messages
    assert all(told in warning for told in ("2 of 5 examples", "'ABC'", "max_prompt_tokens = 4"))


def test_an_environments_failure_drops_its_group_or_is_raised_and_the_sampler_is_left_clean():
    sampler, failed = toy.sampler(toy.model(layers=1)), {}
    groups = play(
        sampler, Failing(3), ["A", "K", "L", "B"], group_size=3,
        failed=lambda n, error: failed.update({n: str(error)}),
    )  # fmt: skip
    assert [len(group) for group in groups] == [3, 0, 0, 3]
    assert failed == {1: "database is locked", 2: "a lost disk"}
    assert all(len(one.turns) == 2 for one in (*groups[0], *groups[3]))
    with pytest.raises(sqlite3.OperationalError):
        play(sampler, Failing(3), ["A", "K"], group_size=3)
    groups = play(sampler, Turns(1), ["A", "B"], group_size=4)
    assert [len(group) for group in groups] == [4, 4]


def test_runs_agree_whatever_the_environments_take():
    """Bit by bit where results are taken in order, as they are on a CPU; in any order each episode
    says the same, for it has a random stream of its own.
    """

    def once(delay_s, **settings):
        sampler = toy.sampler(toy.model(layers=1), **settings)
        assert sampler.is_repeatable == settings.get("repeatable", True)
        environment, limits = Turns(2, delay_s=delay_s), {"max_reply_tokens": 9}
        groups = play(sampler, environment, ["AB", "CDE"], group_size=4, limits=limits)
        return groups, dict(sampler.work)

    in_order, work = once(0.0)
    assert once(0.02) == (in_order, work)
    hasty, _ = once(0.02, repeatable=False)
    ours, theirs = (
        [[turn.reply.ids for turn in one.turns] for group in groups for one in group]
        for groups in (in_order, hasty)
    )
    assert ours == theirs


class Unordered(Script):
    """A sampler that waits for others, as one behind servers does."""

    is_repeatable = False

    def __init__(self, replies):
        super().__init__(replies)
        self.woken = threading.Event()

    def advance(self, *, max_steps):
        if not self.waiting:
            assert self.woken.wait(30)
        self.woken.clear()
        return super().advance(max_steps=max_steps)

    def wake(self):
        self.woken.set()


@pytest.mark.parametrize("what", ["reset", "step"])
def test_what_takes_long_delays_its_own_group_or_episode_alone(what):
    """`B` is slow: it waits until all turns of the other episodes are over."""

    class Slow(Turns):
        over, ended = threading.Event(), 0

        def reset(self, example):
            if what == "reset" and example == "B":
                assert self.over.wait(30)
            return (example,), super().reset(example)[1]

        def step(self, episode, reply):
            if what == "step" and episode == ("B",):
                assert self.over.wait(30)
            episode, observation = super().step(episode, reply)
            with self.lock:
                self.ended += observation is None and episode[0] != "B"
                if self.ended == 6:
                    self.over.set()
            return episode, observation

    sampler = Unordered([[7, 1], [8, 1]])
    groups = play(sampler, Slow(3), ["B", "A", "C", "D"], group_size=2, env_workers=3)
    assert [[t.episode[0] for t in group] for group in groups] == [[x] * 2 for x in "BACD"]
    assert {r.episode for r in sampler.requests[-2:]} == {0, 1}
