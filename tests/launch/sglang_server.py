"""Real SGLang servers on 127.0.0.1, on the CPU."""

import urllib.request
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from minirl.config import SglangConfig
from minirl.sglang import process
from tests.waiting import wait_until

ARGUMENTS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "context-length": 4096,
    "max-total-tokens": 16384,
    "max-running-requests": 8,
    # States of linear attention; else a share of the machine's memory is taken for them.
    "max-mamba-cache-size": 64,
}
VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONPATH": str(Path(__file__).parent / "sglang_shim"),
    "HF_HUB_OFFLINE": "1",
    # Else in bfloat16 whatever the model is in.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    # Several servers on few cores: threads that wait for each other take the time of all.
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def serve(
    python: str, model: Path, logs: Path, *, count: int = 1, flags: Iterable[str] = ()
) -> Generator[tuple[str, ...]]:
    """Serve a Hugging Face folder as the model `tiny` until the block ends; give the addresses."""
    arguments = {**ARGUMENTS, "served-model-name": "tiny", **dict.fromkeys(flags, True)}
    config = SglangConfig(launch=count, python=python, arguments=arguments, variables=VARIABLES)
    children = process.launch(config, model, dtype="float32", seed=0, logs=logs)
    try:
        for child in children:
            wait_until(lambda child=child: _is_ready(child), limit_s=480)
        yield tuple(child.url for child in children)
    finally:
        process.close(children)


def _is_ready(child: process.ChildServer) -> bool:
    assert child.is_running, child.log_tail()
    with suppress(OSError), urllib.request.urlopen(f"{child.url}/ready", timeout=5):
        return True
    return False
