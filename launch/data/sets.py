"""From downloads to sets of checked questions, phase by phase; each phase can be resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import apsw

from launch.cli import progress_bar
from launch.data.checking import CHECKS, TOGETHER, Do, checking
from launch.data.contamination import OverlapIndex, refuse
from launch.data.inspection import DatabaseJob, open_inspector
from launch.data.request import VALIDATION, VALUES, PrepareRequest
from launch.data.summary import GOLD_ISSUES, SetReport, SourceEntry, Summary, describe_lengths
from launch.evaluation.process_pool import process_pool
from minirl.run.files import PART, naming, settle
from sqlenv.data.descriptions import read_descriptions
from sqlenv.data.held_out import hold_out
from sqlenv.data.issues import Checked
from sqlenv.data.layouts import MANIFEST, locate
from sqlenv.data.loading import choose, fingerprint, open_pools
from sqlenv.data.prepared import DATABASES, SCHEMAS, DatabaseEntry, write_question
from sqlenv.data.sources import Check, Pool
from sqlenv.errors import UserError
from sqlenv.types import Example

KEYED = (CHECKS, SCHEMAS, VALUES)
"""Folders whose files are named by all that decides them: of use to any settings."""
_BATCH = 2_048  # questions that are checked together: what memory holds of a set that is streamed
_SURVEY_EVERY = 10_000
_ADVICE = "add --drop-missing to leave such questions out"

Survey = Counter[tuple[str, Path]]
"""Questions of each database, by `db_id` and file."""


def prepare(request: PrepareRequest, *, writes_sets: bool = True) -> Summary:
    """Do all that is left to do; perhaps nothing is written but the golds that have issues.

    The sets of before stay as they are until all new ones are there.
    """
    data = request.job.data
    try:
        summary = _write_all(request)
        names = [GOLD_ISSUES]
        if writes_sets:
            if data.overlap == "refuse":
                refuse(summary.contamination, excluded=data.train.exclude_databases)
            (request.folder / MANIFEST).unlink(missing_ok=True)
            names += [*(f"{name}.jsonl" for name in summary.sets), DATABASES]
        for name in names:
            settle(_scratch(request, name), request.folder / name)
    finally:
        for path in request.folder.rglob(f".*{PART}"):
            path.unlink()
    return summary


def _write_all(request: PrepareRequest) -> Summary:
    """Write all files, under names that none of them keeps."""
    surveys = {name: _survey(request, name) for name in (*request.measured, *request.learned)}
    total = sum(survey.total() for survey in surveys.values())
    open_work = partial(open_inspector, request)
    most = -(-total // TOGETHER)
    with process_pool(open_work, request.job.executor, most=most, chunk=1) as do:
        entries, broken = _databases(request, surveys, do)
        index = OverlapIndex(lambda example: entries[example.database], shapes=True)
        with checking(request, do, total) as look:
            held_out = _hold_out(request, look, broken)
            sets, used = _write_sets(request, held_out, look, broken, index)
    with _writing(request, DATABASES) as write:
        for path in used:
            write(entries[path].model_dump_json())
    return Summary(
        sets=sets,
        sample=request.sample,
        wanted=request.mixture.total if request.mixture else None,
        seed=request.seed,
        held_out=tuple(sorted(held_out)),
        broken_databases={str(path): why for path, why in broken.items()},
        contamination=tuple(index.overlaps()),
        sqlite=apsw.sqlite_lib_version(),
    )


def _scratch(request: PrepareRequest, name: str) -> Path:
    return request.folder / f".{name}{PART}"


@contextmanager
def _writing(request: PrepareRequest, name: str) -> Generator[Callable[[str], object]]:
    """Open a file that is settled when all is there; give what writes a line."""
    path = _scratch(request, name)
    with naming(path), path.open("w", encoding="utf-8") as file:
        yield lambda line: file.write(line + "\n")


def _survey(request: PrepareRequest, name: str) -> Survey:
    """Read a data set from end to end before anything is run: it is whole, or refused."""
    found: Survey = Counter()
    pool = Pool(request.sources[name], request.whole(name), advice=_ADVICE)
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
    request: PrepareRequest, surveys: Mapping[str, Survey], do: Do
) -> tuple[dict[Path, DatabaseEntry], dict[Path, str]]:
    """Read each database once; return those that cannot be read with the reason."""
    for name in (SCHEMAS, VALUES):
        (request.folder / name).mkdir(exist_ok=True)
    jobs: dict[Path, DatabaseJob] = {}
    for name, survey in surveys.items():
        waiting = {db_id: path for db_id, path in survey if path not in jobs}
        source = request.sources[name]
        told = read_descriptions(locate(source), source, waiting)
        for db_id, path in waiting.items():
            jobs[path] = DatabaseJob(db_id, path, told.get(path, {}))
    entries: dict[Path, DatabaseEntry] = {}
    broken: dict[Path, str] = {}
    with progress_bar("reading databases") as update:
        for path, answer in zip(jobs, do(list(jobs.values())), strict=True):
            if isinstance(answer, DatabaseEntry):
                entries[path] = answer
            elif not request.drop_missing:
                raise UserError(f"{answer}, or add --drop-missing to leave its questions out")
            else:
                broken[path] = str(answer)
            update(len(entries) + len(broken), len(jobs), "")
    return entries, broken


def _hold_out(request: PrepareRequest, look: Check, broken: Collection[Path]) -> frozenset[str]:
    """Choose the databases whose questions validate, and are not learned from."""
    if not request.validation or request.mixture is None:
        return frozenset()

    def usable(example: Example) -> bool:
        return example.database not in broken

    try:
        count = request.validation
        return hold_out(request.mixture, count, look, accept=usable, advice=_ADVICE)
    except UserError as error:
        raise UserError(f"--validation {error}") from None


def _write_sets(
    request: PrepareRequest,
    held_out: frozenset[str],
    look: Check,
    broken: Collection[Path],
    index: OverlapIndex,
) -> tuple[dict[str, SetReport], dict[Path, None]]:
    """Write each set and the golds that have issues; return the databases in use too."""
    sets: dict[str, SetReport] = {}
    used: dict[Path, None] = {}
    with _writing(request, GOLD_ISSUES) as write:

        def check(examples: Sequence[Example]) -> Iterator[Checked]:
            for checked in look(examples):
                if checked.issues:
                    write(_issue_line(checked))
                yield checked

        for name, config in request.plan(holds_out=bool(held_out)).items():
            is_measured, validates = name in request.measured, name == VALIDATION

            def accept(
                example: Example, *, every: bool = is_measured, held: bool = validates
            ) -> bool:
                is_in = every or (example.db_id in held_out) == held
                return is_in and example.database not in broken

            pools = open_pools(config, check, accept=accept, advice=_ADVICE, batch=_BATCH)
            questions = chain.from_iterable(choose(pools, config))
            sets[name], databases = _write_set(request, name, pools, questions, index)
            used |= databases
    return sets, used


def _issue_line(c: Checked) -> str:
    asked = {"id": c.example.id, "db_id": c.example.db_id}
    record = {**asked, "issues": c.issues, "note": c.note, "gold": c.example.gold_sql}
    return json.dumps(record, ensure_ascii=False)


def _write_set(
    request: PrepareRequest,
    name: str,
    pools: Sequence[Pool],
    questions: Iterable[Checked],
    index: OverlapIndex,
) -> tuple[SetReport, dict[Path, None]]:
    issues: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    matched: Counter[bool] = Counter()
    databases: dict[Path, None] = {}
    is_learned = name in request.learned_sets

    def written() -> Iterator[Example]:
        for checked in questions:
            example = checked.example
            write(write_question(checked))
            if is_learned or name == VALIDATION:
                index.learn(name, example)
            if not is_learned:
                index.measure(name, example)
            databases[example.database] = None
            issues.update(checked.issues)
            matched[bool(example.value_matches)] += 1
            if checked.prompt_tokens is not None:
                lengths[checked.prompt_tokens] += 1
            yield example

    with _writing(request, f"{name}.jsonl") as write:
        digest = fingerprint(written())
    reports = [pool.report for pool in pools]
    job = request.job
    limits = job.evaluation_sampler if name in request.measured else job.sampler
    found = sum((Counter(report.found) for report in reports), Counter())
    summary = SetReport(
        questions=sum(report.kept for report in reports),
        fingerprint=digest,
        databases=len(databases),
        read=sum(report.read for report in reports),
        found=dict(sorted(found.items())),
        issues=dict(sorted(issues.items())),
        value_matches=matched[True],
        prompt_tokens=describe_lengths(lengths, limits.max_prompt_tokens),
        sources=tuple(
            SourceEntry(name=one.name, read=one.read, kept=one.kept, failures=tuple(one.failures))
            for one in reports
        ),
    )
    return summary, databases
