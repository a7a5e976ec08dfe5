"""The page of launch.report in a headless Chromium."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from launch.evaluation.answers import ModelFacts
from tests.worlds import write

from .browser import CHROMIUM, Browser, browser
from .conftest import json_lines
from .report_cases import (
    HOSTILE,
    accuracy_in,
    make_hostile,
    make_run,
    question,
    unfinish,
    write_marks,
    write_page,
)

MINUS = "\N{MINUS SIGN}"
pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="no chromium on the path: apt-get install chromium, or put Chrome there"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    return make_run(place / "made-up-seed0")


@pytest.fixture(scope="module")
def html(run: Path) -> Path:
    return write_page(run)


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


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def test_the_page_has_each_part_with_the_right_numbers(page, html, run):
    assert min(page.open(html) for _ in range(3)) < 2_000  # ms
    result = json.loads((run / "result.json").read_text())
    shown = page.texts("#verdict .interval > b")
    told = [result["accuracy"][name]["set"] for name in ("before", "after")]
    assert [re.findall(r"[\d.]+", text) for text in shown] == [
        [f"{100 * each:.1f}" for each in (one["mean"], *one["ci95"])] for one in told
    ]
    test = result["gains"]["run"]["set"]
    low, high = (f"{100 * bound:+.1f}" for bound in test["ci95"])
    facts = dict(row.split("\t") for row in page.texts("#verdict .one tr"))
    gain = f"{100 * test['difference']:+.1f} [{low}, {high}]"
    assert facts["gain in points"] == gain.replace("-", MINUS)
    answers = [json_lines(run / name / "predictions.jsonl") for name in ("before", "after")]
    rights = [[bool(one["scores"]["set"]) for one in part] for part in answers]
    flips = list(zip(*rights, strict=True))
    counts = [flips.count((False, True)), flips.count((True, False))]
    found = [facts[f"flipped to {name}"] for name in ("right", "wrong")]
    assert found == [f"✓ {counts[0]} questions", f"✗ {counts[1]} questions"]
    titles = page.texts("#curves h3")
    assert titles[0] == "Execution accuracy"
    assert {"Reward and its parts", "What there is to learn from", "Entropy of the policy"} < {
        *titles
    }
    last = json_lines(run / "metrics.jsonl")[-1]
    # The legend says what the line shows, which is smoothed.
    values = '[data-plot="Execution accuracy"] .u-series:not(.edge) .u-value'
    smooth = page.texts(values)
    page.js("Object.assign($('smoothing'), {value: 0}).dispatchEvent(new Event('input'))")
    legend = page.texts(values)
    assert smooth[2] != legend[2]
    keys = ("validation/accuracy", "rollout/accuracy", "rollout/accuracy_first")
    assert legend == ["8", *(percent(last[key]) for key in keys)]
    assert page.texts("#count") == ["40 questions of 52"]
    marks = {(True, True): "✓ → ✓", (False, True): "✗ → ✓", (True, False): "✓ → ✗"}
    assert page.texts("tr[data-id] .mark") == [marks.get(flip, "✗ → ✗") for flip in flips]


def test_an_evaluation_says_what_it_is_of(page, place):
    """One place: shares by part, right and wrong, settings; neither flips nor curves."""
    settings: dict[str, Any] = {"decode": "vote@8", "timeout_s": 60.0}
    settings |= {"versions": {"sqlite": "3.1"}, "model": ModelFacts("m")}
    result = write_marks(place / "result.json", "0100", {"ex": "1"}, **settings)
    page.open(write_page(result))
    facts = ["judged by\tex", "held-out questions\t4", "queries that fail\t0"]
    assert page.texts("#verdict .one tr") == [*facts, "decoding\tvote@8", "seed\t0"]
    assert {"easy 4\t25 %", "d 4\t25 %"} < {*page.texts("#verdict .parts tr")}
    assert page.texts("#verdict .answer") == ["25.0 % [4.6, 69.9] of 4 questions are right by ex."]
    said = page.js('document.querySelector("#verdict details").textContent')
    assert all(each in said for each in ("sqlite 3.1", "timeout_s60", "model.namem"))
    assert page.texts("[data-flip]") == ["right 1", "wrong 3"]
    assert page.js('document.querySelector("#questions [aria-label*=two]")') is None
    assert page.texts("#bar a:not([hidden])") == ["minirl-sql", "Verdict", "Questions"]
    page.press("f")
    page.click('[data-flip="both"]')
    page.wait('document.querySelectorAll("tr[data-id]").length === 1')


def test_runs_of_which_one_has_another_rule_say_by_which_each_is_judged(page, place):
    other = write_marks(place / "other.json", "1111", {"ex": "1"})
    page.open(write_page(other, make_run(place / "one-rule-seed0")))
    table = "#verdict .scores > .card > table"
    heads = page.texts(f"{table} th")
    first, second = (
        dict(zip(heads, page.texts(f"{table} tbody tr:nth-child({row}) td"), strict=True))
        for row in (1, 2)
    )
    assert first["judged by"] == "ex"
    assert second["judged by"] == "set"
    assert second["gain in points"] == "+25.0 [+7.5, +42.5]"


@pytest.mark.parametrize(
    ("second_stage", "planned"), [(None, 10), ({"steps": 30}, 40), ({"steps": None}, 20)]
)
def test_a_run_that_goes_on_says_of_how_many_steps(page, place, second_stage, planned):
    """A second stage without a number of steps has as many as the first."""
    folder = make_run(place / f"stages-{planned}")
    (folder / "result.json").unlink()
    train = {"steps": 10, "second_stage": second_stage}
    (folder / "config.yaml").write_text(yaml.safe_dump({"train": train}))
    page.open(write_page(folder))
    assert f"steps\tnot finished: 8 of {planned} steps so far" in page.texts("#verdict .one tr")


def test_a_run_with_a_warm_start_has_three_places(page, place):
    """The gain of each stage, both intervals, queries that fail, and what samples say."""
    run = make_run(place / "three-seed0", samples=8)
    html = write_page(run)
    page.open(html)
    gains = json.loads((run / "result.json").read_text())["gains"]
    names = ("before", "between", "after")
    assert page.texts("#verdict .interval > span:first-child") == [*names]
    assert len(page.texts("#verdict .interval > .over")) == 3
    rows = page.texts("#verdict .one > .card > table > tbody > tr")
    facts = dict(row.split("\t") for row in rows)
    said = "800 questions: 35.0 % never, 30.0 % sometimes, 35.0 % always right"
    assert facts["screened"].startswith(said)
    page.js("document.querySelector('#verdict details details, #verdict td details').open = true")
    rows = page.texts("#verdict td details tr")
    assert rows[1:] == [
        f"{name}\t800\t35.0 %\t30.0 %\t35.0 %\t50.0 %" for name in ("easy", "<b>pets")
    ]
    for stage in ("warm start", "reinforcement"):
        points = f"{100 * gains[stage]['set']['difference']:+.1f} ["
        told = facts[f"by {'the ' if stage == 'warm start' else ''}{stage}"]
        assert told.startswith(points.replace("-", MINUS))
    assert re.fullmatch(r"\[.*, .*\]", facts["over databases"])
    verdicts = [json_lines(run / name / "predictions.jsonl") for name in names]
    counts = [sum(one["status"] == "error" for one in part) for part in verdicts]
    assert facts["queries that fail"] == " → ".join(map(str, counts))
    assert min(counts) > 0
    page.open(html, "#rule=mean%408")
    rights = [sum(one["scores"]["set"] for one in part) / 40 for part in verdicts]
    shown = [text.split(" [")[0] for text in page.texts("#verdict .interval > b")]
    # Five of eight samples are right where the greedy answer is, three where it is not.
    assert shown == [percent((3 + 2 * right) / 8) for right in rights]
    [easy] = [row for row in page.texts("#verdict .parts tr") if row.startswith("easy")]
    parts = [[one for one in verdicts[end] if one["difficulty"] == "easy"] for end in (0, -1)]
    shares = (fmean((3 + 2 * one["scores"]["set"]) / 8 for one in part) for part in parts)
    assert re.findall(r"\d+ %", easy) == [percent(share, 0) for share in shares]
    page.open(html, "#rule=pass%408")  # of eight samples some is right everywhere
    for link, count in (("a.right", 0), (".parts a", len(parts[0]))):
        page.click(f"#verdict {link}")
        page.wait('location.hash.includes("to=questions")')
        assert len(page.texts("tr[data-id]")) == count
        assert page.js('document.querySelector("[aria-label=rule]").value') == "pass@8"
    page.open(html, "#q=test%2F0&a=0.between&b=0.after")
    assert page.texts("#detail .pane h2") == ["after the warm start", "after learning"]
    for width in (1280, 400):
        page.resize(width)
        page.open(html)
        assert page.js("document.documentElement.scrollWidth") == width


def test_filters_and_links(page, html):
    page.open(html)
    [label] = [text for text in page.texts("[data-flip]") if text.startswith("flipped to right")]
    page.click('[data-flip="right"]')
    page.wait("document.querySelector('[data-flip=right][aria-current]')")
    assert len(page.texts("tr[data-id]")) == int(label.split()[-1])
    page.js('document.querySelector("[aria-label=difficulty]").value = "hard"')
    page.js('document.querySelector("[aria-label=difficulty]").dispatchEvent(new Event("change"))')
    page.wait('location.hash.includes("level=hard")')
    assert all("hard" in text for text in page.texts("tr[data-id]"))
    asked = question(3, "test")
    page.open(html, "#find=aisle+3%3F")
    assert page.texts("tr[data-id] a") == [asked["question"]]
    # A link of its own: the question at once, also in a fresh page.
    page.open(html, "#q=test%2F3")
    assert page.texts("#detail h1") == [asked["question"]]
    assert page.texts("#detail .pane h2") == ["before learning", "after learning"]
    page.open(html, "#q=nothing")
    assert page.texts("#detail .note") == ["No question is called nothing."]


def test_a_group_and_its_transcripts(page, html, run):
    group = json_lines(run / "trajectories.jsonl")[1]
    page.open(html, f"#q={group['id']}")
    rewards = sorted((one["reward"] for one in group["trajectories"]), reverse=True)
    assert [re.findall(r"reward (\S+)", text) for text in page.texts("#detail .member")] == [
        [f"{reward:g}".replace("-", MINUS)] for reward in rewards
    ]
    best = max(group["trajectories"], key=lambda one: one["advantage"] or 0)
    replies = page.texts("#detail .said.wrote pre")
    assert replies == [turn["reply"] for turn in best["turns"]]
    assert page.js('document.querySelectorAll("#detail .credit.plus").length') > 0
    assert page.texts("#detail .k")[:2] == ["SELECT", "FROM"]
    page.press("]")
    page.wait('location.hash.includes("nb=")')


def test_of_several_samples_the_one_that_answers_is_shown_first(page, place):
    run = make_run(place / "samples", steps=1)
    path = run / "after" / "trajectories.jsonl"
    head, first, *others = json_lines(path)
    first |= {"chosen": 1, "trajectories": first["trajectories"] * 2}
    first["trajectories"][0] = {"turns": [{"sql": "SELECT 'not chosen'", "correct": False}]}
    write(path, [head, first, *others])
    page.open(write_page(run), f"#q={first['id']}&a=0.after&b=0.after")
    [shown] = page.texts("#detail .pane [aria-current]")
    assert "not chosen" not in shown
    assert len(page.texts("#detail .pane .member")) == 2


def test_credit_stands_at_its_characters_also_behind_those_that_count_twice(page, place):
    folder = make_run(place / "astral", steps=1, questions=2)
    path = folder / "trajectories.jsonl"
    head, group, *_ = json_lines(path)
    one = group["trajectories"][0]
    one["turns"][0]["reply"] = "\U0001f600 a \U0001f600 b"
    one["turns"][0]["place"] = 2
    one["spans"] = [[0, 2, 3, 1.0], [0, 6, 7, -1.0]]
    group["trajectories"] = [one]
    write(path, [head, group])
    page.open(write_page(folder), f"#q={group['id']}&a=0.1")
    assert page.texts("#detail .said.wrote .credit") == ["a", "b"]


def test_results_beside_the_gold(page, place):
    """Rows that one result has alone are marked; a right result with other rows names the rule."""
    folder = make_run(place / "rows", questions=2)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | {"env": {"match": "set"}}))
    path = folder / "after" / "trajectories.jsonl"
    head, *answers = json_lines(path)
    gold = [["tea", 1], ["jam", 2], ["oil", 3], ["rye", 4]]
    own = [["jam", 2], ["tea", 1], ["oil", 9], ["nut", 8]]
    for answer, rows in zip(answers, (own, [*gold, gold[0]]), strict=True):
        answer["gold_result"] |= {"columns": ["n", "p"], "rows": gold, "count": 4, "width": 2}
        [turn] = answer["trajectories"][0]["turns"]
        turn |= {"correct": rows != own, "result": {**answer["gold_result"], "rows": rows}}
    write(path, [head, *answers])
    html = write_page(folder)
    page.open(html, "#q=test/0&a=0.after")
    gone, new = [f"{MINUS}\toil\t3", f"{MINUS}\trye\t4"], ["+\toil\t9", "+\tnut\t8"]
    assert page.texts("#detail .results tr.alone") == [*gone, *new]
    assert "2 rows missing, 2 rows too many" in page.texts("#detail .pane")[0]
    page.open(html, "#q=test/1&a=0.after")
    assert "right by set, 1 row too many" in page.texts("#detail .pane")[0]


def test_the_keyboard(page, html):
    heading = 'document.querySelector("main:not([hidden]) h1")?.innerText'

    page.open(html)
    page.press("f")
    page.wait("document.querySelector('[data-flip=right][aria-current]')")
    assert {*page.texts("tr[data-id] .mark")} == {"✗ → ✓"}
    first, second, *_ = page.texts("tr[data-id] a")
    heads = ["made-up-seed0"]
    for key in ("j", "j", "k", "Escape"):
        page.press(key)
        page.wait(f"{heading} !== {heads[-1]!r}")
        heads.append(page.wait(heading))
    assert heads[1:] == [first, second, first, "made-up-seed0"]
    page.press("/")
    page.wait('document.activeElement.id === "find"')
    for letter in "xyz":
        page.press(letter)
    page.wait('document.querySelectorAll("tr[data-id]").length === 0')
    assert page.js("document.activeElement.value") == "xyz"
    assert page.js("location.hash").endswith("find=xyz")
    page.press("Escape")
    page.press("?")
    page.wait('document.querySelector("#keys:popover-open")')
    assert page.texts("#keys kbd") == ["j", "k", "f", "/", "[", "]", "d", "Escape", "?"]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_both_widths_in_both_lights(page, html, width, dark):
    ground = "getComputedStyle(document.body).backgroundColor"
    page.resize(width, dark=dark)
    for fragment in ("", "#q=test/1", "#q=train/4"):
        page.open(html, fragment)
        assert page.js("document.documentElement.scrollWidth") == width
        light = page.js(ground)
        assert (sum(map(int, re.findall(r"\d+", light)[:3])) < 200) == dark
    page.press("d")
    assert page.js(ground) != light


def test_hostile_texts_show_as_texts(page, place):
    """All of them in every field of a question and of a group."""
    hostile = write_page(make_hostile(place / "hostile"))
    page.open(hostile)
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
    page.open(hostile, f"#q={len(HOSTILE) - 1}+constructor")
    assert page.texts("#detail .sql") == ["constructor"] * 3


def test_runs_beside_each_other(page, place):
    runs = [make_run(place / f"pair-seed{seed}", seed=seed) for seed in range(3)]
    runs.append(make_run(place / "other", seed=5, rate=0.002))
    html = write_page(*runs, against=runs[0])
    page.open(html)
    assert page.texts("h1") == ["4 runs compared"]
    ends = [accuracy_in(run, "after") for run in runs]
    seeds = f"{percent(fmean(ends[:3]))} [{100 * min(ends[:3]):.1f}, {100 * max(ends[:3]):.1f}]"
    assert page.texts("#verdict .interval > b")[0] == seeds
    for run, row in zip(runs, page.texts("#verdict table tr")[1:5], strict=True):
        wanted = [run.name, *(percent(accuracy_in(run, name)) for name in ("before", "after"))]
        assert all(each in row for each in wanted)
    assert "Beside pair-seed0/after" in page.texts("#verdict h2")
    assert any("lowest to the highest" in text for text in page.texts("#curves p"))
    labels = page.texts('[data-plot="Entropy of the policy"] .u-series:not(.edge) .u-label')
    assert labels == ["step", "pair (3 seeds)", "other"]
    # The questions that flipped in a run are a click away from its line.
    [count] = re.findall(r"✓ (\d+) questions", page.texts("#verdict table tr")[2])
    page.click("#verdict tbody tr:nth-child(2) a.right")
    page.wait("document.querySelector('[data-flip=right][aria-current]')")
    assert len(page.texts("tr[data-id]")) == int(count)
    page.open(html, "#q=test/0")
    panes = [f"{name}: after learning" for name in ("pair-seed0", "other")]
    assert page.texts("#detail .pane h2") == panes


def test_a_mean_over_seeds_is_of_those_that_are_finished(page, place):
    runs = [make_run(place / f"part-seed{seed}", seed=seed) for seed in range(3)]
    begun = [make_run(place / f"begun-seed{seed}", seed=seed, rate=0.002) for seed in range(2)]
    lone = make_run(place / "lone", rate=0.003)
    for run in (runs[2], *begun, lone):
        unfinish(run)
    page.open(write_page(*runs, *begun, lone))
    ends = [accuracy_in(run, "after") for run in runs[:2]]
    mean = f"{percent(fmean(ends))} [{100 * min(ends):.1f}, {100 * max(ends):.1f}]"
    assert page.texts("#verdict .interval > b") == [mean, "not finished", "not finished"]
    labels = ["part (2 of 3 seeds finished)", "begun (none of 2 seeds finished)", "lone"]
    assert page.texts("#verdict .interval > span") == labels
    plot = '[data-plot="Entropy of the policy"] .u-series:not(.edge) .u-label'
    assert page.texts(plot) == ["step", *labels]
    # What a run had before learning is in no column of what it has after.
    accuracies = [row.split("\t")[2] for row in page.texts("#verdict table tr")[1:7]]
    assert accuracies[2:] == ["\N{EN DASH}"] * 4
    assert accuracies[0].startswith(percent(ends[0]))


def test_the_picture_of_the_readme(page, html, place):
    """With MINIRL_REPORT_RUN, a run folder, docs/report.png is made anew from it."""
    readmes = Path(__file__).parents[2] / "docs" / "report.png"
    run = os.environ.get("MINIRL_REPORT_RUN")
    path = readmes if run else place / "report.png"
    page.resize(1180, 860)
    page.open(write_page(run, out=place / "run.html") if run else html)
    page.js("new Promise(done => setTimeout(done, 500))")
    page.picture(path)
    for one in (path, readmes):
        assert 10_000 < one.stat().st_size < 200_000
