"""Prompts: one module of templates a paper, and the functions that fill them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from minirl.exchange import Message
from sqlenv.config import AgenticConfig
from sqlenv.prompts import astra, demo, omnisql, paverl, progress, short
from sqlenv.prompts.tags import TAG_SENTENCES
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

Undiagnosed = Literal["close", "runs", "fails"]
"""Why a wrong query has no tags: its structure is the gold's, or the two could not be compared."""


def first_observation(example: Example, schema_text: str, *, style: PromptStyle) -> Observation:
    """Ask the question: the messages before the policy's first reply.

    Evidence stands on a line of its own before the question; PaVeRL's prompt has a section for it.
    """
    details = {"db_engine": _engine(example), "db_details": schema_text}
    if style == "paverl":
        text = paverl.USER.format(**details, **_paverl_fields(example))
        return (Message("user", text),)
    evidence = example.evidence.strip()
    question = "\n".join(filter(None, (evidence, example.question.strip())))
    template = {"progress": progress, "omnisql": omnisql, "short": short, "demo": demo}[style]
    message = Message("user", template.USER.format(**details, question=question))
    if style == "progress":
        return (Message("system", progress.SYSTEM.format(**details)), message)
    return (message,)


def agent_observation(
    example: Example, schema_text: str, config: AgenticConfig, *, style: PromptStyle
) -> Observation:
    """Ask the question and offer a tool (SQL-ASTRA, appendix F).

    The paper puts the question in OmniSQL's template; `demo` only names the tool.
    """
    *before, question = first_observation(example, schema_text, style=style)
    if style == "demo":
        return (Message("user", question.content + demo.CALL.format(tool=config.tool)),)
    db_id = astra.DB_ID.format(db_id=example.db_id)
    call = astra.CALL.format(tool=config.tool, db_id=db_id)
    if config.finish_tool is not None:
        call += astra.FINISH.format(finish_tool=config.finish_tool)
    system = astra.SYSTEM.format(calls=config.calls)
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
    could not be parsed (the paper's note); of what ran it never says that its syntax is wrong.
    `form` is where the prompt asked for the query; the paper's is `sql_tag`. None is the demo's,
    whose words leave out the form and the sentences of the tags.
    """
    template = progress if form else demo
    if tags:
        descriptions = " ".join(TAG_SENTENCES[tag] for tag in tags)
        issues = template.FEEDBACK.format(
            error_codes=", ".join(tags), error_descriptions=descriptions
        )
    else:
        issues = template.GENERIC_FEEDBACK.format(generic=template.GENERIC[undiagnosed])
    return issues + template.REVISE[form].format(db_engine=_engine(example))


def judge_observation(example: Example, schema_text: str, queries: Sequence[str]) -> Observation:
    """Ask for a score between 0 and 1 of every query (PaVeRL-SQL, appendix A, prompt 2)."""
    numbered = [(f"SQL{index}", query) for index, query in enumerate(queries, start=1)]
    text = paverl.JUDGE.format(
        db_engine=_engine(example),
        db_details=schema_text,
        count=len(queries),
        queries="\n".join(f"{name}:\n```sql\n{query}\n```" for name, query in numbered),
        scores="\n".join(f"{name}: score" for name, _ in numbered),
        **_paverl_fields(example),
    )
    return (Message("user", text),)


def _engine(example: Example) -> str:
    return ENGINES.get(example.dialect, example.dialect)


def _paverl_fields(example: Example) -> dict[str, str]:
    evidence = example.evidence.strip()
    context = paverl.CONTEXT.format(evidence=evidence) if evidence else ""
    return {"context": context, "question": example.question.strip()}
