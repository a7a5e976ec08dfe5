"""From downloads to sets of checked questions, phase by phase; each phase can be resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import apsw

from launch.cli import progress_bar
from launch.data.check_cache import CheckCache
from launch.data.contamination import QuestionIndex, database_overlaps
from launch.data.inspection import DatabaseJob, open_inspector, open_reader
from launch.data.mixtures import (
    BATCH,
    VALIDATION,
    VALUES,
    Part,
    PrepareRequest,
    Survey,
    held_out_databases,
    make_pool,
    plan_sets,
)
from launch.data.samples import SAMPLES
from launch.data.summary import (
    GOLD_ISSUES,
    SetReport,
    SourceEntry,
    Summary,
    describe_lengths,
)
from launch.evaluation.process_pool import process_pool
from minirl.run.files import naming, settle
from sqlenv.data.descriptions import stream_descriptions
from sqlenv.data.issues import Checked
from sqlenv.data.layouts import locate
from sqlenv.data.loading import Fingerprint
from sqlenv.data.prepared import DATABASES, SCHEMAS, DatabaseEntry, write_question
from sqlenv.data.sources import Check
from sqlenv.errors import UserError
from sqlenv.types import Example

_Item = TypeVar("_Item")

CHECKS = "checks"
_TOGETHER = 32  # questions that one process checks together
_SHOWN_EVERY = 16
_SURVEY_EVERY = 10_000


def prepare(request: PrepareRequest, *, writes_sets: bool = True) -> Summary:
    """Do all that is left to do; perhaps nothing is written but the golds that have issues."""
    folder = request.folder
    surveys = {name: _survey(name, request) for name in (*request.measured, *request.learned)}
    everything = sum(surveys[name].total() for name in request.learned)
    if request.validation and request.validation >= everything:
        raise UserError(
            f"--validation {request.validation}: there are {everything:,} questions to learn from; "
            "set fewer aside"
        )
    entries, broken = _databases(request, surveys)
    questions = QuestionIndex(lambda path: entries[path].shape)
    sets: dict[str, SetReport] = {}
    used: dict[str, dict[Path, None]] = {}
    total = sum(survey.total() for survey in surveys.values())
    with _checking(request, total) as (look, check):
        held_out = held_out_databases(request, look, broken)
        for name, part in plan_sets(request, held_out, check, broken).items():
            sets[name], used[name] = _write_set(request, name, part, questions)
    _write_databases(folder, [entries[path] for path in dict.fromkeys(chain(*used.values()))])
    for name in (*(f"{name}.jsonl" for name in sets), DATABASES):
        if writes_sets:
            settle(_scratch(folder, name), folder / name)
        else:
            _scratch(folder, name).unlink()
    settle(_scratch(folder, GOLD_ISSUES), folder / GOLD_ISSUES)
    found = {name: [entries[path] for path in paths] for name, paths in used.items()}
    learned = {*request.learned_sets, VALIDATION}
    overlaps = database_overlaps(
        {name: one for name, one in found.items() if name in learned},
        {name: one for name, one in found.items() if name not in request.learned_sets},
    )
    return Summary(
        sets=sets,
        sample=request.sample,
        wanted=SAMPLES[request.sample].total if request.sample else None,
        seed=request.seed,
        held_out=tuple(sorted(held_out)),
        broken_databases={str(path): why for path, why in broken.items()},
        contamination=(*overlaps, *questions.overlaps()),
        sqlite=apsw.sqlite_lib_version(),
    )


def _scratch(folder: Path, name: str) -> Path:
    return folder / f".{name}.part"


def _survey(name: str, request: PrepareRequest) -> Survey:
    """Read a data set from end to end before anything is run: it is whole, or refused."""
    found: Survey = Counter()
    pool = make_pool(request.sources[name], request, None)
    with progress_bar(f"reading {name}") as update:
        for number, checked in enumerate(pool.questions(), 1):
            found[checked.example.db_id, checked.example.database] += 1
            if number % _SURVEY_EVERY == 0:
                update(number, 0, "")
        update(pool.report.read, pool.report.read, "")
    if not found:
        raise UserError(
            f"{name}: no question is left; {pool.report.line()}; bring what is missing, or name "
            "the other sets with --data"
        )
    return found


def _databases(
    request: PrepareRequest, surveys: Mapping[str, Survey]
) -> tuple[dict[Path, DatabaseEntry], dict[Path, str]]:
    for folder in (request.folder / SCHEMAS, request.folder / VALUES):
        folder.mkdir(exist_ok=True)
    used = {path: name for survey in surveys.values() for name, path in survey}
    entries: dict[Path, DatabaseEntry] = {}
    broken: dict[Path, str] = {}
    open_work = partial(open_reader, request)
    with (
        process_pool(open_work, request.job.executor, most=len(used)) as do,
        progress_bar("reading databases") as update,
    ):
        for jobs in _batched(_database_jobs(request, surveys), BATCH):
            for job, answer in zip(jobs, do(jobs), strict=True):
                if isinstance(answer, DatabaseEntry):
                    entries[job.database] = answer
                elif not request.drop_missing:
                    raise UserError(f"{answer}, or add --drop-missing to leave its questions out")
                else:
                    broken[job.database] = str(answer)
                update(len(entries) + len(broken), len(used), "")
    return entries, broken


def _database_jobs(request: PrepareRequest, surveys: Mapping[str, Survey]) -> Iterator[DatabaseJob]:
    """List the databases, each once, with what its data set says of its columns."""
    done: set[Path] = set()
    for name, survey in surveys.items():
        source = request.sources[name]
        waiting = {db_id: path for db_id, path in survey if path not in done}
        done.update(waiting.values())
        by_path = {path: db_id for db_id, path in waiting.items()}
        found: dict[Path, dict[tuple[str, str], str]] = {}
        for path, descriptions in stream_descriptions(locate(source), source, waiting):
            found.setdefault(path, {}).update(descriptions)
        for path, db_id in by_path.items():
            yield DatabaseJob(db_id, path, found.pop(path, {}))


def _batched(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _write_databases(folder: Path, entries: Iterable[DatabaseEntry]) -> None:
    path = _scratch(folder, DATABASES)
    with naming(path), path.open("w", encoding="utf-8") as file:
        file.writelines(entry.model_dump_json() + "\n" for entry in entries)


@contextmanager
def _checking(request: PrepareRequest, total: int) -> Generator[tuple[Check, Check]]:
    """Open what checks questions on all cores, and the cache of earlier checks.

    Yields:
        What checks questions, and what also writes down the golds that have issues.
    """
    job = request.job
    settings = {
        "sqlite": apsw.sqlite_lib_version(),
        "limits": job.executor.model_dump(mode="json", exclude={"workers", "cache_dir"}),
        "slow_s": request.slow_s,
        "value_matches": request.value_matches,
        "prompt": job.prompt.model_dump(mode="json"),
        "env": job.env.model_dump(mode="json"),
        "tokenizer": _stamp(request.tokenizer),
    }
    done = 0

    def ask(examples: Sequence[Example]) -> Iterator[tuple[int, Checked]]:
        # Questions of one database follow one another: it is opened once.
        order = sorted(range(len(examples)), key=lambda place: examples[place].database)
        lots = [[examples[place] for place in lot] for lot in _batched(order, _TOGETHER)]
        for place, checked in zip(order, chain.from_iterable(do(lots)), strict=True):
            nonlocal done
            done += 1
            if done % _SHOWN_EVERY == 0:
                update(done, max(done, total), "")
            yield place, checked

    path, open_work = _scratch(request.folder, GOLD_ISSUES), partial(open_inspector, request)
    with (
        CheckCache(request.folder / CHECKS, settings) as cache,
        process_pool(open_work, job.executor, most=-(-total // _TOGETHER), chunk=1) as do,
        naming(path),
        path.open("w", encoding="utf-8") as file,
        progress_bar("questions") as update,
    ):

        def look(examples: Sequence[Example]) -> list[Checked]:
            nonlocal done
            before = done
            found = cache.look_up(examples, ask)
            done = before + len(found)
            return found

        def check(examples: Sequence[Example]) -> Iterable[Checked]:
            for checked in look(examples):
                if checked.issues:
                    file.write(_issue_line(checked))
                yield checked

        yield look, check
        update(done, done, "")


def _issue_line(c: Checked) -> str:
    asked = {"id": c.example.id, "db_id": c.example.db_id}
    record = {**asked, "issues": c.issues, "note": c.note, "gold": c.example.gold_sql}
    return json.dumps(record, ensure_ascii=False) + "\n"


def _stamp(tokenizer: Path | None) -> list[object] | None:
    if tokenizer is None:
        return None
    names = ("tokenizer.json", "tokenizer_config.json")
    stats = [(tokenizer / name).stat() for name in names if (tokenizer / name).is_file()]
    return [str(tokenizer.resolve()), *([stat.st_size, stat.st_mtime_ns] for stat in stats)]


def _write_set(
    request: PrepareRequest, name: str, part: Part, index: QuestionIndex
) -> tuple[SetReport, dict[Path, None]]:
    (pools, stream), is_learned = part, name in request.learned_sets
    fingerprint, questions, matched = Fingerprint(), 0, 0
    issues: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    databases: dict[Path, None] = {}
    path = _scratch(request.folder, f"{name}.jsonl")
    with naming(path), path.open("w", encoding="utf-8") as file:
        for checked in stream:
            file.write(write_question(checked) + "\n")
            if is_learned or name == VALIDATION:
                index.learn(name, checked.example)
            if not is_learned:
                index.measure(name, checked.example)
            fingerprint.add(checked.example)
            questions += 1
            databases[checked.example.database] = None
            issues.update(checked.issues)
            matched += bool(checked.example.value_matches)
            if checked.prompt_tokens is not None:
                lengths[checked.prompt_tokens] += 1
    reports = [pool.report for pool in pools]
    found = sum((Counter(report.found) for report in reports), Counter())
    summary = SetReport(
        questions=questions,
        fingerprint=fingerprint.text,
        databases=len(databases),
        read=sum(report.read for report in reports),
        found=dict(sorted(found.items())),
        issues=dict(sorted(issues.items())),
        value_matches=matched,
        prompt_tokens=describe_lengths(lengths, request.job.sampler.max_prompt_tokens),
        sources=tuple(
            SourceEntry(name=one.name, read=one.read, kept=one.kept, failures=one.failures)
            for one in reports
        ),
    )
    return summary, databases
