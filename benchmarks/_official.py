"""Ask an official evaluator for its verdicts, in an environment that has what it imports.

`ask` runs this file there with a job: the program, its folder, files in the program's own form and
where databases are. The program's own code reads and decides; here its verdicts are only noted,
question by question. Nothing of this project is imported, since that environment may lack it.
"""

import contextlib
import importlib
import io
import json
import subprocess
import sys
import tempfile
import types
from argparse import Namespace
from pathlib import Path
from typing import Any


def ask(python: Path, program: str, folder: Path, **job: Any) -> dict[str, Any]:
    """Run one of the programs below.

    Args:
        python: The interpreter of an environment that has what the program imports.
        program: Name of the function.
        folder: The program's own.
        job: What it is asked.
    """
    with tempfile.TemporaryDirectory() as place:
        request = Path(place) / "job.json"
        request.write_text(json.dumps({**job, "program": program, "folder": str(folder.resolve())}))
        command = [python.absolute(), Path(__file__).resolve(), request]
        found = subprocess.run(command, stdout=subprocess.PIPE, cwd=place, check=False)
    if found.returncode:
        sys.exit(f"{folder}: the official program failed; its own words are above")
    return json.loads(found.stdout)


def spider(job):
    """Note what taoyds/test-suite-sql-eval finds; here a gold that fails does not end it."""
    use_plain_tokenizer()
    program = load("evaluation")
    verdicts, levels = [], []
    decide, grade = program.eval_exec_match, program.Evaluator.eval_hardness

    def noted_verdict(**arguments):
        try:
            verdicts.append(decide(**arguments))
        except AssertionError:
            verdicts.append("gold failed")
        return verdicts[-1] == 1

    def noted_level(self, sql):
        levels.append(grade(self, sql))
        return levels[-1]

    program.eval_exec_match, program.Evaluator.eval_hardness = noted_verdict, noted_level
    program.evaluate(
        job["gold"],
        job["predicted"],
        job["databases"],
        etype="exec",
        kmaps=None,
        plug_value=False,
        keep_distinct=False,
        progress_bar_for_each_datapoint=False,
    )
    return {"verdicts": verdicts, "levels": levels}


def spider_levels(job):
    """Grade queries by the official parser, on the schema of tables.json or of a database."""
    use_plain_tokenizer()
    parser, program = (load(name) for name in ("process_sql", "evaluation"))
    schemas = {name: parser.Schema(tables) for name, tables in job["schemas"].items()}
    levels = []
    for sql, db_id in job["queries"]:
        try:
            parsed = parser.get_sql(schemas[db_id], sql)
            levels.append(program.Evaluator().eval_hardness(parsed))
        except Exception as error:  # noqa: BLE001 - whatever the parser stumbles over
            levels.append(f"failed: {type(error).__name__}")
    return {"levels": levels}


def bird(job):
    """Note what one of mini_dev's programs gives each question (`metric`: ex, f1)."""
    program = load(f"evaluation_{job['metric']}")
    predicted, _ = program.package_sqls(job["predicted"], job["databases"], mode="pred")
    gold, files = program.package_sqls(job["gold"], job["databases"], mode="gt")
    options = {"num_cpus": job.get("workers", 1)}
    program.exec_result = []
    program.run_sqls_parallel(list(zip(predicted, gold)), db_places=files, **options)  # noqa: B905
    found = program.sort_results(program.exec_result)
    return {"verdicts": [one["res"] for one in found]}


def spider2(job):
    """Note what Spider 2's program gives each instance of a staged evaluation suite."""
    for name in ("google", "google.cloud", "google.cloud.bigquery"):
        sys.modules.setdefault(name, types.ModuleType(name))
    load("google.cloud").bigquery = load("google.cloud.bigquery")
    program = load("evaluate")
    program.__file__ = f"{job['stage']}/evaluation_suite/evaluate.py"
    options = Namespace(
        mode="sql", result_dir=job["predicted"], gold_dir=job["gold"], timeout=60, max_workers=1
    )
    found = program.evaluate_spider2sql(options, Path(job["stage"]) / "temporary")
    return {"verdicts": {one["instance_id"]: one["score"] for one in found}}


def load(name: str) -> Any:
    """Import a module of which nothing is known here."""
    return importlib.import_module(name)


def use_plain_tokenizer():
    """Take nltk's rules for words; its model of sentences is a download."""
    words = load("nltk")
    words.word_tokenize = words.tokenize.TreebankWordTokenizer().tokenize


PROGRAMS = {one.__name__: one for one in (spider, spider_levels, bird, spider2)}


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    out = sys.stdout
    sys.path.insert(0, job["folder"])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        answer = PROGRAMS[job["program"]](job)
    json.dump(answer, out)


if __name__ == "__main__":
    main()
