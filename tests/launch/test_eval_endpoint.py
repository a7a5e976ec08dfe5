"""A model behind an endpoint on a test set: greedy, votes, pass@n, costs, and a kill."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import eval as command
from minirl.exchange import UserError

from .chat_server import Chat, serve
from .conftest import TINY, json_lines, loaded, write_job
from .small_sets import ASKED, GOLDS, make_spider


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endpoint")
    make_spider(folder / "spider_data")
    write_job(
        folder / "served.yaml", folder / "spider_data",
        evaluation={**TINY["evaluation"], "questions": None},
        endpoint={"parallel": 4, "retries": 2, "timeout_s": 20, "max_tokens": 99},
    )  # fmt: skip
    return folder


def brain(body: Any, earlier: int) -> str:
    """Answer greedily with the gold query, else wrongly in two of three."""
    text = body["messages"][-1]["content"]
    gold = next(gold for _, question, gold in ASKED if question in text)
    wrong = body["temperature"] > 0 and body["seed"] % 3
    return f"<think>…</think><sql>{'SELECT 17' if wrong else gold}</sql>"


def evaluate(place: Path, out: Path, chat: Chat, *more: str) -> dict[str, Any]:
    command.main(
        [
            *("--cfg", str(place / "served.yaml"), "--endpoint", chat.url, "--model", "m/one"),
            *("--data", "spider-dev", "--out", str(out), *more),
        ]
    )
    return loaded(out)


def test_greedy_answers_are_judged_by_the_test_sets_rule(place, tmp_path, capsys):
    out = tmp_path / "out"
    with serve(Chat(brain)) as chat:
        sheet = evaluate(place, out, chat)
        assert chat.requests == len(GOLDS)
        assert {body["temperature"] for body in chat.bodies} == {0.0}
        assert {body["max_tokens"] for body in chat.bodies} == {99}
        # Nobody is asked again, also where calls are made in another manner.
        other = (
            "--json",
            str(tmp_path / "copy.json"),
            "endpoint.retries=1",
            "endpoint.timeout_s=9",
        )
        again = evaluate(place, out, chat, *other)
        assert again["questions"] == sheet["questions"]
        assert json.loads((tmp_path / "copy.json").read_text()) == again
        assert chat.requests == len(GOLDS)
        other = evaluate(place, tmp_path / "out", chat, "--comparators", "bird_ex")
        assert list(other["measures"]) == ["bird_ex"]
        assert chat.requests == len(GOLDS)
    assert sheet["measures"]["spider_ex"]["mean"] == sheet["measures"]["spider_ts"]["mean"] == 1
    said = sheet["settings"]
    assert (said["model"]["name"], said["model"]["model"], said["seed"]) == ("m-one", "m/one", 0)
    assert said["questions"] == 5
    outcomes = sheet["outcomes"]
    assert (outcomes["replies"], outcomes["no_query"], outcomes["refused"]) == (5, 0, 0)
    assert outcomes["reply_tokens"] == chat.tokens["completion_tokens"]
    group = json_lines(out / "trajectories.jsonl")[1]
    assert ASKED[0][1] in group["prompt"]
    assert "<think>" in group["trajectories"][0]["turns"][0]["reply"]
    assert [one["sql"] for one in sheet["questions"]] == GOLDS
    assert "spider_ts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrapping", "found"), [("null", GOLDS), ("any", GOLDS), ("sql_tag", [""] * len(GOLDS))]
)
def test_an_endpoint_may_write_the_bare_query(place, tmp_path, wrapping, found):
    out = tmp_path / "out"
    with serve(Chat(lambda *of: f"<think>{GOLDS[0]}</think>{brain(*of)[21:-6]}")) as chat:
        sheet = evaluate(place, out, chat, f"evaluation.wrapping={wrapping}")
    assert [question["sql"] for question in sheet["questions"]] == found
    turn = json_lines(out / "trajectories.jsonl")[1]["trajectories"][0]["turns"][0]
    # Of a query that is in the reasoning too, the page marks what counts.
    assert turn.get("place") == (len(f"<think>{GOLDS[0]}</think>") if found[0] else None)


def test_an_endpoint_is_asked_as_the_settings_say(place, tmp_path):
    with serve(Chat(lambda *_: "")) as chat:
        evaluate(place, tmp_path / "own", chat, "endpoint.temperature=null")
        assert not any("temperature" in body for body in chat.bodies)
        agentic = ["env={kind: agentic}", "reward={kind: astra}", "evaluation.episode=agentic"]
        with pytest.raises(UserError, match=r"evaluation\.episode"):
            evaluate(place, tmp_path / "agentic", chat, *agentic)
        assert chat.requests == len(GOLDS)
    assert not (tmp_path / "agentic").exists()


@pytest.mark.parametrize("comments", ["names", "full"])
def test_a_test_set_is_asked_with_the_jobs_column_comments(place, tmp_path, comments):
    own = f"data.test.sources=[{{layout: spider, path: ., split: dev, comments: {comments}}}]"
    with serve(Chat(brain)) as chat:
        evaluate(place, tmp_path / "out", chat, own)
    settings = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert settings["data"]["test"]["sources"][0]["comments"] == comments


def test_commands_that_need_no_learner_run_without_it(place, tmp_path, process):
    """In a process of its own, which the base install with the openai package can run."""
    root = place / "spider_data"
    (tmp_path / "p.sql").write_text("".join(f"{gold}\n" for gold in GOLDS))
    pair = ["--db", str(root / "database" / "pets" / "pets.sqlite"), "--gold", GOLDS[0]]
    file = ["--predictions", "p.sql", "--data", "spider-dev", "--data-root", str(root)]
    lines = [["score", *pair, "--pred", "SELECT 2"], ["eval", *file, "--out", "file"]]
    with serve(Chat(brain)) as chat:
        named = ["--cfg", str(place / "served.yaml"), "--endpoint", chat.url, "--model", "m/one"]
        lines.append(["eval", *named, "--data", "spider-dev", "--out", "out"])
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


def test_an_endpoint_that_is_not_there_is_told_in_few_lines(place, tmp_path, command):
    """The client of an endpoint tells each of its attempts."""
    named = ["--cfg", place / "served.yaml", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m"]
    where = ["--data", "spider-dev", "--out", "out", "endpoint.retries=1"]
    done = command("launch.eval", *named, *where, cwd=tmp_path)
    assert done.returncode == 2
    assert "Retrying" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: http://127.0.0.1:9/v1: still failing after 2 tries (Connection")


def test_votes_and_pass_of_sampled_answers(place, tmp_path):
    with serve(Chat(brain)) as chat:
        voted = evaluate(place, tmp_path / "v", chat, "--decode", "vote@5")
        assert (voted["settings"]["decode"], voted["settings"]["vote_by"]) == ("vote@5", "set")
        assert chat.requests == 5 * len(GOLDS)
        passed = evaluate(place, tmp_path / "p", chat, "--decode", "pass@5", "seed=1")
        assert {body["temperature"] for body in chat.bodies} == {0.8}
        assert not any("top_p" in body for body in chat.bodies)
        assert not any("chat_template_kwargs" in body for body in chat.bodies)
        own = ("evaluation.top_p=0.9", "prompt.template={enable_thinking: false}")
        evaluate(place, tmp_path / "n", chat, "--decode", "vote@5", *own)
        nucleus = chat.bodies[10 * len(GOLDS) :]
        assert [body.get("top_p") for body in nucleus] == [0.9] * 25
        assert {str(body["chat_template_kwargs"]) for body in nucleus} == {
            "{'enable_thinking': False}"
        }
        assert len({body["seed"] for body in chat.bodies}) == 10 * len(GOLDS)
    for question, gold in zip(voted["questions"], GOLDS, strict=True):
        assert len(question["samples"]) == 5
        assert question["sql"] == (gold if question["right"] > 2 else "SELECT 17")
    for question in passed["questions"]:
        assert question["scores"]["spider_ex"] == float(question["right"] > 0)
    rate = sum(question["right"] for question in voted["questions"]) / 25
    assert voted["pass_at"]["1"] == pytest.approx(rate)
    assert list(voted["pass_at"]) == ["1", "2", "4", "5"]


def test_votes_are_those_of_the_rule_whatever_the_jobs_own_limits(place, tmp_path):
    """Of a file with the same samples the answers are the same."""
    replies = {question: iter(["SELECT 1"] * 3) for _, question, _ in ASKED}
    names = "SELECT name FROM pet"
    replies["Who is there?"] = iter(["SELECT 17", names, names])
    replies["How many items?"] = iter(["SELECT nothing", "SELECT none", "SELECT nobody"])

    def speaks(body: Any, earlier: int) -> str:
        text = body["messages"][-1]["content"]
        asked = next(question for _, question, _ in ASKED if question in text)
        return f"<think>…</think><sql>{next(replies[asked])}</sql>"

    out = tmp_path / "out"
    with serve(Chat(speaks)) as chat:
        # Two rows are too many for the job, one is not.
        more = ("--decode", "vote@3", "--official", "executor.max_rows=1")
        sheet = evaluate(place, out, chat, *more)
    chosen = {one["question"]: one["sql"] for one in sheet["questions"]}
    assert chosen["Who is there?"] == names
    assert chosen["How many items?"] == "Error SQL"
    assert (out / "predictions.sql").read_text().splitlines() == list(chosen.values())
    file = ("--predictions", str(out), "--data", "spider-dev", "--decode", "vote@3")
    again = tmp_path / "again.json"
    command.main([*file, "--data-root", str(place / "spider_data"), "--json", str(again)])
    assert [one["sql"] for one in json.loads(again.read_text())["questions"]] == [*chosen.values()]
