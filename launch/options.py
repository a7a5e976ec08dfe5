"""Options that several commands have: a flag is one type, and so means one thing in all of them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnknownOptionError
from cyclopts.validators import Number

from launch.config import JobConfig
from launch.config_files import nearest, settings_named
from launch.files import check_new, write_text
from minirl.exchange import UserError
from minirl.exchange.settings import at_home

STDOUT = Path("-")
"""What `--json` names for standard output."""


ConfigOption = Annotated[
    str,
    Parameter(
        help="a YAML file, a packaged config (progress.yaml, progress-demo.yaml; .yaml may be left "
        "out), or a run folder"
    ),
]
OtherConfigOption = Annotated[
    str | None,
    Parameter(help="a config, such as progress-demo.yaml (default: a run's own, else plain.yaml)"),
]
AcceleratorOption = Annotated[
    Literal["cpu", "gpu", "tpu"] | None,
    Parameter(help="what to compute on (default: what the machine has)"),
]
Overrides = Annotated[
    str, Parameter(help="settings in place of the config's, key.sub=value: train.steps=20")
]
LimitOption = Annotated[
    int | None,
    Parameter(help="at most N questions of each split, a sample by seed", validator=Number(gte=1)),
]
ShowPromptOption = Annotated[
    bool,
    Parameter(help="print a question as the model is asked it, and its number of tokens, and stop"),
]
JsonOption = Annotated[
    Path | None,
    Parameter(help="the result as JSON: into this file, or on standard output (--json=-)"),
]
ModelOption = Annotated[
    str | None,
    Parameter(help="name of an endpoint's model, or of a published shape (qwen2.5-coder-7b)"),
]


TimeoutOption = Annotated[
    float | None,
    Parameter(help="wall time of one query, in seconds", validator=Number(gt=0, lte=1_000_000)),
]
DialectOption = Annotated[
    str,
    Parameter(help="dialect of queries (sqlite, mysql, postgres), unless their record names one"),
]


COMMANDS = ("prepare", "train", "eval", "ask", "score", "report", "export", "plan")
"""Each is a module of `launch`."""
app = App(
    name="python -m launch",
    help="Teach a model to write SQL. Each command has --help; README.md begins with one of them.",
    default_parameter=Parameter(negative=(), show_default=False, allow_repeating=True),
    version_flags=[],
    result_action="return_value",
)
"""All commands: `python -m launch.train` is `python -m launch train`."""


def command(function: Callable[..., None]) -> Callable[[Sequence[str]], None]:
    """Make a function a command of `app`, named after its module, whose docstring is the help;
    return what runs it. Parameters with names are options, `*overrides` the words between them.
    """
    module = sys.modules[function.__module__]
    assert module.__spec__ is not None
    name = module.__spec__.name.rpartition(".")[2]
    # Examples, which begin with blanks, are lines of their own.
    text = re.sub(
        r"(?m)(^    .*\n)+", lambda found: f"```text\n{dedent(found[0])}```\n", module.__doc__ or ""
    )
    if name not in [*app]:  # which the module that is run has registered
        app.command(App(name, help=text, help_format="markdown")).default(function)
    return lambda words: run([name, *words])


def run(words: Sequence[str]) -> None:
    """Run a command, the first word; a mistake in the words is a `UserError`."""
    try:
        function, bound, _ = app.parse_args(
            with_home(words), exit_on_error=False, print_error=False
        )
    except CycloptsError as error:
        said = " ".join(str(error).split())
        if isinstance(error, MissingArgumentError) and (missing := error.argument):
            # An option that is not there at all is no option without its argument.
            said = said if error.keyword or missing.tokens else f"{missing.name} is missing."
        if isinstance(error, UnknownOptionError):
            found = settings_named(JobConfig, error.token.value.lstrip("-").replace("-", "_"))
            said += f" A setting is written without dashes: {found[0]}=VALUE." if found else ""
        name = ".".join(["python -m launch", *words[:1]])
        raise UserError(f"{name}: {said} See --help.") from None
    function(*bound.args, **bound.kwargs)  # that of --help, where this is asked for


def with_home(arguments: Iterable[str]) -> list[str]:
    """Put the home folder in the place of `~` behind the first `=`, as shells do before it."""
    parts = (word.partition("=") for word in arguments)
    return [f"{name}{sign}{at_home(value)}" for name, sign, value in parts]


def check_result(path: Path | None) -> None:
    """Raise a `UserError` if what `--json` asks for cannot be written, or would replace a file."""
    if path is not None and path != STDOUT:
        check_new(path, "--json")


def write_result(path: Path | None, result: Any) -> None:
    """Write what `--json` asks for: a text of JSON, or what it is made of."""
    text = result if isinstance(result, str) else json.dumps(result, indent=1) + "\n"
    if path == STDOUT:
        print(text, end="")  # noqa: T201
    elif path is not None:
        write_text(path, text)


def choose(option: str, word: str, known: Iterable[str]) -> str:
    """Return a word that is known; a `UserError` names the nearest one."""
    names = list(known)
    if word in names:
        return word
    raise UserError(f"{option} {word}: {nearest(word, names)}there are {', '.join(names)}")
