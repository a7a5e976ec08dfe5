"""Templates of PaVeRL-SQL (prompts 1 and 2), in the paper's wording."""

_TASK = """\
Database Engine:
{db_engine}

Database Schema:
{db_details}

{context}Question:
{question}

"""

CONTEXT = """\
Context:
{evidence}

"""

USER = (
    """\
Task Overview:
You are a powerful text-to-SQL model. Below, you are provided with a database schema and a \
natural language question. Your task is to understand the schema and generate a valid SQL query \
to answer the question.

"""
    + _TASK
    + """\
Instructions:
- Please use the minimum number of tokens required to provide a SQL statement and use sql \
functions for {db_engine} database.
- Make sure you only output the information that is asked in the question. If the question asks \
for a specific column, make sure to only include that column in the SELECT clause, nothing more.
- The generated query should return all of the information asked in the question without any \
missing or extra information.
- Please think through the steps of how to write the query with minimum number of tokens.

Output Format:
In your answer, please enclose the thinking block with less than 1600 tokens followed by a code \
block with the generated SQL code:
<think>
-- Your brief thinking
</think>
```sql
-- Your SQL query
```

Please DO NOT generate any explanation to the final SQL code solution."""
)

JUDGE = (
    """\
Task Overview:
You are a scoring machine to make scores for {count} SQL scripts, based on understanding from \
input DATABASE SCHEMA, CONTEXT and QUESTION.

"""
    + _TASK
    + """\
Instructions for scoring SQL scripts:
- Based on your understanding from input DATABASE SCHEMA, CONTEXT and QUESTION, please give score \
for each SQL script.
- Please compare all SQL scripts and give high score for SQL script that fully answers the input \
QUESTION.
- Please think through the steps with minimum number of tokens and the score should be between 0 \
and 1.

{queries}

Output Format:
In your answer, please enclose the thinking block with less than 1600 tokens followed by a code \
block with scores for each SQL script:
<think>
-- Your brief thinking
</think>
<scores>
{scores}
</scores>

Please DO NOT generate any explanation to the final scores."""
)
