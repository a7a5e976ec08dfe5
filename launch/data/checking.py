"""Questions checked on all cores, each once: what was found of them is kept in a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import apsw

from launch.cli import progress_bar
from launch.data.request import PrepareRequest
from sqlenv.cache import DiskCache
from sqlenv.data.issues import Checked
from sqlenv.executor.database import identify
from sqlenv.types import Example

Do = Callable[[Sequence[Any]], Iterator[Any]]
"""Does jobs of `open_inspector` on all cores; answers come in order."""

CHECKS = "checks"
TOGETHER = 32
"""Questions that one process checks together."""
_SHOWN_EVERY = 16


@contextmanager
def checking(
    request: PrepareRequest, do: Do, total: int
) -> Generator[Callable[[Sequence[Example]], list[Checked]]]:
    """Make what looks questions up, and checks those that are not known yet, all at once.

    Known are checks of the same question, version of its database and settings.
    """
    settings = _settings(request)
    done = 0

    @cache
    def schema_of(database: Path) -> str:
        """Digest what a counted prompt shows: a data set may say something else of its columns."""
        told = request.files_of(database)[0].read_bytes() if request.tokenizer else b""
        return hashlib.sha256(told).hexdigest()

    with (
        closing(DiskCache(request.folder / CHECKS)) as entries,
        progress_bar("questions") as update,
    ):

        def look(examples: Sequence[Example]) -> list[Checked]:
            nonlocal done
            keys = [_key(one, schema_of(one.database), settings) for one in examples]
            known = zip(examples, map(entries.get, keys), strict=True)
            found = [_read(example, entry) if entry else None for example, entry in known]
            missing = [place for place, checked in enumerate(found) if checked is None]
            # Questions of one database follow one another: it is opened once.
            missing.sort(key=lambda place: examples[place].database)
            asked = [examples[place] for place in missing]
            lots = [asked[at : at + TOGETHER] for at in range(0, len(asked), TOGETHER)]
            answers = chain.from_iterable(do(lots))
            for count, (place, checked) in enumerate(zip(missing, answers, strict=True), done + 1):
                if count % _SHOWN_EVERY == 0:
                    update(count, max(count, total), "")
                found[place] = checked
                if checked.is_final:
                    entries[keys[place]] = _entry(checked)
            done += len(examples)
            return [checked for checked in found if checked is not None]

        yield look
        update(done, done, "")


def _settings(request: PrepareRequest) -> str:
    job, tokenizer = request.job, request.tokenizer
    settings = {
        "sqlite": apsw.sqlite_lib_version(),
        "limits": job.executor.model_dump(mode="json", exclude={"workers", "cache_dir"}),
        "slow_s": request.slow_s,
        "value_matches": request.value_matches,
        "prompt": job.prompt.model_dump(mode="json"),
        "env": job.env.model_dump(mode="json"),
        "tokenizer": _stamp(tokenizer) if tokenizer else None,
    }
    return json.dumps(settings, sort_keys=True)


def _stamp(tokenizer: Path) -> list[object]:
    paths = (tokenizer / name for name in ("tokenizer.json", "tokenizer_config.json"))
    stats = [path.stat() for path in paths if path.is_file()]
    return [str(tokenizer.resolve()), *([stat.st_size, stat.st_mtime_ns] for stat in stats)]


def _key(e: Example, *more: str) -> str:
    parts = [*identify(e.database), e.gold_sql, e.dialect, e.question, e.evidence, *more]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _entry(c: Checked) -> list[Any]:
    return [c.issues, c.note, c.rows, c.prompt_tokens, c.example.value_matches]


def _read(example: Example, entry: list[Any]) -> Checked:
    issues, note, rows, prompt_tokens, matches = entry
    asked = replace(example, value_matches=tuple(map(tuple, matches)))
    return Checked(asked, tuple(issues), note, rows=rows, prompt_tokens=prompt_tokens)
