"""The shortest prompt that a chat model answers with a query: tables, question, form."""

USER = """\
{db_details}
{question}
Answer with one {db_engine} query in a ```sql code block and nothing else."""
