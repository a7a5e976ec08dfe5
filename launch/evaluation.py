"""Execution accuracy: predictions of a model on questions, and how sure one can be of it."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table as RichTable

from launch.config import Decode, JobConfig
from launch.predictions import BIRD_MARK
from minirl import hosts
from minirl.config import SamplerConfig
from minirl.errors import UserError
from minirl.local import local_model, local_params
from minirl.model import Decoder
from minirl.reading import keep_lines
from minirl.rollout import rollout
from minirl.sampler import NativeSampler
from minirl.tokenizer import ChatTokenizer
from minirl.types import Decoding
from minirl.writing import writing
from sqlenv.envs.agentic import Agentic
from sqlenv.envs.single_turn import SingleTurn
from sqlenv.parse import one_line
from sqlenv.types import Attempt, Example, Table

# Episode numbers name random streams: those of evaluations lie above all of training.
_FIRST_EPISODE = 2**30
# Questions between two writes of the predictions: what an interruption may cost.
_CHUNK = 128
# Spider's, BIRD's and SynSQL's words for difficulty.
_LEVELS = (
    *("easy", "medium", "hard", "extra"),
    *("simple", "moderate", "challenging", "complex", "highly complex"),
)
_SEPARATORS = re.compile(r"[\t\n\r]+")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One question's prediction and whether its result matches the gold result."""

    id: str
    db_id: str
    difficulty: str
    question: str
    gold: str
    sql: str
    correct: bool

    @classmethod
    def of(cls, example: Example, sql: str, *, correct: bool) -> Verdict:
        """Make the verdict on a prediction for a question."""
        return cls(
            example.id,
            example.db_id,
            example.difficulty,
            example.question,
            example.gold_sql,
            sql,
            correct,
        )


class Evaluator:
    """Measures accuracy with one sampler, so that it compiles once.

    Args:
        model: Gives the structure and the first weights.
        tokenizer: Its tokenizer.
        environment: Judges replies.
        config: Slots and token limits.
        decode: How questions are answered.
        seed: Seed of samples.
        max_turns: The most replies to a question.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: ChatTokenizer,
        environment: SingleTurn | Agentic,
        config: SamplerConfig,
        decode: Decode,
        *,
        seed: int,
        max_turns: int = 1,
    ) -> None:
        self._tokenizer, self._environment = tokenizer, environment
        self._config, self._decode = config, decode
        self._max_turns = max_turns
        local = local_model(model)
        self._dtype, self._own_mesh = model.dtype, local.mesh
        self._sampler = NativeSampler(
            local, config, tokenizer, group_size=decode.samples, seed=seed
        )

    def set_weights(self, params: Any, *, version: int) -> None:
        """Measure these weights next, once: the memory of their copy is given back then."""
        self._sampler.set_weights(
            local_params(params, self._own_mesh, self._dtype), version=version
        )

    def accuracy(self, examples: Sequence[Example]) -> float:
        """Return the share of correct answers; 0 for no question."""
        answered = self._answer(examples, first=0)
        self._sampler.free_memory()
        return accuracy(answered)

    def predict(
        self,
        examples: Sequence[Example],
        path: Path,
        *,
        progress: Callable[[int, int, str], None],
    ) -> list[Verdict]:
        """Answer questions, writing each verdict to a file of JSON lines.

        Questions that the file already answers are not asked again.

        Raises:
            UserError: The file answers other questions.
        """
        done = hosts.from_first(lambda: _found(path))
        asked = [(example.id, example.gold_sql) for example in examples[: len(done)]]
        if asked != [(verdict.id, verdict.gold) for verdict in done]:
            raise UserError(f"{path}: holds predictions for other questions; move it away")
        chunk = _CHUNK * hosts.count()
        for start in range(len(done), len(examples), chunk):
            new = self._answer(examples[start : start + chunk], first=start)
            hosts.from_first(partial(_append, path, new))
            done += new
            progress(len(done), len(examples), f"accuracy {100 * accuracy(done):.1f} %")
        self._sampler.free_memory()
        return done

    def _answer(self, examples: Sequence[Example], *, first: int) -> list[Verdict]:
        """Answer questions, each process its share of them."""
        share = hosts.own_share(len(examples))
        own = [examples[place] for place in share]
        parts = hosts.gather(lambda: self._answer_own(own, first=first + share.start))
        return [verdict for part in parts for verdict in part]

    def _answer_own(self, examples: Sequence[Example], *, first: int) -> list[Verdict]:
        samples = self._decode.samples
        groups = rollout(
            self._sampler,
            self._tokenizer,
            self._environment,
            examples,
            config=self._config,
            group_size=samples,
            first_episode=_FIRST_EPISODE + first * samples,
            decoding=Decoding(self._decode.temperature),
            max_turns=self._max_turns,
        )
        verdicts = []
        for example, group in zip(examples, groups, strict=True):
            answers = (trajectory.episode.answer for trajectory in group)
            attempts = [answer for answer in answers if answer is not None]
            chosen = vote(attempts)
            sql, correct = (chosen.sql, chosen.correct) if chosen else ("", False)
            verdicts.append(Verdict.of(example, sql, correct=correct))
        return verdicts


def vote(attempts: Sequence[Attempt]) -> Attempt | None:
    """Choose the first attempt of the commonest result (OmniSQL's majority vote).

    Results are sets of rows; ties go to the result seen first; an empty result counts. Without a
    query that runs, the first attempt is chosen; without any attempt (a prompt too long, a
    budget spent on calls), none.
    """
    ran = [attempt for attempt in attempts if isinstance(attempt.result, Table)]
    if not ran:
        return attempts[0] if attempts else None
    counts = Counter(_rows(attempt) for attempt in ran)  # keeps the order of first sight
    winner = max(counts, key=lambda rows: counts[rows])
    return next(attempt for attempt in ran if _rows(attempt) == winner)


def _rows(attempt: Attempt) -> frozenset[Any]:
    assert isinstance(attempt.result, Table)
    return frozenset(attempt.result.rows)


def _found(path: Path) -> list[Verdict]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return read_verdicts(path) if path.exists() else []


def _append(path: Path, verdicts: Sequence[Verdict]) -> None:
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(verdict)) + "\n" for verdict in verdicts)


def read_verdicts(path: Path) -> list[Verdict]:
    """Read the whole lines of a file of verdicts; a last line cut short is taken away.

    Raises:
        UserError: It holds something else.
    """
    return keep_lines(path, Verdict, advice="bring back the file of predictions, or move it away")


def write_official(verdicts: Sequence[Verdict], folder: Path) -> None:
    """Write predictions in the official evaluators' forms.

    `predictions.sql` is Spider's (one query a line), `predictions_bird.json` is BIRD's.
    """
    # The evaluators split at line ends and tabs, also of those in quotes; a blank line would shift
    # every later line against its gold query.
    lines = [_SEPARATORS.sub(" ", one_line(verdict.sql)) or "SELECT" for verdict in verdicts]
    spider = folder / "predictions.sql"
    with writing(spider):
        spider.write_text("\n".join(lines) + "\n", encoding="utf-8")
    bird = {
        str(number): f"{line}{BIRD_MARK}{verdict.db_id}"
        for number, (line, verdict) in enumerate(zip(lines, verdicts, strict=True))
    }
    text = json.dumps(bird, indent=1, ensure_ascii=False)
    path = folder / "predictions_bird.json"
    with writing(path):
        path.write_text(text + "\n", encoding="utf-8")


def accuracy(verdicts: Sequence[Verdict]) -> float:
    """Return the share of correct verdicts; 0 for none."""
    return sum(verdict.correct for verdict in verdicts) / max(len(verdicts), 1)


def bootstrap_interval(
    values: Sequence[float], *, resamples: int, seed: int
) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of a mean over questions.

    For a paired comparison give the differences, question by question.
    """
    data = np.asarray(values, np.float64)
    rng = np.random.default_rng(seed)
    means = [data[rng.integers(0, len(data), len(data))].mean() for _ in range(resamples)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def ci95(values: Sequence[float], config: JobConfig) -> list[float]:
    """Return the interval of a mean as a job's settings ask for it, rounded for a report."""
    low, high = bootstrap_interval(values, resamples=config.evaluation.resamples, seed=config.seed)
    return [round(low, 6), round(high, 6)]


def breakdown(verdicts: Sequence[Verdict]) -> Mapping[str, Mapping[str, tuple[int, float]]]:
    """Return (questions, accuracy) overall, by difficulty and by database."""

    def by(key: Callable[[Verdict], str]) -> dict[str, tuple[int, float]]:
        parts: defaultdict[str, list[Verdict]] = defaultdict(list)
        for verdict in verdicts:
            parts[key(verdict)].append(verdict)
        return {
            name: (len(part), accuracy(part)) for name, part in sorted(parts.items(), key=_rank)
        }

    return {
        "overall": by(lambda _: "all"),
        "difficulty": by(lambda verdict: verdict.difficulty or "unknown"),
        "database": by(lambda verdict: verdict.db_id),
    }


def _rank(part: tuple[str, Any]) -> tuple[int, str]:
    """Order levels of difficulty from easy to hard, all other names by the alphabet."""
    name = part[0]
    return (_LEVELS.index(name.lower()) if name.lower() in _LEVELS else len(_LEVELS), name)


def accuracy_table(verdicts: Sequence[Verdict], interval: Sequence[float]) -> RichTable:
    """Lay a breakdown out for the terminal, with the interval of the whole."""
    table = RichTable("", "questions", "execution accuracy")
    for column in table.columns[1:]:
        column.justify = "right"
    for heading, parts in breakdown(verdicts).items():
        table.add_section()
        for name, (count, share) in parts.items():
            table.add_row(f"{heading}: {name}", f"{count:,}", f"{100 * share:.1f} %")
        if heading == "overall":
            low, high = interval
            table.add_row("95 % interval", "", f"{100 * low:.1f} to {100 * high:.1f} %")
    return table
