"""The kinds of question: one SQL template each, and several wordings.

Slots are a letter and the number of a table. The SQL and the wording share them:

| slot | in SQL | in a question |
|---|---|---|
| t, T, S | table name | T: plural words, S: singular words |
| l | label column (name or title) | its words; ls: plural |
| c, d | any shown column | its words; cs, ds: plural |
| n, a | a number column, one that can be aggregated | its words |
| x, y, z | category columns, a column with gaps | their words; xs: plural |
| v, w, u | values of x, x and y | the value; is, isor, also: a phrase with column and value |
| o, k, j | comparison and thresholds on n | cmp, between: a phrase |
| b, m | a value of the label, a LIKE pattern | b: the value; like: a phrase |
| g | aggregate function of a | its words |
| r | ASC or DESC on n | sorted, best (one row), top (the first q rows): phrases |
| f | foreign key to table 2 or 3 | P: preposition that leads to that table |
| q, h | limit, group size | the number |

Square brackets mark what a query cannot do without: a question is kept only if dropping any one of them changes
the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Difficulty = Literal["easy", "medium", "hard", "extra"]
Scene = Literal["one", "pair", "chain", "link", "twins"]

PAIR = "{t1} AS t1 JOIN {t2} AS t2 ON t1.{f2} = t2.id"
CHAIN = PAIR + " JOIN {t3} AS t3 ON t2.{f3} = t3.id"
LINK = PAIR + " JOIN {t3} AS t3 ON t1.{f3} = t3.id"


@dataclass(frozen=True, slots=True)
class QuestionKind:
    """A family of questions with one shape of SQL.

    Attributes:
        name: Goes into the tags of a record.
        difficulty: As Spider names it.
        scene: One table; child and parent; child, parent and grandparent; child and two
            parents; two tables with a category in common.
        sql: The query, with brackets around what it needs.
        wordings: Questions of the same meaning.
        keys: Query whose rows must all differ, or the order of the result would be arbitrary.
        weaker: Further queries with which the gold must not agree.
        unique: Whether repeated rows in the result make the question ambiguous.
        weight: How often the kind is drawn, against the others of its difficulty.
    """

    name: str
    difficulty: Difficulty
    scene: Scene
    sql: str
    wordings: tuple[str, ...]
    keys: str = ""
    weaker: tuple[str, ...] = ()
    unique: bool = False
    weight: int = 2


EASY = (
    QuestionKind(
        "list",
        "easy",
        "one",
        "SELECT {c1} FROM {t1}",
        (
            "{show} the {c1} of all {T1}.",
            "What are the {cs1} of the {T1}?",
            "{show} the {c1} of every {S1}.",
            "What is the {c1} of each {S1}?",
        ),
    ),
    QuestionKind(
        "list_two",
        "easy",
        "one",
        "SELECT {c1}, {d1} FROM {t1}",
        (
            "{show} the {c1} and {d1} of all {T1}.",
            "What are the {cs1} and {ds1} of the {T1}?",
            "{show} the {c1} and the {d1} of every {S1}.",
            "For each {S1}, {lowshow} the {c1} and {d1}.",
        ),
    ),
    QuestionKind(
        "count",
        "easy",
        "one",
        "SELECT COUNT(*) FROM {t1}",
        (
            "How many {T1} are there?",
            "Count the {T1}.",
            "What is the number of {T1}?",
            "{show} the total number of {T1}.",
        ),
        weight=1,
    ),
    QuestionKind(
        "filter_text",
        "easy",
        "one",
        "SELECT {c1} FROM {t1}[ WHERE {x1} = '{v1}']",
        (
            "{show} the {c1} of {T1} {is1}.",
            "What are the {cs1} of {T1} {is1}?",
            "{show} the {c1} of all {T1} {is1}.",
            "For {T1} {is1}, what is the {c1}?",
        ),
        weight=3,
    ),
    QuestionKind(
        "filter_number",
        "easy",
        "one",
        "SELECT {c1} FROM {t1}[ WHERE {n1} {o1} {k1}]",
        (
            "{show} the {c1} of {T1} {cmp1}.",
            "What are the {cs1} of {T1} {cmp1}?",
            "{show} the {c1} of every {S1} {cmp1}.",
            "For {T1} {cmp1}, what is the {c1}?",
        ),
        weight=3,
    ),
    QuestionKind(
        "filter_not",
        "easy",
        "one",
        "SELECT {c1} FROM {t1}[ WHERE {x1} != '{v1}']",
        (
            "{show} the {c1} of {T1} whose {x1} is not {v1}.",
            "What are the {cs1} of {T1} that do not have {x1} {v1}?",
            "{show} the {c1} of all {T1} except those with {x1} {v1}.",
        ),
        weight=1,
    ),
    QuestionKind(
        "find_by_name",
        "easy",
        "one",
        "SELECT {c1} FROM {t1}[ WHERE {l1} = '{b1}']",
        (
            "What is the {c1} of the {S1} {b1}?",
            "{show} the {c1} of the {S1} called {b1}.",
            "{show} the {c1} of the {S1} with {l1} {b1}.",
            "What is the {c1} of the {S1} whose {l1} is {b1}?",
        ),
    ),
    QuestionKind(
        "count_text",
        "easy",
        "one",
        "SELECT COUNT(*) FROM {t1}[ WHERE {x1} = '{v1}']",
        (
            "How many {T1} {is1} are there?",
            "Count the {T1} {is1}.",
            "What is the number of {T1} {is1}?",
            "How many {T1} have {x1} {v1}?",
        ),
    ),
    QuestionKind(
        "count_number",
        "easy",
        "one",
        "SELECT COUNT(*) FROM {t1}[ WHERE {n1} {o1} {k1}]",
        (
            "How many {T1} {cmp1} are there?",
            "Count the {T1} {cmp1}.",
            "What is the number of {T1} {cmp1}?",
        ),
    ),
    QuestionKind(
        "distinct",
        "easy",
        "one",
        "SELECT [DISTINCT ]{x1} FROM {t1}",
        (
            "{show} the different {xs1} of the {T1}.",
            "What are the distinct {xs1} of {T1}?",
            "Which different {xs1} do the {T1} have?",
            "{show} all the unique {xs1} of {T1}.",
        ),
    ),
    QuestionKind(
        "count_distinct",
        "easy",
        "one",
        "SELECT COUNT([DISTINCT ]{x1}) FROM {t1}",
        (
            "How many different {xs1} do the {T1} have?",
            "Count the distinct {xs1} of {T1}.",
            "What is the number of different {xs1} of the {T1}?",
        ),
    ),
    QuestionKind(
        "aggregate",
        "easy",
        "one",
        "SELECT {g1}({a1}) FROM {t1}",
        (
            "What is the {g1} {a1} of all {T1}?",
            "{show} the {g1} {a1} of the {T1}.",
            "Find the {g1} {a1} over every {S1}.",
        ),
    ),
    QuestionKind(
        "order",
        "easy",
        "one",
        "SELECT {c1} FROM {t1}[ ORDER BY {n1} {r1}]",
        (
            "{show} the {c1} of {T1} {sorted1}.",
            "What are the {cs1} of the {T1} {sorted1}?",
            "{show} the {c1} of all {T1}, {sorted1}.",
        ),
        keys="SELECT {n1} FROM {t1}",
    ),
    QuestionKind(
        "like",
        "easy",
        "one",
        "SELECT {l1} FROM {t1}[ WHERE {l1} LIKE '{m1}']",
        (
            "{show} the {l1} of {T1} whose {l1} {like1}.",
            "Which {T1} have a {l1} that {like1}?",
            "What are the {ls1} of {T1} with a {l1} that {like1}?",
        ),
        weight=1,
    ),
    QuestionKind(
        "between",
        "easy",
        "one",
        "SELECT {c1} FROM {t1} WHERE {n1} BETWEEN {k1} AND {j1}",
        (
            "{show} the {c1} of {T1} with {n1} between {k1} and {j1}.",
            "What are the {cs1} of {T1} whose {n1} is between {k1} and {j1}?",
            "{show} the {c1} of {T1} with {n1} from {k1} to {j1}.",
        ),
        weaker=(
            "SELECT {c1} FROM {t1} WHERE {n1} >= {k1}",
            "SELECT {c1} FROM {t1} WHERE {n1} <= {j1}",
        ),
        weight=1,
    ),
    QuestionKind(
        "missing",
        "easy",
        "one",
        "SELECT {l1} FROM {t1}[ WHERE {z1} IS NULL]",
        (
            "{show} the {l1} of {T1} without {z1}.",
            "Which {T1} have no {z1}? {show} the {l1}.",
            "What are the {ls1} of {T1} whose {z1} is missing?",
        ),
        weight=1,
    ),
)

MEDIUM = (
    QuestionKind(
        "and",
        "medium",
        "one",
        "SELECT {c1} FROM {t1} WHERE {x1} = '{v1}'[ AND {n1} {o1} {k1}]",
        (
            "{show} the {c1} of {T1} {is1} and {cmp1}.",
            "What are the {cs1} of {T1} {is1} and {cmp1}?",
            "For {T1} {is1} and {cmp1}, what is the {c1}?",
        ),
        weaker=("SELECT {c1} FROM {t1} WHERE {n1} {o1} {k1}",),
    ),
    QuestionKind(
        "and_text",
        "medium",
        "one",
        "SELECT {c1} FROM {t1} WHERE {x1} = '{v1}'[ AND {y1} = '{u1}']",
        (
            "{show} the {c1} of {T1} {is1} and {also1}.",
            "What are the {cs1} of {T1} {is1} and {also1}?",
            "{show} the {c1} of all {T1} {is1} and also {also1}.",
        ),
        weaker=("SELECT {c1} FROM {t1} WHERE {y1} = '{u1}'",),
        weight=1,
    ),
    QuestionKind(
        "or",
        "medium",
        "one",
        "SELECT {c1} FROM {t1} WHERE {x1} = '{v1}'[ OR {x1} = '{w1}']",
        (
            "{show} the {c1} of {T1} {isor1}.",
            "What are the {cs1} of {T1} {isor1}?",
            "{show} the {c1} of all {T1} with {x1} either {v1} or {w1}.",
        ),
        weaker=(
            "SELECT {c1} FROM {t1} WHERE {x1} = '{w1}'",
            "SELECT {c1} FROM {t1}",
        ),
    ),
    QuestionKind(
        "aggregate_filter",
        "medium",
        "one",
        "SELECT {g1}({a1}) FROM {t1}[ WHERE {x1} = '{v1}']",
        (
            "What is the {g1} {a1} of {T1} {is1}?",
            "{show} the {g1} {a1} of the {T1} {is1}.",
            "For {T1} {is1}, what is the {g1} {a1}?",
        ),
    ),
    QuestionKind(
        "superlative",
        "medium",
        "one",
        "SELECT {c1} FROM {t1}[ ORDER BY {n1} {r1}][ LIMIT 1]",
        (
            "What is the {c1} of {best1}?",
            "{show} the {c1} of {best1}.",
            "Find the {c1} of {best1}.",
        ),
        keys="SELECT {n1} FROM {t1} ORDER BY {n1} {r1} LIMIT 2",
        weight=3,
    ),
    QuestionKind(
        "top",
        "medium",
        "one",
        "SELECT {c1} FROM {t1}[ ORDER BY {n1} {r1}][ LIMIT {q1}]",
        (
            "{show} the {c1} of {top1}.",
            "What are the {cs1} of {top1}?",
            "Find the {c1} of {top1}.",
        ),
        keys="SELECT {n1} FROM {t1} ORDER BY {n1} {r1} LIMIT {q1} + 1",
    ),
    QuestionKind(
        "group_count",
        "medium",
        "one",
        "SELECT {x1}, COUNT(*) FROM {t1} GROUP BY {x1}",
        (
            "How many {T1} are there for each {x1}?",
            "{show} each {x1} and the number of {T1}.",
            "Count the {T1} of each {x1}.",
            "For each {x1}, how many {T1} are there?",
        ),
    ),
    QuestionKind(
        "group_aggregate",
        "medium",
        "one",
        "SELECT {x1}, {g1}({a1}) FROM {t1} GROUP BY {x1}",
        (
            "What is the {g1} {a1} of {T1} for each {x1}?",
            "{show} each {x1} and the {g1} {a1} of its {T1}.",
            "For each {x1}, {lowshow} the {g1} {a1} of the {T1}.",
        ),
    ),
    QuestionKind(
        "join",
        "medium",
        "pair",
        "SELECT t1.{c1}, t2.{l2} FROM " + PAIR,
        (
            "{show} the {c1} of each {S1} and the {l2} of its {S2}.",
            "For each {S1}, {lowshow} its {c1} and the {l2} of the {S2}.",
            "What are the {c1} of every {S1} and the {l2} of its {S2}?",
        ),
    ),
    QuestionKind(
        "join_filter",
        "medium",
        "pair",
        "SELECT t1.{c1} FROM " + PAIR + "[ WHERE t2.{x2} = '{v2}']",
        (
            "{show} the {c1} of {T1} {P2} {T2} {is2}.",
            "What are the {cs1} of {T1} {P2} {T2} {is2}?",
            "{show} the {c1} of all {T1} {P2} a {S2} {is2}.",
        ),
        weight=3,
    ),
    QuestionKind(
        "join_find",
        "medium",
        "pair",
        "SELECT t1.{c1} FROM " + PAIR + "[ WHERE t2.{l2} = '{b2}']",
        (
            "{show} the {c1} of {T1} {P2} the {S2} {b2}.",
            "What are the {cs1} of {T1} {P2} the {S2} {b2}?",
            "{show} the {c1} of all {T1} {P2} the {S2} with {l2} {b2}.",
        ),
        weight=3,
    ),
    QuestionKind(
        "join_count",
        "medium",
        "pair",
        "SELECT COUNT(*) FROM " + PAIR + "[ WHERE t2.{l2} = '{b2}']",
        (
            "How many {T1} {P2} the {S2} {b2} are there?",
            "Count the {T1} {P2} the {S2} {b2}.",
            "What is the number of {T1} {P2} the {S2} with {l2} {b2}?",
        ),
    ),
)

HARD = (
    QuestionKind(
        "having",
        "hard",
        "one",
        "SELECT {x1} FROM {t1} GROUP BY {x1}[ HAVING COUNT(*) >= {h1}]",
        (
            "Which {xs1} have at least {h1} {T1}?",
            "{show} the {x1} of at least {h1} {T1}.",
            "Find each {x1} with {h1} or more {T1}.",
        ),
    ),
    QuestionKind(
        "group_most",
        "hard",
        "one",
        "SELECT {x1} FROM {t1} GROUP BY {x1} ORDER BY COUNT(*) DESC[ LIMIT 1]",
        (
            "Which {x1} has the most {T1}?",
            "{show} the {x1} with the most {T1}.",
            "What is the most common {x1} of {T1}?",
        ),
        keys="SELECT COUNT(*) FROM {t1} GROUP BY {x1} ORDER BY COUNT(*) DESC LIMIT 2",
    ),
    QuestionKind(
        "above_average",
        "hard",
        "one",
        "SELECT {c1} FROM {t1}[ WHERE {n1} {o1} (SELECT AVG({n1}) FROM {t1})]",
        (
            "{show} the {c1} of {T1} with {n1} {beyond1} the average.",
            "What are the {cs1} of {T1} whose {n1} is {beyond1} average?",
            "{show} the {c1} of every {S1} with {n1} {beyond1} the average {n1}.",
        ),
    ),
    QuestionKind(
        "in",
        "hard",
        "pair",
        "SELECT {l2} FROM {t2} WHERE id IN (SELECT {f2} FROM {t1}[ WHERE {n1} {o1} {k1}])",
        (
            "{show} the {l2} of {T2} that have {T1} {cmp1}.",
            "Which {T2} have {T1} {cmp1}? {show} the {l2}.",
            "What are the {ls2} of {T2} that have any {S1} {cmp1}?",
        ),
    ),
    QuestionKind(
        "not_in",
        "hard",
        "pair",
        "SELECT {l2} FROM {t2} WHERE id[ NOT] IN (SELECT {f2} FROM {t1})",
        (
            "{show} the {l2} of {T2} that have no {T1}.",
            "Which {T2} have no {T1}? {show} the {l2}.",
            "What are the {ls2} of {T2} without any {S1}?",
        ),
    ),
    QuestionKind(
        "join_group",
        "hard",
        "pair",
        "SELECT t2.{l2}, COUNT(*) FROM " + PAIR + " GROUP BY t2.{l2}",
        (
            "{show} the {l2} of each {S2} and its number of {T1}.",
            "How many {T1} does each {S2} have? {show} the {l2} and the number.",
            "For each {S2}, {lowshow} the {l2} and the number of {T1}.",
        ),
    ),
    QuestionKind(
        "join_superlative",
        "hard",
        "pair",
        "SELECT t2.{l2} FROM " + PAIR + "[ ORDER BY t1.{n1} {r1}][ LIMIT 1]",
        (
            "What is the {l2} of the {S2} of {best1}?",
            "{show} the {l2} of the {S2} that has {best1}.",
            "Which {S2} has {best1}? {show} its {l2}.",
        ),
        keys="SELECT {n1} FROM {t1} ORDER BY {n1} {r1} LIMIT 2",
    ),
    QuestionKind(
        "except",
        "hard",
        "one",
        "SELECT {x1} FROM {t1} EXCEPT SELECT {x1} FROM {t1}[ WHERE {n1} {o1} {k1}]",
        (
            "Which {xs1} have no {T1} {cmp1}?",
            "{show} the {xs1} that have no {S1} {cmp1}.",
            "Find each {x1} without {T1} {cmp1}.",
        ),
        weaker=(
            "SELECT {x1} FROM {t1}",
            "SELECT DISTINCT {x1} FROM {t1}",
        ),
    ),
)

EXTRA = (
    QuestionKind(
        "join_most",
        "extra",
        "pair",
        "SELECT t2.{l2} FROM "
        + PAIR
        + " GROUP BY t2.{l2}[ ORDER BY COUNT(*) {r0}][ LIMIT 1]",
        (
            "Which {S2} has the {fewest0} {T1}? {show} its {l2}.",
            "{show} the {l2} of the {S2} with the {fewest0} {T1}.",
            "What is the {l2} of the {S2} that has the {fewest0} {T1}?",
        ),
        keys="SELECT COUNT(*) FROM {t1} GROUP BY {f2} ORDER BY COUNT(*) {r0} LIMIT 2",
    ),
    QuestionKind(
        "join_having",
        "extra",
        "pair",
        "SELECT t2.{l2} FROM " + PAIR + " GROUP BY t2.{l2}[ HAVING COUNT(*) >= {h1}]",
        (
            "Which {T2} have at least {h1} {T1}? {show} the {l2}.",
            "{show} the {l2} of {T2} with at least {h1} {T1}.",
            "What are the {ls2} of {T2} that have {h1} or more {T1}?",
        ),
    ),
    QuestionKind(
        "join_group_aggregate",
        "extra",
        "pair",
        "SELECT t2.{l2}, {g1}(t1.{a1}) FROM " + PAIR + " GROUP BY t2.{l2}",
        (
            "{show} the {l2} of each {S2} and the {g1} {a1} of its {T1}.",
            "For each {S2}, {lowshow} its {l2} and the {g1} {a1} of the {T1}.",
            "What is the {g1} {a1} of the {T1} {P2} each {S2}? {show} the {l2} too.",
        ),
    ),
    QuestionKind(
        "three_tables",
        "extra",
        "chain",
        "SELECT t1.{l1} FROM " + CHAIN + "[ WHERE t3.{x3} = '{v3}']",
        (
            "{show} the {l1} of {T1} {P2} {T2} {P3} {T3} {is3}.",
            "What are the {ls1} of {T1} {P2} {T2} {P3} {T3} {is3}?",
            "{show} the {l1} of all {T1} {P2} a {S2} {P3} a {S3} {is3}.",
        ),
    ),
    QuestionKind(
        "three_tables_link",
        "extra",
        "link",
        "SELECT t2.{l2} FROM " + LINK + "[ WHERE t3.{l3} = '{b3}']",
        (
            "{show} the {l2} of {T2} that have {T1} {P3} the {S3} {b3}.",
            "Which {T2} have {T1} {P3} the {S3} {b3}? {show} the {l2}.",
            "What are the {ls2} of {T2} with {T1} {P3} the {S3} {b3}?",
        ),
        unique=True,
    ),
    QuestionKind(
        "intersect",
        "extra",
        "one",
        "SELECT {x1} FROM {t1} WHERE {n1} > {j1} INTERSECT SELECT {x1} FROM {t1}[ WHERE {n1} < {k1}]",
        (
            "Which {xs1} have both {T1} with {n1} above {j1} and {T1} with {n1} below {k1}?",
            "{show} the {xs1} that have {T1} with {n1} above {j1} and also below {k1}.",
            "Find each {x1} with {T1} whose {n1} is above {j1} and others below {k1}.",
        ),
        weaker=(
            "SELECT DISTINCT {x1} FROM {t1} WHERE {n1} > {j1}",
            "SELECT DISTINCT {x1} FROM {t1} WHERE {n1} < {k1}",
            "SELECT DISTINCT {x1} FROM {t1}",
        ),
    ),
    QuestionKind(
        "union",
        "extra",
        "twins",
        "SELECT {x1} FROM {t1} UNION SELECT {x2} FROM {t2}",
        (
            "{show} the {xs1} of {T1} or {T2}.",
            "Which {xs1} have {T1} or {T2}?",
            "What are the {xs1} of the {T1} together with those of the {T2}?",
        ),
        weaker=(
            "SELECT DISTINCT {x1} FROM {t1}",
            "SELECT DISTINCT {x2} FROM {t2}",
        ),
    ),
    QuestionKind(
        "intersect_tables",
        "extra",
        "twins",
        "SELECT {x1} FROM {t1} INTERSECT SELECT {x2} FROM {t2}",
        (
            "{show} the {xs1} that have both {T1} and {T2}.",
            "Which {xs1} have {T1} as well as {T2}?",
            "What are the {xs1} of both {T1} and {T2}?",
        ),
        weaker=(
            "SELECT DISTINCT {x1} FROM {t1}",
            "SELECT DISTINCT {x2} FROM {t2}",
        ),
    ),
    QuestionKind(
        "except_tables",
        "extra",
        "twins",
        "SELECT {x1} FROM {t1} EXCEPT SELECT {x2} FROM {t2}",
        (
            "{show} the {xs1} that have {T1} but no {T2}.",
            "Which {xs1} have {T1} but not {T2}?",
            "What are the {xs1} of {T1} that are not {xs2} of {T2}?",
        ),
        weaker=("SELECT DISTINCT {x1} FROM {t1}",),
    ),
)

KINDS = EASY + MEDIUM + HARD + EXTRA
