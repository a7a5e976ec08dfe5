"""Verbal RL (`--decode judge@K`) against an HTTP server that fails, and sees its client killed."""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import eval as command
from minirl.exchange import UserError
from tests.forked import Copy
from tests.waiting import wait_until

from .chat_server import Chat, Failure, serve
from .conftest import json_lines, loaded, mistake, verbal_folder

pytestmark = pytest.mark.usefixtures("quick")
QUESTIONS, CANDIDATES, JUDGEMENTS = 3, 3, 4
SETTINGS = {
    "candidates": CANDIDATES,
    "attempts": 12,
    "judgements": JUDGEMENTS,
    "judge_retries": 1,
    "parallel": 4,
    "retries": 3,
    "timeout_s": 20,
}
SECRET = "a-key-of-the-tests"
OTHERS = ("SELECT 1", "SELECT 'x', 2", "SELECT nothing FROM nowhere", "")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a config that reads it."""
    return verbal_folder(tmp_path_factory.mktemp("verbal"), SETTINGS, questions=QUESTIONS)


@pytest.fixture(scope="module")
def brain(place: Path) -> Callable[..., str]:
    """What writes the gold query now and then, and gives it the highest score."""
    records = json.loads((place / "data" / "test.json").read_text(encoding="utf-8"))
    golds = {record["question"]: record["query"] for record in records}

    def answer(body, earlier) -> str:
        text = body["messages"][-1]["content"]
        gold = next(gold for question, gold in golds.items() if question in text)
        if "scoring machine" not in text:
            sql = (gold, *OTHERS)[body["seed"] % 5]
            return f"<think>…</think><sql>{sql}</sql>" if sql else "I would rather not."
        queries = re.findall(r"SQL(\d+):\n```sql\n(.*?)\n```", text, re.DOTALL)
        lines = [f"SQL{n}: {0.9 if sql == gold else 0.2}" for n, sql in queries]
        return "<think>SQL1: 1</think>\n<scores>\n{}\n</scores>".format("\n".join(lines))

    return answer


JUDGE = f"judge@{CANDIDATES}"


def words(place: Path, out: Path, chat: Chat, *overrides: str) -> list[str]:
    named = ["--cfg", str(place / "verbal.yaml"), "--endpoint", chat.url, "--model", "m/one"]
    return [*named, "--decode", JUDGE, "--out", str(out), *overrides]


def launch(place: Path, out: Path, chat: Chat, *overrides: str) -> dict:
    command.main(words(place, out, chat, *overrides))
    return loaded(out)


def test_the_best_candidate_answers_and_costs_are_told(place, brain, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    out, met = tmp_path / "out", threading.Event()

    def answer(body, earlier):
        if chat.under_way > 1:
            met.set()
        met.wait(10)  # the first request for another one
        return brain(body, earlier)

    with serve(Chat(answer)) as chat:
        report = launch(place, out, chat)
        requests = chat.requests
        again = launch(place, out, chat)  # nobody is asked
        assert {**again, "notes": {**again["notes"], "seconds": 0}} == {
            **report, "notes": {**report["notes"], "seconds": 0}
        }  # fmt: skip
        assert "endpoint.judgements" in mistake(launch, place, out, chat, "endpoint.judgements=5")
        assert chat.requests == requests == sum(chat.paid.values())
        assert 1 < chat.most_at_once <= SETTINGS["parallel"]
        assert chat.keys == {f"Bearer {SECRET}"}
        notes = report["notes"]
        assert sum(cost["calls"] for cost in notes["cost"].values()) == requests
        for name in ("prompt_tokens", "completion_tokens"):
            assert sum(cost[name] for cost in notes["cost"].values()) == chat.tokens[name]
    assert not any(SECRET.encode() in path.read_bytes() for path in out.rglob("*.*"))
    predictions = report["questions"]
    choices = {one["id"]: one["choice"] for one in predictions}
    assert len(predictions) == len(choices) == QUESTIONS == len(report["questions"])
    for prediction in predictions:
        choice = choices[prediction["id"]]
        known = prediction["gold_sql"] in choice["candidates"]
        assert prediction["scores"] == {"set": float(known)}
        assert (prediction["sql"] == prediction["gold_sql"]) is known
        assert choice["judged"] == JUDGEMENTS
        assert len(choice["candidates"]) == len(choice["scores"]) <= CANDIDATES
    assert report["settings"]["decode"] == JUDGE
    accuracy = sum(p["scores"]["set"] for p in predictions) / QUESTIONS
    assert report["measures"]["set"]["mean"] == pytest.approx(accuracy, abs=1e-6)
    assert accuracy > 0
    assert notes["attempts"] == sum(choice["attempts"] for choice in choices.values())
    body = chat.bodies[0]
    assert (body["temperature"], body["max_tokens"]) == (0.8, 4096)


# Whoever started the tests may have them ignore this signal, and children inherit that.
AS_A_USER = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("launch.eval", run_name="__main__", alter_sys=True)
"""


def test_an_interrupted_run_waits_for_no_server_and_keeps_its_answers(
    copies, place, brain, tmp_path
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
        line = words(place, out, chat, "endpoint.timeout_s=600")
        alive.append(copies(*line, cwd=tmp_path, code=AS_A_USER))
        done = alive[0].end(timeout_s=90)
        ended.set()
        assert (done.returncode, "Traceback" in done.stderr) == (130, False)
        kept = len(json_lines(out / "answers.jsonl"))
        assert kept >= 8 - SETTINGS["parallel"]
    # Of another server: the first may not have seen all that was under way.
    with serve(Chat(brain)) as again:
        launch(place, out, again)
    # None but those that were under way is asked again.
    assert again.requests == len(again.paid) == len(chat.paid | again.paid) - kept


def test_where_every_judgement_is_refused_nothing_is_chosen(place, brain, tmp_path):
    """By lot among candidates, which would be no judgement; it may be taken another day."""
    out, is_mended = tmp_path / "out", threading.Event()
    refusal = Failure(400, "too long")

    def answer(body, earlier):
        is_judge = "scoring machine" in body["messages"][-1]["content"]
        return refusal if is_judge and not is_mended.is_set() else brain(body, earlier)

    with serve(Chat(answer)) as chat:
        assert "every judge request failed: 400: too long" in mistake(launch, place, out, chat)
        assert not (out / "verdicts.json").exists()
        wait_until(lambda: not chat.under_way)  # of requests that were given up
        is_mended.set()
        result = launch(place, out, chat)
        assert set(chat.paid.values()) == {1}
        plain = launch(place, tmp_path / "plain", chat)
    for one in (result, plain):
        del one["notes"]["seconds"]
    assert result == plain


def test_questions_without_gold_have_predictions_and_no_accuracy(place, brain, tmp_path, capsys):
    records = json.loads((place / "data" / "test.json").read_text(encoding="utf-8"))
    blind = [{**record, "query": ""} for record in records]
    (place / "data" / "blind.json").write_text(json.dumps(blind), encoding="utf-8")
    with serve(Chat(brain)) as chat:
        result = launch(
            place, tmp_path / "out", chat,
            "data.test.sources.0.file=blind.json", "data.test.exclude=[]",
        )  # fmt: skip
    assert result["measures"] == {}
    assert len(result["questions"]) == QUESTIONS
    assert all(p["sql"] for p in json_lines(tmp_path / "out" / "predictions.jsonl"))
    assert "95 % interval" not in capsys.readouterr().out


def test_without_the_package_the_extra_is_named(place, brain, tmp_path, monkeypatch):
    """Before any gold query runs."""
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.setattr("launch.config.load_config", None)
    with pytest.raises(UserError, match=r"pip install '\.\[openai\]'$"):
        launch(place, tmp_path / "out", Chat(brain, url="http://127.0.0.1:9/v1"))
