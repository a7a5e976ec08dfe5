"""The Progress-SQL dialogue in as few tokens as a tiny model needs; answers keep their form."""

USER = "{db_details}\n{question}"

FEEDBACK = "Feedback: {error_codes}. "

GENERIC_FEEDBACK = "Feedback: {generic} "

REVISE = "Revise."

CALL = "\nTool: {tool}"
