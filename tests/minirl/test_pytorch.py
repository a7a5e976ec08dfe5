"""Tensors and process groups of PyTorch, with a peer that joins as SGLang's servers do."""

from __future__ import annotations

import threading
from datetime import timedelta

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch (the extra `torch`) is not installed here")

from torch.distributed import (  # noqa: E402  # ty: ignore[import-not-found]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from minirl.sglang.transfer import Group, host_tensor  # noqa: E402

ARRAYS = (jnp.arange(6.0).reshape(2, 3), jnp.array([[1.5], [-2.0]], jnp.bfloat16))


def numbers(tensor):
    return tensor.to(torch.float32).numpy()


def join(group, rank):
    """Join as `init_custom_process_group` of SGLang 0.5.23 does."""
    wait = timedelta(seconds=20)
    store = TCPStore("127.0.0.1", group.port, group.size, is_master=False, timeout=wait)
    for prefix in (group.name, f"{group.name}/", "cpu/"):
        store = PrefixStore(prefix, store)
    return ProcessGroupGloo(store, rank, group.size, wait)


@pytest.mark.parametrize("array", [*ARRAYS, np.asarray(ARRAYS[1])])
def test_a_tensor_is_the_array(array):
    tensor = host_tensor(array)
    assert str(tensor.dtype) == f"torch.{array.dtype.name}"
    np.testing.assert_array_equal(numbers(tensor), np.asarray(array, np.float32))


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_of_a_server_get_a_broadcast(ranks):
    group = Group(ranks, timeout_s=20)
    got = {}

    def peer(rank):
        own = join(group, rank)
        got[rank] = [torch.zeros(a.shape, dtype=getattr(torch, a.dtype.name)) for a in ARRAYS]
        for tensor in got[rank]:
            own.broadcast([tensor], BroadcastOptions()).wait()

    peers = [threading.Thread(target=peer, args=(1 + n,)) for n in range(ranks)]
    for one in peers:
        one.start()
    group.join()
    group.broadcast(ARRAYS)
    for one in peers:
        one.join(20)
    group.close()
    assert sorted(got) == list(range(1, 1 + ranks))
    for tensors in got.values():
        for tensor, array in zip(tensors, ARRAYS, strict=True):
            np.testing.assert_array_equal(numbers(tensor), np.asarray(array, np.float32))


def test_a_peer_that_does_not_join_is_waited_for_no_longer_than_said():
    with pytest.raises(RuntimeError, match="timeout"):
        Group(1, timeout_s=1).join()


def test_a_peer_that_is_gone_fails_the_broadcast():
    group = Group(1, timeout_s=3)
    peer = threading.Thread(target=join, args=(group, 1))
    peer.start()
    group.join()
    peer.join(20)  # its group went with it
    with pytest.raises(RuntimeError):
        group.broadcast([jnp.ones(3_000_000)])
    group.close()
