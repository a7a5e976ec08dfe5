"""What all commands share: arguments, errors for people, the console, the accelerator."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

import minirl.errors
import sqlenv.errors
from minirl.run.files import naming
from minirl.run.preemption import Preempted

USER_ERRORS = (minirl.errors.UserError, sqlenv.errors.UserError)
# Progress goes to standard error, results to standard output.
console = Console(stderr=True, highlight=False)


class Output(Console):
    """Standard output, which an error of the system names."""

    def print(self, *things: Any, **how: Any) -> None:
        """Print; see `Console.print`."""
        with naming(Path("standard output")):
            super().print(*things, **how)


output = Output(highlight=False)

# What to do about errors of the file system that are no fault of ours.
_MAKE_ROOM = "make room, and the same command goes on from what it has saved"
_MOVE_AWAY = "move away what is there, or choose another folder"
_ALLOW = "allow it, or choose another folder"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _MAKE_ROOM),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST), _MOVE_AWAY),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _ALLOW),
    errno.ENAMETOOLONG: "write a shorter path",
}
_LONGEST_NAME = 200
_LONGEST_LINE = 2000
_NEAR = 40  # characters shown around the place of an error
# What the extras for an accelerator install, by the names that are imported.
_LEARNER = frozenset(
    {"jax", "jaxlib", "jaxtyping", "flax", "optax", "orbax", "numpy", "safetensors"}
    | {"tensorboardX", "tokenizers", "transformers", "jinja2"}
)


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in a line, with the status of a user's mistake."""
        fail(f"{self.prog}: {message}; see --help")


def fail(message: str) -> NoReturn:
    """End with a line on standard error and status 2."""
    sys.stderr.write(f"error: {message}\n")
    sys.exit(2)


def make_parser(
    module: str,
    description: str,
    *,
    example: str = "seed=1 run.dir=second",
    needs_config: bool = True,
) -> argparse.ArgumentParser:
    """Make a parser with the arguments that every job has.

    Args:
        module: Which is run.
        description: What it does.
        example: What stands after `--cfg progress-demo.yaml` in the example that help ends with.
        needs_config: Whether `--cfg` has to be given.
    """
    parser = Parser(
        prog=f"python -m {module}",
        description=description,
        epilog=f"example:\n  python -m {module} --cfg progress-demo.yaml {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cfg",
        required=needs_config,
        metavar="FILE",
        help="a YAML file, or the name of a packaged one (progress.yaml, progress-demo.yaml)",
    )
    parser.add_argument(
        "--accel", choices=("cpu", "gpu", "tpu"), default="cpu", help="what to compute on"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.sub=value",
        help="settings in place of the file's, for example train.steps=20",
    )
    return parser


def read_seed(text: str) -> int:
    """Read a seed from the command line.

    Raises:
        ArgumentTypeError: It is no whole number from 0 on.
    """
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: should be a whole number from 0 on")
    return int(text)


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that several processes can run together."""
    group = parser.add_argument_group(
        "several processes",
        "the same command on every host; Slurm's and a TPU slice's variables say the rest",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of the first process, or auto to let JAX find it",
    )
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, metavar="I", help="number of this one, from 0")


def check_processes(options: argparse.Namespace) -> None:
    """Refuse arguments of `add_processes` that do not belong together.

    Raises:
        UserError: One is missing, or a number is out of range.
    """
    given = (options.coordinator, options.processes, options.process)
    if given in ((None, None, None), ("auto", None, None)):
        return
    if None in given or ":" not in options.coordinator:
        raise minirl.errors.UserError(
            "--coordinator HOST:PORT, --processes N and --process I belong together; "
            "give all three, or --coordinator auto"
        )
    if not 0 <= options.process < options.processes:
        raise minirl.errors.UserError(
            f"--process {options.process}: should be from 0 to {options.processes - 1}, one less "
            "than --processes"
        )


def _join_others(options: argparse.Namespace) -> None:
    """Find the other processes of the command, if there are any; before JAX is used.

    Raises:
        UserError: The others cannot be found.
    """
    from minirl.run import distributed

    if options.coordinator is None and not distributed.is_announced():
        return
    is_given = options.processes is not None
    where = (options.coordinator, options.processes, options.process)
    distributed.join(distributed.ProcessConfig(*where) if is_given else None)
    _listen_to_first()


def _listen_to_first() -> None:
    """Let one of several processes print."""
    from minirl.run import distributed

    if not distributed.is_first():
        console.quiet = output.quiet = True
        logging.getLogger().setLevel(logging.ERROR)


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Run a command; a user's mistake ends it with one line and status 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_log_handler()])
    for noisy in ("jax", "orbax", "httpx", "httpx2"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # Orbax logs the tracebacks of errors that it also raises; asyncio those of Orbax's tasks that a
    # first error has left behind.
    for noisy in ("absl", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    _hush()
    _take_any_name()
    try:
        main(sys.argv[1:])
    except BrokenPipeError:  # whoever reads our output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(1)
    except Preempted as stop:
        if not console.quiet:
            sys.stderr.write(f"stopped by {stop.signal.name}: {stop}; the same command goes on\n")
        sys.exit(0 if stop.signal == signal.SIGTERM else 130)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from what it has saved\n")
        _leave(130)
    except Exception as error:
        line = _line_for(error)
        if _has_others():
            _leave_others(error, line)
        if line is None:
            raise
        fail(line)
    sys.exit(0)


def _take_any_name() -> None:
    """Let standard output take names of files that are no text, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _has_others() -> bool:
    """Tell whether this is one of several processes."""
    if "minirl.run.distributed" not in sys.modules:
        return False
    from minirl.run import distributed

    return distributed.is_joined()


def _leave(status: int) -> NoReturn:
    """End this process; one of several at once: the others would wait for it, and it for them."""
    if _has_others():
        from minirl.run import distributed

        distributed.leave(status)
    sys.exit(status)


def _leave_others(error: Exception, line: str | None) -> NoReturn:
    """Say what ends one of several processes, and end it."""
    from minirl.run import distributed

    status = 1 if line is None else 2
    if line is None and distributed.is_lost(error):
        line = (
            "another process of this run has ended or cannot be reached, and this one ends too: "
            f"start all again, and they go on from what is saved ({' '.join(str(error).split())})"
        )
    if line is None:
        traceback.print_exc()
    else:
        sys.stderr.write(f"error: {line[:_LONGEST_LINE]}\n")
    distributed.leave(status)


def _line_for(error: Exception) -> str | None:
    """Say in a line what a user can do about an error; None if it is a fault of ours."""
    words = " ".join(str(error).split())
    if isinstance(error, USER_ERRORS):
        return words
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        install = "pip install '.[cpu]' (or '.[gpu]', '.[tpu]')"
        line = f"{missing} is not installed, and this command needs it: {install}"
        return line if missing in _LEARNER else None
    if isinstance(error, OSError) and error.errno in _ADVICE:
        name = str(_closed(error) or error.filename or "a file")
        name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        return f"{name}: {error.strerror}; {_ADVICE[error.errno]}"
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        near = error.object[max(error.start - _NEAR, 0) : error.end + _NEAR]
        return f"{near!r}: a name that is not UTF-8, and has to be written down; rename it"
    if "RESOURCE_EXHAUSTED" in words:  # JAX's
        return (
            "the device has too little memory: lower sampler.cache_gb, sampler.slots or "
            f"train.batching.groups_per_batch, or set model.remat=full ({words[:120]})"
        )
    return None


def _closed(error: OSError) -> Path | None:
    """Name the folder that may not be entered, if that is why a file in it cannot be reached."""
    if error.errno != errno.EACCES or not isinstance(error.filename, str):
        return None
    folders = reversed(Path(error.filename).absolute().parents)
    return next((folder for folder in folders if not os.access(folder, os.X_OK)), None)


def give_up() -> NoReturn:
    """End at once, whatever threads still wait for; what is written stays written."""
    sys.stderr.write("interrupted again; the same command goes on from what it has saved\n")
    sys.stderr.flush()
    os._exit(130)


def _hush() -> None:
    """Keep quiet what is said of a damaged checkpoint after the first read of it has failed.

    Orbax then closes its event loop with other reads under way. TensorStore's threads and Orbax's
    coroutines complain of that to the interpreter, in tracebacks that no log level stops.
    """
    tell = sys.unraisablehook

    def hush(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        is_of_orbax = code is not None and "orbax" in code.co_filename
        if not is_of_orbax and str(unraisable.exc_value) != "Event loop is closed":
            tell(unraisable)

    sys.unraisablehook = hush


def _log_handler() -> logging.Handler:
    """Make the handler of log lines; in a file they are not broken at the width of a terminal."""
    if console.is_terminal:
        return RichHandler(console=console, show_path=False, show_time=False)
    return logging.StreamHandler()


def use_accelerator(name: str, processes: argparse.Namespace | None = None) -> None:
    """Select JAX's backend, and keep compiled programs for the next start.

    Args:
        name: Of `--accel`.
        processes: Where the command is one that several processes can run together.

    Raises:
        UserError: The accelerator is not there, or the other processes are not.
    """
    platforms = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}[name]
    if name == "gpu" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        # What plans fill of a device (`minirl.plan.fit.FILLED`); JAX would take 75 % of it.
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.95")
    # JAX takes seconds to import, and mistakes in the arguments need not wait for it.
    import jax

    jax.config.update("jax_platforms", platforms)
    base = os.environ.get("MINIRL_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(base).expanduser() / "minirl" / "jax"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    if processes is not None:
        _join_others(processes)
    try:
        with _held_back():
            found = jax.default_backend()
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:160]
        raise minirl.errors.UserError(
            f"--accel {name}: no such device here ({reason}); use --accel cpu, or install "
            f"the {name} extra on a machine that has one"
        ) from None
    if found != name:
        raise minirl.errors.UserError(
            f"--accel {name}: JAX finds only {found} here; use --accel {found}"
        )


@contextmanager
def _held_back() -> Generator[None]:
    """Hold back what libraries write to standard error beneath Python, and drop it if they fail.

    libtpu says in many lines that there is no TPU; we say it in one.
    """
    with TemporaryFile() as kept:
        stderr = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        kept.seek(0)
        os.write(2, kept.read())


COMPILING = "compiling"
"""Status of a phase before its first step, which takes longest."""


@contextmanager
def progress_bar(title: str) -> Generator[Callable[[int, int, str], None]]:
    """Show a bar with a line on how it goes; on no terminal, a line now and then."""
    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    ]
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None, status="")
        shown: tuple[bool, int] | None = None

        def update(done: int, total: int, status: str) -> None:
            nonlocal shown
            bar.update(task, completed=done, total=total, status=status)
            # The start, the first step, then every tenth.
            tenth = (done > 0, 10 * done // max(total, 1))
            if not console.is_terminal and tenth != shown:
                shown = tenth
                console.print(f"{title}: {done}/{total} {status}".rstrip(), soft_wrap=True)

        yield update
