"""What all commands share: errors for people, the console, the accelerator."""

from __future__ import annotations

import errno
import io
import logging
import os
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from threading import Event, Thread
from typing import Any, NoReturn

import apsw
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from minirl.exchange import UserError
from minirl.run import activity
from minirl.run.preemption import Preempted
from sqlenv.cache import cache_folder

if os.environ.get("COLUMNS") == "0":  # of a terminal that does not know its size: nothing has room
    del os.environ["COLUMNS"]
# Progress goes to standard error, results to standard output.
# What is printed is text of users and models: nothing in it is rich's markup.
console = Console(stderr=True, highlight=False, markup=False, emoji=False)
# A line of a result is as long as it is, wherever it is printed; tables fit the terminal.
output = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
LINE_S = 30.0
"""Seconds between two lines of a log that say what is being done."""
_NAMED = 3
_log = logging.getLogger(__name__)
RESUME = "run the same command again to resume"
# Errors of the file system that are no fault of ours.
_SYSTEM_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
    | {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}
)
# What the extras of the learner install, by the names that are imported.
_LEARNER = frozenset(
    {"aiohttp", "flax", "jax", "jaxtyping", "jinja2", "optax", "orbax", "safetensors"}
    | {"tokenizers", "transformers"}
)


def command_line(module: str, *arguments: object) -> str:
    """Write a command as it can be typed here: with this interpreter where it lies below."""
    python, here = Path(sys.executable), Path.cwd()
    name = python.relative_to(here) if python.is_relative_to(here) else "python"
    return shlex.join(map(str, (name, "-m", module, *arguments)))


def _join_others(*others: Any) -> None:
    from minirl.run import distributed

    if others == (None, None, None) and not distributed.is_announced():
        return
    distributed.join(*others)
    if not distributed.is_first():  # one of them prints
        console.quiet = output.quiet = True
        logging.getLogger().setLevel(logging.ERROR)


def run(main: Callable[[list[str]], object]) -> NoReturn:
    """Run a command; a user's mistake ends it with one line and status 2."""
    _set_up_output()
    try:
        main(sys.argv[1:])
    except BrokenPipeError:  # whoever reads our output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(1)
    except Preempted as stop:
        if not console.quiet:
            sys.stderr.write(f"stopped by {stop.signal.name}: {stop}; {RESUME}\n")
        sys.exit(130 if stop.signal == signal.SIGINT else 0)
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; {RESUME}\n")
        _leave(130)
    except Exception as error:
        line = _line_for(error)
        if line is None and not _others():
            raise
        if line is None:
            traceback.print_exc()
        else:
            sys.stderr.write(f"error: {line}\n")
        _leave(1 if line is None else 2)
    sys.exit(0)


def _set_up_output() -> None:
    handler: logging.Handler = logging.StreamHandler()
    if console.is_terminal:  # in a file, lines are not broken at the width of a terminal
        handler = RichHandler(console=console, show_path=False, show_time=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    # JAX logs why the plug-in of an accelerator does not start, and raises that there is none.
    for noisy in ("jax", "httpx", "httpx2", "openai"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # Of a damaged checkpoint Orbax logs the tracebacks that it also raises; its coroutines, asyncio
    # and TensorStore's threads complain to the interpreter after the first read has failed.
    for noisy in ("orbax", "absl", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    sys.unraisablehook = _tell_unraisable
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files that are not text
        sys.stdout.reconfigure(errors="backslashreplace")


def _tell_unraisable(unraisable: Any) -> None:
    file = getattr(getattr(unraisable.object, "cr_code", None), "co_filename", "")
    if "orbax" not in file and str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _others() -> Any:
    """Return the module `distributed` where this is one of several processes; else None."""
    module = sys.modules.get("minirl.run.distributed")
    return module if module is not None and module.is_joined() else None


def _leave(status: int) -> NoReturn:
    """End this process; one of several at once: the others would wait for it, and it for them."""
    if others := _others():
        others.leave(status)
    sys.exit(status)


def _line_for(error: Exception) -> str | None:
    """Say in a line what a user can mend; None for a mistake of ours."""
    words = " ".join(str(error).split())
    if isinstance(error, UserError):
        return words
    if isinstance(error, ModuleNotFoundError) and error.name in _LEARNER:
        install = "pip install '.[cpu]' (or '.[gpu]', '.[tpu]')"
        return f"{error.name} is not installed, and this command needs it: {install}"
    if isinstance(error, OSError) and error.errno in _SYSTEM_ERRORS:
        place = error.filename or "standard output"
        return f"{place}: {error.strerror}; mend that, and {RESUME}"
    if isinstance(error, apsw.FullError):  # the only files that SQLite writes for us lie there
        return f"{gettempdir()}: {words}; mend that, and {RESUME}"
    if "RESOURCE_EXHAUSTED" in words:  # JAX's
        return (
            "the device has too little memory: lower sampler.cache_gb, sampler.slots or "
            f"train.batching.micro_batch_tokens, or set model.remat=full ({words[:120]})"
        )
    others = _others()
    if others and others.is_lost(error):
        return (
            "a peer process of this run died or cannot be reached; restart all processes to "
            f"resume from the last checkpoint ({words})"
        )
    return None


# Versions of JAX with this flag, which is experimental: XLA aborts the process for one that it does
# not know.
_WITH_DOTS = {(0, 10), (0, 11), (0, 12)}
_ONLY_DOTS = "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"


def _own_accelerator() -> str:
    """Name what this machine has and JAX is installed for."""
    devices = Path("/dev")
    if find_spec("jax_cuda13_plugin") and (devices / "nvidiactl").exists():
        return "gpu"
    is_tpu = any(devices.glob("accel*")) or any(devices.glob("vfio/*"))
    return "tpu" if is_tpu and find_spec("libtpu") else "cpu"


def use_accelerator(
    choice: str | None, others: tuple[str | None, int | None, int | None] | None = None
) -> str:
    """Select JAX's backend by `--accel`, and keep compiled programs for the next start; where there
    may be several processes, find the others by address of the first, their number, and that of
    this one (`distributed.join`). Return the backend's name.

    Of several processes JAX lets the first alone keep its programs.
    """
    name = choice or _own_accelerator()
    if name == "gpu" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        # What plans fill of a device (`minirl.plan.fit.FILLED`); JAX would take 75 % of it.
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.95")
    # JAX takes seconds to import, and mistakes in the arguments need not wait for it.
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    if name == "cpu" and "ynn_fusion_type" not in flags and jax.__version_info__[:2] in _WITH_DOTS:
        # What XLA's other fusions for the CPU take, a third of an update's memory, is in no plan of
        # the compiler, and they are not quicker.
        os.environ["XLA_FLAGS"] = f"{flags} {_ONLY_DOTS}".strip()
    platforms = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}[name]
    jax.config.update("jax_platforms", platforms)
    # A CPU's results are waited for anyhow; else what a program took is given back only while the
    # next one runs, and two micro-batches are in memory.
    jax.config.update("jax_cpu_enable_async_dispatch", val=False)
    activity.watch_compiler()
    if others is not None:
        _join_others(*others)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # whoever sets it has a better place
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    try:
        found = jax.default_backend()
    except RuntimeError as error:
        found = str(error)
    if found != name:
        raise UserError(
            f"--accel {name}: no such device here (JAX: {found}); use --accel cpu, or install "
            f"the {name} extra on a machine that has one"
        )
    return name


def warn_of(names: Sequence[str], what: str) -> None:
    """Log what is the matter with so many things, and the first of their names."""
    if names:
        more = ", …" if len(names) > _NAMED else ""
        _log.warning("%d %s: %s%s", len(names), what, ", ".join(names[:_NAMED]), more)


def lines(prompt: str) -> Iterator[str]:
    """Yield the lines of standard input but blank ones; on a terminal each is asked for."""
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            try:
                line = input(prompt if sys.stdin.isatty() else "").strip()
            except UnicodeDecodeError:
                raise UserError(
                    f"standard input: is no text in {sys.stdin.encoding}; convert it"
                ) from None
            if line:
                yield line


@contextmanager
def progress_bar(title: str) -> Generator[Callable[[int, int, str], None]]:
    """Show a bar, what is being done (`minirl.run.activity`) and how the last step went; on no
    terminal, a line now and then.
    """
    if not console.is_terminal:
        with _lines_of_a_log(title) as update_log:
            yield update_log
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(20), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), _Doing(), console=console) as bar:
        task = bar.add_task(title, total=None, status="")

        def update(done: int, total: int, status: str) -> None:
            bar.update(task, completed=done, total=total, status=status)

        yield update


class _Doing(ProgressColumn):
    """What is being done, and how the last step went, as far as the line has room."""

    def render(self, task: Task) -> Text:
        """Ask anew."""
        said = filter(None, (activity.status(), task.fields["status"]))
        return Text("; ".join(said), overflow="ellipsis", no_wrap=True)


@contextmanager
def _lines_of_a_log(title: str) -> Generator[Callable[[int, int, str], None]]:
    """Print the start, the first step, then every tenth; between them what is done, where that is
    something else than before.
    """
    place, shown, is_over = title, (False, -1), Event()

    def update(done: int, total: int, status: str) -> None:
        nonlocal place, shown
        place = f"{title}: {done}/{total}"
        before, shown = shown, (done > 0, 10 * done // max(total, 1))
        if shown != before:
            console.print(f"{place} {status}".rstrip(), soft_wrap=True)

    def tell() -> None:
        before = ""
        while not is_over.wait(LINE_S):
            said = activity.status()
            if said not in ("", before):
                console.print(f"{place} ({said})", soft_wrap=True)
            before = said

    thread = Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield update
    finally:
        is_over.set()
        thread.join()
