"""Text as it comes: replies, tokens, trees, and queries of other engines."""

from __future__ import annotations

import gc
import json
import threading
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlenv.config import SingleTurnConfig
from sqlenv.dialects import transpile
from sqlenv.envs.single_turn import SingleTurn
from sqlenv.evaluators.equality import matches
from sqlenv.evaluators.official import as_spider_runs
from sqlenv.evaluators.spider2 import fenced_sql
from sqlenv.prompts import first_observation
from sqlenv.sql import extraction, lexer
from sqlenv.sql.answers import answer_of, block_of, is_one_query, wrapped
from sqlenv.sql.lexer import one_line, strip_comments, tokenize, tokens
from sqlenv.types import Answer, Example, SqlError, Table, Wrapping
from tests.sqlenv.conftest import table_of
from tests.vectors import read, read_cases
from tests.worlds import load_one, make_file, spider, write

REPLIES = read("answers")["cases"]
WRAPPINGS: tuple[Wrapping, ...] = get_args(Wrapping)
MARKS = (
    *("<think>", "</think>", "<sql>", "</sql>", "<tool_call>", "</tool_call>", "```sql", "```"),
    *("````", "```python", "SELECT 1", ";", "--", "/*", "*/", "'", '"', "(", "{", " ", "\n"),
    "\r\n",
)
replies = st.one_of(
    st.text(),
    st.binary().map(lambda data: data.decode("utf-8", "surrogateescape")),
    st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=3)), max_size=12).map("".join),
)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("case", REPLIES, ids=lambda case: case["id"])
def test_a_reply_is_read(case: dict[str, Any], wrapping: Wrapping) -> None:
    answer = answer_of(case["reply"], wrapping)
    assert answer.sql == case[wrapping]
    assert bool(answer.sql) is bool(case[wrapping])
    assert answer.in_form is (wrapping in case.get("asked", ()))
    assert answer.reasoning == case.get("reasoning", answer.reasoning)
    assert answer.call == case.get("call")
    check(answer)


# What models put around a query: before it, the marks, and behind it.
QUERIES = ["SELECT name FROM boat", "with a as (select '```' x)\n\nselect * from a;"]
QUERIES += [
    "-- boats\nSELECT \"n\", `m` FROM t WHERE x = '</sql>'",
    "(SELECT 1)\nUNION\n(SELECT 2)",
]
THOUGHTS = ["", "<think>\n{draft}\n</think>\n\n", "{draft}\n</think>\n", "<think>\n\n</think>\n"]
THOUGHTS += ["[THINK]{draft}[/THINK]\n", "<thinking>\n{draft}\n</thinking>\n\n"]
PROSE = ["", "Here is the query, it's short:\n", "## Answer\n1. **SQL**:\n\n", "~~No~~, `name`: "]
FENCED = [
    f"{mark}{tag}{{end}}{{sql}}{{end}}{mark}"
    for mark in ("```", "````", "~~~")
    for tag in (
        "sql",
        "SQL",
        "sqlite",
        " postgresql",
        "",
        'sql title="a b"',
        "sql {{.n}}",
        "sql:q.sql",
    )
]
TAGGED = ["<sql>{sql}</sql>", "<SQL>{end}{sql}{end}</SQL>", "<sql>`{sql}`</sql>"]
TAGGED += [f"<sql>{{end}}{one}{{end}}</sql>" for one in FENCED[::3]]
AFTER = ["", "\n\nIt lists boats; isn't it?", "\n```\nname\nAda\n```\n", " <sql> is the tag."]


@pytest.mark.parametrize("form", [*FENCED, *TAGGED])
def test_a_query_is_found_in_whatever_models_put_around_it(form: str) -> None:
    draft = "maybe <sql>SELECT 7</sql> or ```sql\nSELECT 8\n```"
    around = product(QUERIES, THOUGHTS, PROSE, AFTER, ("\n", "\r\n"))
    for sql, thought, prose, after, end in around:
        if form == TAGGED[2] and sql.startswith("--"):
            continue  # a comment, and no query, begins behind the backtick
        block = form.format(sql=sql, end=end)
        reply = (thought.format(draft=draft) + prose + block + after).replace("\n", end)
        wrapping: Wrapping = "sql_tag" if form in TAGGED else "fence"
        for read_by in (wrapping, "any"):
            assert answer_of(reply, read_by).sql == sql.replace("\n", end), (reply, read_by)


@given(replies, st.sampled_from(WRAPPINGS))
def test_any_text_is_read(reply: str, wrapping: Wrapping) -> None:
    check(answer_of(reply, wrapping))


def check(answer: Answer) -> None:
    """Check what holds of every reply."""
    assert answer.sql == answer.reply[answer.start : answer.end] == answer.sql.strip()
    assert 0 <= answer.said_from <= answer.said_to <= len(answer.reply)
    assert len(answer.reasoning) + len(answer.said) == len(answer.reply)
    assert (answer.form is not None) is bool(answer.sql) is (answer.place >= 0)
    if answer.sql:
        assert answer.said_from <= answer.start < answer.end <= answer.said_to


@given(st.sampled_from(WRAPPINGS), st.sampled_from(["", "<think>a</think>", "b</think> "]))
def test_what_is_written_is_read(wrapping: Wrapping, reasoning: str) -> None:
    sql = "SELECT '```' -- </sql>\nFROM boat"
    answer = answer_of(reasoning + wrapped(sql, wrapping), wrapping)
    assert answer.sql == sql
    assert answer.in_form is bool(reasoning)


REPLY_PIECES = (
    *("`", "```", "```sql", "```sql\n", "``` ", "<sql>", "</sql>", "<sql></sql>", "<sql>/*</sql>"),
    *("<think>", "\n<think>", "</think>", "<tool_call>", "<tool_call>{", "</tool_call>", "/*"),
    *("--", "'", '"', "(", "[", ";", "\n", " ", "```sql/* ```\n", "```sql\n(", "<sql>(("),
    "SELECT ';' ",
)


@pytest.mark.parametrize("start", ["", "SELECT ';' ", "```sql\n", "<sql>"])
@pytest.mark.parametrize("piece", REPLY_PIECES)
def test_hostile_replies_take_linear_time(piece: str, start: str) -> None:
    """In square time a tenth of this would take minutes; it takes about 0.1 s."""
    reply = start + piece * (200_000 // len(piece)) + "*/</sql>\n```\n"
    before = time.thread_time()
    answer_of(reply, "any")
    block_of(reply, "scores")
    assert time.thread_time() - before < 2.0


def test_a_query_of_a_call_stands_where_json_spells_it_alike() -> None:
    call = '<tool_call>{"query": "SELECT 1"}</tool_call>'
    answer = answer_of(f"<think>SELECT 1</think>{call}", "fence")
    assert answer.with_sql("SELECT 1").place == answer.reply.rindex("SELECT 1")
    assert answer.with_sql("SELECT\n1").place == -1
    assert answer.with_sql("").place == -1


def test_a_call_that_is_cut_off_is_told() -> None:
    whole = '<tool_call>{"query": "SELECT 1"}</tool_call>'
    assert answer_of(whole, "any").call_ends
    assert not answer_of(whole.removesuffix("</tool_call>"), "any").call_ends


def test_blocks_of_other_tags() -> None:
    assert block_of("<think><a>1</a></think> <a>2</a> <a>3</a> <a>", "a") == "3"
    assert block_of("<think><a>1</a></think>", "a") == ""


def test_real_replies(shared: Path) -> None:
    """Of 108 replies of a real model 96 are a bare query, 9 have a fence, 3 were cut off."""
    lines = (shared / "data/replies/qwen2.5-coder-0.5b.jsonl").read_text("utf-8").splitlines()
    found = [json.loads(line)["reply"] for line in lines]
    forms = [answer_of(reply, "any").form for reply in found]
    assert [forms.count(form) for form in ("bare", "fence", None)] == [96, 9, 3]
    assert all(is_one_query(answer_of(reply, "any").sql) for reply in found[3:])


# The lexer: tokens with places, comments, one line.

TOKENS = [*"'\"`[];()a \né", "--", "/*", "*/", "1.5e3", "||"]
ANY_SQL = st.one_of(st.text(), st.lists(st.sampled_from(TOKENS)).map("".join))


@pytest.mark.parametrize(
    "sql",
    ["SELECT '-- no  comment'", 'SELECT "/* a */"', "SELECT 'it''s -- x'", "SELECT `--a`, [/*b*/]"],
)
def test_quoted_text_is_no_comment(sql):
    assert strip_comments(sql) == sql
    assert one_line(sql) == sql


def test_unterminated_comment_runs_to_the_end():
    assert one_line("SELECT 1 /* and so on") == "SELECT 1"


@pytest.mark.parametrize(("sql", "found"), read_cases("tokens"))
def test_tokens(sql, found):
    assert tokens(sql) == found


@given(ANY_SQL)
def test_tokens_and_what_is_between_them_are_the_text(sql):
    found = tokenize(sql)
    assert all(a.end <= b.start for a, b in pairwise(found))
    assert all(token.start < token.end and token.depth >= 0 for token in found)
    gaps = zip([0, *(t.end for t in found)], [*(t.start for t in found), len(sql)], strict=True)
    assert not "".join(strip_comments(sql[a:b]) for a, b in gaps).strip()
    spaced = [(sql[t.start : t.end].strip(), t.depth) for t in found]
    for text in (strip_comments(sql), one_line(sql)):
        again = [(text[t.start : t.end].strip(), t.depth) for t in tokenize(text)]
        assert again == spaced


@pytest.fixture(scope="module")
def nothing_old():
    """Else Python looks through all that tests before these hold, whenever it collects garbage."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_old")
@pytest.mark.parametrize(
    "piece",
    [" ", "\n", "--", "/*", "/* ", "/**/ ", "'", '"', "`a", "[", "(", ")", "1", "```sql\nx"],
)
def test_any_text_is_read_in_linear_time(piece):
    start = time.thread_time()
    for text in (piece * 100_000, "SELECT 1" + piece * 100_000):
        tokenize(text)
        one_line(text)
        as_spider_runs(f"DISTINCT {text}")
        fenced_sql(text)
    assert time.thread_time() - start < 2.0


# Text that would crash or stall the parser.


def test_what_is_too_long_has_no_tree():
    assert extraction.parse("SELECT 1" + " " * lexer.MAX_CHARS) is None


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1;",
        "SELECT end, CASE WHEN end THEN 1 END FROM t",
        " (SELECT 1) ",
        "WITH a AS (SELECT 1) SELECT * FROM a;\n-- done",
        "SELECT a FROM t UNION SELECT b FROM u ORDER BY 1 LIMIT 2",
        "SELECT a, rank() OVER (PARTITION BY b ORDER BY c) FROM t WHERE d GLOB 'x*'",
        "SELECT * FROM t WHERE a IN (" + ", ".join(map(str, range(1000))) + ")",
        "SELECT 1 FROM t WHERE " + " AND ".join(f"t.c{i} = {i}" for i in range(100)),
        "SELECT 1" + " UNION SELECT 1" * 50,
        "SELECT * FROM " + ", ".join(f"t{i}" for i in range(40)),
        "SELECT * FROM t0" + "".join(f" JOIN t{i} ON t{i}.a = t0.a" for i in range(1, 40)),
        "SELECT * FROM t0" + " JOIN t1" * 20 + " ON 1" * 20,
        "SELECT 1 FROM a " + "JOIN (SELECT 1 FROM b JOIN c USING (d)) ON 1 " * 20,
        "SELECT " + ", ".join(f"CASE WHEN a = {i} THEN {i} ELSE -1 END" for i in range(60)),
        "SELECT " + "(" * 20 + "1" + ")" * 20,
    ],
    ids=lambda sql: sql[:40],
)
def test_large_but_honest_queries_have_a_tree(sql):
    assert extraction.parse(sql) is not None


# Each of these once crashed the interpreter (compiled sqlglot overflows the C stack), or cost time
# that doubles with each repetition. The tail closes what the piece opens.
HOSTILE = read("hostile_text")


@pytest.mark.parametrize(("head", "piece", "tail"), HOSTILE, ids=[h + p for h, p, _ in HOSTILE])
def test_hostile_text_costs_neither_stack_nor_time(head, piece, tail):
    texts = [
        text
        for count in (30, 300, 3_000)
        for text in (head + piece * count, head + piece * count + "1" + tail * count)
    ]

    took_s = []

    def work() -> None:
        start = time.thread_time()  # of the thread that works
        for text in texts:
            extraction.parse(text)
        took_s.append(time.thread_time() - start)

    _on_small_stack(work)
    assert took_s[0] < 1.0


def test_tree_depth_is_bounded():
    chain = "SELECT 1" + "+1" * (extraction.MAX_TREE_DEPTH - 10)
    assert extraction.parse(chain) is not None
    assert extraction.parse(chain + "+1" * 20) is None


@given(st.one_of(st.text(), st.binary().map(lambda b: b.decode("utf-8", "surrogateescape"))))
def test_no_text_raises(text):
    extraction.parse(text)
    extraction.parse("SELECT " + text)


def _on_small_stack(work) -> None:
    """Run in a thread with a stack of 1 MB, an eighth of the usual; a crash ends the process."""
    before = threading.stack_size(1 << 20)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)


# Queries of MySQL and PostgreSQL on SQLite: what is equal there, and what is refused.

DIALECTS = read("dialects")
WORDS = [
    *("SELECT", "a", "b", "FROM", "t", "WHERE", "name", "=", "'x'", "LIKE", "'x%'", "GROUP BY"),
    *("COUNT(", ")", "(", ",", "/", "UNION", "JOIN", "ON", "/*", "*/", '"', "`", "--", "#", "\\"),
    *("CASE", "WHEN", "END", "IN", "NOT", "CAST(", "AS", "DECIMAL", "::", "int", "LIMIT", "1", "*"),
]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return make_file(tmp_path / "t.sqlite", DIALECTS["tables"])


@pytest.mark.parametrize("case", DIALECTS["same"], ids=lambda case: case["id"])
def test_what_is_carried_over_gives_the_engines_rows(case, database, runner):
    text = transpile(case["sql"], case["dialect"])
    assert isinstance(text, str), text
    rows = [list(row) for row in table_of(runner, database, text).rows]
    assert rows == case["rows"], text


@pytest.mark.parametrize("case", DIALECTS["refused"], ids=lambda case: case["id"])
def test_what_is_no_query_of_sqlite_is_refused(case):
    found = transpile(case["sql"], case["dialect"])
    assert isinstance(found, SqlError)
    engine = {"mysql": "MySQL", "postgres": "PostgreSQL"}[case["dialect"]]
    assert found.message.startswith(f"not transpiled from {engine}: ")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dialect", ["mysql", "postgres"])
@pytest.mark.parametrize(
    "text",
    [
        "SELECT " + "(" * 5000,
        "SELECT # '\n" + "(" * 5000 + "'",
        "SELECT 1 /* /* */ ' */ " + "(" * 5000 + "'",
        "SELECT ARRAY[" + "(" * 5000 + "]",
        "SELECT `" + "(" * 5000 + "`",
        "SELECT '\\'" + "(" * 5000,
        "SELECT $x$'$x$" + "(" * 5000 + "'",
        "SELECT " + "NOT " * 5000 + "1",
        "SELECT '" + "a" * 1_000_000,
        "SELECT \0",
        "SELECT a" + " + a" * 2400,
        "SELECT 1" + "+1" * 3000 + " / 2",
        "SELECT CONCAT(" + "a," * 1000 + "a)",
        "SELECT 1 + 1 AS c0, " + ", ".join(f"c{n} AS c{n + 1}" for n in range(700)) + " = '1'",
    ],
    ids=range(14),
)
def test_hostile_text_is_read_in_time(text, dialect):
    found = transpile(text, dialect)
    # To MySQL the brackets of two of them are the name of a column; CONCAT is one call.
    assert isinstance(found, SqlError) or len(found) < 20 * len(text)


@given(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join) | st.text(max_size=40))
def test_no_text_of_another_engine_raises(text):
    for dialect in ("mysql", "postgres"):
        assert isinstance(transpile(text, dialect), str | SqlError)


# In an episode.


def test_predictions_are_executed_carried_over(database, runner):
    gold = "SELECT a FROM t WHERE name = 'ADA'"
    example = Example("1", "?", "t", database, gold, dialect="mysql")
    env = SingleTurn(
        SingleTurnConfig(),
        executor=runner,
        first_prompt=lambda e: first_observation(e, "schema", style="omnisql"),
    )
    episode, prompt = env.reset(example)
    assert "MySQL" in prompt[0].content

    def attempt(sql):
        return env.step(episode, f"<sql>{sql}</sql>")[0].attempts[0]

    assert attempt('SELECT `a` FROM `t` WHERE "ada" = name').correct
    assert attempt("SELECT a FROM t WHERE name = 'ada'").sql == "SELECT a FROM t WHERE name = 'ada'"
    wrong = attempt("SELECT a FROM t WHERE name REGEXP '^a'")
    assert isinstance(wrong.result, SqlError)
    assert not wrong.correct
    # The same text means something else where case counts.
    plain = Example("1", "?", "t", database, gold)
    found = env.step(env.reset(plain)[0], f"<sql>{gold}</sql>")[0].attempts[0]
    assert found.result == Table(("a",), ())


def test_what_cannot_be_carried_over_is_counted_and_left_out(tmp_path, runner):
    make_file(tmp_path / "database" / "t" / "t.sqlite", DIALECTS["tables"])
    queries = [
        ("SELECT a FROM t WHERE name = 'BO'", {}),
        ("SELECT a FROM t XOR", {}),
        ("SELECT name FROM t WHERE name ILIKE 'b%'", {"dialect": "PostgreSQL"}),
        ("SELECT a / b FROM t", {"dialect": "sqlite"}),
        ("SELECT a FROM t", {"dialect": "oracle"}),
        ("SELECT nothing FROM t", {}),
        ("SELECT a FROM t WHERE name = 'nobody'", {}),
    ]
    asked = (spider(sql, "t", question=f"{n}?", **more) for n, (sql, more) in enumerate(queries))
    write(tmp_path / "dev.json", [*asked])
    loaded = load_one(tmp_path, executor=runner, split="dev", dialect="mysql")
    assert [(e.question, e.dialect) for e in loaded.examples] == [
        ("0?", "mysql"), ("2?", "postgres"), ("3?", "sqlite")
    ]  # fmt: skip
    (pool,) = loaded.pools
    assert pool.found == {"not for SQLite": 1, "failing": 2, "empty": 1, "scalar": 2}
    assert "dev/1: not transpiled from MySQL: " in pool.line()


def test_real_pairs_of_postgresql_and_sqlite_agree(shared, runner):
    """BIRD's mini-dev has each gold query for both engines, written by people."""
    folder = shared / "data" / "bird_dev"
    pairs = [
        json.loads((folder / f"mini_dev_{name}.json").read_text())
        for name in ("postgresql", "sqlite")
    ]
    plain = {record["question_id"]: record["SQL"] for record in pairs[1]}
    assert len(pairs[0]) == 33
    for record in pairs[0]:
        name = record["db_id"]
        database = folder / "dev_databases" / name / f"{name}.sqlite"
        text = transpile(record["SQL"], "postgres")
        assert isinstance(text, str), text
        carried, written = (
            runner.execute(database, sql) for sql in (text, plain[record["question_id"]])
        )
        assert matches(carried, written, mode="set"), text
