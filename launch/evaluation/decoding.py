"""Which answer several samples give: the majority's by what they return, or an oracle's choice.

The majority is that of OmniSQL's rule, or of PaVeRL-SQL's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from sqlenv.errors import UserError

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
    """

    samples: int
    temperature: float
    kind: Kind = "vote"
    top_p: float = 1.0

    @property
    def name(self) -> str:
        """Write it as it is given on the command line."""
        return f"{self.kind}@{self.samples}" if self.temperature else "greedy"

    @classmethod
    def parse(
        cls, text: str, *, vote_temperature: float, top_p: float = 1.0, candidates: int = 0
    ) -> Decode:
        """Read `greedy`, `vote@n`, `pass@n` or `judge@n`; `judge` alone takes `candidates`."""
        if text == "greedy":
            return cls(1, 0.0)
        kind, _, count = text.partition("@")
        if text == "judge" and candidates:
            count = str(candidates)
        known = next((one for one in get_args(Kind) if one == kind), None)
        if known and re.fullmatch("[1-9][0-9]{0,5}", count):
            return cls(int(count), vote_temperature, known, top_p)
        raise UserError(f"--decode {text}: write greedy, vote@n, pass@n or judge@n, such as vote@8")


GREEDY = Decode(samples=1, temperature=0.0)


def majority(ballots: Sequence[str | None]) -> int | None:
    """Return the number of the first sample with the commonest vote, None where none has a vote;
    ties go to the vote seen first.
    """
    counts = Counter(vote for vote in ballots if vote is not None)  # in the order of first sight
    if not counts:
        return None
    winner = max(counts, key=lambda vote: counts[vote])
    return ballots.index(winner)


def choose(
    samples: Sequence[Sequence[str]], ballots: Sequence[Sequence[str | None]], *, spider: bool
) -> list[str]:
    """Choose a query for each question of a data set, as OmniSQL does.

    Where none of a question's samples runs, that of Spider and its variants is `Error SQL`, and all
    others' are drawn by one generator, question after question.
    """
    draw = Random(_RANDOM_SEED)
    chosen = []
    for queries, votes in zip(samples, ballots, strict=True):
        winner = majority(votes)
        if winner is not None:
            chosen.append(queries[winner])
        else:
            chosen.append(ERROR_SQL if spider else draw.choice(queries))
    return chosen
