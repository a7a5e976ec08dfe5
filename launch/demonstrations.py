"""Replies to learn from before reinforcement learning: the warm start's demonstrations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from launch.config import JobConfig
from minirl.sft import Demonstration
from minirl.tiny import MARKS
from sqlenv.config import AgenticConfig, Wrapping
from sqlenv.mistakes import mistake
from sqlenv.parse import tables_of
from sqlenv.types import Episode, Example, Observation


class Teacher(Protocol):
    """An environment that says what is wrong with a reply."""

    def reset(self, example: Example) -> tuple[Episode, Observation]:
        """Ask the question."""
        ...

    def step(self, episode: Episode, reply: str) -> tuple[Episode, Observation | None]:
        """Judge a reply."""
        ...


@dataclass(frozen=True, slots=True)
class Form:
    """How demonstrations write queries.

    Attributes:
        wrapping: What a query stands in.
        agent: The tool-calling episode, or None where one reply answers.
        brief: Leave out of a call what the environment ignores, for tiny models.
    """

    wrapping: Wrapping = "sql_tag"
    agent: AgenticConfig | None = None
    brief: bool = False

    @classmethod
    def of(cls, config: JobConfig) -> Form:
        """Return the form that a job's environment reads."""
        env = config.env
        agent = env if isinstance(env, AgenticConfig) else None
        return cls(env.wrapping, agent, brief=config.prompt.style == "demo")

    @property
    def marks(self) -> tuple[str, ...]:
        """List the texts that a tiny model writes in one token each."""
        if self.agent is None:
            return MARKS if self.wrapping == "sql_tag" else (*MARKS, "```sql", "```")
        before, _, after = write_call("|", self.agent).rpartition("|")
        response = ("<tool_response>", "</tool_response>")
        return (*MARKS[:2], "```sql", "```", before.strip(), after.strip(), *response)

    def answer(self, sql: str) -> str:
        """Write the reply that answers a question without a tool."""
        return write_reply(sql, self.wrapping)

    def call(self, sql: str, example: Example) -> str:
        """Write the reply that calls the tool; the thought names the tables."""
        assert self.agent is not None
        db_id = None if self.brief else example.db_id
        return f"{_thought(sql)} {write_call(sql, self.agent, db_id=db_id)}"

    def last(self, sql: str) -> str:
        """Write the reply that ends a tool-calling episode."""
        if self.agent is not None and self.agent.finish_tool is not None:
            return write_call(sql, self.agent, is_final=True)
        return write_query(sql, self.wrapping)


def write_query(sql: str, wrapping: Wrapping) -> str:
    """Write a query where the environment looks for it."""
    return f"<sql> {sql} </sql>" if wrapping == "sql_tag" else f"```sql\n{sql}\n```"


def write_reply(sql: str, wrapping: Wrapping = "sql_tag") -> str:
    """Write a query as a reply in the required form; the thought names the tables it reads."""
    return f"{_thought(sql)} {write_query(sql, wrapping)}"


def write_call(
    sql: str, config: AgenticConfig, *, db_id: str | None = None, is_final: bool = False
) -> str:
    """Write a call of the tool, or of the tool that ends the episode."""
    arguments = {"answer" if is_final else "query": sql}
    if db_id is not None:
        arguments["db_id"] = db_id
    name = config.finish_tool if is_final else config.tool
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _thought(sql: str) -> str:
    return f"<think> {', '.join(tables_of(sql))} </think>"


def demonstrations(
    examples: Sequence[Example],
    environment: Teacher,
    *,
    mistake_share: float,
    repair_share: float,
    seed: int,
    form: Form | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Demonstration]:
    """Make a demonstration of every example.

    Where the form has a tool, a demonstration is the transcript of an episode: the query as a call,
    the tool's response, the query as the answer; a repair calls with the mistake first.

    Args:
        examples: Questions with gold queries.
        environment: Asks them, and diagnoses wrong replies.
        mistake_share: Of those that are no repairs, the share whose answer has a mistake
            (`sqlenv.mistakes`).
        repair_share: Share that first make that mistake, then mend it after the environment's
            feedback. Where the mistake does not change the result, the right answer alone is shown.
        seed: Decides which ones.
        form: How queries are written; None for `<sql>` tags in one reply.
        progress: Called with (done, in all, "").
    """
    form = form or Form()
    answer, repair = (_answer, _repair) if form.agent is None else (_transcript, _long_transcript)
    rng = Random(f"{seed} demonstrations")
    made = []
    for number, example in enumerate(examples, start=1):
        draw = rng.random()
        if draw < repair_share:
            made.append(repair(example, environment, form))
        else:
            has_mistake = draw < repair_share + (1 - repair_share) * mistake_share
            sql = (mistake(example.gold_sql) if has_mistake else None) or example.gold_sql
            made.append(answer(example, environment, form, sql))
        if progress is not None and number % 100 == 0:
            progress(number, len(examples), "")
    return made


def _answer(example: Example, environment: Teacher, form: Form, sql: str) -> Demonstration:
    _, question = environment.reset(example)
    return Demonstration((question,), (), form.answer(sql), key=example.db_id)


def _repair(example: Example, environment: Teacher, form: Form) -> Demonstration:
    episode, question = environment.reset(example)
    wrong = mistake(example.gold_sql)
    _, feedback = environment.step(episode, form.answer(wrong)) if wrong else (None, None)
    if wrong is None or feedback is None:  # no feedback: that mistake does not change the result
        return _answer(example, environment, form, example.gold_sql)
    dialogue = ((question, feedback), (form.answer(wrong),))
    # A key of its own: a group is as long as its longest member.
    return Demonstration(*dialogue, form.answer(example.gold_sql), key=(example.db_id, "repair"))


def _transcript(example: Example, environment: Teacher, form: Form, *queries: str) -> Demonstration:
    """Call the tool with each query, and answer with the last one; that call is learnt too."""
    episode, question = environment.reset(example)
    observations, replies = [question], []
    for sql in queries:
        reply = form.call(sql, example)
        episode, response = environment.step(episode, reply)
        assert response is not None
        observations.append(response)
        replies.append(reply)
    return Demonstration(
        tuple(observations),
        tuple(replies),
        form.last(queries[-1]),
        learnt=2,
        learn_responses=False,
        key=(example.db_id, len(queries)),
    )


def _long_transcript(example: Example, environment: Teacher, form: Form) -> Demonstration:
    assert form.agent is not None
    wrong = mistake(example.gold_sql) if form.agent.calls > 1 else None
    queries = (example.gold_sql,) if wrong is None else (wrong, example.gold_sql)
    return _transcript(example, environment, form, *queries)
