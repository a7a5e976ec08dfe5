"""The page of launch.report in a headless Chromium."""

import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.evaluation.answers import ModelFacts
from tests.vectors import read
from tests.worlds import write

from .browser import CHROMIUM, Browser, browser
from .conftest import json_lines
from .report_cases import HOSTILE, make_hostile, make_run, unfinish, write_marks, write_page

pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="no chromium on the path: apt-get install chromium, or put Chrome there"
)


def evaluation(place: Path) -> Path:
    settings: dict[str, Any] = {"decode": "vote@8", "timeout_s": 60.0}
    settings |= {"versions": {"sqlite": "3.1"}, "model": ModelFacts("m")}
    return write_page(write_marks(place / "result.json", "0100", {"ex": "1"}, **settings))


def two_rules(place: Path) -> Path:
    other = write_marks(place / "other.json", "1111", {"ex": "1"})
    return write_page(other, make_run(place / "one-rule-seed0"))


def on_its_way(second_stage: Any, place: Path) -> Path:
    """A run of ten steps that is not finished, perhaps with a second stage."""
    unfinish(make_run(place))
    train = {"steps": 10, "second_stage": second_stage}
    (place / "config.yaml").write_text(yaml.safe_dump({"train": train}))
    return write_page(place)


def seeds(place: Path) -> Path:
    runs = [make_run(place / f"pair-seed{seed}", seed=seed) for seed in range(3)]
    return write_page(*runs, make_run(place / "other", seed=5, rate=0.002), against=runs[0])


def unfinished_seeds(place: Path) -> Path:
    runs = [make_run(place / f"part-seed{seed}", seed=seed) for seed in range(3)]
    runs += [make_run(place / f"begun-seed{seed}", seed=seed, rate=0.002) for seed in range(2)]
    runs += [make_run(place / "lone", rate=0.003)]
    for run in runs[2:]:
        unfinish(run)
    return write_page(*runs)


def edited(change: Callable[[list[Any]], object], name: str, place: Path) -> Path:
    """A run whose groups or answers somebody has changed."""
    make_run(place, steps=1, questions=2)
    path = place / name / "trajectories.jsonl"
    lines = json_lines(path)
    change(lines[1:])
    write(path, lines)
    return write_page(place)


def sampled_twice(answers: list[Any]) -> None:
    one = answers[0]
    one |= {"chosen": 1, "trajectories": one["trajectories"] * 2}
    one["trajectories"][0] = {"turns": [{"sql": "SELECT 'not chosen'", "correct": False}]}


def beyond_16_bits(groups: list[Any]) -> None:
    """Characters before the credit count twice in a browser."""
    one = groups[0]["trajectories"][0]
    one["turns"][0] |= {"reply": "\U0001f600 a \U0001f600 b", "place": 2}
    one["spans"] = [[0, 2, 3, 1.0], [0, 6, 7, -1.0]]
    groups[0]["trajectories"] = [one]


def with_rows(answers: list[Any]) -> None:
    gold = [["tea", 1], ["jam", 2], ["oil", 3], ["rye", 4]]
    own = [["jam", 2], ["tea", 1], ["oil", 9], ["nut", 8]]
    for answer, rows in zip(answers, (own, [*gold, gold[0]]), strict=True):
        answer["gold_result"] |= {"columns": ["n", "p"], "rows": gold, "count": 4, "width": 2}
        [turn] = answer["trajectories"][0]["turns"]
        turn |= {"correct": rows != own, "result": {**answer["gold_result"], "rows": rows}}


PAGES: dict[str, Callable[[Path], Path]] = {
    "one": lambda place: write_page(make_run(place / "made-up-seed0")),
    "three places": lambda place: write_page(make_run(place / "three-seed0", samples=8)),
    "evaluation": evaluation,
    "two rules": two_rules,
    "10 steps": lambda place: on_its_way(None, place),
    "10 and 30": lambda place: on_its_way({"steps": 30}, place),
    "10 and as many": lambda place: on_its_way({"steps": None}, place),
    "seeds": seeds,
    "unfinished seeds": unfinished_seeds,
    "sampled twice": lambda place: edited(sampled_twice, "after", place),
    "beyond 16 bits": lambda place: edited(beyond_16_bits, "", place),
    "rows": lambda place: edited(with_rows, "after", place),
    "hostile": lambda place: write_page(make_hostile(place / "hostile")),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what gives a page by its name, made once."""
    place = tmp_path_factory.mktemp("report")
    return cache(lambda name: PAGES[name](place / name))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(chromium: Browser) -> Iterator[Browser]:
    """A browser in which nothing goes wrong, and which asks for nothing but the page."""
    chromium.problems.clear()
    chromium.requests.clear()
    chromium.resize(1280)
    yield chromium
    assert chromium.problems == []
    assert all(url.startswith("file://") and ".html" in url for url in chromium.requests)


@pytest.mark.parametrize("case", read("page"), ids=lambda case: case["why"])
def test_the_page_shows(page, pages, case):
    """`seen` has all texts of a selector, or one that is among them."""
    page.open(pages(case["page"]), case.get("at", ""))
    for name, *words in case.get("do", ()):
        getattr(page, name)(*words)
    for selector, wanted in case.get("seen", {}).items():
        found = page.texts(selector)
        assert found == wanted if isinstance(wanted, list) else wanted in found, found


def test_a_page_is_ready_soon(page, pages):
    assert min(page.open(pages("one")) for _ in range(3)) < 2_000  # ms


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_both_widths_in_both_lights(page, pages, width, dark):
    ground = "getComputedStyle(document.body).backgroundColor"
    page.resize(width, dark=dark)
    for name, fragment in (
        ("three places", ""), ("one", ""), ("one", "#q=test/1"), ("one", "#q=train/4")
    ):  # fmt: skip
        page.open(pages(name), fragment)
        assert page.js("document.documentElement.scrollWidth") == width
        light = page.js(ground)
        assert (sum(map(int, re.findall(r"\d+", light)[:3])) < 200) == dark
    page.press("d")
    assert page.js(ground) != light


def test_hostile_texts_show_as_texts(page, pages):
    """All of them in every field of a question and of a group."""
    page.open(pages("hostile"))
    for width, kind in ((1280, "0 "), (400, "trajectories.jsonl ")):
        page.resize(width)
        found = f"data.questions.find(q => q.id.startsWith({kind!r}))"
        page.js(f"location.hash = link({{q: {found}.id}})")
        page.wait(f'document.querySelector("#detail .chip")?.innerText.startsWith({kind!r})')
        assert page.js("document.documentElement.scrollWidth") == width
        assert "javascript:document.title='taken'" in page.texts("#detail")[0]
        page.press("Escape")
        page.wait("!document.querySelector('#overview').hidden")
        assert page.js("document.documentElement.scrollWidth") == width
        assert page.js("document.title") == "hostile"
        assert page.js('document.querySelectorAll("main script, main img, main b b").length') == 0
    # A query and a kind of reply that are names of what every object has.
    page.open(pages("hostile"), f"#q={len(HOSTILE) - 1}+constructor")
    assert page.texts("#detail .sql") == ["constructor"] * 3


def test_the_picture_of_the_readme(page, pages, tmp_path):
    """With MINIRL_REPORT_RUN, a run folder, docs/report.png is made anew from it."""
    readmes = Path(__file__).parents[2] / "docs" / "report.png"
    run = os.environ.get("MINIRL_REPORT_RUN")
    path = readmes if run else tmp_path / "report.png"
    page.resize(1180, 860)
    page.open(write_page(run, out=tmp_path / "run.html") if run else pages("one"))
    page.js("new Promise(done => setTimeout(done, 500))")
    page.picture(path)
    for one in (path, readmes):
        assert 10_000 < one.stat().st_size < 200_000
