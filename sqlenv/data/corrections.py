"""Corrected gold queries, questions and evidence, laid over a data set by question id.

Published forms are read as they are: BIRD-Verified (arXiv:2603.20004), Arcwise-Plat, proposals for
Spider. Copies of one name differ, so a file can be pinned by its hash: FILE@SHA256.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import AliasChoices, BaseModel, Field

from minirl.exchange import UserError
from sqlenv.data.records import Rule, Text, check, read_records
from sqlenv.executor.database import fingerprint
from sqlenv.types import Example

_PIN = re.compile(r"(?P<file>.*)@(?P<hash>[0-9a-f]{6,64})")
_ADVICE = "correct it, or take it out"


class CorrectionRecord(BaseModel, frozen=True):
    """The fields of a correction; what is null stays as it was."""

    question_id: int | Text = Field(validation_alias=AliasChoices("question_id", "id"))
    db_id: Text
    gold_sql: Text | None = Field(
        default=None, validation_alias=AliasChoices("gold_sql", "corrected_query", "SQL", "query")
    )
    alternatives: tuple[Text, ...] | None = None
    question: Text | None = Field(
        default=None, validation_alias=AliasChoices("corrected_question", "question")
    )
    evidence: Text | None = None
    grading_method: Rule = ""
    original_gold: Text | None = Field(
        default=None, validation_alias=AliasChoices("original_query", "original_SQL")
    )
    original_question: Text | None = None


@dataclass(frozen=True, slots=True)
class Corrections:
    """The corrections of a file by question id."""

    path: Path
    by_id: Mapping[str, CorrectionRecord]

    def check(self, examples: Iterable[Example]) -> None:
        """Make sure that every correction is of one of these questions.

        Raises:
            UserError: One is of no question, of two, or of another one or another database.
        """
        found: dict[str, Example] = {}
        for example in examples:
            name = example.question_id
            if (one := self.by_id.get(name)) is None:
                continue
            if name in found:
                raise UserError(
                    f"{self.path}: question {name} is {found[name].id} and {example.id}; "
                    "give a file with one of their question files"
                )
            found[name] = example
            self._check_same(one, example)
        if left := [name for name in self.by_id if name not in found]:
            raise UserError(
                f"{self.path}: {len(left)} corrections are of no question of the data set, the "
                f"first is of question {left[0]}; check the data set, or take them out"
            )

    def lay(self, example: Example) -> Example:
        """Return a question with its correction, if there is one."""
        one = self.by_id.get(example.question_id)
        if one is None:
            return example
        return replace(
            example,
            gold_sql=(one.gold_sql or example.gold_sql).strip(),
            alternatives=tuple(sql.strip() for sql in one.alternatives or ()),
            question=(one.question or example.question).strip(),
            evidence=example.evidence if one.evidence is None else one.evidence.strip(),
            grading_method=one.grading_method or "",
        )

    def place(self, example: Example) -> str:
        """Name the correction of a question in a message."""
        return f"{self.path}: question {example.question_id}"

    def _check_same(self, one: CorrectionRecord, example: Example) -> None:
        if one.db_id != example.db_id:
            raise UserError(
                f"{self.place(example)} is about database {one.db_id}, but {example.id} about "
                f"{example.db_id}; check the data set"
            )
        # A later release of a data set has other texts here and there, and not of both.
        gold, question = one.original_gold, one.original_question or one.question
        is_asked = question and _plain(question) == _plain(example.question)
        if gold and not is_asked and _plain(gold) != _plain(example.gold_sql):
            raise UserError(
                f"{self.place(example)} corrects another question than {example.id}, "
                f"{example.question!r:.60}; check the data set"
            )


def read_corrections(name: str) -> Corrections:
    """Read a file of corrections, FILE or FILE@SHA256 with the first digits of its hash.

    Raises:
        UserError: The file has another hash, or a record is no correction.
    """
    pin = _PIN.fullmatch(name)
    path = Path(pin["file"] if pin else name)
    sha256 = fingerprint(path)
    if pin and not sha256.startswith(pin["hash"]):
        raise UserError(
            f"{path}: is another copy, its sha256 is {sha256[:12]} and not {pin['hash']}; use "
            "the pinned copy, or name this file by its path"
        )
    by_id: dict[str, CorrectionRecord] = {}
    for number, record in enumerate(read_records(path)):
        where = f"{path}: record {number}"
        one = check(CorrectionRecord, record, where=where, advice=_ADVICE)
        name = str(one.question_id).strip()
        if name in by_id:
            raise UserError(f"{where}: a second correction of question {name}; {_ADVICE}")
        by_id[name] = one
    return Corrections(path, by_id)


def _plain(text: str) -> str:
    return " ".join(text.lower().replace(";", " ").split())
