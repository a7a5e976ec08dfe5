"""The questions of a test set or a split: where they are, and what answers are judged by."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from launch.config import DataSection
from launch.options import choose
from minirl.exchange import UserError
from rewards import columns
from sqlenv.config import AnswerConfig, SourceConfig
from sqlenv.data.layouts import DATASETS, SETS, TEST_SETS, is_below, locate
from sqlenv.evaluators.comparators import COMPARATORS
from sqlenv.evaluators.spider2 import Reference, read_references
from sqlenv.executor.database import check_contents
from sqlenv.types import Dialect, Example, ExecutionMatch, Numbers, Result

_log = logging.getLogger(__name__)

PARTIAL: Mapping[str, Callable[[Result, Result], float]] = {
    "ex_f": columns.fractional_accuracy,
    "ex_b": columns.binary_accuracy,
    "ex_f_code": columns.evaluated_accuracy,
    "csmr": columns.csmr,
}
"""The papers' measures of how much of the gold result a prediction reproduces: PaVeRL-SQL's EX_f
and EX_b, EX_f as its released evaluator computes it, SQL-ASTRA's CSMR."""
TEXTUAL = ("struct", "lex", "clause")
"""Measures that compare with the text of the gold query: Progress-SQL's two alignments, and the
mean of EXPO-SQL's clause rewards."""
REFERENCED = frozenset(name for name, one in COMPARATORS.items() if one.needs == "reference")
"""Comparators that look at Spider 2's gold results alone; all others look at gold queries, those of
`PARTIAL` at either."""
SUITED = frozenset(name for name, one in COMPARATORS.items() if one.needs == "suite")
"""Comparators that run on a test suite."""
WITNESS = "witness"
"""Measure: right by the first rule of execution that is asked for (`rule_of`), on the question's
database and on its gold query's witnesses (`sqlenv.witness`)."""
MEASURES: tuple[str, ...] = (*COMPARATORS, *PARTIAL, *TEXTUAL, WITNESS)
"""All measures."""

# Where the test suite lies, from the root or from the data set's own folder.
_SUITES = (
    *("test_suite_database", "../test_suite_database", "spider/test_suite_database"),
    *("test_suite_sql_eval/test_suite_database", "testsuitedatabases/database"),
)
# Where Spider 2's gold results lie, likewise.
_GOLDS = ("evaluation_suite/gold", "gold", "../evaluation_suite/gold")


def folder_and_file(root: Path | None, file: str) -> tuple[Path | None, str]:
    """Read `--data-root` and `--file` as people write them: a path of a question file does for
    either, and says where the data is.
    """
    if root is not None and root.is_file():
        return root.parent, str(root.absolute())
    path = Path(file)
    if root is None and (path.is_absolute() or path.is_file()):
        return path.parent, str(path.absolute())
    return root, file


def find(
    name: str,
    root: Path,
    file: str = "",
    *,
    key: str = "--data-root",
    dialect: Dialect = "sqlite",
) -> SourceConfig:
    """Find a test set below a data root.

    The root is the data set's own folder, OmniSQL's `data/`, or a folder of several downloads; a
    person has set it by `key`. A question file that is read in place of the set's own is a name
    below the root, or a path. The dialect is that of gold queries and predictions.
    """
    if not root.is_dir():
        advice = "check the path" if key == "--data-root" else "set it, or give --data-root FOLDER"
        raise UserError(f"{key} {root}: no such folder or file; {advice}")
    source = SETS[name].at(root, dialect)
    source = source.model_copy(update={"file": file}) if file else source
    # What lies below the root goes before what lies here.
    if file and not is_below(source) and Path(file).is_file():
        source = source.model_copy(update={"file": str(Path(file).absolute())})
    try:
        location = locate(source)
    except UserError as error:
        option = f"--file {file}" if file else key
        advice = "" if file else "; another question file: --file NAME"
        raise UserError(f"{option}: {name}: {error}{advice}") from None
    if location.root not in (root, root / DATASETS[source.layout].omnisql):
        _log.info("%s: taken for %s", location.files[0], name)
    return source


def check_databases(files: Iterable[Path]) -> None:
    """Make sure that databases can be read and are whole."""
    with ThreadPoolExecutor() as threads:
        for _ in threads.map(check_contents, dict.fromkeys(files)):
            pass


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """The questions of a test set or a split, and what they are judged by and on.

    Attributes:
        measures: Of `MEASURES`; the first is the one that counts.
        suite: Files of the test suite by database, where it is used.
        references: Gold results by question, for Spider 2.
        witnesses: How many, at most, `witness` asks for a question.
        numbers: How they compare; official programs know `exact` alone.
    """

    name: str
    examples: tuple[Example, ...]
    measures: tuple[str, ...]
    suite: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    references: Mapping[str, Reference] = field(default_factory=dict)
    witnesses: int = 8
    numbers: Numbers = "exact"

    @property
    def suite_files(self) -> set[Path]:
        """Return all files of the test suite that are used."""
        return {path for paths in self.suite.values() for path in paths}

    @property
    def databases(self) -> set[Path]:
        """Return the questions' own databases."""
        return {example.database for example in self.examples}


def question_set(
    name: str,
    examples: tuple[Example, ...],
    data: DataSection,
    *,
    comparators: str | None = None,
    test_suite: Path | None = None,
) -> QuestionSet:
    """Find what the questions of a test set, the first source of the data's, are judged by and on.

    Without comparators they are the test set's own; without a test suite it is looked for below the
    root and beside the source.
    """
    root = data.root or Path()
    place = locate(data.of("test", root).sources[0]).root
    names = comparators.split(",") if comparators else TEST_SETS[name].comparators
    asked = (choose("--comparators", one.strip(), MEASURES) for one in names)
    measures = tuple(dict.fromkeys(asked))
    _check_measures(examples, measures)
    suite: Mapping[str, tuple[Path, ...]] = {}
    if test_suite is not None and SUITED.isdisjoint(measures):
        raise UserError(f"--test-suite: none of {', '.join(measures)} uses one; leave it out")
    if not SUITED.isdisjoint(measures):
        if test_suite is not None and not test_suite.is_dir():
            raise UserError(f"--test-suite {test_suite}: no such folder")
        if folder := test_suite or _first_folder((place, root), _SUITES):
            suite = _suite_files(folder, examples)
        elif comparators is not None:
            raise UserError(
                f"--comparators {comparators}: no test suite at {root}; give its folder "
                "with --test-suite DIR"
            )
        else:
            _log.warning("%s: no test suite here (--test-suite DIR), so EX alone", root)
            measures = tuple(measure for measure in measures if measure not in SUITED)
    references = _references((place, root), examples) if _is_spider2(examples) else {}
    return QuestionSet(name, examples, measures, suite, references)


def _check_measures(examples: Sequence[Example], measures: Sequence[str]) -> None:
    is_spider2 = _is_spider2(examples)
    fitting = set(REFERENCED if is_spider2 else {*COMPARATORS, *TEXTUAL, WITNESS} - REFERENCED)
    for measure in measures:
        if measure not in fitting and measure not in PARTIAL:
            kind = "gold results" if is_spider2 else "gold queries"
            raise UserError(
                f"--comparators {measure}: these questions have {kind} alone; there are "
                f"{', '.join(sorted(fitting | set(PARTIAL)))}"
            )
    if not is_spider2 and (blank := [one.id for one in examples if not one.gold_sql]):
        raise UserError(
            f"{len(blank)} of {len(examples)} questions have no gold query, the first is "
            f"{blank[0]}; answers to them cannot be judged"
        )


def rule_of(measures: Sequence[str]) -> ExecutionMatch:
    """Find what is asked of witnesses too: Spider's rule for its test suite, `set` without any."""
    names = [name.replace("_ts", "_ex") for name in measures]
    return next(
        (rule for name in names for rule in get_args(ExecutionMatch) if rule == name), "set"
    )


def own_set(name: str, examples: tuple[Example, ...], env: AnswerConfig) -> QuestionSet:
    """Judge as a job does: by its rule, and before it, where it asks them, by its witnesses."""
    measures = (WITNESS, env.match) if env.witnesses else (env.match,)
    return QuestionSet(name, examples, measures, witnesses=env.witnesses, numbers=env.compared)


def _is_spider2(examples: Sequence[Example]) -> bool:
    return examples[0].source == "spider2"


def _first_folder(bases: Sequence[Path], names: Sequence[str]) -> Path | None:
    places = (base / name for base in bases for name in names)
    return next((place for place in places if place.is_dir()), None)


def _references(bases: Sequence[Path], examples: Sequence[Example]) -> dict[str, Reference]:
    """Read the gold results of Spider 2 by question."""
    folder = _first_folder(bases, _GOLDS)
    if folder is None:
        raise UserError(
            f"{bases[0]}: no evaluation_suite/gold in it, with Spider 2's gold results; copy it "
            "there from the repository"
        )
    references = {f"spider2/{name}": found for name, found in read_references(folder).items()}
    if left := [one.id for one in examples if one.id not in references]:
        raise UserError(
            f"{folder}: no gold result for {len(left)} questions, the first is {left[0]}; "
            "bring the evaluation suite up to date"
        )
    return references


def _suite_files(suite: Path, examples: Sequence[Example]) -> dict[str, tuple[Path, ...]]:
    """List the suite's files of each database: all in its folder with `.sqlite` in their names."""
    found = {}
    for db_id in dict.fromkeys(example.db_id for example in examples):
        folder = suite / db_id
        found[db_id] = tuple(sorted(folder.glob("*.sqlite*")))
        if not found[db_id]:
            raise UserError(
                f"{folder}: no database of the test suite in it; give its folder with --test-suite "
                f"DIR, which holds {db_id}/{db_id}.sqlite and its variants"
            )
    return found
