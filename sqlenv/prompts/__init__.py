"""Prompts: a file of templates for each paper, and the functions that fill them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from minirl.exchange import Message
from sqlenv.config import AgenticConfig
from sqlenv.types import ENGINES, Example, Observation, Wrapping

PromptStyle = Literal["progress", "omnisql", "paverl", "short", "demo"]
ASKED_FOR: dict[PromptStyle, Wrapping | None] = {
    "progress": "sql_tag",
    "omnisql": "fence",
    "paverl": "fence",
    "short": "fence",
    "demo": None,
}
"""Where each style asks for the query; the demo's says nothing, its policy is shown replies."""
REASONING: frozenset[PromptStyle] = frozenset({"progress", "omnisql", "paverl"})
"""Styles that ask for reasoning before the query."""

DB_ID = "{db_id}/{db_id}.sqlite"
"""How a call of SQL-ASTRA's tool names the database."""

Undiagnosed = Literal["close", "runs", "fails"]
"""Why a wrong query has no tags: its structure is the gold's, or the two could not be compared."""


@cache
def _templates(name: str) -> Mapping[str, Any]:
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))


def tag_sentences() -> Mapping[str, str]:
    """Return what the diagnostic tags say to the model: one neutral sentence each, the gold never
    named.
    """
    return _templates("progress")["tags"]


def first_observation(example: Example, schema_text: str, *, style: PromptStyle) -> Observation:
    """Ask the question: the messages before the policy's first reply.

    Evidence stands on a line of its own before the question; PaVeRL's prompt has a section for it.
    """
    fields, templates = _fields(example, schema_text), _templates(style)
    if style != "paverl":
        told = (example.evidence.strip(), fields["question"])
        fields["question"] = "\n".join(filter(None, told))
    message = Message("user", templates["user"].format(**fields))
    if style == "progress":
        return (Message("system", templates["system"].format(**fields)), message)
    return (message,)


def agent_observation(
    example: Example, schema_text: str, config: AgenticConfig, *, style: PromptStyle
) -> Observation:
    """Ask the question and offer a tool (SQL-ASTRA, appendix F).

    The paper puts the question in OmniSQL's template; `demo` only names the tool.
    """
    *before, question = first_observation(example, schema_text, style=style)
    if style == "demo":
        call = _templates("demo")["call"].format(tool=config.tool)
        return (Message("user", question.content + call),)
    templates = _templates("astra")
    db_id = DB_ID.format(db_id=example.db_id)
    call = templates["call"].format(tool=config.tool, db_id=db_id)
    if config.finish_tool is not None:
        call += templates["finish"].format(finish_tool=config.finish_tool)
    system = templates["system"].format(calls=config.calls)
    return (Message("system", system), *before, Message("user", question.content + call))


def feedback_text(
    example: Example,
    tags: Sequence[str],
    *,
    form: Wrapping | None = "sql_tag",
    undiagnosed: Undiagnosed = "close",
) -> str:
    """Ask for another attempt (Progress-SQL, appendix F, round 2 and later).

    Without tags a generic text replaces them, and another where the previous or the gold query
    could not be parsed (the paper's note). A query that ran is never called a syntax error.
    `form` is where the prompt asked for the query; the paper's is `sql_tag`. None is the demo's,
    whose words leave out the form and the sentences of the tags.
    """
    templates = _templates("progress" if form else "demo")
    if tags:
        descriptions = " ".join(tag_sentences()[tag] for tag in tags)
        issues = templates["feedback"].format(
            error_codes=", ".join(tags), error_descriptions=descriptions
        )
    else:
        issues = templates["generic_feedback"].format(generic=templates["generic"][undiagnosed])
    return issues + templates["revise"][form].format(db_engine=ENGINES[example.dialect])


def judge_observation(example: Example, schema_text: str, queries: Sequence[str]) -> Observation:
    """Ask for a score between 0 and 1 of every query (PaVeRL-SQL, appendix A, prompt 2)."""
    numbered = [(f"SQL{index}", query) for index, query in enumerate(queries, start=1)]
    text = _templates("paverl")["judge"].format(
        count=len(queries),
        queries="\n".join(f"{name}:\n```sql\n{query}\n```" for name, query in numbered),
        scores="\n".join(f"{name}: score" for name, _ in numbered),
        **_fields(example, schema_text),
    )
    return (Message("user", text),)


def _fields(example: Example, schema_text: str) -> dict[str, str]:
    """Give what templates name of a question."""
    evidence = example.evidence.strip()
    context = _templates("paverl")["context"].format(evidence=evidence) if evidence else ""
    fields = {"db_engine": ENGINES[example.dialect], "db_details": schema_text}
    return fields | {"context": context, "question": example.question.strip()}
