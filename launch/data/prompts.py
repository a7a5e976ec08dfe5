"""The form of prompts and replies: schemas, value matches, wording, where a query stands. No JAX.

Training, validation, evaluation and `launch.ask` write prompts here, of the same facts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from launch import cli
from launch.config import JobConfig, PromptConfig
from sqlenv.cache import shared_cache
from sqlenv.config import FROZEN_NOW, AgenticConfig, EnvConfig
from sqlenv.prompts import (
    ASKED_FOR,
    DB_ID,
    REASONING,
    agent_observation,
    first_observation,
    judge_observation,
)
from sqlenv.schema.reading import DatabaseSchema, Descriptions, read_schema
from sqlenv.schema.rendering import render_schema
from sqlenv.schema.values import ValueMatcher, with_matches
from sqlenv.sql.answers import wrapped
from sqlenv.sql.extraction import tables_of
from sqlenv.types import Example, Observation, ValueMatch, Wrapping

if TYPE_CHECKING:
    from minirl.model.tokenizer import ChatTokenizer


def read_tokenizer(config: JobConfig, folder: Path) -> ChatTokenizer:
    """Read a tokenizer whose chat template has a job's arguments, and the date that queries see; a
    fixed one where these see the real time, so that a prompt is the same on another day.
    """
    # Of the learner's extra, and seconds to import.
    from minirl.model.tokenizer import ChatTokenizer

    return ChatTokenizer(
        folder, arguments=config.prompt.template, now=config.executor.now or FROZEN_NOW
    )


class Prompts:
    """Writes prompts; the schema of a database is read once."""

    def __init__(self, config: PromptConfig, env: EnvConfig) -> None:
        self._config, self._env = config, env
        self._descriptions: dict[Path, Descriptions] = {}
        self._schema = cache(self._read_schema)
        self._text = cache(lambda path, dialect: self._render(self._schema(path), dialect))
        shows_matches = config.value_matches and config.schema_style == "omnisql"
        self._matcher = ValueMatcher(shared_cache()) if shows_matches else None

    def describe(self, descriptions: Mapping[Path, Descriptions]) -> None:
        """Use what data sets say of the columns of their databases."""
        self._descriptions |= descriptions

    def matches(self, example: Example) -> tuple[ValueMatch, ...]:
        """Find the values that a question names, where prompts show them."""
        return self._matcher.matches(example) if self._matcher else ()

    def schema(self, example: Example) -> DatabaseSchema:
        """Return the schema that an example's prompt shows."""
        return with_matches(self._schema(example.database), self.matches(example))

    def training(self, example: Example, schema: DatabaseSchema | None = None) -> Observation:
        """Put a question as training episodes do, perhaps with a part of its schema."""
        text = self._render(schema, example.dialect) if schema else self._schema_text(example)
        if isinstance(self._env, AgenticConfig):
            return agent_observation(example, text, self._env, style=self._config.style)
        return first_observation(example, text, style=self._config.style)

    def single_turn(self, example: Example) -> Observation:
        """Put a question that one reply answers."""
        return first_observation(example, self._schema_text(example), style=self._config.style)

    def judge(self, example: Example, queries: Sequence[str]) -> Observation:
        """Ask for a score of each query (PaVeRL-SQL, prompt 2)."""
        return judge_observation(example, self._schema_text(example), queries)

    def _schema_text(self, example: Example) -> str:
        if self.matches(example):
            return self._render(self.schema(example), example.dialect)
        return self._text(example.database, example.dialect)

    def _render(self, schema: DatabaseSchema, dialect: str) -> str:
        return render_schema(schema, style=self._config.schema_style, dialect=dialect)

    def _read_schema(self, database: Path) -> DatabaseSchema:
        return read_schema(
            database,
            examples=self._config.example_values,
            profile=self._config.schema_style == "profile",
            descriptions=self._descriptions.get(database),
        )


_CHARACTERS = 4  # of a token, about


def measure(prompt: Observation, tokenizer: ChatTokenizer | None, *, limit: int) -> tuple[str, str]:
    """Return a prompt as the model is shown it, and how many tokens it has; without a tokenizer its
    messages, and about how many.
    """
    if tokenizer is None:
        text = "\n".join(f"[{message.role}]\n{message.content}" for message in prompt)
        count = sum(len(message.content) for message in prompt) // _CHARACTERS
        return text, f"about {count:,} tokens; the model's own tokenizer is not here"
    ids = tokenizer.encode_chat(prompt)
    size = f"of {limit:,}" if len(ids) <= limit else f"are too many, {limit:,} are allowed"
    return tokenizer.decode(ids), f"{len(ids):,} tokens {size}"


def show_prompt(
    example: Example, prompt: Observation, tokenizer: ChatTokenizer | None, *, limit: int
) -> None:
    """Print a prompt and how many tokens it has."""
    text, size = measure(prompt, tokenizer, limit=limit)
    cli.output.out(text)
    cli.output.print(f"Question {example.id}: {size}")


MARKS = ("<think>", "</think>", "<sql>", "</sql>")
"""Written by the policy and read by environments: tokens of a tiny model, text like any other."""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a reply writes a query: as the prompt asks for it.

    Attributes:
        agent: The tool-calling episode; None where one reply answers.
        reasons: The prompt asks for reasoning before the query.
        brief: The demo's form, for tiny models: the tables that a query reads as a thought, and
            nothing that the environment ignores.
    """

    wrapping: Wrapping = "sql_tag"
    agent: AgenticConfig | None = None
    reasons: bool = False
    brief: bool = False

    @classmethod
    def of(cls, config: JobConfig) -> ReplyFormat:
        """Return the form that a job's prompt asks for, which its environment reads."""
        env, style = config.env, config.prompt.style
        return cls(
            ASKED_FOR[style] or env.wrapping,
            env if isinstance(env, AgenticConfig) else None,
            reasons=style in REASONING,
            brief=style == "demo",
        )

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
        if not self.brief:
            return wrapped(sql, self.wrapping)
        is_fence = self.wrapping == "fence"
        return f"{_thought(sql)} {wrapped(sql, 'fence') if is_fence else f'<sql> {sql} </sql>'}"

    def call(self, sql: str, example: Example) -> str:
        """Write the reply that calls the tool."""
        assert self.agent is not None
        if self.brief:
            return f"{_thought(sql)} {write_call(sql, self.agent)}"
        db_id = DB_ID.format(db_id=example.db_id)
        return write_call(wrapped(sql, "fence"), self.agent, db_id=db_id)

    def last(self, sql: str) -> str:
        """Write the reply that ends a tool-calling episode."""
        if self.agent is not None and self.agent.finish_tool is not None:
            text = sql if self.brief else wrapped(sql, "fence")
            return write_call(text, self.agent, is_final=True)
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
