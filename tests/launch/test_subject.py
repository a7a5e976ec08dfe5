"""Evaluating needs no config: a run is asked as it was trained, any other model in a stated way."""

import json
import logging
from pathlib import Path
from typing import Any

from launch import eval as evaluation
from launch import train
from launch.config import load_config
from launch.policy import find_subject

from .chat_server import Chat, serve
from .conftest import loaded, parsed
from .small_sets import ASKED, GOLDS


def gold(body: Any, _earlier: int) -> str:
    """Answer with the bare query, as real models do whatever they are asked for."""
    text = body["messages"][-1]["content"]
    return next(sql for _, question, sql in ASKED if question in text)


def ask(chat: Chat, spider: Path, out: Path, *more: str) -> dict[str, Any]:
    named = ["--endpoint", chat.url, "--model", "m", "--data", "spider-dev"]
    evaluation.main([*named, "--data-root", str(spider), "--out", str(out), *more])
    return loaded(out)


# A run.


def find(*line: str) -> Any:
    """Find what a command line evaluates."""
    found = parsed("eval", *line)
    options = found.get("given", evaluation.EvalOptions())
    given = {name: getattr(options, name) for name in ("checkpoint", "endpoint")}
    return find_subject(options.cfg, found["overrides"], **given)


def test_settings_of_the_command_line_change_those_of_the_run(place):
    run = str(place / "finished")
    config = find("--checkpoint", run, "seed=7", "evaluation.top_p=0.5", "mesh={data: 1}")
    assert (config.seed, config.evaluation.top_p, config.mesh.data) == (7, 0.5, 1)
    assert find("--checkpoint", run).mesh == "auto"


# Any other model.


def test_an_endpoint_needs_no_config(spider, tmp_path, capsys):
    with serve(Chat(gold)) as chat:
        sheet = ask(chat, spider, tmp_path / "out")
    assert chat.requests == len(GOLDS)
    assert "prompt.style=short" in capsys.readouterr().out
    for body in chat.bodies:
        [message] = body["messages"]
        assert message["content"].endswith(
            "one SQLite query in a ```sql code block and nothing else."
        )
    # Bare queries are read, though a fence was asked for.
    assert sheet["measures"]["spider_ex"]["mean"] == 1
    assert sheet["outcomes"]["no_query"] == 0


# How many questions.


def test_the_number_of_questions_is_never_dropped(spider, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with serve(Chat(gold)) as chat:
        sheet = ask(chat, spider, tmp_path / "own", "evaluation.questions=2")
        assert (chat.requests, sheet["settings"]["questions"]) == (2, 2)
        assert "test: a sample of 2 of 5 questions" in caplog.messages
        sheet = ask(chat, spider, tmp_path / "more", "evaluation.questions=2", "--limit", "3")
        assert (chat.requests, sheet["settings"]["questions"]) == (2 + 3, 3)
        ask(chat, spider, tmp_path / "all", "--limit", "9")
        assert chat.requests == 2 + 3 + 5


def test_the_sample_of_a_file_is_that_of_a_model(spider, tmp_path):
    (tmp_path / "p.sql").write_text("".join(f"{sql}\n" for sql in GOLDS))
    data = ["--data", "spider-dev", "--data-root", str(spider), "--limit", "3"]
    file = tmp_path / "file.json"
    evaluation.main(["--predictions", str(tmp_path / "p.sql"), *data, "--json", str(file)])
    with serve(Chat(gold)) as chat:
        sheet = ask(chat, spider, tmp_path / "out", "--limit", "3")
    found = [
        [one["id"] for one in each["questions"]] for each in (json.loads(file.read_text()), sheet)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 3
    assert json.loads(file.read_text())["measures"]["spider_ex"]["mean"] == 1


def test_a_job_of_few_questions_says_so_in_its_settings(tiny):
    line = ["--cfg", str(tiny), "--limit", "5", "evaluation.questions=null", "data.held_out=9"]
    given = parsed("train", *line)
    cfg, settings = given["cfg"], given["overrides"]
    config = train._limited(load_config(cfg, settings), cfg, settings, given["limit"])
    asked = config.evaluation
    assert (config.data.train.total, asked.questions, asked.validation_questions) == (5, 5, 4)
    assert config.data.held_out == 5


# One prompt.


def test_a_prompt_is_shown_as_the_model_is_asked_it(place, spider, tiny, monkeypatch, capsys):
    monkeypatch.chdir(place)
    lines = {
        train: ["--cfg", str(tiny), "run.dir=finished"],
        evaluation: ["--checkpoint", "finished"],
    }
    for command, line in lines.items():
        command.main([*line, "--show-prompt"])
        told = capsys.readouterr().out
        assert told.startswith("<|im_start|>")
        assert "tokens of 700" in told.splitlines()[-1]
        assert "CREATE TABLE" in told or "(id" in told
    question = loaded(place / "finished" / "after")["questions"][0]["question"]
    assert question in told  # of the last command
    named = ["--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--data", "spider-dev"]
    evaluation.main([*named, "--data-root", str(spider), "--show-prompt"])
    told = capsys.readouterr().out
    assert "[user]\nCREATE TABLE pet" in told
    assert "about " in told.splitlines()[-1]
