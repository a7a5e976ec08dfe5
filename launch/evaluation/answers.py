"""Answers: whose they are, how many replies a question gets, what became of them, and the file that
keeps them.
"""

from __future__ import annotations

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

from launch.build import SqlSide
from launch.config import JobConfig
from launch.files import ANSWERS
from minirl.exchange import UserError
from minirl.run.files import keep_lines, naming
from minirl.types import Progress
from sqlenv.evaluators.votes import VoteBy
from sqlenv.sql.answers import answer_of
from sqlenv.types import Answer, Example, Wrapping

DecodeKind = Literal["vote", "pass", "judge"]


@dataclass(frozen=True, slots=True)
class Decode:
    """How a question is answered.

    Attributes:
        samples: Replies to a question.
        temperature: Of the sampler; 0 is greedy.
        kind: Which of the samples answers: that of the majority (`vote`), the first one that is
            right, as an oracle would choose (`pass`), or the one that the model itself judges best
            (`judge`, PaVeRL-SQL's verbal RL).
        top_p: Of the sampler: draw only from the likeliest tokens that together reach it.
        vote_by: What makes two samples one vote.
    """

    samples: int
    temperature: float
    kind: DecodeKind = "vote"
    top_p: float = 1.0
    vote_by: VoteBy = "set"

    @property
    def name(self) -> str:
        """Write it as it is given on the command line."""
        return f"{self.kind}@{self.samples}" if self.temperature else "greedy"

    @classmethod
    def parse(cls, text: str, config: JobConfig, vote_by: VoteBy = "set") -> Decode:
        """Read `greedy`, `vote@n`, `pass@n` or `judge@n`; `judge` alone takes as many candidates as
        the job's settings say.
        """
        if text == "greedy":
            return cls(1, 0.0)
        if text == "judge":
            text = f"judge@{config.endpoint.candidates}"
        if match := re.fullmatch("(vote|pass|judge)@([1-9][0-9]{0,5})", text):
            kind, drawn = cast("DecodeKind", match[1]), config.evaluation
            return cls(int(match[2]), drawn.vote_temperature, kind, drawn.top_p, vote_by)
        raise UserError(f"--decode {text}: write greedy, vote@n, pass@n or judge@n, such as vote@8")


GREEDY = Decode(samples=1, temperature=0.0)


_log = logging.getLogger(__name__)

End = Literal["stop", "length", "failed", "too_long"]
"""How a reply ended: by itself, or at the limit of tokens; or why there is none: the endpoint gave
none, or the prompt is too long for the policy."""
FIRST = 20
"""Replies after which an evaluation is looked at, and stops if none of them holds a query."""
_SHOWN_CHARS = 160


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of replies.

    Attributes:
        replies: How many were asked for; with a tool, how many episodes.
        no_query: Replies that were written and hold no query.
        cut_off: Replies that end at the limit of tokens, with a query or without.
        failed: Requests that an endpoint refused, or failed at.
        too_long: Prompts that are too long for the policy.
        prompt_tokens, reply_tokens: Tokens read and written, as far as they are told.
    """

    replies: int = 0
    no_query: int = 0
    cut_off: int = 0
    failed: int = 0
    too_long: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0

    @classmethod
    def of(
        cls, sql: str, end: End = "stop", *, prompt_tokens: int = 0, reply_tokens: int = 0
    ) -> Outcomes:
        """Count one reply, by the query in it and how it ended."""
        no_query = int(not sql and end in ("stop", "length"))
        counts = {} if end == "stop" else {"cut_off" if end == "length" else end: 1}
        tokens = {"prompt_tokens": prompt_tokens, "reply_tokens": reply_tokens}
        return cls(replies=1, no_query=no_query, **counts, **tokens)

    @classmethod
    def total(cls, parts: Iterable[Outcomes]) -> Outcomes:
        """Add outcomes up."""
        found, names = list(parts), [one.name for one in fields(cls)]
        return cls(*(sum(getattr(one, name) for one in found) for name in names))

    def line(self) -> str:
        """Say it in a line; what did not happen is left out."""
        counts = {
            "hold no query": self.no_query,
            "cut off at the limit of tokens": self.cut_off,
            "without an answer": self.failed,
            "with too long a prompt": self.too_long,
        }
        told = [
            f"{count:,} {words} ({100 * count / self.replies:.1f} %)"
            for words, count in counts.items()
            if count
        ]
        tokens = f"{self.prompt_tokens:,} prompt tokens, {self.reply_tokens:,} reply tokens"
        parts = [", ".join(told) or "each holds a query"]
        parts += [tokens] if self.prompt_tokens or self.reply_tokens else []
        plural = "replies" if self.replies != 1 else "reply"
        return f"{self.replies:,} {plural}: {'; '.join(parts)}"


NO_REPLIES = Outcomes()
"""Nothing was asked, or nobody counted."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What is answered to one question.

    Attributes:
        queries: One, or several samples.
        replies: The texts that they stand in; none in a file of predictions.
        turns: Turns of each episode, where the model may call a tool.
        line: Of `trajectories.jsonl`, where episodes have several turns.
        choice: How the query was chosen among the model's own, with `judge@K`.
        ends: How each reply ended.
        outcomes: What became of all replies to the question.
        places: Where each query begins in its reply, in characters; -1 where it does not.
        right: Which queries are right by the environment's rule, where it has judged them.
    """

    queries: tuple[str, ...]
    replies: tuple[str, ...] = ()
    turns: tuple[int, ...] = ()
    line: Mapping[str, Any] | None = None
    choice: Mapping[str, Any] | None = None
    ends: tuple[End, ...] = ()
    outcomes: Outcomes = NO_REPLIES
    places: tuple[int, ...] = ()
    right: tuple[bool, ...] = ()

    @classmethod
    def of(cls, read: Sequence[Answer], **more: Any) -> Sampled:
        """Take the queries out of replies that were read."""
        return cls(
            tuple(one.sql for one in read),
            tuple(one.reply for one in read),
            places=tuple(one.place for one in read),
            **more,
        )


def unread_of(found: Sequence[Sampled]) -> list[str]:
    """List the replies that hold no query."""
    pairs = (pair for one in found for pair in zip(one.queries, one.replies, strict=False))
    return [reply for sql, reply in pairs if reply and not sql]


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """A line of a file of answers."""

    id: str
    sampled: Sampled


_Line = TypeVar("_Line")


class AnswerFile:
    """Answers as JSON lines in `answers.jsonl` of a folder, appended as they come: what is there is
    not asked for again. Whatever decides them is in the folder's `config.yaml`.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ANSWERS

    def lines(self, kind: type[_Line]) -> list[_Line]:
        """Read all lines; a last one that was cut off is removed."""
        if not self._path.exists():
            return []
        return keep_lines(self._path, kind, advice="delete it to ask again")

    def append(self, lines: Iterable[Any]) -> None:
        """Write lines at the end."""
        with naming(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(line)) + "\n" for line in lines)

    def read(self, examples: Sequence[Example]) -> list[Sampled]:
        """Read the samples of the first questions, as many as have theirs.

        Raises:
            UserError: They are of other questions.
        """
        found = self.lines(AnsweredQuestion)
        for line, example in zip(found, examples, strict=False):
            if line.id != example.id:
                raise UserError(
                    f"{self._path}: has an answer to {line.id}, and {example.id} is asked; delete "
                    "it to ask again"
                )
        return [line.sampled for line in found[: len(examples)]]

    def write(self, examples: Sequence[Example], new: Sequence[Sampled]) -> None:
        """Keep the samples of the next questions."""
        pairs = zip(examples, new, strict=True)
        self.append(AnsweredQuestion(example.id, one) for example, one in pairs)


_LIMITS = "evaluation.max_prompt_tokens, evaluation.max_response_tokens, endpoint.max_tokens"


def look(outcomes: Outcomes, replies: Sequence[str], wrapping: Wrapping, *, stops: bool) -> None:
    """Say what became of the first replies.

    Raises:
        UserError: None of them holds a query; without `stops` this is only told.
    """
    _log.info("first %s", outcomes.line())
    lost = outcomes.no_query + outcomes.failed + outcomes.too_long
    if outcomes.replies < FIRST or lost < outcomes.replies:
        return
    written = [text for text in replies if text]
    shown = f", such as {_short(written[0])}" if written else ""
    advice = hint(written, wrapping) or f"look at --show-prompt, and at the limits {_LIMITS}"
    message = f"no query in the first {outcomes.line()}{shown}; {advice}"
    if stops:
        raise UserError(message)
    _log.warning("%s", message)


def hint(unread: Sequence[str], wrapping: Wrapping) -> str:
    """Say what would find queries in replies in which this wrapping finds none; else nothing."""
    others = [one for one in get_args(Wrapping) if one != wrapping]
    found = {one: sum(answer_of(text, one).sql != "" for text in unread) for one in others}
    best = max(others, key=lambda one: (found[one], one == "any"))
    if not found[best]:
        return ""
    return f"evaluation.wrapping={best} would find a query in {found[best]:,} of {len(unread):,}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}…")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Whose answers were judged.

    Attributes:
        model: Folder of its weights, or the endpoint's name of it.
        base, reward: What learning started from, and what it learned from.
        sampler: Where it is not the native one.
    """

    name: str
    model: str | None = None
    checkpoint: str | None = None
    base: str | None = None
    reward: str | None = None
    sampler: str | None = None


SourceOutput = tuple[Sequence[Sampled], Mapping[str, Any]]
"""What a source gives to all questions, and what it says of its work."""


@dataclass(frozen=True, slots=True)
class Source(ABC):
    """Whoever answers."""

    config: JobConfig
    decode: Decode
    facts: ModelFacts
    is_asked: ClassVar[bool] = True
    """Whether answers take time or money, and are kept."""

    @property
    def folder(self) -> Path | None:
        """Return the folder of the model and its tokenizer, if it is here."""
        return None

    @abstractmethod
    def answers(self, examples: Sequence[Example], sql: SqlSide, show: Progress) -> SourceOutput:
        """Answer the questions, or what is left of them, in the SQL side's folder; a `UserError` if
        the model cannot.
        """

    @abstractmethod
    def deciding(self) -> Mapping[str, Any]:
        """List what decides the answers, beside the questions and the decoding: an evaluation goes
        on where all of these are the same.
        """

    def _of_job(self, **sections: Any) -> dict[str, Any]:
        used = {"seed": True, "data": True, "prompt": True, "executor": True, **sections}
        return self.config.model_dump(mode="json", include=used)
