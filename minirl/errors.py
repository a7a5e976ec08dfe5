"""The error that a run is saved before, and the words for wrong values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minirl.exchange import UserError

# How the names of pydantic's errors begin, and what it words by the names of our classes.
_WORDS = {
    **dict.fromkeys(("model_", "dataclass_", "dict_"), "should be a mapping of keys to values"),
    **dict.fromkeys(("list_type", "tuple_type"), "should be a list"),
    "string_type": "should be text",
    "path_type": "should be a path",
    "int_": "should be a whole number",
    "float_": "should be a number",
    "bool_": "should be true or false",
}


class LostError(UserError):
    """Servers or environments are gone; what is done can be saved, to go on from later."""


def describe(error: Mapping[str, Any]) -> str:
    """Say what is wrong with a value, as in "should be a number, not 'x'"; an error is one of those
    that pydantic's `ValidationError` lists.
    """
    kind = error["type"]
    if kind == "missing":
        return "is missing"
    if kind == "union_tag_invalid":
        return f"kind should be one of {error['ctx']['expected_tags']}, not {error['ctx']['tag']!r}"
    words = next((words for start, words in _WORDS.items() if kind.startswith(start)), "")
    words = words or error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    # A rule over several keys names them itself; its input is the whole mapping.
    if kind == "value_error" and isinstance(error["input"], Mapping):
        return words
    return f"{words}, not {error['input']!r:.60}"
