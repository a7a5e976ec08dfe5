"""What became of replies is counted and shown: no accuracy is 0 in silence."""

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import eval as command
from launch.build import SqlSide
from launch.config import load_config
from launch.evaluation.answers import FIRST, Outcomes, hint, parts_of
from minirl.exchange import UserError
from minirl.model.tokenizer import ChatTokenizer

from .chat_server import Chat, Failure, serve
from .conftest import json_lines, loaded, succeed, write_job
from .report_cases import opened
from .small_sets import make_pets

QUESTIONS = 30


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Spider folder of thirty questions, and a job that asks for a fence."""
    folder = tmp_path_factory.mktemp("outcomes")
    make_pets(folder / "data" / "database" / "pets" / "pets.sqlite", [("ann", 3), ("bob", 5)])
    records = [
        {"db_id": "pets", "question": f"Number {n}?", "query": f"SELECT {n}"}
        for n in range(QUESTIONS)
    ]
    (folder / "data" / "dev.json").write_text(json.dumps(records))
    write_job(
        folder / "job.yaml", folder / "data",
        env={"kind": "single_turn", "wrapping": "fence"},
        reward={"kind": "one_shot"},
        evaluation={"wrapping": "fence"},
        endpoint={"parallel": 8, "retries": 0, "timeout_s": 20, "max_tokens": 99},
    )  # fmt: skip
    return folder


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.INFO)


def evaluate(asked: Path, out: Path, chat: Chat, *more: str) -> dict[str, Any]:
    line = ["--cfg", str(asked / "job.yaml"), "--endpoint", chat.url, "--model", "m"]
    command.main([*line, "--data", "validation", "--out", str(out), *more])
    return loaded(out)


def number(body: Any) -> int:
    return int(body["messages"][-1]["content"].rpartition("Number ")[2].partition("?")[0])


def completion(content: Any, *, finish: str = "stop", **message: Any) -> Failure:
    """Make a completion that ends for a reason."""
    choice = {"message": {"content": content, **message}, "finish_reason": finish}
    usage = {"prompt_tokens": 10, "completion_tokens": 4}
    text = json.dumps({"choices": [choice], "usage": usage})
    return Failure(200, text, {"content-type": "application/json"})


def fenced(body: Any) -> str:
    return f"```sql\nSELECT {number(body)}\n```"


# The four zeros that nobody was told of.


def test_bare_queries_where_a_fence_is_asked_for_stop_the_evaluation(asked, tmp_path):
    """One of them is shown, and what would read them; nothing is paid for twice then."""
    with serve(Chat(lambda body, _: f"SELECT {number(body)}")) as chat:
        with pytest.raises(UserError, match=r"no query in the first 20 replies, such as 'SELECT "):
            evaluate(asked, tmp_path / "out", chat)
        assert chat.requests == FIRST
        with pytest.raises(UserError, match=r"; evaluation\.wrapping=any would find .* 20 of 20$"):
            evaluate(asked, tmp_path / "out", chat)
        assert chat.requests == FIRST
        sheet = evaluate(asked, tmp_path / "out", chat, "evaluation.wrapping=any")
        assert chat.requests == QUESTIONS
    assert sheet["measures"]["set"]["mean"] == 1


LENGTHS = itertools.count(4200)


def too_long(*_: Any) -> Failure:
    says = f"{next(LENGTHS)} tokens are more than the context length of 4096"
    return Failure(400, json.dumps({"error": {"message": says}}))


# What the server says to all, and what is told then. Of a real model reasoning that does not end
# is the way to answer PaVeRL-SQL's prompt: its query is a draft in there.
OPEN_ENDED = "<think>\nJoin both tables.\n```sql\nSELECT 1\n```"
NOTHING: dict[str, tuple[Callable[..., str | Failure], str]] = {
    "cut off": (
        lambda *_: completion("To answer this, I think step by", finish="length"),
        r"cut off: allow more than endpoint\.max_tokens=99",
    ),
    "open-ended": (lambda *_: OPEN_ENDED, r"; no </think> ends the reasoning in 20 of them$"),
    "too long": (too_long, r"context length.*; lower endpoint\.max_tokens"),
    "failing": (lambda *_: Failure(500), r"500: .*told to fail"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_first_part_without_any_query_stops_the_evaluation(asked, tmp_path, caplog, name):
    answer, told = NOTHING[name]
    with serve(Chat(answer)) as chat:
        with pytest.raises(UserError, match=told):
            evaluate(asked, tmp_path / "out", chat)
        # Of a server that fails, those that were under way.
        assert chat.requests <= FIRST + 8 if name == "failing" else chat.requests == FIRST
    counted = "first 20 replies: 20 hold no query (100.0 %), 20 cut off at the limit of tokens "
    counted += "(100.0 %); 200 prompt tokens, 80 reply tokens"
    assert (counted in caplog.messages) == (name == "cut off")
    assert caplog.text.count("refused a request") == (name == "too long")


# Whatever happens to some is counted, and the others go on.

_REASONED = completion(None, finish="length", reasoning_content="so ```sql\nSELECT 1")
FATES = {
    0: completion("no idea"),
    1: completion("```sql\nSELECT", finish="length"),
    2: completion(None, finish="content_filter"),
    3: completion(None, refusal="I cannot help with that"),
    4: Failure(400, '{"error": {"code": "context_length_exceeded", "message": "no"}}'),
    5: Failure(422, '{"error": {"message": "against a policy"}}'),
    6: Failure(500),
    7: completion("half", finish="abort"),
    8: _REASONED,
    9: completion("```sql\nSELECT 9\n```", reasoning_content="```sql\nSELECT 0\n```"),
    10: completion("", finish="stop"),
}


def test_every_fate_of_a_reply_is_counted_and_shown(asked, tmp_path, capsys):
    out = tmp_path / "out"
    with serve(Chat(lambda body, _: FATES.get(number(body)) or fenced(body))) as chat:
        sheet = evaluate(asked, out, chat)
    counts = {name: sheet["outcomes"][name] for name in ("replies", "no_query", "cut_off")}
    assert counts == {"replies": 30, "no_query": 4, "cut_off": 2}  # 0, 1, 8 and 10; 1 and 8
    lost = {name: sheet["outcomes"][name] for name in ("refused", "too_long", "failed")}
    assert lost == {"refused": 3, "too_long": 1, "failed": 2}
    assert sheet["measures"]["set"]["mean"] == pytest.approx(20 / 30, abs=1e-6)
    told = "".join(capsys.readouterr().out.split())
    line = (
        "30 replies: 4 hold no query (13.3 %), 2 cut off at the limit of tokens (6.7 %), 2 failed"
    )
    assert "".join(line.split()) in told
    lines = json_lines(out / "trajectories.jsonl")[1:]
    replies = {
        asked["question"]: one["trajectories"][0]["turns"][0]
        for asked, one in zip(sheet["questions"], lines, strict=True)
    }
    assert [replies[f"Number {n}?"]["finish"] for n in range(11)] == [
        *("stop", "length", "refused", "refused", "too_long", "refused", "failed", "failed"),
        *("length", "stop", "stop"),
    ]
    # Reasoning that is told apart is a part of the reply.
    nine = replies["Number 9?"]
    assert nine["reply"].startswith("<think>\n```sql\nSELECT 0\n```\n</think>\n\n```sql")
    assert (nine["sql"], nine["correct"]) == ("SELECT 9", True)


def test_a_server_that_fails_for_good_is_given_up(asked, tmp_path):
    """What was answered before stays."""

    def fails(body: Any, _earlier: int) -> str | Failure:
        return fenced(body) if chat.requests <= 1 else Failure(500)

    with serve(Chat(fails)) as chat, pytest.raises(UserError, match="still failing"):
        evaluate(asked, tmp_path / "out", chat)
    with serve(Chat(lambda body, _: fenced(body))) as chat:
        assert evaluate(asked, tmp_path / "out", chat)["measures"]["set"]["mean"] == 1
        assert chat.requests == QUESTIONS - 1


def test_judged_candidates_are_counted(asked, tmp_path):
    """A model that writes no query is asked for 20 answers, and not for 200 of each question."""
    judge = ["--decode", "judge@10"]
    with serve(Chat(lambda body, _: f"<sql>SELECT {number(body)}</sql>")) as chat:
        with pytest.raises(UserError, match=r"evaluation\.wrapping=\w+ would find"):
            evaluate(asked, tmp_path / "out", chat, *judge)
        assert chat.requests == FIRST


# The record.


def test_outcomes_add_up_and_are_said_in_a_line():
    parts = [
        Outcomes.of("SELECT 1", prompt_tokens=5, reply_tokens=2),
        Outcomes.of("", "length", prompt_tokens=5, reply_tokens=9),
        Outcomes.of("SELECT 1", "length"),
        Outcomes.of("", "too_long"),
    ]
    assert Outcomes.total(parts) == Outcomes(4, 1, 2, 0, 0, 1, 10, 11)
    assert Outcomes.total(parts).without_query == 2
    assert Outcomes.total(parts).line() == (
        "4 replies: 1 hold no query (25.0 %), 2 cut off at the limit of tokens (50.0 %), "
        "1 with too long a prompt (25.0 %); 10 prompt tokens, 11 reply tokens"
    )
    assert Outcomes.of("SELECT 1").line() == "1 reply: each holds a query"
    assert Outcomes.total([]) == Outcomes()


def test_the_first_part_has_the_first_replies():
    assert [*parts_of(50, 1, size=30)] == [slice(0, 20), slice(20, 50)]
    assert [*parts_of(50, 8, size=30)] == [slice(0, 3), slice(3, 33), slice(33, 50)]
    assert [*parts_of(50, 1, size=30, start=20)] == [slice(20, 50)]
    assert [*parts_of(2, 1, size=30)] == [slice(0, 2)]


def test_a_hint_names_what_reads_most():
    assert hint(["<sql>SELECT 1</sql>", "?"], "fence").endswith("find a query in 1 of 2")
    assert hint(["what?"], "fence") == hint([], "fence") == ""


# Prompts that are too long, wherever accuracy is measured.


def lengths(run: Path) -> list[int]:
    """Count the tokens of the test prompts of a run."""
    config = load_config(str(run / "config.yaml"), [])
    tokenizer = ChatTokenizer(run / "model")
    with SqlSide(config, run) as sql:
        examples = sql.examples("test", limit=config.evaluation.questions)
        return [len(tokenizer.encode_chat(sql.evaluation_prompt(one))) for one in examples]


def test_a_question_with_too_long_a_prompt_is_wrong_and_counted(command, tiny, place, tmp_path):
    """In both evaluations of a run, and alone: the others are answered as ever."""
    found = sorted(lengths(place / "finished"))
    limit = found[len(found) // 2]
    too_long = sum(one > limit for one in found)
    assert 0 < too_long < len(found) == 6
    line = ["--cfg", tiny, "run.dir=run", f"evaluation.max_prompt_tokens={limit}"]
    line += ["warm_start=null", "train.steps=1", "train.eval_every=1", "evaluation.samples=2"]
    _, told, _ = succeed(
        command,
        ["launch.train", *line],
        ["launch.eval", *line, "--checkpoint", "run", "--out", "alone"],
        ["launch.report", "run", "--out", "page.html"],
        cwd=tmp_path,
    )
    assert f"{too_long} with too long a prompt" in told
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    sheet = loaded(tmp_path / "alone")
    places = {"run/before": result["outcomes"]["before"], "run/after": result["outcomes"]["after"]}
    for place, outcomes in {**places, "alone": sheet["outcomes"]}.items():
        assert (outcomes["replies"], outcomes["too_long"]) == (6, too_long)
        verdicts = json_lines(tmp_path / place / "predictions.jsonl")
        lost = [one for one in verdicts if one["outcomes"]["too_long"]]
        assert [(one["sql"], one["scores"]) for one in lost] == [("", {"set": 0.0})] * too_long
    for place in places:
        outcomes = loaded(tmp_path / place / "samples")["outcomes"]
        assert (outcomes["replies"], outcomes["too_long"]) == (12, 2 * too_long)
    assert [*result["accuracy"]["after"]] == ["set", "mean@2", "pass@2"]
    # The page says so of each place.
    [run] = opened(tmp_path / "page.html")["overview"]["runs"]
    assert f"{too_long} with too long a prompt" in run["replies"]["before"]
    assert run["replies"].keys() == {"before", "after"}
