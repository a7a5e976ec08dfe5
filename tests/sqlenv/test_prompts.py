"""The messages that a policy sees."""

from dataclasses import replace
from pathlib import Path

import pytest

from sqlenv.prompts import ASKED_FOR, feedback_text, first_observation, judge_observation
from sqlenv.prompts.tags import TAG_SENTENCES
from sqlenv.types import Example

EXAMPLE = Example(
    id="x/0",
    question="How many {bands} are there?",
    db_id="band",
    database=Path("band.sqlite"),
    gold_sql="SELECT count(*) FROM band",
    evidence="band refers to groups",
)
SCHEMA = "CREATE TABLE band (id INT);"


def test_progress_asks_in_two_messages():
    system, user = first_observation(EXAMPLE, SCHEMA, style="progress")
    assert (system.role, user.role) == ("system", "user")
    assert "Database Engine:\nSQLite\n" in system.content
    assert "<think>\nYour step-by-step reasoning here.\n</think>\n<sql>" in system.content
    assert user.content.startswith(f"Database Schema:\n{SCHEMA}\nThis schema describes")
    assert user.content.endswith("Question:\nband refers to groups\nHow many {bands} are there?")


def test_paverl_has_a_context_only_where_there_is_evidence():
    (with_context,) = first_observation(EXAMPLE, SCHEMA, style="paverl")
    assert "\n\nContext:\nband refers to groups\n\nQuestion:\nHow many" in with_context.content
    bare = Example("x/1", "How many?", "band", Path("band.sqlite"), "SELECT 1", dialect="mysql")
    (without,) = first_observation(bare, SCHEMA, style="paverl")
    assert "Context:" not in without.content
    assert "Database Engine:\nMySQL\n" in without.content


@pytest.mark.parametrize("style", ["progress", "omnisql", "paverl", "short", "demo"])
def test_no_first_prompt_shows_the_gold_query_or_an_unfilled_field(style):
    text = "\n".join(m.content for m in first_observation(EXAMPLE, SCHEMA, style=style))
    assert EXAMPLE.gold_sql not in text
    assert "{" not in text.replace("{bands}", "")


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


def test_the_short_prompt_is_tables_question_and_form():
    (user,) = first_observation(EXAMPLE, SCHEMA, style="short")
    assert user.content.startswith(f"{SCHEMA}\n{EXAMPLE.evidence}\n{EXAMPLE.question}\n")
    assert user.content.endswith("one SQLite query in a ```sql code block and nothing else.")


def test_omnisql_asks_in_one_message_for_a_fenced_query():
    (user,) = first_observation(EXAMPLE, SCHEMA, style="omnisql")
    assert user.role == "user"
    assert f"Database Schema:\n{SCHEMA}\n" in user.content
    assert "```sql\n-- Your SQL query\n```" in user.content
