"""The ways by which new weights come to servers: a folder, broadcasts, tensors over HTTP.

A way makes parcels of a model, of which all processes together bring one tensor at a time into one
place, and tells how a server takes them; `belt` brings them there.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minirl.model.huggingface import tensor_names
from minirl.model.sharding import is_stacked, param_path
from minirl.sglang.client import BRIEF_S, RefusedError, Server, ServerError
from minirl.sglang.push import by_layer, version_folder, whole_tensors, write_version

if TYPE_CHECKING:
    from minirl.sglang.nccl import Group

# Largest bucket of tensors; a tensor that is larger goes alone. Over HTTP it is in memory some six
# times, as tensors, pickled, in base64, and on its way.
_BROADCAST_BYTES, _HTTP_BYTES = 2**28, 2**26
# Weights of a server that has only some of the new ones: what it samples with them is refused.
_PARTIAL = "-partial"


class Parcel(Protocol):
    """Weights, or a part of them."""

    @property
    def nbytes(self) -> int:
        """Return their size."""
        ...


Whole = jax.Array | np.ndarray
Take = Callable[[Any], Awaitable[None]]
# Makes parcels once more, by one process alone.
Again = Callable[[], Iterator[Parcel]]


class Way(Protocol):
    """How weights come to a server.

    Attributes:
        endpoints: Those that the server must have for it.
        one_group: Whether only the ranks of one tensor-parallel group are reached.
        advice: What a server needs that refuses the first weights.
    """

    endpoints: ClassVar[tuple[str, ...]]
    one_group: ClassVar[bool]
    advice: ClassVar[str]

    def parcels(self, params: nnx.State, name: str) -> Iterator[Parcel]:
        """Make parcels of all weights of a model; all processes have to ask."""
        ...

    def again(self, params: Callable[[], nnx.State] | None, name: str) -> Again | None:
        """Return how to make them once more, for a server that missed them; None for not at all.

        Args:
            params: Gives the weights, from any thread and with no other process; None if it cannot.
            name: Of the weights.
        """
        ...

    def taking(
        self, server: Server, name: str, *, ranks: int, timeout_s: float
    ) -> AbstractAsyncContextManager[Take]:
        """Let a paused server take parcels, one after the other.

        Args:
            server: It.
            name: Of the weights.
            ranks: Over how many tensor-parallel ranks the server is split.
            timeout_s: Longest wait for each parcel.

        Raises:
            ServerError: It has not taken them.
            RefusedError: It does not take them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Folder:
    """A parcel on the disk."""

    path: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A parcel of whole tensors, on one device of this process or its host.

    Attributes:
        tensors: Each with its Hugging Face name.
        is_last: Whether the model is complete with it.
    """

    tensors: tuple[tuple[str, Whole], ...]
    is_last: bool

    @property
    def nbytes(self) -> int:
        """Return their size."""
        return sum(array.nbytes for _, array in self.tensors)


class Disk:
    """A folder that servers read; each process writes the parts that it holds."""

    endpoints: ClassVar[tuple[str, ...]] = ("/update_weights_from_disk",)
    one_group: ClassVar[bool] = False
    advice: ClassVar = (
        "it has to serve the same model, and to see rollout.sglang.weights at the same path"
    )

    def __init__(self, place: Path, dtype: str) -> None:
        self._place, self._dtype = place, dtype

    def parcels(self, params: nnx.State, name: str) -> Iterator[Folder]:
        """Write the folder."""
        yield Folder(*write_version(self._place, name, params, dtype=self._dtype))

    def again(self, params: Callable[[], nnx.State] | None, name: str) -> Again:
        """Return the folder that was written."""
        del params
        folder = version_folder(self._place, name)
        return lambda: iter([Folder(folder, 0)])

    @asynccontextmanager
    async def taking(
        self, server: Server, name: str, *, ranks: int, timeout_s: float
    ) -> AsyncGenerator[Take]:
        """Let a server read the folder."""
        del ranks

        async def take(folder: Folder) -> None:
            body = {"model_path": str(folder.path), "weight_version": name, "flush_cache": True}
            await server.tell("/update_weights_from_disk", body, timeout_s=timeout_s)

        yield take


class _Buckets:
    """Parcels that are never on a disk."""

    one_group: ClassVar[bool] = True
    bucket_bytes: ClassVar[int]

    def __init__(self, place: Path, dtype: str) -> None:
        del place
        self._dtype = dtype

    def parcels(self, params: nnx.State, name: str) -> Iterator[Bucket]:
        """Gather tensor by tensor."""
        del name
        return buckets(whole_tensors(params, self._dtype), max_bytes=self.bucket_bytes)

    def again(self, params: Callable[[], nnx.State] | None, name: str) -> Again | None:
        """Collect them once more, while the learner has not overwritten them."""
        del name
        if params is None:
            return None
        return lambda: buckets(host_tensors(params(), self._dtype), max_bytes=self.bucket_bytes)


class Broadcasts(_Buckets):
    """A PyTorch process group with each server, made anew for each push.

    So a server that was restarted, or hangs in a broadcast, does nothing to the others.
    """

    endpoints: ClassVar[tuple[str, ...]] = (
        *("/init_weights_update_group", "/destroy_weights_update_group"),
        *("/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"),
    )
    advice: ClassVar[str] = "it has to serve the same model, and to reach this host"
    bucket_bytes: ClassVar[int] = _BROADCAST_BYTES

    @asynccontextmanager
    async def taking(
        self, server: Server, name: str, *, ranks: int, timeout_s: float
    ) -> AsyncGenerator[Take]:
        """Broadcast to the ranks of a server."""
        from minirl.sglang.nccl import Group

        try:
            address = await asyncio.to_thread(_own_address, server.url)
            group = Group(ranks, timeout_s=timeout_s)
        except (OSError, RuntimeError) as error:
            # Its name is not known at the moment, or there is no port.
            raise ServerError(
                "connection", f"cannot be reached for a broadcast ({error})"
            ) from None
        named = {"group_name": group.name}
        joining = named | {
            "master_address": address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "backend": group.backend,
        }

        async def take(bucket: Bucket) -> None:
            body = named | {
                "names": [name for name, _ in bucket.tensors],
                "dtypes": [array.dtype.name for _, array in bucket.tensors],
                "shapes": [array.shape for _, array in bucket.tensors],
                **_version(name, bucket),
            }
            asked = server.tell("/update_weights_from_distributed", body, timeout_s=timeout_s)
            arrays = [array for _, array in bucket.tensors]
            await _both(asked, lambda: group.broadcast(arrays), timeout_s=timeout_s)

        try:
            asked = server.tell("/init_weights_update_group", joining, timeout_s=timeout_s)
            await _both(asked, group.join, timeout_s=timeout_s)
            async with _updating(server):
                yield take
        finally:
            await _leave(server, group)


class Tensors(_Buckets):
    """Tensors in the bodies of requests, by way of this host's memory."""

    endpoints: ClassVar[tuple[str, ...]] = (
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
    )
    advice: ClassVar[str] = "it has to serve the same model"
    bucket_bytes: ClassVar[int] = _HTTP_BYTES

    @asynccontextmanager
    async def taking(
        self, server: Server, name: str, *, ranks: int, timeout_s: float
    ) -> AsyncGenerator[Take]:
        """Send the same tensors to each rank of a server."""

        async def take(bucket: Bucket) -> None:
            body = await asyncio.to_thread(_body, bucket, name, ranks)
            await server.tell("/update_weights_from_tensor", body, timeout_s=timeout_s)

        async with _updating(server):
            yield take


WAYS: dict[str, type[Disk | Broadcasts | Tensors]] = {
    "disk": Disk,
    "nccl": Broadcasts,
    "tensor": Tensors,
}
"""The values of `rollout.sglang.push`."""


def buckets(tensors: Iterable[tuple[str, Whole]], *, max_bytes: int) -> Iterator[Bucket]:
    """Put tensors together, in order.

    Args:
        tensors: With their names.
        max_bytes: Size above which a bucket is not grown; one tensor may be larger.
    """
    held: list[tuple[str, Whole]] = []
    for name, array in tensors:
        if held and sum(one.nbytes for _, one in held) + array.nbytes > max_bytes:
            yield Bucket(tuple(held), is_last=False)
            held = []
        held.append((name, array))
    yield Bucket(tuple(held), is_last=True)


def host_tensors(params: nnx.State, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the same in this host's memory, if all parts of the weights are on its devices.

    No program is run over several devices: another thread may be running one.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        names = tensor_names(param_path(path), leaf.shape)
        layers = len(names) if is_stacked(param_path(path), leaf.ndim) else None
        shape = leaf.shape if layers is None else leaf.shape[1:]
        shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
        parts = [
            (one.index[-len(shape) :], by_layer(one.data, layers, dtype=dtype)) for one in shards
        ]
        for name in names:
            whole = np.empty(shape, jnp.dtype(dtype))
            for index, part in parts:
                whole[index] = next(part)
            yield name, whole


@asynccontextmanager
async def _updating(server: Server) -> AsyncGenerator[None]:
    with suppress(RefusedError):  # one that was abandoned is still open
        await server.tell("/end_weight_update", {}, timeout_s=BRIEF_S)
    await server.tell("/begin_weight_update", {}, timeout_s=BRIEF_S)
    yield
    await server.tell("/end_weight_update", {}, timeout_s=BRIEF_S)


def _version(name: str, bucket: Bucket) -> dict[str, Any]:
    return {
        "weight_version": name if bucket.is_last else name + _PARTIAL,
        "flush_cache": bucket.is_last,
    }


def _body(bucket: Bucket, name: str, ranks: int) -> BytesIO:
    """Write a request's JSON; of the base64 in it nothing is to be escaped."""
    from minirl.sglang.nccl import pickled

    text = b'"' + pickled(bucket.tensors) + b'"'
    head = json.dumps(_version(name, bucket)).encode()
    texts = b",".join([text] * ranks)
    return BytesIO(b"".join([head[:-1], b', "serialized_named_tensors": [', texts, b"]}"]))


async def _both(asked: Awaitable[None], work: Callable[[], None], *, timeout_s: float) -> None:
    """Let a server and this process do their parts of something.

    Raises:
        ServerError: One of them did not.
        RefusedError: The server will not.
    """
    request = asyncio.ensure_future(asked)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(request, _in_thread(work))
    except TimeoutError:
        raise ServerError("deadline", f"took no broadcast within {timeout_s:g} s") from None
    except RuntimeError as error:
        words = " ".join(str(error).split())[:160]
        raise ServerError("connection", f"took no broadcast ({words})") from None
    finally:
        request.cancel()


def _in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Do something that may hang, in a thread that nobody has to wait for, not even at the end."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (raised where it is waited for)
            future.set_exception(error)

    Thread(target=run, name="push", daemon=True).start()
    return asyncio.wrap_future(future)


async def _leave(server: Server, group: Group) -> None:
    group.close()
    with suppress(ServerError, RefusedError):
        body = {"group_name": group.name}
        await server.tell("/destroy_weights_update_group", body, timeout_s=BRIEF_S)


def _own_address(url: str) -> str:
    """Return the address of this host that a server finds it by."""
    where = urlsplit(url)
    found = socket.getaddrinfo(where.hostname, where.port or 80, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    # Nothing is sent: a socket of datagrams only looks for its way.
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(address)
        return towards.getsockname()[0]
