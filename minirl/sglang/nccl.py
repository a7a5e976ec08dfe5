"""What weights need of PyTorch on their way to servers: tensors, and process groups.

Written for PyTorch 2.13. NCCL's part has run on no GPU yet; Gloo's is tested with real servers.
"""

from __future__ import annotations

import base64
import os
import pickle
import uuid
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import jax
import numpy as np
import torch  # ty: ignore[import-not-found]  (an extra)
from torch.distributed import (  # ty: ignore[import-not-found]  (an extra)
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)


def host_tensor(array: jax.Array | np.ndarray) -> torch.Tensor:
    """Copy an array into a tensor in this host's memory."""
    block = np.array(array)
    # As bytes: NumPy's bfloat16 is none of PyTorch's types.
    data = torch.from_numpy(block.reshape(-1).view(np.uint8))
    return data.view(getattr(torch, block.dtype.name)).reshape(block.shape)


def pickled(tensors: Iterable[tuple[str, jax.Array | np.ndarray]]) -> bytes:
    """Write names and tensors as `update_weights_from_tensor` reads them, in base64.

    They go through this host's memory. Handles of CUDA's memory, which SGLang takes too, would have
    to be those of buffers that PyTorch made.
    """
    return base64.b64encode(pickle.dumps([(name, host_tensor(array)) for name, array in tensors]))


class Group:
    """A process group of this process, rank 0, and the ranks of one server after it.

    It is none of PyTorch's global ones, so that a server that hangs takes nothing else with it. The
    store's prefixes are those of SGLang's `init_custom_process_group` (0.5.23).

    Args:
        ranks: Those of the server.
        timeout_s: Longest wait for the others to join, and for one broadcast.
    """

    def __init__(self, ranks: int, *, timeout_s: float) -> None:
        self.backend = "nccl" if jax.default_backend() == "gpu" else "gloo"
        self.name = f"minirl-{uuid.uuid4().hex}"
        self.size = 1 + ranks
        self._timeout = timedelta(seconds=timeout_s)
        self._store = TCPStore(
            "0.0.0.0", 0, self.size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        self._group: Any = None

    @property
    def port(self) -> int:
        """Return where the others find it."""
        return self._store.port

    def join(self) -> None:
        """Wait until all are there.

        Raises:
            RuntimeError: They are not.
        """
        store: Any = self._store
        device = "cuda" if self.backend == "nccl" else "cpu"
        for prefix in (self.name, f"{self.name}/", f"{device}/"):
            store = PrefixStore(prefix, store)
        make = _nccl if self.backend == "nccl" else ProcessGroupGloo
        self._group = make(store, 0, self.size, self._timeout)
        self._group._set_sequence_number_for_group()

    def broadcast(self, arrays: Sequence[jax.Array | np.ndarray]) -> None:
        """Send whole arrays to all, and wait until they have them.

        Raises:
            RuntimeError: One of them did not take them.
        """
        convert = _device_tensor if self.backend == "nccl" else host_tensor
        tensors = [convert(array) for array in arrays]
        works = [self._group.broadcast([tensor], BroadcastOptions()) for tensor in tensors]
        for work in works:
            work.wait()
        if self.backend == "nccl":
            # There `wait` is for the stream alone, and the arrays are freed after this.
            torch.cuda.synchronize(tensors[0].device)

    def close(self) -> None:
        """Leave: what NCCL still waits for fails; Gloo's waits end with their own deadline."""
        if self._group is not None:
            self._group.abort()


def _device_tensor(array: jax.Array | np.ndarray) -> torch.Tensor:
    """Look at an array of a GPU as a tensor, without a copy."""
    return torch.from_dlpack(array) if isinstance(array, jax.Array) else host_tensor(array).cuda()


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    # A broadcast that a server does not take is given up here; PyTorch would end the process.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
