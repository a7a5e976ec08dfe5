"""Which answer several samples give: the majority's by what they return, or an oracle's choice.

The majority is that of OmniSQL's rule, or of PaVeRL-SQL's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, cast

from exchange import UserError
from sqlenv.evaluators.votes import VoteBy

VOTE_TIMEOUT_S = 10.0
"""OmniSQL gives a sample 10 seconds to return its vote."""
ERROR_SQL = "Error SQL"
"""What OmniSQL writes in Spider's files where there is no query that runs."""
_RANDOM_SEED = 42  # OmniSQL's seed of the choice where no sample of a BIRD question runs

Kind = Literal["vote", "pass", "judge"]


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
    kind: Kind = "vote"
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
            kind = cast("Kind", match[1])
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
