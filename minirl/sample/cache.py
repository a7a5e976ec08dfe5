"""The sampler's keys and values, and how much memory they take.

A prompt is kept once for the group that samples from it; every slot has room of its own for the
tokens after it. Layers of linear attention have a state for each prompt and slot instead. Sizes are
fixed before anything is allocated.

On a mesh every part of the devices that has rows of its own (`data` x `fsdp`) has slots and prompts
of its own and numbers both from 0: nothing of the cache travels. Heads are split over `tensor`.
"""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from minirl.config import SamplerConfig
from minirl.exchange import UserError
from minirl.model.config import ModelConfig
from minirl.model.linear_attention import State
from minirl.model.sharding import axes_sharding, axis_parts, device_bytes, platform_of, row_parts
from minirl.run.memory import capacity_bytes

# Without `sampler.cache_gb`, the cache takes at most this share of what weights leave of a device's
# memory, the rest being the programs'; or of all memory of a CPU, which is not ours alone. Not of
# what is free, so that a resumed run has the same slots.
_SHARE, _CPU_SHARE = 0.9, 0.25
GB = 1e9
# Positions are rounded up to a multiple of this.
_TILE = 32
# A CPU takes as long as there are rows and tokens, and compiles a program in seconds. Others read
# all weights in the time that hundreds of rows take, and compile for minutes.
ROWS = {"cpu": (4, 8, 16, 32, 64, 128, 256), "gpu": (), "tpu": ()}
# The largest bounds the scores' memory. Each is a program; more of them would save a CPU a tenth of
# a long prompt's time.
_PIECES = {"cpu": (64, 256), "gpu": (128, 512), "tpu": (128, 512)}


class KeyValues(NamedTuple):
    """Keys and values of a layer, [X, L, K E] each; X rows, which are prompts or slots.

    Token by token, and the heads of a token in one axis: of another order a TPU's decode loop would
    make a copy that it can write tokens to, as large as the cache (libtpu 0.0.42).
    """

    k: Any
    v: Any

    @property
    def length(self) -> int:
        """Return L, the positions of a row."""
        return self.v.shape[1]


class Cache(NamedTuple):
    """The keys and values of every layer, or its states, of prompts and of slots."""

    prompts: list[Any]
    slots: list[Any]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The size of the cache in each of `parts` parts of the mesh."""

    parts: int
    slots: int  # episodes decoded side by side
    group_size: int  # episodes that share a prompt
    prompts: int
    prompt_tokens: int  # room for each prompt
    slot_tokens: int  # room in each slot for the tokens after the prompt
    rows: tuple[int, ...]  # how many slots a decode program may go over; the last is all
    pieces: tuple[int, ...]  # how many tokens of a prompt are computed at once
    has_states: bool = False  # whether there are states, each known at the end of its row alone

    @property
    def tokens(self) -> int:
        """Count the positions, of prompts and slots together."""
        return self.prompts * self.prompt_tokens + self.slots * self.slot_tokens


def plan_cache(
    model: ModelConfig,
    config: SamplerConfig,
    *,
    group_size: int,
    dtype: Any,
    mesh: Mesh | None,
    room: float,
) -> CacheShape:
    """Choose the number of slots: `config.slots`, or as many as there is memory for: `room` bytes,
    or `sampler.cache_gb`.

    There is room for twice as many prompts as full groups need, because groups end one by one.

    Raises:
        UserError: Not even one slot fits into `sampler.cache_gb`.
    """
    parts = row_parts(mesh)
    most = -(-config.slots // parts)
    # The decode loop feeds the last token of a prompt, which so is in the slot; nobody feeds the
    # last one of a response.
    lengths = [_rounded(config.max_prompt_tokens - 1), _rounded(config.max_response_tokens)]
    platform = platform_of(mesh)
    pieces = tuple(sorted({min(size, lengths[0]) for size in _PIECES[platform]}))

    def shape(slots: int) -> CacheShape:
        group = min(group_size, slots)
        prompts = min(slots, 2 * -(-slots // group))
        rows = (*(size for size in ROWS[platform] if size < slots), slots)
        return CacheShape(parts, slots, group, prompts, *lengths, rows, pieces, bool(model.hybrid))

    def size(slots: int) -> float:
        return device_bytes(cache_shapes(shape(slots), model, dtype=dtype, mesh=mesh))

    least = size(1)
    limit = max(room, least) if config.cache_gb is None else config.cache_gb * GB
    if limit < least:
        raise UserError(
            f"sampler.cache_gb: {config.cache_gb:g} GB hold no episode of "
            f"{config.max_prompt_tokens} + {config.max_response_tokens} tokens; write "
            f"{math.ceil(least / GB * 100) / 100:g} or more, or lower max_prompt_tokens and "
            "max_response_tokens of sampler, or of evaluation"
        )
    return shape(bisect(range(1, most + 1), limit, key=size))


def _rounded(tokens: int) -> int:
    return max(-(-tokens // _TILE) * _TILE, _TILE)


def token_bytes(model: ModelConfig, *, itemsize: int) -> int:
    """Return the bytes of the keys and values of a token."""
    return 2 * model.full_layers * model.num_key_value_heads * model.head_dim * itemsize


def cache_room(memory_bytes: float, *, held_bytes: float, platform: str) -> float:
    """Return the bytes that the cache may take of a device which holds weights and more."""
    if platform == "cpu":
        return _CPU_SHARE * memory_bytes
    return _SHARE * (memory_bytes - held_bytes)


def device_memory(mesh: Mesh | None) -> float:
    """Return the memory of one of this process's devices; the devices of a CPU share it."""
    # Devices of other processes do not tell.
    device = (jax.local_devices() if mesh is None else mesh.local_devices)[0]
    parts = 1 if mesh is None or device.platform != "cpu" else mesh.size
    return capacity_bytes(device) / parts


def cache_shapes(shape: CacheShape, config: ModelConfig, *, dtype: Any, mesh: Mesh | None) -> Cache:
    """Describe the arrays of the cache, on all parts of the mesh."""

    def layers(rows: int, tokens: int) -> list[Any]:
        X, K = rows * shape.parts, config.num_key_value_heads
        # Whole heads are split, and not their numbers.
        sharding = axes_sharding(("batch", "position", "kv_heads"), (X, tokens, K), mesh)
        array = jax.ShapeDtypeStruct((X, tokens, K * config.head_dim), dtype, sharding=sharding)
        return [
            KeyValues(array, array)
            if config.is_full(layer)
            else state_shapes(config, X, dtype, mesh)
            for layer in range(config.num_hidden_layers)
        ]

    return Cache(layers(shape.prompts, shape.prompt_tokens), layers(shape.slots, shape.slot_tokens))


def state_shapes(config: ModelConfig, rows: int, dtype: Any, mesh: Mesh | None) -> State:
    """Describe the states of rows of a layer of linear attention, on all parts of the mesh."""
    shape = config.hybrid
    assert shape is not None
    K, H = shape.linear_num_key_heads, shape.linear_num_value_heads
    E, U = shape.linear_key_head_dim, shape.linear_value_head_dim
    # Where the mesh does not divide the heads of keys, all heads are on every device.
    head = "heads" if axis_parts("heads", K, mesh) > 1 else "head_size"

    def array(dims: tuple[int, ...], axes: tuple[str, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = axes_sharding(axes, dims, mesh)
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=sharding)

    def tail(heads: int, size: int) -> jax.ShapeDtypeStruct:
        dims = (rows, shape.linear_conv_kernel_dim - 1, heads, size)
        return array(dims, ("batch", "position", head, "head_size"), dtype)

    memory = array((rows, H, U, E), ("batch", head, "head_size", "head_size"), jnp.float32)
    return State(memory, (tail(K, E), tail(K, E), tail(H, U)))


def empty_cache(shapes: Cache) -> Cache:
    """Allocate a cache, in zeros."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)
