"""Models on a test set, behind an endpoint or sampled by servers: greedy, votes, pass@n, costs;
what became of each reply is counted, and no accuracy is 0 in silence.
"""

import itertools
import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import eval as evaluation
from launch.config import TinyConfig
from launch.evaluation.answers import FIRST
from launch.tiny import make_tiny
from minirl.exchange import UserError
from minirl.model.tokenizer import ChatTokenizer
from tests.minirl.fake_sglang import Fake
from tests.worlds import ASKED, GOLDS, write

from .chat_server import Chat, Failure, completion, knowing, serve
from .conftest import TINY, asking, json_lines, judging, loaded, mistake

QUESTIONS = 30
WRONG = "SELECT 17"
brain = knowing(WRONG, WRONG)


def bare(body: Any, earlier: int) -> str:
    """Answer with the query alone, as real models do whatever they are asked for."""
    return brain(body, earlier).removeprefix("<think>…</think><sql>").removesuffix("</sql>")


def test_greedy_answers_are_judged_by_the_test_sets_rule(evaluate, tmp_path, capsys):
    out = tmp_path / "out"
    with serve(Chat(brain)) as chat:
        sheet = evaluate(out, chat)
        assert chat.requests == len(GOLDS)
        assert {body["temperature"] for body in chat.bodies} == {0.0}
        assert {body["max_tokens"] for body in chat.bodies} == {99}
        # Nobody is asked again, also where calls are made in another manner.
        copy = str(tmp_path / "copy.json")
        again = evaluate(out, chat, "--json", copy, "endpoint.retries=1", "endpoint.timeout_s=9")
        assert again["questions"] == sheet["questions"]
        assert json.loads(Path(copy).read_text()) == again
        assert [*evaluate(out, chat, "--comparators", "bird_ex")["measures"]] == ["bird_ex"]
        told = mistake(evaluate, out, chat, "--model", "m/two")
        assert "(model is 'm/one' there and 'm/two' here)" in told
        assert chat.requests == len(GOLDS)
    assert sheet["measures"]["spider_ex"]["mean"] == sheet["measures"]["spider_ts"]["mean"] == 1
    said = sheet["settings"]
    assert (said["model"]["name"], said["model"]["model"], said["seed"]) == ("m-one", "m/one", 0)
    assert said["questions"] == 5
    outcomes = sheet["outcomes"]
    assert (outcomes["replies"], outcomes["no_query"], outcomes["failed"]) == (5, 0, 0)
    assert outcomes["reply_tokens"] == chat.tokens["completion_tokens"]
    group = json_lines(out / "trajectories.jsonl")[1]
    assert ASKED[0][1] in group["prompt"]
    assert "<think>" in group["trajectories"][0]["turns"][0]["reply"]
    assert [one["sql"] for one in sheet["questions"]] == GOLDS
    assert "spider_ts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrapping", "found"), [("null", GOLDS), ("any", GOLDS), ("sql_tag", [""] * len(GOLDS))]
)
def test_an_endpoint_is_asked_as_the_settings_say_and_may_write_the_bare_query(
    evaluate, tmp_path, wrapping, found
):
    out = tmp_path / "out"
    own = ["data.test.sources.0.comments=full", "endpoint.temperature=null"]
    with serve(Chat(lambda *of: f"<think>{GOLDS[0]}</think>{bare(*of)}")) as chat:
        sheet = evaluate(out, chat, f"evaluation.wrapping={wrapping}", *own)
    assert [question["sql"] for question in sheet["questions"]] == found
    # It is asked as the settings say.
    assert not any("temperature" in body for body in chat.bodies)
    settings = yaml.safe_load((out / "config.yaml").read_text())
    assert settings["data"]["test"]["sources"][0]["comments"] == "full"
    turn = json_lines(out / "trajectories.jsonl")[1]["trajectories"][0]["turns"][0]
    # Of a query that is in the reasoning too, the page marks what counts.
    assert turn.get("place") == (len(f"<think>{GOLDS[0]}</think>") if found[0] else None)


def test_an_endpoint_needs_no_config(evaluate, tmp_path, capsys):
    with serve(Chat(bare)) as chat:
        sheet = evaluate(tmp_path / "out", chat, "--json=-", job="")
    out, told = capsys.readouterr()
    assert json.loads(out) == sheet
    assert "prompt.style=short" in told
    form = "one SQLite query in a ```sql code block and nothing else."
    contents = [message["content"] for body in chat.bodies for message in body["messages"]]
    assert [content.endswith(form) for content in contents] == [True] * len(GOLDS)
    # Bare queries are read, though a fence was asked for.
    assert sheet["measures"]["spider_ex"]["mean"] == 1


def test_the_number_of_questions_is_never_dropped(spider_root, evaluate, tmp_path, caplog):
    with serve(Chat(bare)) as chat:
        sheet = evaluate(tmp_path / "own", chat, "evaluation.questions=2", job="")
        assert (chat.requests, sheet["settings"]["questions"]) == (2, 2)
        assert "test: a sample of 2 of 5 questions" in caplog.messages
        more = ("evaluation.questions=2", "--limit", "3")
        sheet = evaluate(tmp_path / "more", chat, *more, job="")
        assert (chat.requests, sheet["settings"]["questions"]) == (2 + 3, 3)
        evaluate(tmp_path / "all", chat, "--limit", "9", job="")
        assert chat.requests == 2 + 3 + 5
        # Whatever the seed of a run is.
        other = evaluate(tmp_path / "seed", chat, "--limit", "3", "seed=4", job="")
        assert asked_of(other) == asked_of(sheet)
    # Of a file it is the same sample.
    file, out = write(tmp_path / "p.sql", GOLDS), tmp_path / "file.json"
    evaluation.main(judging(file, spider_root, "--limit", "3", "--json", str(out)))
    found = json.loads(out.read_text())
    assert asked_of(found) == asked_of(sheet)
    assert found["measures"]["spider_ex"]["mean"] == 1


def asked_of(sheet: dict[str, Any]) -> list[str]:
    return [one["id"] for one in sheet["questions"]]


def test_commands_that_need_no_learner_run_without_it(served, spider_root, tmp_path, process):
    """In a process of its own, which the base install with the openai package can run."""
    write(tmp_path / "p.sql", GOLDS)
    pair = ["--db", str(spider_root / "database" / "pets" / "pets.sqlite"), "--gold", GOLDS[0]]
    lines = [["score", *pair, "--pred", "SELECT 2"]]
    lines.append(["eval", *judging("p.sql", spider_root, "--out", "file")])
    with serve(Chat(brain)) as chat:
        lines.append(["eval", *asking(served, Path("out"), chat)])
        code = (
            "import sys; from importlib import import_module\n"
            f"for module, *words in {lines}:\n"
            "    import_module(f'launch.{module}').main(words)\n"
            "    assert not {'jax', 'flax', 'orbax', 'transformers'} & set(sys.modules), words\n"
            # What takes long to import waits until it is needed.
            "    slow = {'scipy', 'openai'} & set(sys.modules)\n"
            "    assert '--endpoint' in words or not slow, (words, slow)\n"
        )
        done = process(cwd=tmp_path, code=code)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "verdicts.json").exists()


def test_an_endpoint_that_is_not_there_is_told_in_few_lines(served, tmp_path, command):
    """The client of an endpoint tells each of its attempts."""
    nobody = Chat(brain, url="http://127.0.0.1:9/v1")
    words = asking(served, Path("out"), nobody, "endpoint.retries=1")
    done = command("launch.eval", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "Retrying" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: http://127.0.0.1:9/v1: still failing (Connection")


def test_votes_and_pass_of_sampled_answers(evaluate, tmp_path):
    with serve(Chat(brain)) as chat:
        voted = evaluate(tmp_path / "v", chat, "--decode", "vote@5")
        assert (voted["settings"]["decode"], voted["settings"]["vote_by"]) == ("vote@5", "set")
        assert chat.requests == 5 * len(GOLDS)
        passed = evaluate(tmp_path / "p", chat, "--decode", "pass@5", "seed=1")
        assert {body["temperature"] for body in chat.bodies} == {0.8}
        assert not any({"top_p", "chat_template_kwargs"} & body.keys() for body in chat.bodies)
        own = ("evaluation.top_p=0.9", "prompt.template={enable_thinking: false}")
        evaluate(tmp_path / "n", chat, "--decode", "vote@5", *own)
        nucleus = chat.bodies[10 * len(GOLDS) :]
        assert [body.get("top_p") for body in nucleus] == [0.9] * 25
        assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in nucleus)
        assert len({body["seed"] for body in chat.bodies}) == 10 * len(GOLDS)
    for question, gold in zip(voted["questions"], GOLDS, strict=True):
        assert len(question["samples"]) == 5
        assert question["sql"] == (gold if question["right"] > 2 else WRONG)
    for question in passed["questions"]:
        assert question["scores"]["spider_ex"] == float(question["right"] > 0)
    assert list(voted["pass_at"]) == ["1", "2", "4", "5"]


# The four zeros that nobody was told of.


def number(body: Any) -> int:
    return int(body["messages"][-1]["content"].rpartition("Number ")[2].partition("?")[0])


def fenced(body: Any) -> str:
    return f"```sql\nSELECT {number(body)}\n```"


def test_bare_queries_where_a_fence_is_asked_for_stop_the_evaluation(evaluate, tmp_path):
    """One of them is shown, and what would read them; nothing is paid for twice then."""
    out = tmp_path / "out"
    with serve(Chat(lambda body, _: f"SELECT {number(body)}")) as chat:
        for _ in range(2):
            told = mistake(evaluate, out, chat, job="thirty")
            assert "no query in the first 20 replies: " in told
            assert ", such as 'SELECT " in told
            assert re.search(r"; evaluation\.wrapping=any would find .* 20 of 20$", told)
            assert chat.requests == FIRST
        sheet = evaluate(out, chat, "evaluation.wrapping=any", job="thirty")
        assert chat.requests == QUESTIONS
        # A model that writes no query is asked for 20 answers, and not for 200 of each question.
        with pytest.raises(UserError, match=r"evaluation\.wrapping=\w+ would find"):
            evaluate(tmp_path / "judged", chat, "--decode", "judge@10", job="thirty")
        assert chat.requests == QUESTIONS + FIRST
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
        r"20 cut off at the limit of tokens .*, such as 'To answer.*endpoint\.max_tokens",
    ),
    "open-ended": (lambda *_: OPEN_ENDED, r", such as '<think> Join both tables"),
    "too long": (too_long, r"first 20 replies: 20 without an answer \(100.0 %\); look at"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_first_part_without_any_query_stops_the_evaluation(evaluate, tmp_path, caplog, name):
    answer, told = NOTHING[name]
    with serve(Chat(answer)) as chat:
        with pytest.raises(UserError, match=told):
            evaluate(tmp_path / "out", chat, job="thirty")
        assert chat.requests == FIRST
    counted = "first 20 replies: 20 hold no query (100.0 %), 20 cut off at the limit of tokens "
    counted += "(100.0 %); 40 prompt tokens, 60 reply tokens"
    assert (counted in caplog.messages) == (name == "cut off")
    assert caplog.text.count("are more than the context length") == (name == "too long")


# Whatever happens to some is counted, and the others go on.
FATES = {
    0: completion("no idea"),
    1: completion("```sql\nSELECT", finish="length"),
    2: completion(None, finish="content_filter"),
    3: completion(None, refusal="I cannot help with that"),
    4: Failure(400, '{"error": {"code": "context_length_exceeded", "message": "no"}}'),
    5: Failure(422, '{"error": {"message": "against a policy"}}'),
    6: Failure(500),
    7: completion("half", finish="abort"),
    8: completion(None, finish="length", reasoning_content="so ```sql\nSELECT 1"),
    9: completion("```sql\nSELECT 9\n```", reasoning_content="```sql\nSELECT 0\n```"),
    10: completion("", finish="stop"),
}


def test_every_fate_of_a_reply_is_counted_and_shown(evaluate, tmp_path, capsys):
    out = tmp_path / "out"
    with serve(Chat(lambda body, _: FATES.get(number(body)) or fenced(body))) as chat:
        sheet = evaluate(out, chat, job="thirty")
    counts = {name: sheet["outcomes"][name] for name in ("replies", "no_query", "cut_off")}
    assert counts == {"replies": 30, "no_query": 4, "cut_off": 2}  # 0, 1, 8 and 10; 1 and 8
    lost = {name: sheet["outcomes"][name] for name in ("too_long", "failed")}
    assert lost == {"too_long": 0, "failed": 6}
    assert sheet["measures"]["set"]["mean"] == pytest.approx(20 / 30, abs=1e-6)
    told = "".join(capsys.readouterr().out.split())
    line = (
        "30 replies: 4 hold no query (13.3 %), 2 cut off at the limit of tokens (6.7 %), 6 without"
    )
    assert "".join(line.split()) in told
    lines = json_lines(out / "trajectories.jsonl")[1:]
    replies = {
        asked["question"]: one["trajectories"][0]["turns"][0]
        for asked, one in zip(sheet["questions"], lines, strict=True)
    }
    assert [replies[f"Number {n}?"]["finish"] for n in range(11)] == [
        *("stop", "length", *["failed"] * 6),
        *("length", "stop", "stop"),
    ]
    # Reasoning that is told apart is a part of the reply.
    nine = replies["Number 9?"]
    assert nine["reply"].startswith("<think>\n```sql\nSELECT 0\n```\n</think>\n\n```sql")
    assert (nine["sql"], nine["correct"]) == ("SELECT 9", True)


def test_a_server_that_fails_for_good_is_given_up(evaluate, tmp_path):
    """What was answered before stays."""
    answers = iter([True])

    def fails(body: Any, _earlier: int) -> str | Failure:
        return fenced(body) if next(answers, False) else Failure(500)

    told = pytest.raises(UserError, match=r"still failing.*500: .*told to fail")
    with serve(Chat(fails)) as chat, told:
        # One at a time: an answer counts when it arrives, and others may arrive before it.
        evaluate(tmp_path / "out", chat, "endpoint.parallel=1", job="thirty")
    assert chat.requests == 1 + 20  # so many in a row
    with serve(Chat(lambda body, _: fenced(body))) as chat:
        sheet = evaluate(tmp_path / "out", chat, job="thirty")
        assert (sheet["measures"]["set"]["mean"], chat.requests) == (1, QUESTIONS - 1)


# Servers that sample a checkpoint.

REPLY = "<sql>SELECT 1</sql>"
# Of results that nobody names the folder: its name has the sampler.
OUT = Path("evals", "model-sglang-spider-validation-vote@2-seed0")


def test_votes_of_a_checkpoint_are_sampled_by_the_servers(served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = TinyConfig(**TINY["model"]["tiny"])
    make_tiny(Path("model"), [REPLY, "which name has the largest salary?"] * 40, shape, 0)
    tokenizer = ChatTokenizer(Path("model"))
    ids = [*tokenizer.encode(REPLY), tokenizer.stop_ids[0]]
    fake = Fake(reply=ids)
    line = ["--cfg", str(served / "five.yaml"), "--checkpoint", "model", "--accel", "cpu"]
    line += ["--data", "validation", "--decode", "vote@2", "evaluation.validation_questions=3"]
    line += [f"rollout.sglang.urls=[{fake.url}]"]
    line += ["sampler.max_prompt_tokens=2000"]  # the tokenizer has seen no schema
    with closing(fake):
        evaluation.main(line)
        report = loaded(OUT)
        assert (report["notes"]["sampler"], len(report["questions"])) == ("sglang", 3)
        assert report["notes"]["servers"] == {"sglang/requests": 6}
        assert len(fake.bodies) == 6
        assert {body["sampling_params"]["temperature"] for body in fake.bodies} == {0.8}
        # The checkpoint's weights came before the first of them, once, and their copy is gone.
        assert fake.order.count("/update_weights_from_disk") == 1
        assert not list((OUT / "weights").iterdir())
        assert {one["sql"].replace(" ", "") for one in report["questions"]} == {"SELECT1"}
        evaluation.main(line)  # nobody is asked
        assert len(fake.bodies) == 6
        other = [*line, "--out", str(OUT), "rollout.backend=native"]
        assert "--out" in mistake(evaluation.main, other)
