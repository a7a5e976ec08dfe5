"""New weights on their way to SGLang servers: by a folder that servers read, or by broadcasts.

A backend cuts the weights of a model into buckets, which all processes of the learner make
together, and sends buckets to one server. Its `send` raises as `Server` does.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from minirl.config import LoraConfig
from minirl.model.config import SINGLE
from minirl.model.huggingface import (
    target_modules,
    tensor_names,
    tensor_shapes,
    write_adapter,
    write_file,
)
from minirl.model.sharding import is_stacked, param_path
from minirl.run import distributed
from minirl.run.files import appearing
from minirl.sglang.client import RejectedError, Server, ServerError

_VERSION = "version-"
# Largest bucket of a broadcast; a larger tensor goes alone.
_BUCKET_BYTES = 2**28
# Ends the name of weights of which a server has only a part: no reply with them is accepted.
_PARTIAL = "-partial"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some of the weights, in memory: whole tensors by their Hugging Face names."""

    tensors: tuple[tuple[str, jax.Array], ...]
    is_last: bool


class Disk:
    """A folder of safetensors that servers see at the same path as the learner."""

    def __init__(self, place: Path, dtype: str) -> None:
        self._place, self._dtype = place, dtype

    def buckets(self, params: nnx.State, name: str) -> Iterator[Path]:
        """Write the folder; all processes have to call this."""
        yield write_version(self._place, name, params, dtype=self._dtype)

    async def send(
        self, server: Server, name: str, buckets: AsyncIterator[Path], *, timeout_s: float
    ) -> None:
        """Let a paused server load the folder."""
        async with server.paused():
            async for folder in buckets:
                body = {"model_path": str(folder), "weight_version": name, "flush_cache": True}
                await server.post("/update_weights_from_disk", body, timeout_s=timeout_s)


class Adapters:
    """Adapters alone, which servers add to the weights that they have (SGLang's LoRA).

    Each version is an adapter with a name of its own, and so are its keys in a server's cache:
    nothing is paused, and a reply ends with the adapter that it began with.
    """

    def __init__(self, place: Path, lora: LoraConfig, *, base: Path) -> None:
        self._place, self._lora, self._base = place, lora, str(base)

    @staticmethod
    def options(lora: LoraConfig) -> list[str]:
        """Return what a server is launched with: room for two versions, and for none in a batch."""
        sizes = ["--max-lora-rank", str(lora.rank), "--max-loras-per-batch", "3"]
        return ["--enable-lora", *sizes, "--lora-target-modules", *target_modules(lora)]

    def buckets(self, params: nnx.State, name: str) -> Iterator[Path]:
        """Write the adapters as PEFT does; all processes have to call this."""
        folder = version_folder(self._place, name)
        tensors = [(name, np.asarray(array)) for name, array in whole_tensors(params, "float32")]
        distributed.from_first(
            lambda: write_adapter(
                folder, tensor_shapes(params), tensors, self._lora, base=self._base
            )
        )
        yield folder

    async def send(
        self, server: Server, name: str, buckets: AsyncIterator[Path], *, timeout_s: float
    ) -> None:
        """Let a server load the folder, and ask it with these adapters from now on.

        It keeps those before, with which replies are under way, until the next are there.
        """
        async for folder in buckets:
            body = {"lora_name": name, "lora_path": str(folder)}
            await server.post("/load_lora_adapter", body, timeout_s=timeout_s)
        kept = tuple(one for one in server.adapters if one != name)
        older, server.adapters = kept[:-1], (*kept[-1:], name)
        for old in older:
            with suppress(RejectedError):  # a server that was restarted has none
                body = {"lora_name": old}
                await server.post("/unload_lora_adapter", body, timeout_s=timeout_s)


class Nccl:
    """Broadcasts to the tensor-parallel ranks of each server, over NCCL from GPUs, else Gloo.

    Every push makes a process group for each server, so that one that was restarted, or hangs in a
    broadcast, does nothing to the others.
    """

    def __init__(self, _place: Path, dtype: str) -> None:
        self._dtype = dtype

    def buckets(self, params: nnx.State, _name: str) -> Iterator[Bucket]:
        """Collect the tensors, some at a time; all processes have to call this."""
        return bucketed(whole_tensors(params, self._dtype), max_bytes=_BUCKET_BYTES)

    async def send(
        self, server: Server, name: str, buckets: AsyncIterator[Bucket], *, timeout_s: float
    ) -> None:
        """Broadcast buckets to the ranks of a paused server, each within the time-out."""
        async with server.paused():
            await self._broadcast(server, name, buckets, timeout_s=timeout_s)

    async def _broadcast(
        self, server: Server, name: str, buckets: AsyncIterator[Bucket], *, timeout_s: float
    ) -> None:
        try:
            address = await asyncio.to_thread(_own_address, server.url)
            group = Group(server.ranks, timeout_s=timeout_s)
        except (OSError, RuntimeError) as error:  # no such name at the moment, or no free port
            raise ServerError("connection", f"cannot be reached for broadcasts ({error})") from None
        named = {"group_name": group.name}
        joining = {
            "master_address": address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "backend": group.backend,
        }
        together = functools.partial(_together, server, timeout_s=timeout_s)
        try:
            await together("/init_weights_update_group", named | joining, group.join)
            with suppress(RejectedError):  # an update that a killed run left open
                await server.post("/end_weight_update", {})
            await server.post("/begin_weight_update", {})
            async for bucket in buckets:
                arrays = [array for _, array in bucket.tensors]
                body = {
                    "names": [name for name, _ in bucket.tensors],
                    "dtypes": [array.dtype.name for array in arrays],
                    "shapes": [array.shape for array in arrays],
                    "weight_version": name if bucket.is_last else name + _PARTIAL,
                    "flush_cache": bucket.is_last,
                }
                broadcast = functools.partial(group.broadcast, arrays)
                await together("/update_weights_from_distributed", named | body, broadcast)
            await server.post("/end_weight_update", {})
        finally:
            group.close()
            with suppress(ServerError, RejectedError):
                await server.post("/destroy_weights_update_group", named)


Backend = Disk | Adapters | Nccl
BACKENDS: dict[str, type[Disk | Nccl]] = {"disk": Disk, "nccl": Nccl}
"""The values of `rollout.sglang.push`."""


class Group:
    """A PyTorch process group: this process as rank 0, and the ranks of one server.

    The prefixes of its store are those of SGLang's `init_custom_process_group` (0.5.23). NCCL has
    run on no GPU yet; Gloo is tested. The time-out is that of joining and of one broadcast.
    """

    def __init__(self, ranks: int, *, timeout_s: float) -> None:
        from torch.distributed import TCPStore  # ty: ignore[import-not-found]  (an extra)

        self.backend = "nccl" if jax.default_backend() == "gpu" else "gloo"
        self.name, self.size = f"minirl-{uuid.uuid4().hex}", 1 + ranks
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = TCPStore(
            "0.0.0.0", 0, self.size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        self.port: int = self._store.port
        self._group: Any = None

    def join(self) -> None:
        """Wait until all ranks are there; RuntimeError if they are not."""
        from torch import distributed as torch  # ty: ignore[import-not-found]  (an extra)

        store, arguments = self._store, (0, self.size, self._timeout)
        for prefix in (self.name, f"{self.name}/", "cuda/" if self.backend == "nccl" else "cpu/"):
            store = torch.PrefixStore(prefix, store)
        if self.backend == "nccl":
            # PyTorch would end the process over a broadcast that a server does not take.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            options = torch.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = torch.ProcessGroupNCCL(store, *arguments[:2], options)
        else:
            self._group = torch.ProcessGroupGloo(store, *arguments)
        self._group._set_sequence_number_for_group()

    def broadcast(self, arrays: Iterable[jax.Array]) -> None:
        """Send arrays to all ranks, and wait until they have them; RuntimeError if one has not."""
        import torch  # ty: ignore[import-not-found]  (an extra)

        convert = torch.from_dlpack if self.backend == "nccl" else host_tensor
        tensors = [convert(array) for array in arrays]
        options = torch.distributed.BroadcastOptions()
        works = [self._group.broadcast([tensor], options) for tensor in tensors]
        for work in works:
            work.wait()
        if self.backend == "nccl":
            # `wait` was for PyTorch's stream alone, and JAX frees the arrays after this.
            torch.cuda.synchronize(tensors[0].device)

    def close(self) -> None:
        """Leave: what NCCL still waits for fails; Gloo's waits end with their own deadline."""
        if self._group is not None:
            self._group.abort()


def host_tensor(array: jax.Array) -> Any:
    """Copy an array into a PyTorch tensor in this host's memory."""
    import torch  # ty: ignore[import-not-found]  (an extra)

    block = np.array(array)
    # As bytes: NumPy's bfloat16 is none of PyTorch's types.
    data = torch.from_numpy(block.reshape(-1).view(np.uint8))
    return data.view(getattr(torch, block.dtype.name)).reshape(block.shape)


def bucketed(tensors: Iterable[tuple[str, jax.Array]], *, max_bytes: int) -> Iterator[Bucket]:
    """Put tensors together, in order, up to a size; one tensor may be larger."""
    held: list[tuple[str, jax.Array]] = []
    for name, array in tensors:
        if held and sum(one.nbytes for _, one in held) + array.nbytes > max_bytes:
            yield Bucket(tuple(held), is_last=False)
            held = []
        held.append((name, array))
    yield Bucket(tuple(held), is_last=True)


def write_version(place: Path, name: str, params: nnx.State, *, dtype: Any) -> Path:
    """Write all weights of a model, split over devices in any way; all processes have to call this.

    Each process writes a file of its share of the tensors to a folder of `place`, which all see. It
    appears when all are whole.
    """
    shapes, folder = tensor_shapes(params), version_folder(place, name)
    process, processes = jax.process_index(), distributed.count()
    own = {tensor: shapes[tensor] for tensor in list(shapes)[process::processes]}
    file = SINGLE if processes == 1 else f"model-{process:05}.safetensors"

    def write_own() -> None:
        tensors = whole_tensors(params, dtype)
        try:
            write_file(new / file, own, (one for one in tensors if one[0] in own), dtype=dtype)
        finally:
            # All processes bring a tensor together: after an error here the others go on.
            for _ in tensors:
                pass

    with distributed.held_by_first(appearing(folder)) as new:
        distributed.gather(write_own)
    distributed.check()  # the folder has its name
    return folder


def version_folder(place: Path, name: str) -> Path:
    """Return where a version is."""
    return place / f"{_VERSION}{name}"


def remove_versions(place: Path, *, but: Path | None = None) -> None:
    """Remove the folders of all versions but one, also those that a kill left half written."""
    for folder in place.glob(f"*{_VERSION}*") if distributed.is_first() else ():
        if folder != but:
            shutil.rmtree(folder, ignore_errors=True)


def whole_tensors(params: nnx.State, dtype: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yield each tensor by its Hugging Face name, whole on the first device of this process.

    Parameters that hold all layers are gathered one layer at a time. All processes have to call
    this.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        place = leaf.sharding
        if isinstance(place, NamedSharding):
            place = NamedSharding(place.mesh, PartitionSpec())
        own, gather = param_path(path), _gather(jnp.dtype(dtype), place)
        for layer, name in enumerate(tensor_names(own, leaf.shape)):
            whole = gather(leaf, layer if is_stacked(own, leaf.ndim) else None)
            # One that is not computed yet has memory of its own already.
            yield name, whole.block_until_ready().addressable_data(0)


@functools.lru_cache
def _gather(dtype: Any, place: Sharding) -> Callable[..., jax.Array]:
    def gather(array: jax.Array, layer: Any) -> jax.Array:
        if layer is not None:
            array = jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
        return array.astype(dtype)

    return jax.jit(gather, out_shardings=place)


async def _together(
    server: Server, path: str, body: dict[str, Any], work: Callable[[], None], *, timeout_s: float
) -> None:
    """Let a server and this process do their parts of a collective operation."""
    asked = asyncio.ensure_future(server.post(path, body, timeout_s=timeout_s))
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(asked, _in_daemon(work))
    except TimeoutError:
        raise ServerError("deadline", f"took no broadcast within {timeout_s:g} s") from None
    except RuntimeError as error:
        message = " ".join(str(error).split())[:160]
        raise ServerError("connection", f"took no broadcast ({message})") from None
    finally:
        asked.cancel()


def _in_daemon(work: Callable[[], None]) -> asyncio.Future[None]:
    """Do something that may hang in a thread that nobody waits for at the end of the process."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (raised where it is awaited)
            future.set_exception(error)

    Thread(target=run, name="broadcast", daemon=True).start()
    return asyncio.wrap_future(future)


def _own_address(url: str) -> str:
    """Return the address of this host that a server finds it by."""
    where = urlsplit(url)
    port = where.port or {"http": 80, "https": 443}[where.scheme]
    with socket.create_connection((where.hostname, port), timeout=10) as towards:
        return towards.getsockname()[0]
