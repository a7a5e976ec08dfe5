"""Files of predictions judged with no model: verdicts, votes, and going on."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import eval as command
from launch import report
from launch.config import load_config
from minirl.exchange import UserError
from sqlenv.demo import generate
from sqlenv.executor import Executor
from tests.worlds import GOLDS, edit, make_bird, make_spider, spider, write

from .conftest import json_lines, judging, loaded, mistake

# Right; right as a bag; wrong on the suite alone (two oldest); an error; empty as the gold is.
MIXED = [
    "SELECT name FROM pet ORDER BY 1 DESC",
    "SELECT age FROM pet GROUP BY age",
    "SELECT name FROM pet WHERE age = 9",
    "SELECT count(x) FROM item",
    "SELECT name FROM item WHERE 1 = 0",
]
COMPARATORS = ["spider_ex", "spider_ts", "bird_ex", "set", "ex_f", "csmr", "witness"]
COMPARATORS += ["struct", "lex", "clause"]


@pytest.fixture
def evaluate(spider_root, tmp_path) -> Callable[..., dict[str, Any]]:
    """Return `evaluate(predictions, *words)`: the sheet of a file, or of lines that make one."""

    def run(predictions: Any, *more: str, root: Path = spider_root, **data: str) -> dict[str, Any]:
        out = tmp_path / "o.json"
        if isinstance(predictions, list):
            predictions = write(tmp_path / "p.sql", predictions)
        out.unlink(missing_ok=True)
        command.main(judging(predictions, root, "--json", str(out), *more, **data))
        return json.loads(out.read_text(encoding="utf-8"))

    return run


def verdicts(sheet: dict, measure: str) -> list[float]:
    return [question["scores"][measure] for question in sheet["questions"]]


@pytest.fixture(scope="module")
def mixed(spider_root, tmp_path_factory) -> Path:
    """Results of mixed predictions under every comparator."""
    folder = tmp_path_factory.mktemp("mixed")
    where = ["--comparators", ",".join(COMPARATORS), "--out", str(folder / "out")]
    command.main(judging(write(folder / "p.sql", MIXED), spider_root, *where))
    return folder / "out"


def test_every_question_has_a_verdict_under_every_comparator(mixed):
    sheet = loaded(mixed)
    assert [*sheet["measures"]] == COMPARATORS
    assert verdicts(sheet, "spider_ex") == [1, 0, 1, 0, 1]
    assert verdicts(sheet, "spider_ts") == [1, 0, 0, 0, 1]
    assert verdicts(sheet, "bird_ex") == verdicts(sheet, "set") == [1, 1, 1, 0, 1]
    assert verdicts(sheet, "ex_f")[3:] == [0, 1]
    # Three of the seven pairs of tokens of the first answer are those of the gold query.
    assert verdicts(sheet, "lex")[0] == 3 / 7
    assert verdicts(sheet, "struct")[0] == pytest.approx(0.958)
    assert verdicts(sheet, "clause") == [1.5, 1.5, 1.5, -1, 1.5]
    # Of one something costs 0, as in no file of the suite; in one the oldest is of another age.
    assert verdicts(sheet, "witness") == [1, 0, 0, 0, 0]
    assert [question["status"] for question in sheet["questions"]].count("error") == 1
    assert [question["sql"] for question in sheet["questions"]] == MIXED
    assert sheet["measures"]["spider_ex"]["mean"] == 0.6
    low, high = sheet["measures"]["spider_ex"]["ci95"]
    assert low <= 0.6 <= high
    assert sheet["parts"]["database"]["shop"]["questions"] == 2
    assert sheet["parts"]["database"]["shop"]["spider_ex"] == 0.5
    clauses = sheet["parts"]["clause"]
    assert {name: part["questions"] for name, part in clauses.items()} == {
        "DISTINCT": 1, "LIMIT": 1, "ORDER BY": 1, "WHERE": 1, "aggregate": 1, "none": 1,
    }  # fmt: skip
    assert (clauses["ORDER BY"]["spider_ts"], clauses["WHERE"]["spider_ts"]) == (0, 1)
    tags = sheet["parts"]["tag"]
    assert {name: part["questions"] for name, part in tags.items()} == {
        "DISTINCT_MISMATCH": 1, "GROUP_BY_ERROR": 1, "ORDER_BY_MISMATCH": 2, "SELECT_ERROR": 1,
        "WHERE_ERROR": 2,
    }  # fmt: skip
    assert [tags["ORDER_BY_MISMATCH"][name] for name in ("spider_ex", "spider_ts")] == [1, 0.5]
    assert sheet["mismatch"] == {
        "SELECT": 0.4, "JOIN": 0, "WHERE": 0.4, "GROUP": 0.2, "average": 0.25, "unparsed": 0,
    }  # fmt: skip
    assert sheet["late"] == []


def test_no_query_is_wrong_on_witnesses_also_where_the_gold_result_is_empty(evaluate, tmp_path):
    root = make_spider(tmp_path / "spider")
    write(root / "dev.json", [spider("SELECT name FROM pet LIMIT 0", "pets")])
    path = write(tmp_path / "answers.jsonl", [{"id": "spider/dev/0", "sql": ""}])
    sheet = evaluate(path, "--comparators", "spider_ex,witness", root=root)
    assert verdicts(sheet, "witness") == verdicts(sheet, "spider_ex") == [0]


def test_whole_replies_are_read_and_tagged_and_what_holds_no_query_stays(
    evaluate, tmp_path, capsys
):
    replies = [
        f"So: ```sql\n{GOLDS[0]}\n```",
        f"<think>SELECT 1</think><SQL>{GOLDS[1]}</SQL>",
        f"```sqlite\n{GOLDS[2]}\n``` It's so.",
        "I do not know",
        f"<think>{GOLDS[4]}</think> I give up",
    ]
    sheet = evaluate(write(tmp_path / "replies.jsonl", [{"pred": one} for one in replies]))
    queries = [question["sql"] for question in sheet["questions"]]
    assert queries == [*GOLDS[:3], "I do not know", ""]
    assert verdicts(sheet, "spider_ex") == [1, 1, 1, 0, 0]
    tags = [question["tags"] for question in sheet["questions"]]
    assert tags == [["none"]] * 3 + [["unparsed"]] * 2
    parts = sheet["parts"]["tag"]
    assert {name: (part["questions"], part["spider_ex"]) for name, part in parts.items()} == {
        "none": (3, 1),
        "unparsed": (2, 0),
    }
    # Wilson's: 3 / (3 + z^2).
    assert parts["none"]["ci95"]["spider_ex"] == [0.438503, 1]
    assert set(sheet["mismatch"].values()) == {0.4}  # no query differs in every clause
    assert sheet["outcomes"]["no_query"] == 1
    assert "5 replies: 1 hold no query (20.0 %)" in capsys.readouterr().out


def test_a_gold_fails_where_the_text_that_the_program_runs_does(evaluate, tmp_path, caplog):
    """Spider's program joins `> =`; SQLite knows no such operator, and BIRD's asks SQLite."""
    root = make_spider(tmp_path / "spider")
    odd = "SELECT name FROM pet WHERE age > = 9"
    edit(root / "dev.json", 2, query=odd)
    golds = [*GOLDS[:2], odd, *GOLDS[3:]]
    sheet = evaluate(golds, "--comparators", "spider_ex,bird_ex", root=root)
    assert verdicts(sheet, "spider_ex") == [1] * 5
    assert sheet["failing_golds"] == []
    assert {one["status"] for one in sheet["questions"]} == {"ok"}
    assert "gold queries do not run" not in caplog.text
    sheet = evaluate(golds, "--comparators", "bird_ex", root=root)
    assert verdicts(sheet, "bird_ex") == [1, 1, 0, 1, 1]
    assert sheet["failing_golds"] == ["spider/dev/2"]
    # The measure that counts is the first one.
    sheet = evaluate(golds, "--comparators", "bird_ex,spider_ex", root=root)
    assert sheet["failing_golds"] == ["spider/dev/2"]


def test_spider_2_has_columns_matched_too(evaluate, downloads):
    """PaVeRL-SQL, tables II and IV: EX_f and EX_b beside EX on Spider 2's SQLite questions."""
    queries = [
        "SELECT '2' AS n, NULL AS t UNION ALL SELECT 1, 'x'",  # order and types are the file's
        "SELECT 1",
        "SELECT 0.3333, NULL, 1, 2, 3, 4, 5",  # all columns, and five more
    ]
    own = {"root": downloads, "data": "spider2-local"}
    names = "spider2_local,ex_f,ex_b,ex_f_code,csmr"
    sheet = evaluate(queries, "--comparators", names, **own)
    assert verdicts(sheet, "spider2_local") == [1, 1, 1]
    assert verdicts(sheet, "ex_f") == [1, 0.5, 1]
    assert verdicts(sheet, "ex_b") == [1, 0, 0]
    assert verdicts(sheet, "ex_f_code") == [1, 0.5, 1]
    assert verdicts(sheet, "csmr") == pytest.approx([1, 0.8 / 2, 0.8 / 14])
    assert "ex_f" in mistake(evaluate, queries, "--comparators", "set", **own)


def test_questions_and_predictions_may_be_in_another_dialect(evaluate, tmp_path):
    root = make_bird(tmp_path / "bird")
    said = ["SELECT name FROM pet WHERE name ILIKE '%'", *GOLDS[1:]]
    edit(root / "dev.json", 0, SQL=said[0])
    sheet = evaluate(said, "--dialect", "postgresql", root=root, data="bird-dev")
    assert verdicts(sheet, "bird_ex") == [1] * 5
    sheet = evaluate(said, root=root, data="bird-dev")
    assert verdicts(sheet, "bird_ex") == [0, 1, 1, 1, 1]


def test_corrected_golds_are_a_second_evaluation_that_is_compared(
    evaluate, bird_root, tmp_path, capsys, caplog
):
    fixed = [
        {"question_id": 1, "db_id": "pets", "SQL": "SELECT age FROM pet WHERE age > 3"},
        {"question_id": 4, "db_id": "shop", "gold_sql": GOLDS[4], "alternatives": ["SELECT 'pen'"]},
    ]
    corrections = write(tmp_path / "fixed.json", fixed)
    answers = [GOLDS[0], "SELECT age FROM pet WHERE age > 3", *GOLDS[2:4], "SELECT 'pen'"]
    own = f"data.test.sources.0.corrections={corrections}"
    published, corrected = (
        evaluate(answers, "--out", str(tmp_path / name), *more, root=bird_root, data="bird-dev")
        for name, more in (("published", ()), ("corrected", (own,)))
    )
    assert verdicts(published, "bird_ex") == [1, 0, 1, 1, 0]
    assert [*published["parts"]["difficulty"]] == ["simple", "moderate", "challenging"]
    assert verdicts(corrected, "bird_ex") == [1] * 5
    with pytest.raises(UserError, match=r"holds results of other .*corrections is '' there"):
        evaluate(
            answers, "--out", str(tmp_path / "published"), own, root=bird_root, data="bird-dev"
        )
    paths = [f"{name}={tmp_path / name}" for name in ("corrected", "published")]
    report.main([paths[0], "--against", paths[1], "--out", str(tmp_path / "page.html")])
    assert "+40.0" in " ".join(capsys.readouterr().out.split())
    assert "gold queries is" in caplog.text


def test_a_result_is_on_standard_output_or_in_a_folder_of_one_name(
    spider_root, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = judging(write(tmp_path / "p.sql", MIXED), spider_root)
    command.main([*words, "--json=-"])
    assert len(json.loads(capsys.readouterr().out)["questions"]) == len(MIXED)
    assert not Path("evals").exists()
    command.main([*words, "--model", "../m/one"])
    assert [path.name for path in Path("evals").iterdir()] == ["..-m-one-spider-dev-greedy"]


def test_demo_data_of_a_result_that_is_one_file_is_not_left_in_the_working_folder(
    tiny, tmp_path, monkeypatch
):
    demo = load_config(str(tiny), ()).data.demo
    assert demo is not None
    generate(tmp_path / "demo", demo)
    golds = [one["query"] for one in json.loads((tmp_path / "demo" / "test.json").read_text())]
    monkeypatch.chdir(tmp_path)
    write(Path("p.sql"), golds)
    Path("data").mkdir()  # of downloads
    Path("data", "mine").touch()
    command.main(["--cfg", str(tiny), "--predictions", "p.sql", "--json", "o.json"])
    assert json.loads(Path("o.json").read_text())["measures"]["set"]["mean"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"data", "demo", "o.json", "p.sql"}


def test_a_folder_has_the_answers_of_one_file_by_the_measures_of_the_last_command(
    evaluate, tmp_path, capsys
):
    """It is a file of predictions too, and refused where it is cut off."""
    out = tmp_path / "out"
    first = evaluate(MIXED, "--out", str(out))
    printed = capsys.readouterr().out
    assert "60.00" in printed
    assert "mismatch" not in printed  # that is a part, behind --by tag
    assert str(tmp_path / "o.json") in printed.replace("\n", "")
    (tmp_path / "o.json").unlink()
    other = write(tmp_path / "other.sql", MIXED[::-1])
    for given, key in (([other], "predictions is"), ([MIXED, "--limit", "2"], "limit is None")):
        told = mistake(evaluate, *given, "--out", str(out))
        assert f"holds results of other settings ({key}" in told
    assert not (tmp_path / "o.json").exists()
    sheet = evaluate(MIXED, "--out", str(out), "--comparators", "bird_ex")
    assert verdicts(sheet, "bird_ex") == [1, 1, 1, 0, 1]
    assert [*loaded(out)["measures"]] == ["bird_ex"]
    assert evaluate(out)["questions"] == first["questions"]
    file = out / "predictions.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    told = mistake(report.main, [str(out), "--out", str(tmp_path / "page.html")])
    assert "predictions.jsonl: cut off, holds 2 of 5 questions" in told


def test_half_a_character_in_a_prediction_is_no_query(evaluate, tmp_path):
    """JSON can spell it, and no file of text can hold it: this ended after all was judged."""
    lines = [{"pred": sql} for sql in ("SELECT '\ud800'", *GOLDS[1:])]
    path = write(tmp_path / "p.jsonl", lines)
    sheet = evaluate(path, "--official", "--out", str(tmp_path / "out"))
    assert verdicts(sheet, "spider_ex") == [0, 1, 1, 1, 1]
    texts = (tmp_path / "out" / "predictions.sql").read_text().splitlines()
    assert texts == ["SELECT", *GOLDS[1:]]


def test_what_verdicts_are_found_by_runs_once(evaluate, tmp_path, monkeypatch):
    ran, execute = Counter[tuple[Path, str]](), Executor.execute

    def counted(executor, database, sql, **more):
        ran[database, sql] += 1
        return execute(executor, database, sql, **more)

    monkeypatch.setattr(Executor, "execute", counted)
    evaluate(MIXED, "--out", str(tmp_path / "out"), "--comparators", "set")
    assert set(ran.values()) == {1}


def test_what_verdicts_were_found_by_is_recorded(mixed):
    head, *groups = json_lines(mixed / "trajectories.jsonl")
    assert head == {"step": 0, "version": 2}
    assert [group["id"] for group in groups] == [f"spider/dev/{n}" for n in range(5)]
    assert groups[0]["gold_result"]["rows"] == [["ann"], ["bob"], ["cid"], ["dee"]]
    turns = [group["trajectories"][0]["turns"][0] for group in groups]
    assert [turn["correct"] for turn in turns] == [True, False, True, False, True]
    assert [turn["result"]["status"] for turn in turns] == ["ok", "ok", "ok", "error", "ok"]
    assert turns[1]["result"]["rows"] == [[3], [5], [9]]
    # What Spider's program runs has no DISTINCT.
    assert groups[1]["gold_result"]["rows"] == [[3], [5], [5], [9]]
    assert turns[3]["tags"]


def test_votes_and_pass_of_a_file_of_samples(evaluate, tmp_path):
    wrong = "SELECT 17"
    samples = [
        [wrong, GOLDS[0], MIXED[0]],  # two of one result win
        [wrong, GOLDS[1], "SELECT 18"],  # a tie goes to the first
        ["SELECT", wrong, GOLDS[2]],  # errors have no vote
        ["SELECT", "SELECT FROM", ""],  # nothing runs
        [GOLDS[4], wrong, GOLDS[4]],  # an empty result is a vote
    ]
    path = write(tmp_path / "samples.json", [{"pred_sqls": each} for each in samples])
    out = str(tmp_path / "out")
    # What a rule counts as a result is none of the job's limits.
    sheet = evaluate(path, "--decode", "vote@3", "--out", out, "executor.max_rows=1")
    answers = [question["sql"] for question in sheet["questions"]]
    assert answers == [GOLDS[0], wrong, wrong, "Error SQL", GOLDS[4]]
    assert verdicts(sheet, "spider_ex") == [1, 0, 0, 0, 1]
    assert [question["right"] for question in sheet["questions"]] == [2, 1, 1, 0, 2]
    # C(3-c, 2) / C(3, 2) of two samples are wrong: 0, 1/3, 1/3, ... for c = 2, 1, 1, 0, 2.
    assert sheet["pass_at"] == {
        "1": 0.4,
        "2": pytest.approx((1 + 2 / 3 + 2 / 3 + 0 + 1) / 5),
        "3": 0.8,
    }
    _, *groups = json_lines(Path(out, "trajectories.jsonl"))
    assert [group.get("chosen") for group in groups] == [1, 0, 1, None, 0]
    oracle = evaluate(path, "--decode", "pass@3")
    assert verdicts(oracle, "spider_ex") == [1, 1, 1, 0, 1]
    assert evaluate(Path(out), "--decode", "vote@3")["questions"] == sheet["questions"]
    # The first two samples alone.
    two = evaluate(path, "--decode", "vote@2")
    assert [len(question["samples"]) for question in two["questions"]] == [2] * 5


def test_shared_predictions_on_real_questions(evaluate, shared, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    data = shared / "data"
    (root / "dev.json").symlink_to(data / "spider_data" / "dev_visible.json")
    (root / "database").symlink_to(data / "spider_data" / "database")
    path = data / "predictions" / "spider_dev" / "gpt4_zero_shot.sql"
    sheet = evaluate(path, "--test-suite", str(data / "test_suite_database"), root=root)
    assert len(sheet["questions"]) == 412
    assert sheet["failing_golds"] == []
    # As counted by test-suite-sql-eval's evaluation.py at e97acc546ecb.
    assert sum(verdicts(sheet, "spider_ex")) == 257
    assert sum(verdicts(sheet, "spider_ts")) == 219
