"""Which pages of the cache are whose: sizes of the two pools, free pages, kept prompts.

One pool holds prompts, each once for all the slots that sample from it; the other holds what slots
have of their own. How many pages there are is decided by bytes, not by slots and lengths.
"""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh

from minirl.config import SamplerConfig
from minirl.errors import UserError
from minirl.model.config import ModelConfig
from minirl.model.sharding import row_parts

# Tokens of a prompt's page, and of a slot's own page. TPUs lay arrays out in tiles of 128; on a CPU
# half a page that lies empty costs more than a small product does.
_PROMPT_PAGE = 128
_OWN_PAGE = {"cpu": 32, "gpu": 128, "tpu": 128}
# What part of a pool each of its segments is; of few pages, which cost less than segments do.
_SHARES = (0.25, 0.25, 0.5)
_FEW_SHARES = (0.5, 0.5)
_FEW = 64
# Without `sampler.cache_gb`, pages take at most this part of a device's memory. A part of all the
# memory, not of what is free now: a run that goes on has the same pages as before.
MEMORY_SHARE = 0.25
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Pool:
    """The size of a pool in one part of the mesh.

    Attributes:
        page_tokens: Tokens of a page.
        pages: All pages.
        longest: Pages of the longest prompt, or of the longest response.
    """

    page_tokens: int
    pages: int
    longest: int

    @property
    def segments(self) -> tuple[int, ...]:
        """Return the pages of each segment."""
        shares = _FEW_SHARES if self.pages < _FEW else _SHARES
        first = [math.ceil(self.pages * share) for share in shares[:-1]]
        return tuple(pages for pages in (*first, self.pages - sum(first)) if pages)

    def used_segments(self, pages: int) -> int:
        """Return how many segments hold the first so many pages."""
        starts = [sum(self.segments[:at]) for at in range(len(self.segments))]
        return sum(start < pages for start in starts)

    def pages_for(self, tokens: int) -> int:
        """Return the pages that so many tokens take."""
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class Pools:
    """The cache of a sampler: `parts` times `slots` slots, and as often both pools."""

    parts: int
    slots: int
    group_size: int
    prompts: Pool
    own: Pool


def plan_pools(
    model: ModelConfig,
    config: SamplerConfig,
    *,
    group_size: int,
    itemsize: int,
    mesh: Mesh | None,
) -> Pools:
    """Choose the sizes of the pools.

    Wanted are pages for the longest response in every slot, and for twice as many of the longest
    prompts as full groups need: groups end one by one. What is over the bytes is cut from both
    alike, but one longest episode always has its place.

    Args:
        model: Shape of the model.
        config: Slots, lengths and bytes.
        group_size: Episodes that share one kept prompt.
        itemsize: Bytes of a number of the cache.
        mesh: Over which slots, pages and heads are split.

    Raises:
        UserError: Not even one longest episode fits into the bytes that were set.
    """
    parts = row_parts(mesh)
    slots = -(-config.slots // parts)
    group_size = min(group_size, slots)
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    prompt_page = min(_PROMPT_PAGE, _up(config.max_prompt_tokens))
    own_page = min(_OWN_PAGE.get(platform, 128), _up(config.max_response_tokens))
    # The last token of a prompt is fed by the decode loop, and the last of a response by nobody.
    longest = [
        max(1, -(-(tokens - 1) // page))
        for tokens, page in (
            (config.max_prompt_tokens, prompt_page),
            (config.max_response_tokens, own_page),
        )
    ]
    groups = -(-slots // group_size)
    wanted = [min(slots, 2 * groups) * longest[0], slots * longest[1]]
    token_bytes = _token_bytes(model, itemsize=itemsize, mesh=mesh)
    sizes = [prompt_page * token_bytes, own_page * token_bytes]
    if config.cache_gb is None:
        limit = MEMORY_SHARE * device_memory(mesh)
    else:
        limit = config.cache_gb * _GB
        _check_limit(limit, _bytes(longest, sizes), config)
    pages = _fit(wanted, longest, sizes, limit)
    return Pools(
        parts,
        slots,
        group_size,
        Pool(prompt_page, pages[0], longest[0]),
        Pool(own_page, pages[1], longest[1]),
    )


def _up(tokens: int) -> int:
    return -(-tokens // 16) * 16


def _bytes(pages: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(pages, sizes, strict=True))


def _token_bytes(model: ModelConfig, *, itemsize: int, mesh: Mesh | None) -> int:
    """Return what one token takes on each device that holds it."""
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


def _fit(
    wanted: Sequence[int], least: Sequence[int], sizes: Sequence[int], limit: float
) -> list[int]:
    """Cut the wanted pages alike until they fit into the limit, none to less than the least."""
    share = min(1.0, limit / _bytes(wanted, sizes))
    pages = [max(low, int(count * share)) for count, low in zip(wanted, least, strict=True)]
    for at in range(len(pages)):
        over = max(0.0, _bytes(pages, sizes) - limit)
        pages[at] = max(least[at], pages[at] - math.ceil(over / sizes[at]))
    return pages


class FreePages:
    """The pages of a pool's part that nobody has; the lowest are taken first, so that those in use
    lie together.
    """

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, pages: int) -> list[int]:
        """Take so many pages; there must be as many."""
        return [heapq.heappop(self._free) for _ in range(pages)]

    def give(self, pages: Sequence[int]) -> None:
        """Give pages back."""
        for page in pages:
            heapq.heappush(self._free, page)

    def lowest(self, pages: int) -> Sequence[int]:
        """Return the pages that `take` would take, fewer if there are fewer."""
        return heapq.nsmallest(pages, self._free)


@dataclass(slots=True, eq=False)
class Prompt:
    """A kept prompt: its pages, in order, and the slots that sample from it, by their place."""

    ids: tuple[int, ...]
    pages: list[int]
    slots: dict[int, int] = field(default_factory=dict)


class PromptTable:
    """The kept prompts of one part, each with places for G slots.

    A prompt that nobody samples from stays until its pages are needed, the longest unused first.
    Pages beyond those that full groups need are used last: every page in use costs time at each
    step.
    """

    def __init__(self, pool: Pool, *, slots: int, group_size: int) -> None:
        self._pool, self._group_size = pool, group_size
        self._usual = -(-slots // group_size) * pool.longest
        self.forget()

    def forget(self) -> None:
        """Drop what is kept; nobody may be sampling."""
        self._free = FreePages(self._pool.pages)
        self._used: list[Prompt] = []
        self._unused: list[Prompt] = []

    @property
    def used(self) -> Sequence[Prompt]:
        """Return the prompts that somebody samples from."""
        return self._used

    def find(self, ids: tuple[int, ...]) -> Prompt | None:
        """Return a kept prompt with a free place."""
        kept = [*self._used, *self._unused]
        return next((p for p in kept if p.ids == ids and len(p.slots) < self._group_size), None)

    def has_room(self, ids: tuple[int, ...]) -> bool:
        """Tell whether a prompt could be joined now."""
        unused = sum(len(prompt.pages) for prompt in self._unused)
        pages = self._pool.pages_for(len(ids))
        return len(self._free) + unused >= pages or self.find(ids) is not None

    def join(self, ids: tuple[int, ...], slot: int) -> tuple[Prompt, bool]:
        """Seat a slot beside its prompt; return that, and whether it must be computed first."""
        prompt = self.find(ids)
        is_new = prompt is None
        if prompt is None:
            prompt = Prompt(ids, self._take(self._pool.pages_for(len(ids))))
            self._used.append(prompt)
        elif not prompt.slots:
            self._unused.remove(prompt)
            self._used.append(prompt)
        prompt.slots[next(g for g in range(self._group_size) if g not in prompt.slots)] = slot
        return prompt, is_new

    def leave(self, prompt: Prompt, slot: int) -> None:
        """Take a slot away from its prompt."""
        prompt.slots = {place: other for place, other in prompt.slots.items() if other != slot}
        if not prompt.slots:
            self._used.remove(prompt)
            self._unused.append(prompt)

    def _take(self, pages: int) -> list[int]:
        while self._unused and not self._fits(pages):
            self._free.give(self._unused.pop(0).pages)
        return self._free.take(pages)

    def _fits(self, pages: int) -> bool:
        lowest = self._free.lowest(pages)
        return len(lowest) == pages and all(page < self._usual for page in lowest)
