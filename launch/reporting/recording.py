"""The lines of `trajectories.jsonl`: whole groups of sampled steps, to be looked at.

docs/reports.md describes them; `record.episode_record` is what they hold of questions and queries.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from exchange import Score
from launch.reporting.record import RECORDS, RECORDS_VERSION
from minirl.run.metrics import JsonLines
from minirl.train.advantages import Decode, character_ranges
from minirl.types import TokenRow, Trajectory, Turn

STEP_BYTES = 1_900_000
"""Most bytes of a sampled step, but for its first group: 51 of them stay under 100 MB."""
_PLACES = 6


def open_records(path: Path, *, resume_step: int) -> JsonLines:
    """Open a file of trajectories, without lines of later steps; the first names the version."""
    lines = JsonLines(path, resume_step=resume_step)
    if not path.exists() or not path.stat().st_size:  # a full disk leaves it empty
        lines.write(0, {"version": RECORDS_VERSION})
    return lines


class StepRecorder:
    """Writes the groups of a training run's sampled steps into its folder."""

    def __init__(self, folder: Path, decode: Decode, *, has_tokens: bool) -> None:
        self._path, self._decode, self._has_tokens = folder / RECORDS, decode, has_tokens
        self._lines: JsonLines | None = None

    def write(
        self,
        step: int,
        groups: Sequence[Sequence[Trajectory]],
        rows: Sequence[Sequence[TokenRow] | None],
    ) -> None:
        """Write down a step: its groups, whose episodes have records, and the rows of each of
        them that took part in the update.
        """
        if self._lines is None:
            self._lines = open_records(self._path, resume_step=step - 1)
        lines = (
            group_line(
                group,
                [trajectory.episode.record for trajectory in group],
                self._decode,
                scores=[trajectory.episode.score for trajectory in group],
                rows=own,
                has_tokens=self._has_tokens,
            )
            for group, own in zip(groups, rows, strict=True)
        )
        for number, line in enumerate(within_limit(lines)):
            self._lines.write(step, {"group": number, **line})


def within_limit(lines: Iterable[Mapping[str, Any]], limit: int = STEP_BYTES) -> Iterator[Any]:
    """Give the first lines that together take so many bytes, and one in any case."""
    taken = 0
    for number, line in enumerate(lines):
        taken += len(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace"))
        if number and taken > limit:
            return
        yield line


def group_line(
    group: Sequence[Trajectory],
    records: Sequence[Mapping[str, Any]],
    decode: Decode,
    *,
    scores: Sequence[Score] | None = None,
    rows: Sequence[TokenRow] | None = None,
    has_tokens: bool = False,
) -> dict[str, Any]:
    """Write down the trajectories of one example.

    `records` are what the task says of each; there are no scores where nothing is learned, and no
    rows where the group took no part in the update. With `has_tokens` each token has numbers.
    """
    told = []
    for number, (trajectory, record) in enumerate(zip(group, records, strict=True)):
        row = rows[number] if rows else None
        versions = [version for turn in trajectory.turns for version in turn.reply.versions]
        one = _earned(scores[number]) if scores else {}
        one["advantage"] = None if row is None else _mean_advantage(row)
        one["ended"] = trajectory.ended
        one["versions"] = [min(versions, default=0), max(versions, default=0)]
        one["turns"] = list(_turns(trajectory, record, row if has_tokens else None, decode))
        told.append(one)
    prompt = decode(group[0].turns[0].observation_ids)
    return {**records[0].get("example", {}), "prompt": prompt, "trajectories": told}


def _earned(score: Score) -> dict[str, Any]:
    spans = [[one.turn, one.start, one.end, round(one.value, _PLACES)] for one in score.spans]
    return {
        "reward": round(score.total, _PLACES),
        "parts": {name: round(value, _PLACES) for name, value in score.parts.items()},
        "correct": score.correct,
        **({"spans": spans} if spans else {}),
    }


def _mean_advantage(row: TokenRow) -> float | None:
    each = np.broadcast_to(row.advantage, row.ids.shape)[row.is_action]
    return round(float(each.mean()), _PLACES) if each.size else None


def _turns(
    trajectory: Trajectory, record: Mapping[str, Any], row: TokenRow | None, decode: Decode
) -> Iterator[dict[str, Any]]:
    own = record.get("turns") or [{}] * len(trajectory.turns)
    lengths = [len(turn.observation_ids) + len(turn.reply.ids) for turn in trajectory.turns]
    ends = list(accumulate(lengths))
    for number, (turn, said) in enumerate(zip(trajectory.turns, own, strict=True)):
        # The first observation stands once for the group.
        observed = {"observation": decode(turn.observation_ids)} if number else {}
        place = slice(ends[number] - len(turn.reply.ids), ends[number])
        tokens = {"tokens": _tokens(turn, row, place, decode)} if row is not None else {}
        yield {**observed, "reply": turn.reply.text, "finish": turn.reply.finish, **said, **tokens}


def _tokens(turn: Turn, row: TokenRow, place: slice, decode: Decode) -> dict[str, Any]:
    """Write down what each token of a reply has: the character that it ends at, its version, and
    numbers in base64, as float16 of the least byte first; the learner's before the update.
    """
    advantage = np.broadcast_to(row.advantage, row.ids.shape)
    learner = row.logprobs if row.old_logprobs is None else row.old_logprobs
    # The token that ends a reply has no text in it.
    longest = len(turn.reply.text)
    ends = [min(end, longest) for _, end in character_ranges(turn.reply.ids, decode)]
    versions = list(turn.reply.versions)
    return {
        "ends": ends,
        "versions": versions if len(set(versions)) > 1 else versions[:1],
        "mask": _packed(row.is_action[place]),
        "advantage": _packed(advantage[place]),
        "sampler": _packed(row.logprobs[place]),
        "learner": _packed(learner[place]),
    }


def _packed(values: Any) -> str:
    return b64encode(np.asarray(values, "<f2").tobytes()).decode()
