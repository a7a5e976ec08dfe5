"""What the records of a data set must hold: checked once, as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from sqlenv.errors import UserError
from sqlenv.evaluators.hardness import hardness


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("should be valid Unicode text") from None
    return text


def _filled(name: str) -> str:
    if not name:
        raise ValueError("should name a database")
    return name


def _grade(parse: Any) -> Any:
    """Grade a parsed query; SynSQL and others keep texts in a field of that name."""
    if not isinstance(parse, dict):
        return parse if parse is None else ""
    try:
        return hardness(parse)
    except (LookupError, TypeError, AttributeError):
        raise ValueError("is not a query as Spider's parser writes it") from None


Text = Annotated[str, AfterValidator(_encodable)]


class _Fields(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Question(_Fields):
    """The fields of a question, under our names; `question_kind` has each layout's.

    Attributes:
        parsed: Level of the parsed query in a Spider record; None where the parse is null.
    """

    db_id: Annotated[Text, AfterValidator(_filled)] = Field(
        validation_alias=AliasChoices("db_id", "db")
    )
    question: Text
    gold: Text | None = None
    evidence: Text | None = None
    instance_id: Text | None = None
    difficulty: Text | None = None
    sql_complexity: Text | None = None
    dialect: Text | None = None
    question_style: Text | None = None
    parsed: Annotated[str | None, BeforeValidator(_grade)] = Field("", validation_alias="sql")


@cache
def question_kind(*, question: str, gold: str, evidence: str) -> type[Question]:
    """Make the kind of record whose fields have a layout's names."""
    return create_model(
        "Question",
        __base__=Question,
        question=(Text, Field(validation_alias=question)),
        gold=(Text | None, Field(None, validation_alias=gold)),
        evidence=(Text | None, Field(None, validation_alias=evidence)),
    )


class Named(_Fields):
    """An entry of tables.json of which only the database matters."""

    db_id: Text = ""


class TableNames(Named):
    """An entry of tables.json: names as in the database, and in natural words."""

    table_names_original: list[Text]
    column_names_original: list[tuple[int, Text]]
    column_names: list[tuple[int, Text]]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        originals, natural = self.column_names_original, self.column_names
        if len(originals) != len(natural):
            raise ValueError(
                f"column_names has {len(natural)} items, column_names_original {len(originals)}"
            )
        tables = len(self.table_names_original)
        for number, (table, _) in enumerate(originals):
            if table >= tables:
                raise ValueError(
                    f"column_names_original.{number}: there is no table {table}, "
                    f"table_names_original has {tables}"
                )
        return self


_Kind = TypeVar("_Kind", bound=BaseModel)


def check(kind: type[_Kind], record: Mapping[str, Any], *, where: str, advice: str) -> _Kind:
    """Read a record as one of the kinds above.

    Args:
        kind: What it must hold.
        record: As it stands in the file.
        where: File and number of the record, for the message.
        advice: What to do, for the message.

    Raises:
        UserError: A field is missing or is of another type.
    """
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        raise UserError(f"{where} {_problem(error)}; {advice}") from None


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"has no field {field!r}"
    words = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    words = words.replace("a valid string", "text")
    if not field:
        return f"is wrong: {words}"
    return f"has a wrong field: {field} {words}, not {first['input']!r:.60}"
