"""How long do new weights take to real servers, and to the disk beside its own speed?

    python benchmarks/push.py --sglang-python .venv-sglang/bin/python

The demo's model goes to two SGLang servers on the CPU by a folder and by broadcasts (Gloo), which
need PyTorch here too (the extra `torch`) and are left out without it. Then the shapes of a model of
1.5 billion parameters go to a folder, by turns with a plain file of the same bytes. Prints one JSON
object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from launch.config import load_config
from minirl.config import SglangConfig
from minirl.model import huggingface
from minirl.model.decoder import Decoder
from minirl.model.lora import split
from minirl.model.tiny import make_tiny
from minirl.model.tokenizer import ChatTokenizer
from minirl.plan.memory import published_shape
from minirl.sglang.sampler import Servers
from minirl.sglang.transfer import BACKENDS, remove_versions, write_version
from minirl.train.samplers import make_sampler
from tests.launch.sglang_server import serve

TEXTS = ("SELECT name FROM singer WHERE age > 20 ORDER BY age DESC LIMIT 1;",)
CHUNK = 2**26


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sglang-python", help="of an environment with SGLang; none: disk alone")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument(
        "--pushes", type=int, default=5, help="by each backend, after one that warms"
    )
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="one of minirl/shapes.yaml")
    parser.add_argument("--rounds", type=int, default=3, help="of the disk beside its own speed")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured")
    options = parser.parse_args()
    report: dict[str, Any] = {"cpu_count": os.cpu_count(), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        if options.sglang_python:
            report["demo"] = demo(Path(work), options)
        report["disk"] = disk(Path(work), options.model, options.rounds)
    report["load_after"] = os.getloadavg()[0]
    print(json.dumps(report, indent=2))


def demo(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Push the demo's model by every backend."""
    config = load_config("progress-demo.yaml", [])
    assert config.model.tiny is not None
    model_folder = work / "model"
    make_tiny(model_folder, TEXTS, config.model.tiny, config.seed)
    found: dict[str, Any] = {"servers": options.servers, "pushes": options.pushes}
    with ExitStack() as stack, ThreadPoolExecutor(options.servers) as pool:
        logs = [work / f"{number}.log" for number in range(options.servers)]
        starts = [serve(options.sglang_python, model_folder, log) for log in logs]
        urls = list(pool.map(stack.enter_context, starts))
        for push in BACKENDS:
            if push != "disk" and importlib.util.find_spec("torch") is None:
                found[push] = "left out: PyTorch is not installed here"
                continue
            found[push] = by_backend(push, model_folder, work, urls, options.pushes)
    return found


def by_backend(
    push: str, model_folder: Path, work: Path, urls: Sequence[str], pushes: int
) -> dict[str, Any]:
    config = load_config("progress-demo.yaml", [])
    model = huggingface.load(model_folder)
    _, params, _ = split(model)
    settings = SglangConfig.model_validate({"urls": tuple(urls), "push": push})
    sampler = config.sampler.model_copy(
        update={"max_prompt_tokens": 100, "max_response_tokens": 100}
    )
    lines: list[dict[str, float]] = []
    with Servers(settings, model_folder, sampler, dtype="float32", seed=0, folder=work) as servers:
        tokenizer = ChatTokenizer(model_folder)
        one = make_sampler(model, sampler, tokenizer, group_size=1, seed=0, servers=servers)
        for version in range(1 + pushes):
            params = jax.tree.map(lambda leaf: leaf * 1.01, params)
            begun = time.perf_counter()
            one.set_weights(params, version=version)
            lines.append({"seconds": time.perf_counter() - begun, **one.numbers()})
    lines = lines[1:]
    times = ("seconds", "time/push_probe_s", "time/push_write_s", "time/push_load_s")
    return {
        "bytes": lines[0]["sglang/push_bytes"],
        "probe_gap": max(line["sglang/probe_gap"] for line in lines),
        "failed": sum(value for line in lines for key, value in line.items() if "failed" in key),
        **{key: spread([line[key] for line in lines]) for key in times},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


def disk(work: Path, name: str, rounds: int) -> dict[str, Any]:
    """Write a model's folder, and as many plain bytes, by turns."""
    config, place = published_shape(name), work / "weights"
    shapes = nnx.state(nnx.eval_shape(lambda: Decoder(config, key=jax.random.key(0))), nnx.Param)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: _random(rng, leaf.shape), shapes)
    ours, plain, size = [], [], 0
    for number in range(rounds):
        begun = time.perf_counter()
        size = write_version(place, str(number), params, dtype="bfloat16").nbytes
        ours.append(time.perf_counter() - begun)
        remove_versions(place)
        plain.append(_write_plain(work / "plain", size))
    return {
        "model": name,
        "bytes": size,
        "folder_s": spread(ours),
        "plain_s": spread(plain),
        "folder_s_per_GB": round(statistics.median(ours) / size * 1e9, 3),
        "plain_s_per_GB": round(statistics.median(plain) / size * 1e9, 3),
        "ratio": round(statistics.median(ours) / statistics.median(plain), 3),
    }


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(rng.integers(0, 2**15, shape, np.uint16)).view(jnp.bfloat16)


def _write_plain(path: Path, size: int) -> float:
    """Write and sync a file of random bytes; return the seconds."""
    block = np.random.default_rng(1).bytes(CHUNK)
    begun = time.perf_counter()
    with path.open("wb") as file:
        for start in range(0, size, CHUNK):
            file.write(block[: size - start])
        file.flush()
        os.fsync(file.fileno())
    took = time.perf_counter() - begun
    path.unlink()
    return took


if __name__ == "__main__":
    main()
