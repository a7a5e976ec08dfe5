"""A database asked through a model, as a user does it, and how results are shown."""

import io
import sys
from typing import Any

import pytest

from launch import ask
from launch.evaluation import sampling
from launch.evaluation.answers import Outcomes, Sampled

from .conftest import mistake

# What the model says to each question, and lines of what is printed.
REPLIES = {
    "names": "I think <sql>SELECT name FROM emp WHERE dept = 'x' ORDER BY name</sql>",
    "many": "<sql>SELECT 1 AS one FROM emp a, emp b, emp c</sql>",
    "wrong": "<sql>SELECT nobody FROM emp</sql>",
    "write": "<sql>DELETE FROM emp</sql>",
    "prose": "I cannot say. " * 100,
    "fenced": "```sql\nSELECT 1\n```",
}
SHOWN = {
    "names": ["SELECT name FROM emp WHERE dept = 'x' ORDER BY name", "│ ann  │", "│ bob  │"],
    "many": ["SELECT 1 AS one FROM emp a, emp b, emp c", "│ 1   │", "… 44 more rows"],
    "wrong": ["SELECT nobody FROM emp", "no such column: nobody"],
    "write": ["DELETE FROM emp", "not allowed: DELETE"],
    "prose": ["there is no query in this reply"],
    "fenced": ["there is no query in this reply"],  # which asks for a tag
}
RUNS = ("names", "many")


class Scripted:
    """Takes the place of an `Evaluator`: the policy says what the question asks for."""

    limits: list = []  # noqa: RUF012 - what each was made with
    prompts: list = []  # noqa: RUF012 - and was asked

    def __init__(self, model, tokenizer, environment, limits, config):
        self.limits.append(limits)
        self._environment = environment

    def sample(self, examples, decode, *, first):
        episode, observation = self._environment.reset(examples[0])
        self.prompts.append(observation[-1].content)
        assert "CREATE TABLE" in self.prompts[-1] or "emp(" in self.prompts[-1]
        if examples[0].question == "too long":
            return [Sampled(("",), ("",), outcomes=Outcomes.of("", "too_long"))]
        after, _ = self._environment.step(episode, REPLIES[examples[0].question])
        return [Sampled((after.final_attempt.sql,), (after.final_attempt.text,))]


@pytest.fixture
def asked(place, database, monkeypatch, capsys):
    """Return what asks the finished run, or a folder in it: the exit status and the lines of
    standard output.
    """
    monkeypatch.setattr(sampling, "Evaluator", Scripted)

    def run(*words: str, stdin: str | bytes = "", folder: str = "") -> tuple[Any, list[str]]:
        content = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
        line = ["--checkpoint", str(place / "finished" / folder), "--db", str(database), *words]
        with pytest.raises(SystemExit) as end:
            ask.main(line)
        return end.value.code, capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("question", REPLIES)
def test_a_query_is_shown_with_its_result(asked, question):
    status, lines = asked(question)
    assert status == (0 if question in RUNS else 1)
    for line in SHOWN[question]:
        assert line in lines
    if question == "many":
        assert lines.count("│ 1   │") == 20  # of 64
    if question == "prose":
        assert lines[0] == REPLIES["prose"][:500]


def test_lines_of_standard_input_are_questions_and_one_that_runs_is_enough(asked):
    status, lines = asked(stdin="prose\n\nnames\n \nwrong")
    assert status == 0
    places = [lines.index(SHOWN[question][-1]) for question in ("prose", "names", "wrong")]
    assert places == sorted(places)
    assert asked(stdin="prose\nwrong\n")[0] == 1
    assert "standard input: is no text in utf-8" in mistake(asked, stdin="Où?".encode("latin-1"))


def test_a_run_is_asked_with_its_own_limits_in_one_slot(asked):
    assert "more tables than this prompt has room for" in mistake(asked, "too long")
    sampler = Scripted.limits[-1]
    assert (sampler.slots, sampler.max_reply_tokens, sampler.max_prompt_tokens) == (1, 16, 186)


def test_a_model_folder_has_the_short_prompt_or_that_of_a_config(asked):
    assert asked("fenced", folder="warm/model")[0] == 0
    short = Scripted.prompts[-1]
    assert short.endswith(
        ");\nfenced\nAnswer with one SQLite query in a ```sql code block and nothing else."
    )
    assert asked("--cfg", "progress-demo", "names", folder="warm/model")[0] == 0
    assert short.replace("fenced", "names") != Scripted.prompts[-1]


def test_the_command_answers_with_a_real_policy(command, place, database):
    done = command("launch.ask", "--checkpoint", "finished", "--db", database, "Who?", cwd=place)
    # Whatever so raw a policy says: a table, or a line that says why there is none.
    assert done.returncode == (0 if "┏" in done.stdout else 1), done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
