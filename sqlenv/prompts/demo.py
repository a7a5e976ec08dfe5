"""The Progress-SQL dialogue in as few tokens as a tiny model needs; answers keep their form."""

from sqlenv.types import Wrapping

USER = "{db_details}\n{question}"

FEEDBACK = "Feedback: {error_codes}. "

GENERIC_FEEDBACK = "Feedback: {generic} "

GENERIC = {"close": "VALUES.", "runs": "VALUES.", "fails": "SYNTAX."}

REVISE: dict[Wrapping | None, str] = {None: "Revise."}

CALL = "\nTool: {tool}"
