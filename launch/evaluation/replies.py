"""How many replies a question gets, what became of them, and which one answers."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Literal, cast, get_args

from exchange import UserError
from sqlenv.evaluators.votes import VoteBy
from sqlenv.sql.answers import answer_of
from sqlenv.types import Wrapping

VOTE_TIMEOUT_S = 10.0
"""OmniSQL gives a sample 10 seconds to return its vote."""
ERROR_SQL = "Error SQL"
"""What OmniSQL writes in Spider's files where there is no query that runs."""
_RANDOM_SEED = 42  # OmniSQL's seed of the choice where no sample of a BIRD question runs

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
    def parse(
        cls,
        text: str,
        *,
        vote_temperature: float,
        top_p: float = 1.0,
        candidates: int = 0,
        vote_by: VoteBy = "set",
    ) -> Decode:
        """Read `greedy`, `vote@n`, `pass@n` or `judge@n`; `judge` alone takes `candidates`."""
        if text == "greedy":
            return cls(1, 0.0)
        if text == "judge" and candidates:
            text = f"judge@{candidates}"
        if match := re.fullmatch("(vote|pass|judge)@([1-9][0-9]{0,5})", text):
            kind = cast("DecodeKind", match[1])
            return cls(int(match[2]), vote_temperature, kind, top_p, vote_by)
        raise UserError(f"--decode {text}: write greedy, vote@n, pass@n or judge@n, such as vote@8")


GREEDY = Decode(samples=1, temperature=0.0)


def choose(
    samples: Sequence[Sequence[str]], ballots: Sequence[Sequence[str | None]], *, spider: bool
) -> list[str]:
    """Choose the query with the commonest vote for each question of a data set, as OmniSQL does.

    Ties go to the vote seen first. Where none of a question's samples runs, that of Spider and its
    variants is `Error SQL`, and all others' are drawn by one generator, question after question.
    """
    draw = Random(_RANDOM_SEED)
    chosen = []
    for queries, votes in zip(samples, ballots, strict=True):
        counts = Counter(vote for vote in votes if vote is not None)  # in the order of first sight
        if counts:
            chosen.append(queries[votes.index(max(counts, key=lambda vote: counts[vote]))])
        else:
            chosen.append(ERROR_SQL if spider else draw.choice(queries))
    return chosen


_log = logging.getLogger(__name__)

End = Literal["stop", "length", "refused", "failed", "too_long"]
"""How a reply ended: by itself, or at the limit of tokens; or why there is none: the model refused,
its server failed, or the prompt is too long."""
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
        failed: Requests that failed at the server.
        refused: Requests that the model or its server refused.
        too_long: Requests whose prompt is too long.
        prompt_tokens, reply_tokens: Tokens read and written, as far as they are told.
    """

    replies: int = 0
    no_query: int = 0
    cut_off: int = 0
    failed: int = 0
    refused: int = 0
    too_long: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0

    @classmethod
    def of(
        cls, sql: str, end: End = "stop", *, prompt_tokens: int = 0, reply_tokens: int = 0
    ) -> Outcomes:
        """Count one reply, by the query in it and how it ended."""
        return cls(
            replies=1,
            no_query=int(not sql and end in ("stop", "length")),
            cut_off=int(end == "length"),
            failed=int(end == "failed"),
            refused=int(end == "refused"),
            too_long=int(end == "too_long"),
            prompt_tokens=prompt_tokens,
            reply_tokens=reply_tokens,
        )

    @classmethod
    def total(cls, parts: Iterable[Outcomes]) -> Outcomes:
        """Add outcomes up."""
        found, names = list(parts), [one.name for one in fields(cls)]
        return cls(*(sum(getattr(one, name) for one in found) for name in names))

    @property
    def without_query(self) -> int:
        """Count what there is no query of, for whatever reason."""
        return self.no_query + self.failed + self.refused + self.too_long

    def line(self) -> str:
        """Say it in a line; what did not happen is left out."""
        counts = {
            "hold no query": self.no_query,
            "cut off at the limit of tokens": self.cut_off,
            "failed at the server": self.failed,
            "refused": self.refused,
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


def parts_of(count: int, samples: int, *, size: int, start: int = 0) -> Iterator[slice]:
    """Split questions from a place on: from the first one, so many that they have the first
    replies, then `size` at a time.
    """
    end = -(-FIRST // samples) if start == 0 else start + size
    while start < count:
        yield slice(start, min(end, count))
        start, end = end, end + size


def look(
    outcomes: Outcomes, replies: Sequence[str], wrapping: Wrapping, *, limit: str, stops: bool
) -> None:
    """Say what became of the first replies; `limit` is the setting that bounds their tokens.

    Raises:
        UserError: None of them holds a query; without `stops` this is only told.
    """
    _log.info("first %s", outcomes.line())
    if outcomes.replies < FIRST or outcomes.without_query < outcomes.replies:
        return
    written = [text for text in replies if text]
    shown = f", such as {_short(written[0])}" if written else ""
    message = f"no query in the first {outcomes.replies} replies{shown}"
    message += f"; {hint(written, wrapping) or _advice(outcomes, written, limit)}"
    if stops:
        raise UserError(message)
    _log.warning("%s", message)


def _advice(outcomes: Outcomes, written: Sequence[str], limit: str) -> str:
    unended = sum(
        answer.said_to < len(answer.reply)
        for answer in (answer_of(text, "any") for text in written)
    )
    causes = {
        f"they are cut off: allow more than {limit}": outcomes.cut_off,
        "their prompts are too long: allow more with evaluation.max_prompt_tokens=N, or ask with a "
        "shorter prompt": outcomes.too_long,
        "the server fails (see above)": outcomes.failed,
        "they are refused (see above)": outcomes.refused,
        f"no </think> ends the reasoning in {unended:,} of them": unended,
    }
    cause = max(causes, key=lambda one: causes[one])
    is_most = 2 * causes[cause] > outcomes.replies
    return cause if is_most else "look at what is asked with --show-prompt"


def hint(unread: Sequence[str], wrapping: Wrapping) -> str:
    """Say what would find queries in replies in which this wrapping finds none; else nothing."""
    others = [one for one in get_args(Wrapping) if one != wrapping]
    found = {one: sum(answer_of(text, one).found for text in unread) for one in others}
    best = max(others, key=lambda one: (found[one], one == "any"))
    if not found[best]:
        return ""
    return f"evaluation.wrapping={best} would find a query in {found[best]:,} of {len(unread):,}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}…")
