"""Verbal RL (`--decode judge@K`) against an HTTP server that fails, and sees its client killed."""

import os
import signal
import sys
import threading
from typing import Any

import pytest

from minirl.exchange import UserError
from tests.forked import Copy
from tests.waiting import wait_until
from tests.worlds import ASKED, GOLDS, spider, write

from .chat_server import Chat, Failure, knowing, serve
from .conftest import asking, json_lines, mistake

pytestmark = pytest.mark.usefixtures("quick")
CANDIDATES, JUDGEMENTS, PARALLEL = 3, 4, 4  # the latter as the job says
JUDGE = ("--decode", f"judge@{CANDIDATES}")
SECRET = "a-key-of-the-tests"
brain = knowing("SELECT 17", "SELECT 'x', 2", "SELECT nothing FROM nowhere", "")


def timeless(result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "notes": {**result["notes"], "seconds": 0}}


def test_the_best_candidate_answers_and_costs_are_told(evaluate, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    out, met = tmp_path / "out", threading.Event()

    def answer(body, earlier):
        if chat.under_way > 1:
            met.set()
        met.wait(10)  # the first request for another one
        return brain(body, earlier)

    with serve(Chat(answer)) as chat:
        report = evaluate(out, chat, *JUDGE)
        requests = chat.requests
        assert timeless(evaluate(out, chat, *JUDGE)) == timeless(report)  # nobody is asked
        told = mistake(evaluate, out, chat, *JUDGE, "endpoint.judgements=5")
        assert "endpoint.judgements" in told
        assert chat.requests == requests == sum(chat.paid.values())
        assert 1 < chat.most_at_once <= PARALLEL
        assert chat.keys == {f"Bearer {SECRET}"}
        notes = report["notes"]
        assert sum(cost["calls"] for cost in notes["cost"].values()) == requests
        for name in ("prompt_tokens", "completion_tokens"):
            assert sum(cost[name] for cost in notes["cost"].values()) == chat.tokens[name]
    assert not any(SECRET.encode() in path.read_bytes() for path in out.rglob("*.*"))
    predictions = report["questions"]
    assert len({one["id"] for one in predictions}) == len(predictions) == len(GOLDS)
    for prediction in predictions:
        choice = prediction["choice"]
        known = prediction["gold_sql"] in choice["candidates"]
        assert set(prediction["scores"].values()) == {known}
        assert (prediction["sql"] == prediction["gold_sql"]) is known
        assert choice["judged"] == JUDGEMENTS
        assert len(choice["candidates"]) == len(choice["scores"]) <= CANDIDATES
    assert report["settings"]["decode"] == JUDGE[1]
    accuracy = sum(p["scores"]["spider_ex"] for p in predictions) / len(GOLDS)
    assert report["measures"]["spider_ex"]["mean"] == pytest.approx(accuracy, abs=1e-6)
    assert accuracy > 0
    assert notes["attempts"] == sum(one["choice"]["attempts"] for one in predictions)
    body = chat.bodies[0]
    assert (body["temperature"], body["max_tokens"]) == (0.8, 99)


# Whoever started the tests may have them ignore this signal, and children inherit that.
AS_A_USER = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("launch.eval", run_name="__main__", alter_sys=True)
"""


def test_an_interrupted_run_waits_for_no_server_and_keeps_its_answers(
    copies, served, evaluate, tmp_path
):
    """The server hangs from the eighth request on."""
    out, ended = tmp_path / "out", threading.Event()
    alive: list[Copy] = []

    def before(count: int) -> None:
        if count == 8:
            os.kill(alive[0].pid, signal.SIGINT)
        if count >= 8:
            ended.wait(100)

    with serve(Chat(brain, before)) as chat:
        line = asking(served, out, chat, *JUDGE, "endpoint.timeout_s=600")
        alive.append(copies(*line, cwd=tmp_path, code=AS_A_USER))
        done = alive[0].end(timeout_s=90)
        ended.set()
        assert (done.returncode, "Traceback" in done.stderr) == (130, False)
        kept = len(json_lines(out / "answers.jsonl"))
        assert kept >= 8 - PARALLEL
    # Of another server: the first may not have seen all that was under way.
    with serve(Chat(brain)) as again:
        evaluate(out, again, *JUDGE)
    # None but those that were under way is asked again.
    assert again.requests == len(again.paid) == len(chat.paid | again.paid) - kept


def test_where_every_judgement_is_refused_nothing_is_chosen(evaluate, tmp_path):
    """By lot among candidates, which would be no judgement; it may be taken another day."""
    out, is_mended = tmp_path / "out", threading.Event()
    refusal = Failure(400, "too long")

    def answer(body, earlier):
        is_judge = "scoring machine" in body["messages"][-1]["content"]
        return refusal if is_judge and not is_mended.is_set() else brain(body, earlier)

    with serve(Chat(answer)) as chat:
        told = mistake(evaluate, out, chat, *JUDGE)
        assert "every judge request failed: 400: too long" in told
        assert not (out / "verdicts.json").exists()
        wait_until(lambda: not chat.under_way)  # of requests that were given up
        is_mended.set()
        result = evaluate(out, chat, *JUDGE)
        assert set(chat.paid.values()) == {1}
        plain = evaluate(tmp_path / "plain", chat, *JUDGE)
    assert timeless(result) == timeless(plain)


def test_questions_without_gold_have_predictions_and_no_accuracy(evaluate, tmp_path, capsys):
    blind = [spider("", db_id, question=question) for db_id, question, _ in ASKED]
    file = write(tmp_path / "blind.json", blind)
    own = (f"data.validation.sources.0.file={file}", "data.validation.exclude=[]")
    with serve(Chat(brain)) as chat:
        result = evaluate(tmp_path / "out", chat, *JUDGE, "--data", "validation", *own)
    assert result["measures"] == {}
    assert len(result["questions"]) == 4  # a sample
    assert all(p["sql"] for p in json_lines(tmp_path / "out" / "predictions.jsonl"))
    assert "95 % interval" not in capsys.readouterr().out


def test_without_the_package_the_extra_is_named(evaluate, tmp_path, monkeypatch):
    """Before any gold query runs."""
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.setattr("launch.config.load_config", None)
    with pytest.raises(UserError, match=r"pip install '\.\[openai\]'$"):
        evaluate(tmp_path / "out", Chat(brain, url="http://127.0.0.1:9/v1"), *JUDGE)
