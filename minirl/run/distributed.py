"""Processes of one run, each with its own devices: how they start, what they tell each other.

All run the same program on the same numbers. Only what takes time is shared out, episodes and rows
of a batch; `gather` brings it together again, so that everything between (filters, advantages,
metrics, the order of data) is computed by each from all of it, and does not depend on how many they
are. It is also where they learn that one of them is to be stopped or failed: none waits for it.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax._src import distributed  # the key-value store of the processes has no public name
from jax.experimental import multihost_utils

from minirl.errors import ServersLostError, UserError
from minirl.run import preemption
from minirl.run.preemption import Preempted

_Made = TypeVar("_Made")
_Item = TypeVar("_Item")

_HEARTBEAT_S = 60
# Longest wait for the others at the start: their images may have to be loaded first.
_START_S = 600
# Larger messages go from device to device, smaller ones through the first process.
_MESSAGE_BYTES = 2**20
_LONGEST_PAUSE_S = 0.05
_LOOK_EVERY_S = 1.0
_FAREWELL_S = 2.0
_STOP = "minirl/stop"
# What JAX's transports say of a process that is not there any more.
_LOST = ("Gloo", "gloo", "UNAVAILABLE", "DEADLINE_EXCEEDED", "NCCL", "oordination service")
# Of exchanges: every process makes the same ones in the same order.
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands among those of its run.

    Attributes:
        coordinator: `host:port` of the first process.
        processes: How many there are.
        process: Number of this one, from 0.
        heartbeat_s: A process that was not heard of for so long is taken for dead, which ends the
            others.
    """

    coordinator: str
    processes: int
    process: int
    heartbeat_s: int = _HEARTBEAT_S


def join(place: Place | None) -> None:
    """Become one of several processes, before anything else is asked of JAX.

    Args:
        place: None where Slurm, a TPU's or another environment that JAX knows tells it.

    Raises:
        UserError: The others cannot be found.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Signals are noted by `preemption`, and told by what is below.
    jax.config.update("jax_enable_preemption_service", False)  # noqa: FBT003
    heartbeat_s = _HEARTBEAT_S if place is None else place.heartbeat_s
    where: dict[str, Any] = {"local_device_ids": _slurm_devices()}
    if place is not None:
        where = {
            "coordinator_address": place.coordinator,
            "num_processes": place.processes,
            "process_id": place.process,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **where, initialization_timeout=_START_S, heartbeat_timeout_seconds=heartbeat_s
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the processes of this run do not find each other ({' '.join(str(error).split())}); "
            "give all the same --coordinator and --processes, and each its own --process"
        ) from None
    preemption.share(_Board().look)


def is_joined() -> bool:
    """Tell whether this is one of several processes, without a look at the devices."""
    return distributed.global_state.client is not None


def is_lost(error: Exception) -> bool:
    """Tell whether an error says that another process has ended or is out of reach."""
    return isinstance(error, jax.errors.JaxRuntimeError) and any(
        words in str(error) for words in _LOST
    )


def leave(status: int) -> NoReturn:
    """End this process at once, without the farewell for which all wait for all."""
    sys.stdout.flush()
    sys.stderr.flush()
    if distributed.global_state.process_id == 0:
        time.sleep(_FAREWELL_S)  # its end ends the others, who may know more
    os._exit(status)


def is_announced() -> bool:
    """Tell whether the environment says that this is one of several processes."""
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


def own_share(length: int) -> range:
    """Return the places of this process's part of a list: parts are in order and alike in size."""
    bounds = [length * p // count() for p in range(count() + 1)]
    return range(bounds[jax.process_index()], bounds[jax.process_index() + 1])


def gather(make: Callable[[], _Made]) -> list[_Made]:
    """Do this process's part of some work, and get the parts of all processes, in their order.

    Args:
        make: Gives this process's part; it may be abandoned.

    Raises:
        Preempted: A signal came to one of them.
        UserError: One of them failed; this one with its own error if it is the one.
        ServersLostError: One of them has none to sample.
    """
    if count() == 1:
        return [make()]
    payload, error, stop = b"", None, None
    try:
        payload = pickle.dumps(make())
    except Preempted as notice:
        stop = int(notice.signal)
    except Exception as found:  # noqa: BLE001
        error = found
    words = None if error is None else f"{error}" or repr(error)
    is_small = len(payload) <= _MESSAGE_BYTES
    is_lost = isinstance(error, ServersLostError)
    told = _exchange((stop, words, is_lost, payload if is_small else len(payload)))
    if error is not None:
        raise error
    _stop_together([one[:3] for one in told])
    if all(isinstance(part, bytes) for *_, part in told):
        return [pickle.loads(part) for *_, part in told]
    return [pickle.loads(part) for part in _all_gather(payload, [part for *_, part in told])]


def _stop_together(told: list[tuple[int | None, str | None, bool]]) -> None:
    for process, (_, words, is_lost) in enumerate(told):
        if words is not None:
            # All save what is done, if the one that failed can.
            kind = ServersLostError if is_lost else UserError
            raise kind(f"process {process} failed: {words}")
    signals = [number for number, *_ in told if number is not None]
    if signals:
        raise Preempted(signals[0])


def from_first(make: Callable[[], _Made]) -> _Made:
    """Let the first process do something, and give its result to all; see `gather`."""
    return gather(lambda: make() if is_first() else None)[0]  # ty: ignore[invalid-explicit-return]


@contextmanager
def held_by_first(context: AbstractContextManager[_Made]) -> Generator[_Made]:
    """Let the first process enter a context for all; see `from_first`."""
    with ExitStack() as stack:
        yield from_first(lambda: stack.enter_context(context))


def check() -> None:
    """Stop here if a signal came to any process; all have to ask, and all stop.

    Raises:
        Preempted: It came.
    """
    gather(preemption.check)


def checked(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield the items, with a `check` before each."""
    for item in items:
        check()
        yield item


def whole(array: Any) -> np.ndarray:
    """Return an array that is split over processes; all have to ask."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


class _Board:
    """Where processes post their signals, and look for the others'."""

    def __init__(self) -> None:
        self._posted = False
        self._next_look = 0.0

    def look(self, own: int | None) -> int | None:
        client = distributed.global_state.client
        if client is None:
            return own
        if own is not None and not self._posted:
            self._posted = True
            client.key_value_set(f"{_STOP}/{jax.process_index()}", str(own))
        if own is None and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK_EVERY_S
            posted = client.key_value_dir_get(_STOP)
            own = int(posted[0][1]) if posted else None
        return own


def _exchange(message: Any) -> list[Any]:
    """Tell all processes a small thing, and wait for theirs."""
    client, own = distributed.global_state.client, jax.process_index()
    assert client is not None
    number = next(_numbers)
    folder = f"minirl/{number}"
    client.key_value_set_bytes(f"{folder}/{own}", pickle.dumps(message))
    pause = 0.0005
    # Not a barrier: signals are noted between two looks, and told to those that still work.
    while len(found := client.key_value_dir_get_bytes(folder)) < count():
        preemption.noticed()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    # All have come as far as this, so all have read the exchange before it.
    client.key_value_delete(f"minirl/{number - 1}/{own}")
    by_process = {int(key.rpartition("/")[2]): value for key, value in found}
    return [pickle.loads(by_process[process]) for process in range(count())]


def _all_gather(payload: bytes, sizes: list[Any]) -> list[bytes]:
    """Exchange large messages from device to device, in few sizes: each is a program."""
    lengths = [size if isinstance(size, int) else len(size) for size in sizes]
    padded = np.zeros(1 << (max(lengths) - 1).bit_length(), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
