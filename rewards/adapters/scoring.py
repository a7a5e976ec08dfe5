"""From the row of a data set and a model's replies to a score; what all adapters share."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from threading import Lock
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ValidationError

from minirl.exchange import CreditSpan, UserError
from minirl.exchange.settings import Place
from rewards.compose import build_reward
from rewards.config import ProgressiveConfig, RewardConfig, clashes
from rewards.expo.reward import MATCH
from rewards.progress.diagnosis import feedback
from sqlenv.config import DiagnosedConfig, EnvConfig, ExecutorConfig, Settings
from sqlenv.data.records import Rule, check
from sqlenv.dialects import dialect_of, run_in_dialect
from sqlenv.envs.build import build_environment
from sqlenv.envs.diagnosed import Feedback
from sqlenv.envs.single_turn import BaseEnvironment
from sqlenv.executor import Executor
from sqlenv.sql.answers import answer_of
from sqlenv.types import (
    Attempt,
    Episode,
    Example,
    Form,
    Status,
    Table,
    describe_failure,
)
from sqlenv.witness.store import open_store

_log = logging.getLogger(__name__)

_FORMS: Mapping[Form, str] = {
    "sql_tag": "in <sql>…</sql>",
    "fence": "in a fence",
    "bare": "without anything around it",
}


class AdapterConfig(Settings):
    """What a reward inside another trainer needs to be told."""

    reward: RewardConfig = ProgressiveConfig()
    """The reward family."""

    env: EnvConfig = DiagnosedConfig()
    """What replies are: how SQL is found in them and compared, which of them are calls of a tool,
    and, where the trainer plays our environment, what the model is told between them."""

    executor: ExecutorConfig = ExecutorConfig()
    """How queries run, and what one of them may use up."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a reward says of the replies of an episode, and why.

    Attributes:
        total: What a trainer maximises.
        correct: Whether the last query is right.
        parts: The named summands of the total.
        credit: Of EXPO-SQL, and of SQL-ASTRA's `steps`, the reward of ranges of characters.
        last: The last reply, as it was read and judged; None without any.
        feedback: What Progress-SQL's environment would answer; only from `rewards.score`.
    """

    total: float
    correct: bool
    parts: Mapping[str, float]
    credit: tuple[CreditSpan, ...]
    last: Attempt | None
    feedback: str = ""

    @property
    def status(self) -> Status | Literal["no_sql"]:
        """Name how the last query ended; `no_sql` where the last reply has none that was read."""
        return self.last.result.status if self.last and self.last.sql else "no_sql"

    @property
    def sql(self) -> str:
        """Return the last query; empty without one."""
        return self.last.sql if self.last else ""

    def why(self) -> dict[str, Any]:
        """Name what explains the total, for tables and logs of trainers."""
        return {"status": self.status, "sql": self.sql, "sql_found": float(bool(self.sql))}


class Scorer:
    """Judges replies by execution and rewards them. Threads may share one; forks may not."""

    def __init__(self, config: AdapterConfig) -> None:
        self.config = config
        self._executor = Executor(config.executor)
        self.reward = build_reward(config.reward, self._executor, config.env.compared)
        # Of the forms that `any` reads the paper's own.
        form = "fence" if config.env.wrapping == "fence" else "sql_tag"
        self.feedback = partial(feedback, form=form)
        self._witnesses = open_store(config.env)
        # What a trainer scores is over: it has limited the calls, and nobody reads a diagnosis.
        env = config.env
        env = env.model_copy(update={"calls": sys.maxsize}) if env.kind == "agentic" else env
        self._judging = self.environment(env, lambda *_: ((), ""))
        self._told: set[object] = set()

    def environment(self, env: EnvConfig, told: Feedback | None = None) -> BaseEnvironment:
        """Build an environment whose first prompt is the trainer's: it stands in the data.

        All share their witnesses, so that those of a question are made once.
        """
        made = build_environment(
            env, executor=self._executor, first_prompt=lambda _: (), feedback=told or self.feedback
        )
        return replace(made, witnesses=self._witnesses)

    def score(self, example: Example, replies: Sequence[str]) -> Scored:
        """Score the replies of one episode, one a turn; no reply whatever raises.

        When an episode ends is the trainer's business: replies after a match are judged too, and
        so are more calls than the settings allow.
        """
        question = (example.database, example.gold_sql)
        if question not in self._told:  # one that times out would run once more an episode
            queries = (example.gold_sql, *example.alternatives)
            golds = [run_in_dialect(self._executor.gold, example, one) for one in queries]
            if not any(isinstance(gold, Table) for gold in golds):
                self._warn_once(
                    question,
                    f"the gold query {example.gold_sql!r} does not run on {example.database} "
                    f"({describe_failure(golds[0])}): no reply is right; leave it out",
                )
        episode = Episode(example)
        for reply in replies:
            episode, _ = self._judging.step(episode, reply)
        if not any(attempt.sql for attempt in episode.attempts):
            found = (answer_of(attempt.text, "any").form for attempt in episode.attempts)
            if form := next(filter(None, found), None):
                self._warn_once(
                    form,
                    f"a reply has its SQL {_FORMS[form]}, which env.wrapping="
                    f"{self.config.env.wrapping} does not read: ask for that form in the prompt, "
                    "or set env.wrapping=any",
                )
        return self.scored(episode)

    def scored(self, episode: Episode) -> Scored:
        """Reward an episode that is over."""
        score = self.reward(episode)
        last = episode.attempts[-1] if episode.attempts else None
        return Scored(score.total, score.correct, score.parts, score.spans, last)

    def _warn_once(self, what: object, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            _log.warning(text)

    def score_many(self, episodes: Sequence[tuple[Example, Sequence[str]]]) -> list[Scored]:
        """Score episodes on all workers, in order."""
        return self._executor.map(lambda pair: self.score(*pair), episodes)


_SETTINGS = '{"reward": {"kind": …, …}, "env": {"kind": …, …}, "executor": {…}}'


def read_settings(settings: AdapterConfig | Mapping[str, Any] | None) -> AdapterConfig:
    """Read an adapter's settings from a mapping, also one of OmegaConf's.

    EXPO-SQL compares as its paper does unless the settings name `env.match`: by sets of rows it
    would pay a clause that orders wrongly, or repeats rows, in full.
    """
    try:
        config = AdapterConfig.model_validate(plain(settings or {}))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        where = ": ".join(filter(None, ("settings of the SQL reward", place)))
        raise UserError(f"{where}: {first['msg']}; settings are {_SETTINGS}") from None
    for clash in clashes(config.reward, config.env):
        if clash.is_there:
            raise UserError(f"settings of the SQL reward: {clash.told(config)}")
    if config.reward.kind == "expo" and "match" not in config.env.model_fields_set:
        env = config.env.model_copy(update={"match": MATCH})
        return config.model_copy(update={"env": env})
    return config


def scorer_of(config: AdapterConfig) -> Scorer:
    """Return the scorer of these settings in this process; it is made when first needed.

    Trainers pickle reward functions and fork; an executor allows neither.
    """
    process = os.getpid()
    # Each process has a lock of its own: a fork may inherit another's while it is held.
    with _LOCKS.setdefault(process, Lock()):
        return _scorer(config, process)


_LOCKS: dict[int, Lock] = {}


@lru_cache(maxsize=8)
def _scorer(config: AdapterConfig, _process: int) -> Scorer:
    return Scorer(config)


def example_of(row: Mapping[str, Any] | str | bytes | None, *, gold_sql: Any = None) -> Example:
    """Read a question from the row of a data set.

    Args:
        row: A mapping, or one as JSON text: `database`, the path of a SQLite file; `gold_sql`,
            unless it is given apart; and where there are any `id`, `dialect`, `alternatives` (more
            gold queries) and `grading_method` (the question's own rule). The prompt is the
            trainer's, so the rest is not read.
        gold_sql: The gold query of trainers that have their own name for it.
    """
    row = mapping_of(row)
    row = {name: _cell(row.get(name)) for name in RewardRow.model_fields}
    row["gold_sql"] = _cell(gold_sql) or row["gold_sql"]
    given = {name: value for name, value in row.items() if value not in (None, "")}
    one = check(RewardRow, given, where="a row of the SQL reward's data", advice=_NEEDED)
    return Example(
        id=one.id,
        question="",
        db_id=one.database.stem,
        database=one.database,
        gold_sql=one.gold_sql,
        dialect=dialect_of(one.dialect),
        alternatives=one.alternatives,
        grading_method=one.grading_method or "",
    )


def _listed(value: Any) -> Any:
    """Read more gold queries: one, or a list, which CSV has as JSON."""
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError):
            value = json.loads(value)
    every = value if isinstance(value, list) else [value]
    return [one for one in map(_cell, every) if one not in (None, "")]


class RewardRow(BaseModel, frozen=True, coerce_numbers_to_str=True):
    """What is read of the row of a data set."""

    database: Place
    gold_sql: str
    id: str = ""
    dialect: str = "sqlite"
    alternatives: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    grading_method: Rule = ""


_NEEDED = "give database, the path of a SQLite file, and gold_sql, the query that answers"


def plain(value: Any) -> Any:
    """Return a value as Python has it: of NumPy, Arrow, pandas or OmegaConf, at any depth; None for
    a missing cell of a data frame (NaN, NaT, NA).
    """
    for name in ("as_py", "tolist"):
        value = getattr(value, name)() if hasattr(value, name) else value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return [*map(plain, value)]
    try:
        return value if value == value else None
    except TypeError:  # pandas' NA is neither equal nor not
        return None


def _cell(value: Any) -> Any:
    value = plain(value)
    value = os.fsdecode(value) if isinstance(value, bytes) else value
    return value.strip() if isinstance(value, str) else value


def mapping_of(value: Any) -> Mapping[str, Any]:
    """Read the fields of a row: a mapping, or one as JSON text; none of a missing cell."""
    if isinstance(value, Mapping):
        return value
    fields = plain(value)
    with suppress(ValueError, TypeError):
        fields = json.loads(fields)
    if fields is not None and not isinstance(fields, dict):
        raise UserError(
            f"the SQL reward: {value!r:.60} is no row: give a mapping with `database`, or a JSON "
            "object of one"
        )
    return fields or {}
