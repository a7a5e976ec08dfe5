"""Templates of Progress-SQL (appendix F), in the paper's wording."""

from sqlenv.types import Wrapping

SYSTEM = """\
Task Overview:
You are a data science expert. The user message contains the database schema and the natural \
language question. Your task is to understand the schema and generate a valid SQL query to \
answer the question.

Database Engine:
{db_engine}

Instructions:
- Dialect Strictness: Ensure the generated SQL strictly conforms to the specific syntax and \
functions of the provided {db_engine}.
- Precision: Only output the exact information asked in the question. Do not include extra \
columns in the SELECT clause.
- Ambiguity Prevention: Always use short table aliases (e.g., t1, t2) and explicitly qualify all \
column names with their respective table aliases, especially when JOINs are involved.
- Robustness: Consider edge cases such as handling NULL values appropriately and string matching \
case conventions where applicable.
- Thinking Process: Before generating the final SQL query, step-by-step analyze the tables \
needed, the JOIN conditions, and the filtering criteria. Enclose your reasoning strictly within \
<think> and </think> tags.

Output Format:
Please strictly follow this exact output structure. Do not output any other text or markdown \
outside of these tags:
<think>
Your step-by-step reasoning here.
</think>
<sql>
SELECT ...
</sql>"""

USER = """\
Database Schema:
{db_details}
This schema describes the database's structure, including tables, columns, primary keys, foreign \
keys, and any relevant relationships or constraints.

Question:
{question}"""

FEEDBACK = """\
Feedback: your previous SQL has structural issues: {error_codes}, {error_descriptions} \
Revise your previous answer using these issues. """

GENERIC_FEEDBACK = "Feedback: {generic} "

GENERIC = {
    "close": (
        "the structure of your previous SQL looks close, but its result is wrong. "
        "Check values, conditions and logic again."
    ),
    "runs": (
        "the structure of your previous SQL could not be diagnosed. It runs, but its result "
        "is wrong. Check tables, conditions and logic again."
    ),
    "fails": (
        "the structure of your previous SQL could not be diagnosed. "
        "Fix its syntax and its identifiers first."
    ),
}

REVISE: dict[Wrapping | None, str] = {
    "sql_tag": """\
Revise your previous answer for {db_engine}. Put step-by-step reasoning inside \
<think>...</think>, then output exactly one corrected {db_engine} query inside <sql>...</sql>. \
Do not output any text outside those tags.""",
    # Ours, after prompts of other papers.
    "fence": """\
Revise your previous answer for {db_engine}. \
Answer with exactly one corrected {db_engine} query in a ```sql code block.""",
}
