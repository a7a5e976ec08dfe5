"""From downloads to checked questions, phase by phase; each phase keeps what it has found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import apsw

from launch.cli import progress_bar
from launch.evaluation.process_pool import process_pool
from launch.findings import Findings
from launch.inspection import VALUES, DatabaseJob, DatabaseReader, Inspector
from launch.leaks import Leak, Questions, database_leaks
from launch.prepare_plan import (
    BATCH,
    VALIDATION,
    Part,
    Request,
    Survey,
    check_validation,
    held_out_databases,
    make_pool,
    plan_sets,
)
from minirl.run.files import naming, settle
from sqlenv.data.descriptions import stream_descriptions
from sqlenv.data.issues import Checked
from sqlenv.data.layouts import locate
from sqlenv.data.loading import Fingerprint
from sqlenv.data.prepared import DATABASES, SCHEMAS, DatabaseEntry, write_question
from sqlenv.data.sources import Check, SourceReport
from sqlenv.errors import UserError
from sqlenv.types import Example

FLAWS = "flaws.jsonl"
FINDINGS = "findings.sqlite"
_LOT = 32
"""Questions that one process looks at together."""
_SURVEY_EVERY = 10_000
_SHOWN_EVERY = 16


@dataclass(slots=True)
class SetSummary:
    """What was written of a set.

    Attributes:
        reports: What was found in its sources.
        databases: Questions of each database.
        flaws: How many questions that were written have each flaw.
        lengths: How many prompts have each number of tokens.
        hinted: Questions that name a value.
    """

    reports: Sequence[SourceReport] = ()
    questions: int = 0
    databases: Counter[Path] = field(default_factory=Counter)
    flaws: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    hinted: int = 0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that was prepared.

    Attributes:
        held_out: Databases whose questions are not learned from.
        broken: Databases that cannot be read, and why.
        looked_at: Questions whose gold query was run now, and not by an earlier call.
    """

    sets: Mapping[str, SetSummary]
    leaks: Sequence[Leak]
    held_out: frozenset[str]
    broken: Mapping[Path, str]
    looked_at: int


def prepare(request: Request) -> Outcome:
    """Do all that is left to do.

    Raises:
        UserError: A data set is not whole, or a file of it is damaged.
    """
    surveys = {name: _survey(name, request) for name in (*request.measured, *request.learned)}
    check_validation(request, surveys)
    entries, broken = _databases(request, surveys)
    questions = Questions(lambda path: entries[path].shape)
    sets: dict[str, SetSummary] = {}
    total = sum(sum(survey.values()) for survey in surveys.values())
    with _inspecting(request, total) as (look, check, findings):
        held_out = held_out_databases(request, look, broken)
        plan = plan_sets(request, held_out, check, broken)
        learned = set(request.learned_sets)
        for name, part in plan.items():
            see = partial(_compare, questions, name, is_learned=name in learned)
            sets[name] = _write_set(part, _scratch(request.folder, f"{name}.jsonl"), see)
        looked_at = findings.new
    _write_databases(request.folder, entries, sets)
    for name in (*(f"{name}.jsonl" for name in plan), FLAWS, DATABASES):
        settle(_scratch(request.folder, name), request.folder / name)
    leaks = [*_database_leaks(learned, entries, sets), *questions.leaks()]
    return Outcome(sets, leaks, held_out, broken, looked_at)


def _scratch(folder: Path, name: str) -> Path:
    """Name a file that is not whole yet."""
    return folder / f".{name}.part"


def _database_leaks(
    learned: Collection[str],
    entries: Mapping[Path, DatabaseEntry],
    sets: Mapping[str, SetSummary],
) -> list[Leak]:
    used = {name: [entries[path] for path in one.databases] for name, one in sets.items()}
    return database_leaks(
        {name: found for name, found in used.items() if name in (*learned, VALIDATION)},
        {name: found for name, found in used.items() if name not in learned},
    )


# Reading.


def _survey(name: str, request: Request) -> Survey:
    """Read a data set from end to end before anything is run: it is whole, or refused."""
    found: Survey = Counter()
    pool = make_pool(request.sources[name], request, None)
    with progress_bar(f"reading {name}") as update:
        for number, checked in enumerate(pool.questions(), 1):
            found[checked.example.db_id, checked.example.database] += 1
            if number % _SURVEY_EVERY == 0:
                update(number, 0, "")
        update(pool.read, pool.read, "")
    if not found:
        raise UserError(
            f"{name}: no question is left; {pool.report().line()}; bring what is missing, or name "
            "the other sets with --data"
        )
    return found


# Databases.


def _databases(
    request: Request, surveys: Mapping[str, Survey]
) -> tuple[dict[Path, DatabaseEntry], dict[Path, str]]:
    """Read schemas and values of all databases in use, on all cores.

    Raises:
        UserError: A database cannot be read, and such questions are not to be left out.
    """
    for folder in (request.folder / SCHEMAS, request.folder / VALUES):
        folder.mkdir(exist_ok=True)
    used = {path: name for survey in surveys.values() for name, path in survey}
    entries: dict[Path, DatabaseEntry] = {}
    broken: dict[Path, str] = {}
    reader = DatabaseReader(request.preparation)
    with (
        process_pool(reader, request.job.executor, most=len(used)) as do,
        progress_bar("reading databases") as update,
    ):
        for lot in _lots(_database_jobs(request, surveys)):
            for job, answer in zip(lot, do(lot), strict=True):
                if isinstance(answer, DatabaseEntry):
                    entries[job.database] = answer
                elif not request.drop_missing:
                    raise UserError(f"{answer}, or add --drop-missing to leave its questions out")
                else:
                    broken[job.database] = str(answer)
                update(len(entries) + len(broken), len(used), "")
    return entries, broken


def _database_jobs(request: Request, surveys: Mapping[str, Survey]) -> Iterator[DatabaseJob]:
    """List the databases, each once, with what its data set says of its columns."""
    done: set[Path] = set()
    for name, survey in surveys.items():
        source = request.sources[name]
        waiting = {db_id: path for db_id, path in survey if path not in done}
        done.update(waiting.values())
        by_path = {path: db_id for db_id, path in waiting.items()}
        told: dict[Path, dict[tuple[str, str], str]] = {}
        for path, descriptions in stream_descriptions(locate(source), source, waiting):
            told.setdefault(path, {}).update(descriptions)
        for path, db_id in by_path.items():
            yield DatabaseJob(db_id, path, told.pop(path, {}))


def _lots(jobs: Iterable[DatabaseJob]) -> Iterator[list[DatabaseJob]]:
    lot: list[DatabaseJob] = []
    for job in jobs:
        lot.append(job)
        if len(lot) == BATCH:
            yield lot
            lot = []
    if lot:
        yield lot


def _write_databases(
    folder: Path, entries: Mapping[Path, DatabaseEntry], sets: Mapping[str, SetSummary]
) -> None:
    used = dict.fromkeys(path for summary in sets.values() for path in summary.databases)
    path = _scratch(folder, DATABASES)
    with naming(path), path.open("w", encoding="utf-8") as file:
        file.writelines(entries[database].model_dump_json() + "\n" for database in used)


# Looking at questions.


@contextmanager
def _inspecting(request: Request, total: int) -> Generator[tuple[Check, Check, Findings]]:
    """Open what looks at questions on all cores, and the file of what was found before.

    Yields:
        What looks at questions, what also writes flaws down, and the file.
    """
    preparation = request.preparation
    limits = request.job.executor.model_dump(mode="json", exclude={"workers", "cache_dir"})
    settings = {
        "sqlite": apsw.sqlite_lib_version(),
        "limits": limits,
        "slow_s": preparation.slow_s,
        "hints": preparation.hints,
        "prompt": request.job.prompt.model_dump(mode="json"),
        "env": request.job.env.model_dump(mode="json"),
        "tokenizer": _stamp(preparation.tokenizer),
    }
    done = 0

    def ask(examples: Sequence[Example]) -> Iterator[tuple[int, Checked]]:
        # Questions of one database follow one another: it is opened once.
        order = sorted(range(len(examples)), key=lambda place: examples[place].database)
        lots = [
            [examples[place] for place in order[at : at + _LOT]]
            for at in range(0, len(order), _LOT)
        ]
        for place, checked in zip(order, chain.from_iterable(do(lots)), strict=True):
            nonlocal done
            done += 1
            if done % _SHOWN_EVERY == 0:
                update(done, max(done, total), "")
            yield place, checked

    with (
        Findings(request.folder / FINDINGS, settings) as findings,
        process_pool(
            Inspector(preparation), request.job.executor, most=-(-total // _LOT), chunk=1
        ) as do,
        _lines(_scratch(request.folder, FLAWS)) as tell,
        progress_bar("questions") as update,
    ):

        def look(examples: Sequence[Example]) -> list[Checked]:
            nonlocal done
            before = done
            found = findings.look(examples, ask)
            done = before + len(found)
            return found

        def check(examples: Sequence[Example]) -> Iterator[Checked]:
            for checked in look(examples):
                if checked.issues:
                    tell(_flaw(checked))
                yield checked

        yield look, check, findings
        update(done, done, "")


def _flaw(checked: Checked) -> dict[str, object]:
    e = checked.example
    said = {"id": e.id, "db_id": e.db_id, "flaws": checked.issues, "note": checked.note}
    return {**said, "gold": e.gold_sql}


@contextmanager
def _lines(path: Path) -> Generator[Callable[[Mapping[str, object]], None]]:
    """Open a file of JSON lines."""
    with naming(path), path.open("w", encoding="utf-8") as file:
        yield lambda record: print(json.dumps(record, ensure_ascii=False), file=file)


def _stamp(tokenizer: Path | None) -> list[object] | None:
    if tokenizer is None:
        return None
    names = ("tokenizer.json", "tokenizer_config.json")
    stats = [(tokenizer / name).stat() for name in names if (tokenizer / name).is_file()]
    return [str(tokenizer.resolve()), *([stat.st_size, stat.st_mtime_ns] for stat in stats)]


def _compare(questions: Questions, name: str, example: Example, *, is_learned: bool) -> None:
    if is_learned or name == VALIDATION:
        questions.learn(name, example)
    if not is_learned:
        questions.measure(name, example)


def _write_set(part: Part, path: Path, see: Callable[[Example], None]) -> SetSummary:
    """Write a set's questions, one by one, and sum them up."""
    pools, stream = part
    summary, fingerprint = SetSummary(), Fingerprint()
    with naming(path), path.open("w", encoding="utf-8") as file:
        for checked in stream:
            file.write(write_question(checked) + "\n")
            see(checked.example)
            fingerprint.add(checked.example)
            summary.questions += 1
            summary.databases[checked.example.database] += 1
            summary.flaws.update(checked.issues)
            summary.hinted += bool(checked.example.value_matches)
            if checked.prompt_tokens is not None:
                summary.lengths[checked.prompt_tokens] += 1
    summary.fingerprint = fingerprint.text
    summary.reports = [pool.report() for pool in pools]
    return summary
