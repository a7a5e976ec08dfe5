"""The messages that a policy sees."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from sqlenv.prompts import (
    ASKED_FOR,
    PromptStyle,
    feedback_text,
    first_observation,
    judge_observation,
)
from sqlenv.prompts.tags import TAG_SENTENCES
from sqlenv.types import Example
from tests.vectors import read

EXAMPLE = Example(
    id="x/0",
    question="How many {bands} are there?",
    db_id="band",
    database=Path("band.sqlite"),
    gold_sql="SELECT count(*) FROM band",
    evidence="band refers to groups",
)

SCHEMA = "CREATE TABLE band (id INT);"
SAID = read("prompts")


@pytest.mark.parametrize("style", get_args(PromptStyle))
def test_first_prompts(style):
    messages = first_observation(EXAMPLE, SCHEMA, style=style)
    for message, (role, parts) in zip(messages, SAID[style], strict=True):
        assert message.role == role
        assert [part for part in parts if part not in f"«{message.content}»"] == []
    text = "\n".join(message.content for message in messages)
    assert EXAMPLE.gold_sql not in text
    assert "{" not in text.replace("{bands}", "")


def test_paverl_has_a_context_only_where_there_is_evidence():
    bare = Example("x/1", "How many?", "band", Path("band.sqlite"), "SELECT 1", dialect="mysql")
    (message,) = first_observation(bare, SCHEMA, style="paverl")
    assert "Context:" not in message.content
    assert "Database Engine:\nMySQL\n" in message.content


def test_progress_feedback_names_tags_and_sentences():
    tags = ("WHERE_ERROR", "SELECT_ERROR")
    text = feedback_text(replace(EXAMPLE, dialect="mysql"), tags)
    assert text.startswith(
        "Feedback: your previous SQL has structural issues: WHERE_ERROR, SELECT_ERROR, "
        f"{' '.join(TAG_SENTENCES[tag] for tag in tags)} "
        "Revise your previous answer using these issues. "
    )
    assert text.endswith("Do not output any text outside those tags.")
    assert "exactly one corrected MySQL query inside <sql>...</sql>" in text


def test_feedback_asks_for_the_form_that_the_prompt_asked_for():
    text = feedback_text(EXAMPLE, ("WHERE_ERROR",), form=ASKED_FOR["short"])
    assert text.startswith("Feedback: your previous SQL has structural issues: WHERE_ERROR, ")
    assert text.endswith("Answer with exactly one corrected SQLite query in a ```sql code block.")
    assert "<sql>" not in text


def test_the_judge_sees_every_query():
    (user,) = judge_observation(EXAMPLE, SCHEMA, ["SELECT 1", "SELECT 2"])
    assert "make scores for 2 SQL scripts" in user.content
    assert "SQL2:\n```sql\nSELECT 2\n```" in user.content
    assert "<scores>\nSQL1: score\nSQL2: score\n</scores>" in user.content
