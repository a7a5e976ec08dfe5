"""Templates of SQL-ASTRA (appendix F), in the paper's wording: what a tool adds.

`FINISH` is ours: appendix A names a tool that ends the episode, and no prompt shows it.
"""

SYSTEM = """\
You are a helpful SQL assistant. You will solve the user's question by calling a tool to execute \
SQL code and query a SQL database. After each tool call, you must evaluate the result \
returned in `<tool_response>` to determine its relevance to the question, and decide for yourself \
whether to make another query. You may also use a tool to inspect the database schema first before \
providing your final SQL code. You can call the tool a maximum of {calls} times."""

CALL = """\


For each round's response, please first think step-by-step, and then make the tool call according \
to this format:
<tool_call>
{{
  "name": "{tool}",
  "arguments": {{
    "query": "```sql\\n-- Your SQL query\\n```",
    "db_id": "{db_id}"
  }}
}}
</tool_call>"""

DB_ID = "{db_id}/{db_id}.sqlite"

FINISH = """\


When you have found the answer, give it with this call:
<tool_call>
{{"name": "{finish_tool}", "arguments": {{"answer": "```sql\\n-- Your SQL query\\n```"}}}}
</tool_call>"""
