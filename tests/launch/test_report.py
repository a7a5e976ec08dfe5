"""launch.report: what a page holds, and the page itself in a headless Chromium."""

from __future__ import annotations

import gzip
import json
import os
import re
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import report
from launch.reporting.page import render
from launch.reporting.payload import read_payload, tokens_of
from launch.reporting.record import shown
from sqlenv.errors import UserError
from sqlenv.types import Denied, SqlError, Table

from .browser import CHROMIUM, Browser, browser
from .report_cases import HOSTILE, make_hostile, make_run, question, write_lines

MINUS = "\N{MINUS SIGN}"
needs_chromium = pytest.mark.skipif(
    not CHROMIUM, reason="no chromium on the path: apt-get install chromium, or put Chrome there"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    return make_run(place / "made-up-seed0")


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_page(*arguments: str | Path) -> Path:
    report.main([str(each) for each in arguments])
    return Path(arguments[list(arguments).index("--out") + 1])


def opened(page: Path) -> dict[str, Any]:
    """Read the data of a page as the browser does."""
    found = re.findall(r'id="data-(\w+)">([^<]*)<', page.read_text(encoding="utf-8"))
    return {name: json.loads(gzip.decompress(b64decode(text))) for name, text in found}


def test_the_overview_has_the_numbers_of_the_run(run, place, capsys):
    data = opened(write_page(run, "--out", place / "one.html"))
    result = json.loads((run / "result.json").read_text())
    [found] = data["overview"]["runs"]
    for where in ("before", "after"):
        assert found["measured"][where]["mean"] == pytest.approx(result[f"ex_{where}"])
        assert found["measured"][where]["ci95"] == pytest.approx(result[f"ex_{where}_ci95"])
    assert found["tests"]["gain"] == pytest.approx(result["gain"])
    assert found["tests"]["ci95"] == pytest.approx(result["gain_ci95"])
    metrics = lines_of(run / "metrics.jsonl")
    assert found["numbers"]["step"] == [line["step"] for line in metrics]
    for key in ("rollout/accuracy", "validation/accuracy"):
        assert found["numbers"][key] == [
            pytest.approx(line[key], rel=1e-5) if key in line else None for line in metrics
        ]
    printed = capsys.readouterr().out
    assert f"before {100 * result['ex_before']:.1f} %" in printed
    assert f"gain {100 * result['gain']:+.1f} [" in printed
    assert data["overview"]["notes"] == []


def test_every_group_is_in_a_piece_and_in_the_index(run, place):
    data = opened(write_page(run, "--out", place / "pieces.html"))
    seen = {
        (question["id"], where): data[f"piece{piece}"]["groups"][at]
        for question in data["overview"]["questions"]
        for _, where, piece, at, *_ in question["seen"]
    }
    _, *groups = lines_of(run / "trajectories.jsonl")
    assert len(groups) == 4 * 3
    for group in groups:
        assert seen[group["id"], group["step"]] == group
    for where in ("before", "after"):
        _, *answers = lines_of(run / where / "trajectories.jsonl")
        assert all(seen[answer["id"], where] == answer for answer in answers)
    places = {question["id"]: question["seen"] for question in data["overview"]["questions"]}
    [_, where, _, _, count, total, tags] = places[groups[0]["id"]][0]
    members = groups[0]["trajectories"]
    assert (where, count, total) == (1, sum(one["correct"] for one in members), len(members))
    assert set(tags) == {tag for one in members for tag in one["turns"][-1]["tags"]}


def test_the_verdict_counts_for_more_than_what_a_group_says(place):
    folder = make_run(place / "verdict", steps=1, questions=1)
    path = folder / "after" / "predictions.jsonl"
    [verdict] = lines_of(path)
    write_lines(path, [verdict | {"correct": not verdict["correct"]}])
    [asked] = [
        one
        for one in read_payload([("a", folder)]).overview["questions"]
        if one["id"] == verdict["id"]
    ]
    [count] = [count for _, where, _, _, count, *_ in asked["seen"] if where == "after"]
    assert count == (not verdict["correct"])


def test_places_of_credit_are_those_of_javascript(place):
    folder = make_run(place / "astral", steps=1, questions=2)
    path = folder / "trajectories.jsonl"
    head, group, *_ = lines_of(path)
    one = group["trajectories"][0]
    one["turns"][0]["reply"] = "\U0001f600 a \U0001f600 b"
    one["spans"] = [[0, 2, 3, 1.0], [0, 6, 7, -1.0]]
    write_lines(path, [head, group])
    data = opened(write_page(folder, "--out", place / "astral.html"))
    found = data["piece1"]["groups"][0]["trajectories"][0]["spans"]
    text = one["turns"][0]["reply"].encode("utf-16-le")
    shown = [text[2 * start : 2 * end].decode("utf-16-le") for _, start, end, _ in found]
    assert shown == ["a", "b"]


def test_tokens_of_a_query():
    sql = "SELECT name FROM t WHERE x = 'it''s' AND y > 2.5"
    flat = tokens_of(sql)
    found = [(sql[flat[n] : flat[n] + flat[n + 1]], flat[n + 2]) for n in range(0, len(flat), 3)]
    assert ("SELECT", 0) in found
    assert ("'it''s'", 1) in found
    assert ("2.5", 2) in found
    assert "name" not in dict(found)
    for text in ("", "'", "SELECT \U0001f600", "\x00", "(" * 5000):
        assert isinstance(tokens_of(text), list)


def test_results_are_bounded():
    wide = Table(tuple(f"c{n}" for n in range(2_000)), ((1,) * 2_000,) * 50)
    found = shown(wide)
    assert (found["count"], found["width"], len(found["columns"])) == (50, 2_000, 100)
    assert len(found["rows"]) <= 20
    odd = Table(("a",) * 5, ((None, b"\x00\xff", 2**60, float("inf"), "x" * 1_000),))
    [row] = shown(odd)["rows"]
    assert row[:4] == [None, {"blob": "00ff"}, {"number": str(2**60)}, {"number": "inf"}]
    assert row[4] == "x" * 200 + "… (1,000 characters)"
    assert len(json.dumps(shown(Table(("a",), (("y" * 9_999,),) * 20)))) < 20_000
    assert shown(SqlError("no")) == {"status": "error", "message": "no"}
    assert shown(Denied("a write")) == {"status": "denied", "message": "not allowed: a write"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(path.read_text()[:-900]),
        lambda path: path.write_text('{"step": 0, "ver'),
        lambda path: path.write_text(""),
        lambda path: path.unlink(),
        lambda path: path.write_text('{"step": 1, "turns": []}\n'),
        lambda path: path.write_text("[" * 10_000),
    ],
    ids=["cut", "cut at once", "empty", "gone", "old", "deep"],
)
def test_what_is_missing_is_told_in_a_line_and_the_rest_is_shown(place, damage, request):
    folder = make_run(place / request.node.callspec.id)
    damage(folder / "trajectories.jsonl")
    overview = read_payload([("a", folder)]).overview
    [note] = overview["notes"]
    assert "trajectories.jsonl: " in note
    assert "\n" not in note
    assert len([q for q in overview["questions"] if q["id"].startswith("test/")]) == 40
    assert overview["runs"][0]["numbers"]["step"] == [*range(1, 9)]


def test_a_run_that_goes_on_and_one_that_has_not_begun(place, capsys):
    folder = make_run(place / "going-on")
    for name in ("result.json", "after/predictions.jsonl", "after/trajectories.jsonl"):
        (folder / name).unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "rew')
    write_page(folder, "--out", place / "going-on.html")
    assert "not finished, 8 steps so far" in capsys.readouterr().out
    begun = place / "begun"
    begun.mkdir()
    (begun / "config.yaml").write_text("train: {steps: 3}")
    write_page(begun, "--out", place / "begun.html")
    assert "begun: no accuracy, not finished, 0 steps so far" in capsys.readouterr().out


def test_seeds_are_alike_and_settings_that_differ_are_named(place):
    runs = [("a", make_run(place / "a", steps=2))]
    for name, seed, rate in (("b", 1, 0.001), ("c", 2, 0.002)):
        runs.append((name, make_run(place / name, steps=2, seed=seed, rate=rate)))
    overview = read_payload(runs).overview
    assert overview["alike"] == [[0, 1], [2]]
    assert overview["differing"] == {
        "seed": [0, 1, 2],
        "train.optimizer.learning_rate": [0.001, 0.001, 0.002],
    }


def test_mistakes_are_told(place, run):
    (place / "nothing").mkdir()
    page = ("--out", place / "mistake.html")
    other = place / "shop.sqlite"
    other.write_text("SQLite format 3")
    outs = ((run, "--out", place), (run, "--out", other))
    for wrong in ((place / "nowhere", *page), (place / "nothing", *page), *outs):
        with pytest.raises(UserError, match=str(place)):
            write_page(*wrong)
    with pytest.raises(SystemExit):
        report.main([str(run), "--markdown", str(place / "t.md")])  # beside which base?
    begun = place / "begun-evaluation"
    begun.mkdir()
    (begun / "config.yaml").write_text("decode: greedy")
    with pytest.raises(UserError, match="not finished"):
        write_page(begun, *page)
    assert not (place / "mistake.html").exists()
    assert other.read_text() == "SQLite format 3"
    before = write_page(run, "--out", place / "again.html").read_bytes()
    assert write_page(run, "--out", place / "again.html").read_bytes() == before


def test_hostile_texts_are_data_and_nothing_else(place):
    payload = read_payload([(HOSTILE[0], make_hostile(place / "rendered"))])
    text = render(payload)
    outside = re.sub(r"(?s)<(script|style)[^>]*>.*?</\1>", "", text)
    for hostile in HOSTILE:
        assert hostile[:200].strip() not in outside or not hostile.strip()
    assert "taken" not in text


# In a browser.


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


@pytest.fixture(scope="module")
def html(run: Path, place: Path) -> Path:
    return write_page(run, "--out", place / "page.html")


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


@needs_chromium
def test_the_page_has_each_part_with_the_right_numbers(page, html, run):
    assert min(page.open(html) for _ in range(3)) < 2_000  # ms
    result = json.loads((run / "result.json").read_text())
    [big] = page.texts("#verdict .big")
    wanted = [percent(result[name]) for name in ("ex_before", "ex_after")]
    assert re.findall(r"[\d.]+ %", big) == wanted
    low, high = result["gain_ci95"]
    assert page.texts("#verdict .gain") == [
        f"{100 * result['gain']:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
    ]
    answers = [lines_of(run / name / "predictions.jsonl") for name in ("before", "after")]
    flips = [(one["correct"], two["correct"]) for one, two in zip(*answers, strict=True)]
    counts = [flips.count((False, True)), flips.count((True, False))]
    assert page.texts("#verdict .flips b") == [f"✓ {counts[0]}", f"✗ {counts[1]}"]
    # Of every part the shares before and after.
    rights = [[one["correct"] for one in part if one["difficulty"] == "easy"] for part in answers]
    shares = [sum(part) / len(part) for part in rights]
    [easy] = [row for row in page.texts("#verdict .parts tr") if row.startswith("easy")]
    assert re.findall(r"\d+ %", easy) == [f"{100 * share:.0f} %" for share in shares]
    titles = page.texts("#curves h3")
    assert titles[0] == "Execution accuracy"
    for title in ("Reward and its parts", "Groups without signal", "Entropy of the policy"):
        assert title in titles
    last = lines_of(run / "metrics.jsonl")[-1]
    accuracy = page.texts('[data-plot="Execution accuracy"] .legend b')
    keys = ("validation/accuracy", "rollout/accuracy", "rollout/accuracy_first")
    assert accuracy == [percent(last[key]) for key in keys]
    assert page.texts("#count") == ["40 questions of 52"]
    shown = page.texts("tr[data-id] .mark")
    marks = {(True, True): "✓ → ✓", (False, True): "✗ → ✓", (True, False): "✓ → ✗"}
    assert shown == [marks.get(flip, "✗ → ✗") for flip in flips]


@needs_chromium
def test_filters_and_links(page, html, run):
    page.open(html)
    [label] = [text for text in page.texts("[data-flip]") if text.startswith("flipped to right")]
    page.click('[data-flip="right"]')
    page.wait('location.hash.includes("flip=right")')
    assert len(page.texts("tr[data-id]")) == int(label.split()[-1])
    page.js('document.querySelector("[aria-label=difficulty]").value = "hard"')
    page.js('document.querySelector("[aria-label=difficulty]").dispatchEvent(new Event("change"))')
    assert all("hard" in text for text in page.texts("tr[data-id]"))
    asked = question(3, "test")
    page.open(html, "#find=aisle+3%3F")
    assert page.texts("tr[data-id] .text") == [asked["question"]]
    # A link of its own: the question at once, also in a fresh page.
    page.open(html, "#q=test%2F3")
    page.wait('document.querySelector("#detail .pane")')
    assert page.texts("#detail h1") == [asked["question"]]
    assert page.texts("#detail .pane h2") == ["before learning", "after learning"]
    page.open(html, "#q=nothing")
    page.wait('document.querySelector("#detail .note")')


@needs_chromium
def test_a_group_and_its_transcripts(page, html, run):
    group = lines_of(run / "trajectories.jsonl")[1]
    page.open(html, f"#set=training&q={group['id']}")
    page.wait('document.querySelector("#detail .member")')
    told = page.texts("#detail .member")
    rewards = sorted((one["reward"] for one in group["trajectories"]), reverse=True)
    assert [re.search(r"reward (\S+)", text)[1] for text in told] == [  # ty: ignore
        f"{reward:g}".replace("-", MINUS) for reward in rewards
    ]
    place = max(range(8), key=lambda n: (group["trajectories"][n]["advantage"] or 0, -n))
    best = group["trajectories"][place]
    replies = page.texts("#detail .said.wrote pre")
    assert replies == [turn["reply"] for turn in best["turns"]]
    assert page.js('document.querySelectorAll("#detail .credit.plus").length') > 0
    assert page.texts("#detail .k")[:2] == ["SELECT", "FROM"]
    page.press("]")
    page.wait('location.hash.includes("nb=")')
    page.press("t")
    page.wait('document.querySelector("#detail .token")')
    titles = page.js('[...document.querySelectorAll("#detail .token")].map(e => e.title)')
    told = f"sampler {MINUS}0.25, learner {MINUS}0.125, gap 0.125; weights 0"
    assert all(told in each for each in titles)


@needs_chromium
def test_results_beside_the_gold(page, place):
    folder = make_run(place / "rows", questions=1)
    path = folder / "after" / "trajectories.jsonl"
    head, answer = lines_of(path)
    turn = answer["trajectories"][0]["turns"][0]
    rows = [["tea", 1], ["jam", 2], ["oil", 3], ["rye", 4]]
    own = [["jam", 2], ["tea", 1], ["oil", 9], ["nut", 8]]
    answer["gold_result"] |= {"columns": ["n", "p"], "rows": rows, "count": 4, "width": 2}
    turn |= {"correct": False, "result": {**answer["gold_result"], "rows": own}}
    write_lines(path, [head, answer])
    verdict = lines_of(folder / "after" / "predictions.jsonl")[0] | {"correct": False}
    write_lines(folder / "after" / "predictions.jsonl", [verdict])
    page.open(write_page(folder, "--out", place / "rows.html"), "#q=test/0&a=0.after")
    page.wait('document.querySelector("#detail .results")')
    assert page.texts("#detail .results .sign") == ["↕", "↕", "", MINUS, "", "↕", "↕", "", "", "+"]
    assert page.texts("#detail .results td.differs") == ["3", "9"]
    assert page.texts("#detail tr.missing") == [f"{MINUS}\trye\t4"]
    assert page.texts("#detail tr.extra") == ["+\tnut\t8"]


@needs_chromium
def test_a_right_result_with_other_rows_names_the_rule(page, place):
    folder = make_run(place / "twice", questions=1)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings.setdefault("env", {})["match"] = "set"
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    path = folder / "after" / "trajectories.jsonl"
    head, answer = lines_of(path)
    rows = [["tea", 1], ["jam", 2]]
    answer["gold_result"] |= {"columns": ["n", "p"], "rows": rows, "count": 2, "width": 2}
    turn = answer["trajectories"][0]["turns"][0]
    turn |= {"correct": True, "result": {**answer["gold_result"], "rows": [*rows, rows[0]]}}
    write_lines(path, [head, answer])
    page.open(write_page(folder, "--out", place / "twice.html"), "#q=test/0&a=0.after")
    page.wait('document.querySelector("#detail .results")')
    assert "env.match=set, 1 row too many" in page.texts("#detail .outcome")[0]


@needs_chromium
def test_the_keyboard(page, html):
    page.open(html)
    page.press("f")
    page.wait('location.hash.includes("flip=right")')
    first, second = page.texts("tr[data-id] .text")[:2]
    page.press("j")
    page.wait('document.querySelector("#detail h1")')
    page.press("j")
    page.wait(f'document.querySelector("#detail h1")?.innerText === {second!r}')
    page.press("k")
    page.wait(f'document.querySelector("#detail h1")?.innerText === {first!r}')
    page.press("Escape")
    page.wait("!document.querySelector('#overview').hidden")
    page.press("/")
    page.wait('document.activeElement.id === "find"')
    for letter in "xyz":
        page.press(letter)
    page.wait('document.querySelectorAll("tr[data-id]").length === 0')
    page.press("Escape")
    page.press("?")
    page.wait('document.querySelector("#keys").open')
    assert page.js('document.querySelector("#keys").open') is True


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_both_widths_in_both_lights(page, html, width, dark):
    page.resize(width, dark=dark)
    for fragment in ("", "#q=test/1", "#set=training&q=train/4"):
        page.open(html, fragment)
        page.wait('!document.querySelector("#overview").hidden || document.querySelector(".pane")')
        assert page.js("document.documentElement.scrollWidth") == width
        light = page.js("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", light)[:3])) < 200) == dark
    page.press("d")
    assert page.js("getComputedStyle(document.body).backgroundColor") != light


@needs_chromium
def test_hostile_texts_show_as_texts(page, place):
    """All of them in every field of a question and of a group."""
    html = write_page(make_hostile(place / "hostile"), "--out", place / "hostile.html")
    page.open(html)
    for width in (1280, 400):
        page.resize(width)
        for kind in ("0 ", "trajectories.jsonl "):
            number = page.js(f"data.questions.findIndex(q => q.id.startsWith({kind!r}))")
            page.js(f"go({{q: data.questions[{number}].id}})")
            page.wait(f'document.querySelector("#detail").dataset.shown === "{number}"')
            assert page.js("document.documentElement.scrollWidth") == width
            assert "javascript:document.title='taken'" in page.texts("#detail")[0]
        page.press("Escape")
        page.wait("!document.querySelector('#overview').hidden")
        assert page.js("document.documentElement.scrollWidth") == width
        assert page.js("document.title") == "hostile"
        assert page.js('document.querySelectorAll("main script, main img, main b b").length') == 0


@needs_chromium
def test_runs_beside_each_other(page, place):
    runs = [make_run(place / f"pair-seed{seed}", seed=seed) for seed in range(3)]
    runs.append(make_run(place / "other", seed=5, rate=0.002))
    html = write_page(*runs, "--against", runs[0], "--out", place / "several.html")
    page.open(html)
    assert page.texts("h1") == ["4 runs compared"]
    for run, row in zip(runs, page.texts("#verdict table tr")[1:5], strict=True):
        result = json.loads((run / "result.json").read_text())
        assert run.name in row
        assert percent(result["ex_before"]) in row
        assert percent(result["ex_after"]) in row
    assert "Beside pair-seed0/after" in page.texts("#verdict h2")
    assert any("lowest to the highest" in text for text in page.texts("#curves p"))
    legends = page.texts('[data-plot="Entropy of the policy"] .legend button')
    assert [text.split("\n")[0].rsplit(" ", 1)[0].strip() for text in legends]
    assert any("(3 seeds)" in text for text in legends)
    page.open(html, "#q=test/0")
    page.wait('document.querySelectorAll("#detail .pane").length === 2')
    assert page.texts("#detail .pane h2") == [
        "pair-seed0: after learning",
        "other: after learning",
    ]


@needs_chromium
def test_the_picture_of_the_readme(page, html, place):
    """With MINIRL_REPORT_RUN, a run folder, docs/report.png is made anew from it."""
    readmes = Path(__file__).parents[2] / "docs" / "report.png"
    run = os.environ.get("MINIRL_REPORT_RUN")
    path = readmes if run else place / "report.png"
    page.resize(1180, 860)
    page.open(write_page(run, "--out", place / "run.html") if run else html)
    page.js("new Promise(done => setTimeout(done, 500))")
    page.picture(path)
    for one in (path, readmes):
        assert 10_000 < one.stat().st_size < 200_000
