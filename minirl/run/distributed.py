"""Processes of one run, each with its own devices: how they start and exchange values.

All run the same program on the same numbers. Only episodes and rows of a batch are divided;
`gather` collects the parts, so that filters, advantages, metrics and the order of data are computed
by every process from all of them. An error or a signal of one process reaches the others there too.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax._src import distributed  # the store of the processes has no public name
from jax.experimental import multihost_utils

from minirl.exchange import LostError, UserError
from minirl.run import preemption
from minirl.run.preemption import Preempted

_Made = TypeVar("_Made")
_Item = TypeVar("_Item")

# Longest wait for the others at the start: their images may have to be loaded first.
_START_S = 600
# Larger messages go from device to device, smaller ones through the first process.
_MESSAGE_BYTES = 2**20
# Between two checks for a signal while waiting for another process, and for the signals of others.
_WAIT_MS = 200
_POLL_SIGNALS_S = 1.0
_FLUSH_S = 2.0
_STOP = "minirl/stop"
_NOT_FOUND = (
    "the processes of this run do not find each other ({}); give all the same --coordinator and "
    "--processes, and each its own --process"
)
# How JAX's transports word that a process has gone.
_LOST = ("Gloo", "gloo", "UNAVAILABLE", "DEADLINE_EXCEEDED", "NCCL", "oordination service")
# Of exchanges: every process makes the same ones in the same order.
_numbers = itertools.count(1)


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    heartbeat_s: int = 60,
) -> None:
    """Join the other processes, before any other use of JAX: from `host:port` of the first one, how
    many there are, and the number of this one, from 0. One without a heartbeat for so many seconds
    is dead, which ends all.

    Without an address, or with `auto`, Slurm, a TPU's or another environment that JAX knows has all
    this.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its preemption service lets work go on to the next step, and does not serve a single process.
    jax.config.update("jax_enable_preemption_service", False)  # noqa: FBT003
    is_told = (coordinator or "auto", processes, process) != ("auto", None, None)
    settings: dict[str, Any] = {"local_device_ids": _slurm_devices()}
    if is_told:
        settings = {
            "coordinator_address": coordinator,
            "num_processes": processes,
            "process_id": process,
            "cluster_detection_method": "deactivate",
        }
    # JAX would end the process for it with a dump of its stack.
    timer = threading.Timer(_START_S, _give_up)
    timer.daemon = True
    timer.start()
    try:
        if is_told:
            _check_address(f"{coordinator}", is_ours=process == 0)
        jax.distributed.initialize(
            **settings, initialization_timeout=2 * _START_S, heartbeat_timeout_seconds=heartbeat_s
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(_NOT_FOUND.format(" ".join(str(error).split()))) from None
    finally:
        timer.cancel()
    preemption.share(_SharedSignal().poll)


def _check_address(address: str, *, is_ours: bool) -> None:
    """Raise an error where JAX would crash or wait: for what is no address, or a port in use."""
    match = re.fullmatch(r"\S+:(\d{1,5})", address)
    port = int(match[1]) if match else 0
    if not 0 < port < 2**16:
        raise ValueError(f"{address} is not HOST:PORT")
    if is_ours:
        socket.create_server(("", port)).close()


def _give_up() -> None:
    sys.stderr.write(f"error: {_NOT_FOUND.format(f'not all are there after {_START_S} s')}\n")
    leave(2)


def is_joined() -> bool:
    """Tell whether this is one of several processes, without initialising the devices."""
    return distributed.global_state.client is not None


def is_lost(error: Exception) -> bool:
    """Tell whether an error says that another process has ended or is out of reach."""
    is_jax = isinstance(error, jax.errors.JaxRuntimeError)
    return is_jax and any(words in str(error) for words in _LOST)


def leave(status: int) -> NoReturn:
    """End this process at once, without the barrier at which all wait for all."""
    sys.stdout.flush()
    sys.stderr.flush()
    if distributed.global_state.process_id == 0:
        time.sleep(_FLUSH_S)  # its end ends the others, whose error may say more
    os._exit(status)


def is_announced() -> bool:
    """Tell whether the environment declares several processes."""
    slurm = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    tpu = "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return slurm or tpu or "MEGASCALE_COORDINATOR_ADDRESS" in os.environ


def _slurm_devices() -> list[int] | None:
    """Give a task that is alone on its node all GPUs that it sees; JAX would take one."""
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    # Fewer than the node has, where others are for SGLang's servers.
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and shown:
        gpus = str(len(shown.split(",")))
    is_alone = tasks.partition("(")[0] == "1"
    return list(range(int(gpus))) if is_alone and gpus.isdigit() else None


def is_first() -> bool:
    """Tell whether this process writes and prints."""
    return jax.process_index() == 0


def count() -> int:
    """Return how many processes there are."""
    return jax.process_count()


def process_share(length: int) -> range:
    """Return the indices of this process's part of a list: parts are in order, of like size."""
    bounds = [length * p // count() for p in range(count() + 1)]
    return range(bounds[jax.process_index()], bounds[jax.process_index() + 1])


def gather(make: Callable[[], _Made]) -> list[_Made]:
    """Do this process's part of some work, and return the parts of all processes, in their order.

    A signal to one of them, a `UserError` or a `LostError` of one is raised in all; the one
    that failed raises its own error.
    """
    if count() == 1:
        return [make()]
    payload, error, stop = b"", None, None
    try:
        payload = pickle.dumps(make())
    except Preempted as notice:
        stop = int(notice.signal)
    except Exception as raised:  # noqa: BLE001
        error = raised
    words = None if error is None else f"{error}" or repr(error)
    is_small = len(payload) <= _MESSAGE_BYTES
    is_lost = isinstance(error, LostError)
    messages = _exchange((stop, words, is_lost, payload if is_small else len(payload)))
    if error is not None:
        raise error
    for process, (_, words, is_lost, _) in enumerate(messages):
        if words is not None:
            # All save what is done, if the one that failed can.
            kind = LostError if is_lost else UserError
            raise kind(f"process {process} failed: {words}")
    signals = [number for number, *_ in messages if number is not None]
    if signals:
        raise Preempted(signals[0])
    parts = [part for *_, part in messages]
    if not all(isinstance(part, bytes) for part in parts):
        parts = _all_gather(payload, parts)
    return [pickle.loads(part) for part in parts]


def from_first(make: Callable[[], _Made]) -> _Made:
    """Let the first process do something, and return its result on all; see `gather`."""
    return gather(lambda: make() if is_first() else None)[0]  # ty: ignore[invalid-explicit-return]


@contextmanager
def held_by_first(context: AbstractContextManager[_Made]) -> Generator[_Made]:
    """Let the first process enter a context; all get what it yields, see `from_first`."""
    with ExitStack() as stack:
        yield from_first(lambda: stack.enter_context(context))


def check() -> None:
    """Raise `Preempted` in all processes if a signal came to any; all have to call this."""
    gather(preemption.check)


def whole(array: Any) -> np.ndarray:
    """Return an array that is split over processes, whole; all have to call this."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


class _SharedSignal:
    """The signal that came to any of the processes, in the coordinator's store."""

    _is_sent, _next_poll = False, 0.0

    def poll(self, signal: int | None) -> int | None:
        """Publish this process's signal, or return one of another process."""
        client = distributed.global_state.client
        if client is None:
            return signal
        if signal is not None and not self._is_sent:
            self._is_sent = True
            client.key_value_set(f"{_STOP}/{jax.process_index()}", str(signal))
        if signal is None and time.monotonic() > self._next_poll:
            self._next_poll = time.monotonic() + _POLL_SIGNALS_S
            signals = client.key_value_dir_get(_STOP)
            signal = int(signals[0][1]) if signals else None
        return signal


def _exchange(message: Any) -> list[Any]:
    """Send all processes a small message, and return the messages of all, in their order."""
    client, me = distributed.global_state.client, jax.process_index()
    assert client is not None
    number = next(_numbers)
    folder = f"minirl/{number}"
    client.key_value_set_bytes(f"{folder}/{me}", pickle.dumps(message))
    messages = [message if n == me else _receive(client, f"{folder}/{n}") for n in range(count())]
    # All have sent this one, so all have received those of the exchange before it.
    client.key_value_delete(f"minirl/{number - 1}/{me}")
    return messages


def _receive(client: Any, key: str) -> Any:
    """Wait for a message, and download it once."""
    while True:
        try:
            return pickle.loads(client.blocking_key_value_get_bytes(key, _WAIT_MS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        # Not a barrier: a signal that comes meanwhile is sent to those that still work.
        preemption.noticed()


def _all_gather(payload: bytes, sizes: list[Any]) -> list[bytes]:
    """Exchange large messages from device to device, in few sizes: each is a program."""
    lengths = [size if isinstance(size, int) else len(size) for size in sizes]
    padded = np.zeros(1 << (max(lengths) - 1).bit_length(), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
