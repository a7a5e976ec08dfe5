"""SQL-ASTRA's environment: the model calls a tool that runs SQL, sees the rows, and answers.

Calls have Hermes' form, `<tool_call>{"name": …, "arguments": {"query": …}}</tool_call>`; answers
come in `<tool_response>…</tool_response>` as a message of the user, as Qwen's chat template writes
those of a tool.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from minirl.exchange import Message
from sqlenv.config import AgenticConfig
from sqlenv.dialects import run_in_dialect
from sqlenv.envs.single_turn import BaseEnvironment
from sqlenv.sql.answers import answer_of
from sqlenv.types import (
    Answer,
    Attempt,
    Episode,
    Observation,
    Result,
    SqlError,
    Table,
    cut,
    describe_failure,
)

# What opens a mark of the conversation: `<|im_end|>`, `<tool_call>`, `</tool_response>`.
_MARK = re.compile(r"<(?=\||/?tool_)")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool: the query to run, or the final one."""

    sql: str
    is_final: bool


class Agentic(BaseEnvironment[AgenticConfig]):
    """Runs the model's queries until it answers or has no call left."""

    def step(self, episode: Episode, reply: str) -> tuple[Episode, Observation | None]:
        """Run the call of a reply and answer with the tool's response, or judge its answer.

        A reply without a call is the answer, and so is the one after the last call, whatever it
        holds. Of several calls the first is run. A call that cannot be read is answered with what
        is wrong, and is one of the calls.
        """
        config, example = self.config, episode.example
        answer = answer_of(reply, config.wrapping)
        call = read_call(answer, config)
        final = call if isinstance(call, Call) and call.is_final else None
        if call is None or final or len(episode.attempts) >= config.calls:
            read = answer.with_sql(final.sql) if final else answer
            attempt = self._judge(example, read)
            return replace(episode, attempts=(*episode.attempts, attempt)), None
        if isinstance(call, str):
            result: Result = SqlError(call)
            attempt = Attempt(answer.with_sql(""), result, correct=False, kind="bad_call")
        else:
            result = run_in_dialect(self.executor.execute, example, call.sql)
            read = answer.with_sql(call.sql)
            attempt = replace(self._judge(example, read, result), kind="call")
        # As SQLite gave it: numbers written as the gold result's would tell what is right.
        response = tool_response(result, rows=config.response_rows, chars=config.response_chars)
        following = (Message("user", response),)
        return replace(episode, attempts=(*episode.attempts, attempt)), following


def read_call(answer: Answer, config: AgenticConfig) -> Call | str | None:
    """Read the first call of a reply, thoughts apart; None for a reply without any.

    Of a call that cannot be read the text says why, in words for the model.

    The query may stand in a fence inside the JSON string, and the arguments in a string of their
    own. Other arguments are ignored, the name of a database too: the question decides it.
    """
    if answer.call is None:
        return None
    if not answer.call_ends:
        return "the call does not end; write </tool_call> after it"
    call = _read_json(answer.call)
    if not isinstance(call, dict):
        return "the call is not a JSON object with name and arguments"
    name, known = call.get("name"), {config.tool: "query", config.finish_tool: "answer"}
    argument = known.get(name) if isinstance(name, str) else None
    if argument is None:
        return f"the call names no known tool; its name has to be {config.tool}"
    arguments = call.get("arguments")
    # OpenAI's interface writes the arguments as text, and models repeat what they have read.
    if isinstance(arguments, str):
        arguments = _read_json(arguments)
    sql = arguments.get(argument) if isinstance(arguments, dict) else None
    if not isinstance(sql, str) or not sql.strip():
        return f"the call has no text in arguments.{argument}"
    # JSON can spell halves of characters, which are no text.
    sql = sql.encode("utf-8", "replace").decode()
    return Call(answer_of(sql, "any").sql or sql.strip(), is_final=argument == "answer")


def _read_json(text: str) -> Any:
    """Read a value; None where there is none, or null."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def tool_response(result: Result, *, rows: int, chars: int) -> str:
    """Write what the tool answers: the first rows as Python writes lists, or `error: …`.

    At most so many rows, and characters of them; a line says how many rows there are.
    """
    if isinstance(result, Table):
        text = _rows_text(result, rows=rows, chars=chars)
    else:
        text = f"error: {describe_failure(result)}"[:chars]
    # A value may be written like a mark of the conversation; broken up it is text like any other.
    return f"<tool_response>\n{_MARK.sub('< ', text)}\n</tool_response>"


def _rows_text(table: Table, *, rows: int, chars: int) -> str:
    shown: list[str] = []
    length = 0
    for row in table.rows[:rows]:
        text = repr([cut(value, chars) for value in row[:chars]])
        length += len(text) + 2
        if length > chars:
            break
        shown.append(text)
    if table.rows and not shown:
        shown = [f"{text[: chars - 5]} …"]  # a single row that is too long
    count = len(table.rows)
    note = f"\n{len(shown)} of {count} rows" if len(shown) < count else ""
    return f"[{', '.join(shown)}]{note}"
