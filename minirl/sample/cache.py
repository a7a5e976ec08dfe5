"""The sampler's keys and values, and how much memory they take.

A prompt is kept once for the group that samples from it; every slot has room of its own for the
tokens after it. Both have a fixed size, told before anything is allocated.

On a mesh every part of the devices that has rows of its own (`data` x `fsdp`) has slots and prompts
of its own and numbers both from 0: nothing of the cache travels. Heads are split over `tensor`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from minirl.config import SamplerConfig
from minirl.errors import UserError
from minirl.model.config import ModelConfig
from minirl.model.sharding import axes_sharding, row_parts

# Without `sampler.cache_gb`, the cache takes at most this share of a device's memory. A share of
# all the memory, not of what is free: a resumed run has the same slots.
MEMORY_SHARE = 0.25
_GB = 1e9
# Positions are rounded up to a multiple of this.
_TILE = 32

_log = logging.getLogger(__name__)


class KeyValues(NamedTuple):
    """Keys and values of some layers; X rows, which are prompts or slots."""

    k: Any  # [layers, X, K, E, L]: both so that CPUs read them in order
    v: Any  # [layers, X, K, L, E]


# Logical axes of keys and of values; the second is split as rows are.
_AXES = (
    ("layer", "batch", "kv_heads", "head_size", "position"),
    ("layer", "batch", "kv_heads", "position", "head_size"),
)


class Cache(NamedTuple):
    """The keys and values of prompts and of slots, each a list that together has all layers."""

    prompts: Any
    own: Any


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The size of the cache in each part of the mesh.

    Attributes:
        parts: Parts of the mesh with slots of their own.
        slots: Episodes decoded side by side.
        group_size: Episodes that share a prompt.
        prompts: Prompts kept.
        prompt_tokens: Room for each prompt.
        own_tokens: Room in each slot for the tokens after the prompt.
    """

    parts: int
    slots: int
    group_size: int
    prompts: int
    prompt_tokens: int
    own_tokens: int

    @property
    def prompt_counts(self) -> tuple[int, ...]:
        """Return how many prompts a decode program may look at."""
        return tuple(sorted({-(-self.prompts // 2), self.prompts}))

    @property
    def own_lengths(self) -> tuple[int, ...]:
        """Return how many positions of each slot a decode program may look at."""
        parts = (_rounded(self.own_tokens // 4), _rounded(self.own_tokens // 2), self.own_tokens)
        return tuple(sorted(set(parts)))

    @property
    def tokens(self) -> int:
        """Count the positions, of prompts and slots together."""
        return self.prompts * self.prompt_tokens + self.slots * self.own_tokens


def plan_cache(
    model: ModelConfig,
    config: SamplerConfig,
    *,
    group_size: int,
    itemsize: int,
    mesh: Mesh | None,
) -> CacheShape:
    """Choose as many slots as are wanted and as there is memory for.

    There is room for twice as many prompts as full groups need, because groups end one by one.

    Args:
        model: Shape of the model.
        config: Slots, lengths and bytes.
        group_size: Episodes that share a prompt.
        itemsize: Bytes of a number of the cache.
        mesh: What slots and heads are split over.

    Raises:
        UserError: Not even one slot fits into the bytes that were set.
    """
    parts = row_parts(mesh)
    wanted = -(-config.slots // parts)
    # The last token of a prompt is fed by the decode loop, and the last of a response by nobody.
    lengths = [
        _rounded(max(tokens - 1, 1))
        for tokens in (config.max_prompt_tokens, config.max_response_tokens)
    ]

    def shape(slots: int) -> CacheShape:
        group = min(group_size, slots)
        return CacheShape(parts, slots, group, min(slots, 2 * -(-slots // group)), *lengths)

    token_bytes = _token_bytes(model, itemsize=itemsize, mesh=mesh)
    if config.cache_gb is None:
        limit = max(MEMORY_SHARE * device_memory(mesh), shape(1).tokens * token_bytes)
    else:
        limit = config.cache_gb * _GB
        _check_limit(limit, shape(1).tokens * token_bytes, config)
    slots = next(n for n in range(wanted, 0, -1) if shape(n).tokens * token_bytes <= limit)
    if slots < wanted:
        _log.info(
            "sampler: %d of %d slots fit into %.3g GB of cache on each device; set "
            "sampler.cache_gb, or lower sampler.max_response_tokens, for more",
            slots * parts, config.slots, limit / _GB,
        )  # fmt: skip
    return shape(slots)


def _rounded(tokens: int) -> int:
    return max(-(-tokens // _TILE) * _TILE, _TILE)


def _token_bytes(model: ModelConfig, *, itemsize: int, mesh: Mesh | None) -> int:
    """Return the bytes of one token on each device that holds it."""
    heads = model.num_key_value_heads
    tensor = 1 if mesh is None else mesh.shape["tensor"]
    heads = heads if heads % tensor else heads // tensor
    return 2 * model.num_hidden_layers * heads * model.head_dim * itemsize


def device_memory(mesh: Mesh | None) -> float:
    """Return the memory of one of this process's devices; the devices of a CPU share it."""
    # Devices of other processes do not tell.
    device = (jax.local_devices() if mesh is None else mesh.local_devices)[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is not None:
        return stats["bytes_limit"]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return memory / (1 if mesh is None else mesh.size)


def _check_limit(limit: float, least: int, config: SamplerConfig) -> None:
    if least > limit:
        raise UserError(
            f"sampler.cache_gb: {config.cache_gb:g} GB hold no episode of "
            f"{config.max_prompt_tokens} + {config.max_response_tokens} tokens, which takes "
            f"{least / _GB:.3g} GB on each device; write {math.ceil(least / _GB * 100) / 100:g} "
            "or more, or lower sampler.max_prompt_tokens and sampler.max_response_tokens"
        )


def is_on_cpu(mesh: Mesh | None) -> bool:
    """Tell whether the sampler computes on CPUs; a mesh may be of devices only described."""
    return (jax.default_backend() if mesh is None else mesh.devices.flat[0].platform) == "cpu"


def cache_shapes(shape: CacheShape, config: ModelConfig, *, dtype: Any, mesh: Mesh | None) -> Cache:
    """Describe the arrays of the cache on all parts of the mesh.

    On CPUs every layer has arrays of its own: a slice of an array is a copy there. Elsewhere
    slices are read in place, and one array of all layers is written by one kernel.
    """
    depth, heads, size = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    stacks = depth if is_on_cpu(mesh) else 1

    def stack(rows: int, tokens: int) -> KeyValues:
        first = (depth // stacks, shape.parts * rows, heads)
        found = []
        for axes, last in zip(_AXES, ((size, tokens), (tokens, size)), strict=True):
            sizes = (*first, *last)
            place = None if mesh is None else axes_sharding(axes, sizes, mesh, name="cache")
            found.append(jax.ShapeDtypeStruct(sizes, dtype, sharding=place))
        return KeyValues(*found)

    return Cache(
        [stack(shape.prompts, shape.prompt_tokens)] * stacks,
        [stack(shape.slots, shape.own_tokens)] * stacks,
    )


def empty_cache(shapes: Cache) -> Cache:
    """Allocate a cache, in zeros."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)


def layers(stacks: Sequence[KeyValues]) -> list[KeyValues]:
    """Return the keys and values of each layer, KeyValues without the first axis."""
    return [KeyValues(stack.k[at], stack.v[at]) for stack in stacks for at in range(len(stack.k))]


def first_tokens(stacks: Sequence[KeyValues], tokens: int) -> list[KeyValues]:
    """Return the first positions of every row."""
    return [KeyValues(stack.k[..., :tokens], stack.v[..., :tokens, :]) for stack in stacks]


def with_first_tokens(
    stacks: Sequence[KeyValues], tokens: int, first: Sequence[KeyValues]
) -> list[KeyValues]:
    """Return the stacks with other first positions: the inverse of `first_tokens`."""
    return [
        KeyValues(stack.k.at[..., :tokens].set(new.k), stack.v.at[..., :tokens, :].set(new.v))
        for stack, new in zip(stacks, first, strict=True)
    ]


def first_prompts(stacks: Sequence[KeyValues], count: int, mesh: Mesh | None) -> list[KeyValues]:
    """Return the first prompts of every part."""
    heads = head_spec(stacks[0].k.shape[2], mesh)
    run = on_parts(
        lambda stacks: jax.tree.map(lambda array: array[:, :count], stacks),
        mesh,
        inputs=(Spec(None, *heads(1)),),
        outputs=Spec(None, *heads(1)),
    )
    return run(list(stacks))


def write(
    stacks: Sequence[KeyValues],
    new: Sequence[tuple[Array, Array]],
    row_B: Array,
    column_BT: Array,
    *,
    mesh: Mesh | None,
) -> list[KeyValues]:
    """Put the new keys and values of every layer into the cache.

    Args:
        stacks: The prompts' or the slots' part of the cache.
        new: Of each layer, keys and values, BTKE each.
        row_B: The prompt or slot of each row, inside of its part.
        column_BT: Position of each token; one that the cache does not have drops the token.
        mesh: What rows and heads are split over.
    """

    def local(stack: KeyValues, new: KeyValues, row_B: Array, column_BT: Array) -> KeyValues:
        # Indexed axes come first: [B, T, layers, K, E].
        k, v = (array.transpose(1, 2, 0, 3, 4).astype(stack.k.dtype) for array in new)
        row_B1 = row_B[:, None]
        return KeyValues(
            stack.k.at[:, row_B1, :, :, column_BT].set(k, mode="drop"),
            stack.v.at[:, row_B1, :, column_BT].set(v, mode="drop"),
        )

    heads = head_spec(new[0][0].shape[2], mesh)
    kept, fresh = Spec(None, *heads(1)), Spec(None, *heads(2))
    run = on_parts(local, mesh, inputs=(kept, fresh, ROWS, ROWS), outputs=kept)
    written, at = [], 0
    for stack in stacks:
        arrays = zip(*new[at : at + len(stack.k)], strict=True)
        written.append(run(stack, KeyValues(*map(jnp.stack, arrays)), row_B, column_BT))
        at += len(stack.k)
    return written


# Rows, slots and prompts are split alike.
ROWS = Spec(("data", "fsdp"))


def head_spec(heads: int, mesh: Mesh | None) -> Callable[[int], Spec]:
    """Return a function from an axis of heads to how its array is split, rows first: heads over
    `tensor`, where that divides them.
    """
    over = None if mesh is None or heads % mesh.shape["tensor"] else "tensor"
    return lambda axis: Spec(*ROWS, *[None] * (axis - 1), over)


def on_parts(run: Callable[..., Any], mesh: Mesh | None, *, inputs: Any, outputs: Any) -> Any:
    """Run a function on every part of the mesh with what lies there; as it is without a mesh."""
    if mesh is None:
        return run
    return jax.shard_map(run, mesh=mesh, in_specs=tuple(inputs), out_specs=outputs, check_vma=False)
