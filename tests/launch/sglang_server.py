"""A real SGLang server on 127.0.0.1, on the CPU."""

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from minirl.sglang.process import free_ports

SHIM = Path(__file__).parent / "sglang_shim"
OPTIONS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "dtype": "float32",
    "context-length": 4096,
    "max-total-tokens": 16384,
    "max-running-requests": 8,
    # States of linear attention; else a share of the machine's memory is taken for them.
    "max-mamba-cache-size": 64,
}
ARGUMENTS = {name: value for name, value in OPTIONS.items() if name != "dtype"}
"""The same for servers that a job starts, which names their dtype itself."""
VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONPATH": str(SHIM),
    "HF_HUB_OFFLINE": "1",
    # Else in bfloat16 whatever the model is in.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    # Several servers on few cores: threads that wait for each other take the time of all.
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def serve(
    python: str, model: Path, log: Path, *, flags: Iterable[str] = (), start_s: float = 480
) -> Generator[str]:
    """Serve a Hugging Face folder as the model `tiny` until the block ends; give its address."""
    (port,) = free_ports(1)
    options = {**OPTIONS, "model-path": model, "served-model-name": "tiny", "port": port}
    line = [python, "-m", "sglang.launch_server", "--skip-server-warmup", "--host", "127.0.0.1"]
    line += [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    line += [f"--{flag}" for flag in flags]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as file:
        process = subprocess.Popen(
            line,
            env=os.environ | VARIABLES,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process, f"{url}/ready", log, start_s)
            yield url
        finally:
            with suppress(ProcessLookupError):  # the session holds its other processes
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def _wait(process: subprocess.Popen, url: str, log: Path, start_s: float) -> None:
    end = time.monotonic() + start_s
    while time.monotonic() < end and process.poll() is None:
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"it does not start: {log.read_text(errors='replace')[-2000:]}")
