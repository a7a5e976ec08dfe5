"""The format of replies: what the environment of a job reads, and demonstrations show."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlenv.config import AgenticConfig
from sqlenv.prompts import astra
from sqlenv.sql.answers import wrapped
from sqlenv.sql.extraction import tables_of
from sqlenv.types import Example, Wrapping

if TYPE_CHECKING:
    from launch.config import JobConfig

MARKS = ("<think>", "</think>", "<sql>", "</sql>")
"""Written by the policy and read by environments: tokens of a tiny model, text like any other."""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a reply writes a query.

    Attributes:
        agent: The tool-calling episode; None where one reply answers.
        brief: Leave out of a call what the environment ignores, for tiny models.
    """

    wrapping: Wrapping = "sql_tag"
    agent: AgenticConfig | None = None
    brief: bool = False

    @classmethod
    def of(cls, config: JobConfig) -> ReplyFormat:
        """Return the format that a job's environment reads."""
        env = config.env
        agent = env if isinstance(env, AgenticConfig) else None
        return cls(env.wrapping, agent, brief=config.prompt.style == "demo")

    @property
    def marks(self) -> tuple[str, ...]:
        """List the texts that a tiny model writes in one token each."""
        if self.agent is None:
            return (*MARKS, "```sql", "```") if self.wrapping == "fence" else MARKS
        before, _, after = write_call("|", self.agent).rpartition("|")
        response = ("<tool_response>", "</tool_response>")
        return (*MARKS[:2], "```sql", "```", before.strip(), after.strip(), *response)

    def answer(self, sql: str) -> str:
        """Write the reply that answers a question without a tool."""
        return f"{_thought(sql)} {wrapped(sql, self.wrapping)}"

    def call(self, sql: str, example: Example) -> str:
        """Write the reply that calls the tool; the thought names the tables."""
        assert self.agent is not None
        db_id = None if self.brief else astra.DB_ID.format(db_id=example.db_id)
        return f"{_thought(sql)} {write_call(sql, self.agent, db_id=db_id)}"

    def last(self, sql: str) -> str:
        """Write the reply that ends a tool-calling episode."""
        if self.agent is not None and self.agent.finish_tool is not None:
            return write_call(sql, self.agent, is_final=True)
        return wrapped(sql, self.wrapping)


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
