"""The lines of docs/papers.md for real hardware are commands, shown on small data of that form."""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, reduce
from itertools import cycle, islice
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml

import launch.eval
import launch.evaluation.sampling
from launch.config import JobConfig, load_config
from launch.data.preflight import check_inputs, check_questions, split_reader
from launch.evaluation.questions import check_databases
from minirl.exchange import UserError
from tests.worlds import about_people, make_set

from .conftest import look_like_a_model

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("## The papers' tables on real hardware")[2]
# What it is of, the command, and where it is measured; the paper's numbers follow.
LINES = re.findall(r"^- (.*?): `(.*?)` \((.*?)\): .*$", SECTION, re.MULTILINE)
SIX = ", ".join(re.findall(r"`([\w-]+)`", SECTION.partition("*The six sets*")[2].partition(".")[0]))
BOTH = ", ".join(re.findall(r"`(.*?)`", SECTION.partition("*both*")[2].partition(".")[0]))
(THREE,) = re.findall(r"\*All three\* are `(.*?)`", SECTION)


class Row(NamedTuple):
    """A line of a table: what a shell runs (program and words), and where it is measured."""

    name: str
    calls: list[tuple[str, list[str]]]
    cell: str

    def measured(self) -> Iterator[list[str]]:
        """Read a cell such as `greedy, vote@8: bird-dev, spider-dev; vote@8: spider2-local`: each
        decoding and each set at least once.
        """
        cell = self.cell.replace("the six sets", SIX).replace("both:", f"{BOTH}:")
        cell = cell.replace("all three", THREE)
        for part in cell.split("; "):
            decodes, _, sets = (words.split(", ") for words in part.partition(": "))
            count = max(len(decodes), len(sets)) if sets != [""] else 0
            for decode, one in islice(zip(cycle(decodes), cycle(sets)), count):
                yield ["--decode", *decode.split(), "--data", *one.split()]

    def evaluations(self) -> Iterator[list[str]]:
        """List the words of `launch.eval`, for a run those with its config and settings."""
        for program, words in self.calls:
            more = ["--checkpoint", folder(*words)] if program == "launch.train" else []
            for added in [[]] if "--data" in words else self.measured():
                yield [*words, *more, *added]


def rows() -> list[Row]:
    """Let a shell read the lines, loops included, with the page's own functions."""
    functions = re.findall(r"^    (\w+\(\) \{.*\})$", SECTION, re.MULTILINE)
    script = [r"""python() { printf '%s\0' "$@"; echo; }""", *functions]
    script += [f"{line}\nprintf '\\f'" for _, line, _ in LINES]
    done = subprocess.run(
        ["sh", "-euc", "\n".join(script)], capture_output=True, text=True, check=True, timeout=60
    )
    found = []
    for (name, _, cell), told in zip(LINES, done.stdout.split("\f"), strict=False):
        words = [call.split("\0")[1:-1] for call in told.splitlines()]
        found.append(Row(name, [(program, rest) for program, *rest in words], cell))
    return found


def job(words: Sequence[str], *more: str) -> JobConfig:
    config, *settings = words[words.index("--cfg") + 1 :]
    return load_config(config, [*settings, *more])


@cache
def folder(*words: str) -> str:
    return str(job(words).folder)


def sections(settings: Sequence[str]) -> Iterator[str]:
    """Yield the first part of every key, such as `reward`."""
    for setting in settings:
        yield re.split("[.=]", setting)[0]


ROWS = rows()
TRAINED = [words for row in ROWS for program, words in row.calls if program == "launch.train"]
# Those that change the method, and neither the model nor the data.
ABLATIONS = [
    words for words in TRAINED if words[4:] and not {"model", "data"} & {*sections(words[4:])}
]


@pytest.fixture(scope="module")
def place(downloads, tmp_path_factory):
    """A working folder as the page expects it, with all runs."""
    place = tmp_path_factory.mktemp("tables")
    data = shutil.copytree(downloads, place / "data")
    for name in set(re.findall(r"models/[\w.-]+", SECTION)):
        look_like_a_model(place / name)
    for words in TRAINED:
        with suppress(UserError):  # which the line's own test shows
            (place / folder(*words)).mkdir(parents=True, exist_ok=True)
    bird = data / "bird" / "dev_20240627"
    shutil.copy(bird / "dev.json", bird / "sub_sampled_bird_dev_set.json")
    for split, databases in (("train", ["store", "depot"]), ("dev", ["kiosk"])):
        file = data / "mysql" / f"{split}.json"
        make_set(file, data / "mysql" / "database", about_people(databases))
    return place


def test_the_ablations_of_all_papers_are_listed():
    count = Counter(words[3].removesuffix(".yaml") for words in ABLATIONS)
    # Progress-SQL's tables 3 and 13; EXPO-SQL's tables 4 to 6, 10 and 11; SQL-ASTRA's 1 and 4.
    assert count >= Counter(progress=11, expo=9, paverl=2, astra=10)


def test_every_line_is_a_command_and_no_run_takes_the_folder_of_another():
    """A run that two lines name is one."""
    written = re.findall(r"^- .*`[^`]*\.yaml[^`]*` \(.*$", SECTION, re.MULTILINE)
    assert len(written) <= len(LINES) == len(ROWS)
    assert all(row.calls for row in ROWS)
    assert {program for row in ROWS for program, _ in row.calls} == {"launch.train", "launch.eval"}
    assert len({folder(*words) for words in TRAINED}) == len(set(map(tuple, TRAINED)))


@pytest.mark.parametrize("size", ["", "-demo"])
@pytest.mark.parametrize("words", ABLATIONS, ids=lambda words: words[4])
def test_an_ablation_is_accepted_and_changes_what_it_names_alone(words, size):
    name, settings = words[3].replace(".yaml", f"{size}.yaml"), words[4:]
    full, changed = load_config(name, []), load_config(name, settings)
    keys = [setting.partition("=")[0] for setting in settings]
    for key, setting in zip(keys, settings, strict=True):
        wanted = yaml.safe_load(setting.partition("=")[2])
        found = reduce(getitem, key.split("."), changed.model_dump(mode="json"))
        # A section that was named whole has its other keys by default.
        assert found == (found | wanted if isinstance(wanted, dict) else wanted)
    named = {*sections(settings)}
    # A demo may have the ablation's value already, as of the number of turns.
    assert size or changed.model_dump(exclude={"run"}) != full.model_dump(exclude={"run"})
    assert changed.model_dump(exclude=named) == full.model_dump(exclude=named)


# Ablations leave model and data as they are, which the test above shows.
RUNS = [words for words in TRAINED if words not in ABLATIONS]


@pytest.mark.parametrize("words", RUNS, ids=lambda words: " ".join(words[3:])[:60])
def test_a_run_resolves_on_small_data(words, place, monkeypatch):
    monkeypatch.chdir(place)
    excluded = ["data.train.exclude_databases=[farm_two]"] if "formula_1" in str(words) else []
    config = job(words, "data.train.total=12", "data.held_out=3", *excluded)
    check_inputs(config)
    check_questions(config)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name[:60])
def test_a_line_is_measured_on_small_data(row, place, monkeypatch):
    judged = []

    def judge(options, source, split, out):
        config, root = source.config, source.config.data.root
        examples = split_reader(config, root)(split).examples
        side: Any = SimpleNamespace(config=config, root=root)
        questions = launch.eval._questions(options, side, examples)
        check_databases(questions.databases)
        judged.append(questions.measures)

    def of(config, decode, *_):
        return SimpleNamespace(config=config, decode=decode)

    monkeypatch.setattr(launch.eval, "policy_in", lambda *_: None)
    monkeypatch.setattr(launch.evaluation.sampling.CheckpointSource, "of", of)
    monkeypatch.setattr(launch.eval.cli, "use_accelerator", lambda *_: None)
    monkeypatch.setattr(launch.eval, "_folder", lambda *_: Path("evals"))
    monkeypatch.setattr(launch.eval, "_answer_and_judge", judge)
    monkeypatch.chdir(place)
    for words in row.evaluations():
        launch.eval.main(words)
    assert judged or "metrics.jsonl" in row.cell
    assert all(judged)
