"""Keys and values that the sampler keeps, in pages.

A page belongs to one slot, or, where it holds a part of a prompt, to the slots that sample from
that prompt. Attention goes page by page and not slot by slot: the queries of a page's owners are
brought beside it, and what they find there is joined by owner (the rescaling of arXiv:1805.02867).
So a page is read once a step, where it lies, whoever owns it; nothing gathers the cache.

The pages of a pool lie in a few segments, arrays of which a program is handed those in use. On a
mesh every part of the devices that has rows of its own (`data` x `fsdp`) has pages of its own, for
its own slots, and numbers both from 0: no page travels. Key/value heads are split over `tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Float, Int

from minirl.model.config import ModelConfig
from minirl.model.decoder import Attend
from minirl.model.sharding import axes_sharding

# Finite, so that a part with nothing to look at gets the weight exp(-1e30 - peak) = 0 and no NaN.
_HIDDEN = -1e30
# Numbers of owners are summed as they are: products with ones must not be rounded.
_EXACT = jax.lax.Precision.HIGHEST


class KeyValues(NamedTuple):
    """One layer's pages of a segment."""

    k: Any  # [X, K, E, L]: positions last, so that scores are read in order
    v: Any  # [X, K, L, E]


class Recent(NamedTuple):
    """One layer's tokens of the running decode loop, of every slot: not yet in pages."""

    k_SKEW: Array
    v_SKWE: Array


class Owners(NamedTuple):
    """Whose the pages of a segment are.

    Attributes:
        slot_XG: Slots of the page's part; -1 where a place is empty.
        count_X: Tokens in the page.
    """

    slot_XG: Any
    count_X: Any


class Where(NamedTuple):
    """The pages of rows, in order, and how many of their tokens are there already."""

    pages_BM: Any
    tokens_B: Any


class Look(NamedTuple):
    """Attention over one set of keys before normalising; X is any batch, Q its queries."""

    out_XKQE: Array
    peak_XKQ: Array
    total_XKQ: Array


# Logical axes of keys and of values; the first is split as rows are.
_AXES = (
    ("batch", "kv_heads", "head_size", "position"),
    ("batch", "kv_heads", "position", "head_size"),
)


def segment_shapes(
    config: ModelConfig, *, pages: int, length: int, dtype: Any, mesh: Mesh | None
) -> list[KeyValues]:
    """Describe a segment: `pages` pages of `length` tokens in every layer, all parts together."""
    heads, size = config.num_key_value_heads, config.head_dim
    shapes = ((pages, heads, size, length), (pages, heads, length, size))
    places = [
        None if mesh is None else axes_sharding(axes, shape, mesh, name="key/value pages")
        for axes, shape in zip(_AXES, shapes, strict=True)
    ]
    layer = KeyValues(
        *[
            jax.ShapeDtypeStruct(shape, dtype, sharding=place)
            for shape, place in zip(shapes, places, strict=True)
        ]
    )
    return [layer] * config.num_hidden_layers


def look(q_XKQE: Array, kept: KeyValues, mask_XQL: Bool[Array, "X Q L"]) -> Look:
    """Weigh pages' values by the queries, each query relative to its own highest score."""
    scores = jnp.einsum("xkqe,xkel->xkql", q_XKQE, kept.k, preferred_element_type=jnp.float32)
    return _weigh(scores, kept.v, mask_XQL)


def _weigh(scores_XKQL: Array, v_XKLE: Array, mask_XQL: Array) -> Look:
    scores = jnp.where(mask_XQL[:, None], scores_XKQL, _HIDDEN)
    peak_XKQ = scores.max(axis=-1)
    weights = jnp.exp(scores - peak_XKQ[..., None])
    out_XKQE = jnp.einsum(
        "xkql,xkle->xkqe", weights.astype(v_XKLE.dtype), v_XKLE, preferred_element_type=jnp.float32
    )
    return Look(out_XKQE, peak_XKQ, weights.sum(axis=-1))


def _join(one: Look, other: Look) -> Look:
    """Put two looks of the same queries together."""
    peak = jnp.maximum(one.peak_XKQ, other.peak_XKQ)
    scale, other_scale = jnp.exp(one.peak_XKQ - peak), jnp.exp(other.peak_XKQ - peak)
    out = one.out_XKQE * scale[..., None] + other.out_XKQE * other_scale[..., None]
    return Look(out, peak, one.total_XKQ * scale + other.total_XKQ * other_scale)


def owned(owners: Owners, *, slots: int) -> Float[Array, "S XG"]:
    """Tell with ones which slot owns which place of which page, inside of one part."""
    return (owners.slot_XG.reshape(1, -1) == jnp.arange(slots)[:, None]).astype(jnp.float32)


def _queries(q_BTHE: Array, K: int) -> Array:
    """Scale queries and bring them as BKQE, Q = (heads of one key/value head) x T."""
    B, T, H, E = q_BTHE.shape
    q = (q_BTHE * E**-0.5).reshape(B, T, K, H // K, E)
    return q.transpose(0, 2, 3, 1, 4).reshape(B, K, H // K * T, E)


def _outputs(seen: Look, q_BTHE: Array) -> Array:
    """Normalise over all the keys that were looked at, and undo `_queries`."""
    B, T, H, E = q_BTHE.shape
    out_BKQE = seen.out_XKQE / seen.total_XKQ[..., None]
    K = out_BKQE.shape[1]
    out = out_BKQE.reshape(B, K, H // K, T, E).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, H, E).astype(q_BTHE.dtype)


def _look_at_pages(q_SKQE: Array, kept: KeyValues, owners: Owners) -> Look:
    """Look at every page of a segment once, with the queries of all its owners; X counts places."""
    X, G = owners.slot_XG.shape
    _, K, Q, E = q_SKQE.shape
    q = q_SKQE[owners.slot_XG].transpose(0, 2, 1, 3, 4).reshape(X, K, G * Q, E)
    mask_X1L = jnp.arange(kept.v.shape[2])[None, None] < owners.count_X[:, None, None]
    seen = look(q, kept, mask_X1L)

    def by_place(part: Array) -> Array:
        part = part.reshape(X, K, G, Q, *part.shape[3:]).swapaxes(1, 2)
        return part.reshape(X * G, K, Q, *part.shape[4:])

    return Look(*[by_place(part) for part in seen])


def _join_by_owner(
    own: Look, looks: Sequence[Look], owners: Sequence[Owners], owned: Sequence[Array]
) -> Look:
    """Add what pages gave to what their owners have, S."""
    peak = own.peak_XKQ
    for seen, owned_SX in zip(looks, owned, strict=True):
        theirs = jnp.where(owned_SX[..., None, None] > 0, seen.peak_XKQ[None], _HIDDEN)
        peak = jnp.maximum(peak, theirs.max(axis=1))
    scale = jnp.exp(own.peak_XKQ - peak)
    total, out = own.total_XKQ * scale, own.out_XKQE * scale[..., None]
    for seen, whose, owned_SX in zip(looks, owners, owned, strict=True):
        slot_X = whose.slot_XG.reshape(-1)
        scale = jnp.exp(seen.peak_XKQ - peak[slot_X])
        # An empty place has some other slot's queries: its number may be anything, even infinite.
        scale = jnp.where(slot_X[:, None, None] >= 0, scale, 0.0)
        add = partial(jnp.einsum, precision=_EXACT)
        total += add("sx,xkq->skq", owned_SX, seen.total_XKQ * scale)
        out += add("sx,xkqe->skqe", owned_SX, seen.out_XKQE * scale[..., None])
    return Look(out, peak, total)


def decode_slots(
    step: Int[Array, ""], owners: Sequence[Owners], owned: Sequence[Array], *, mesh: Mesh | None
) -> Attend:
    """Let every slot look at its pages and at its recent tokens, of which one is added.

    A layer's cache is (its pages of every segment, its `Recent`).

    Args:
        step: Column of the recent tokens that is written.
        owners: Of every segment.
        owned: The same as `owned` gives it.
        mesh: On which slots and pages are split.
    """

    def local(
        q_S1HE: Array, k_S1KE: Array, v_S1KE: Array, cache: Any, tables: Any, step: Array
    ) -> Any:
        (pages, recent), (owners, owned) = cache, tables
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=step)
        recent = Recent(
            put(recent.k_SKEW, k_S1KE.transpose(0, 2, 3, 1).astype(recent.k_SKEW.dtype), axis=3),
            put(recent.v_SKWE, v_S1KE.swapaxes(1, 2).astype(recent.v_SKWE.dtype), axis=2),
        )
        q_SKQE = _queries(q_S1HE, k_S1KE.shape[2])
        scores = jnp.einsum(
            "skqe,skew->skqw", q_SKQE, recent.k_SKEW, preferred_element_type=jnp.float32
        )
        mask_W = jnp.arange(scores.shape[-1]) <= step
        own = _weigh(scores, recent.v_SKWE, mask_W[None, None])
        looks = [
            _look_at_pages(q_SKQE, kept, whose) for kept, whose in zip(pages, owners, strict=True)
        ]
        return _outputs(_join_by_owner(own, looks, owners, owned), q_S1HE), recent

    def attend(q_S1HE: Array, k_S1KE: Array, v_S1KE: Array, cache: Any) -> Any:
        heads = _head_spec(k_S1KE.shape[2], mesh)
        run = on_parts(
            local,
            mesh,
            inputs=(*[heads(2)] * 3, heads(1), ROWS, Spec()),
            outputs=(heads(2), heads(1)),
        )
        out, recent = run(q_S1HE, k_S1KE, v_S1KE, cache, (owners, owned), step)
        return out, (cache[0], recent)

    return attend


def fill_rows(prompt: Where, own: Where, *, mesh: Mesh | None) -> Attend:
    """Let new tokens of rows look at the row's pages, page by page, and at one another.

    The memory of the scores is that of one page, or of the new tokens, however long the row is.
    A layer's cache is its pages of every segment, (prompts, own); its new cache is the new keys
    and values, (k_BTKE, v_BTKE).

    Args:
        prompt: The pages of the row's prompt.
        own: The pages of what the row has besides.
        mesh: On which rows and pages are split.
    """

    def local(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any, pages: Any) -> Array:
        _, T, K, _ = k_BTKE.shape
        q_BKQE = _queries(q_BTHE, K)
        scores = jnp.einsum("bkqe,bske->bkqs", q_BKQE, k_BTKE, preferred_element_type=jnp.float32)
        triangle_QT = jnp.tile(jnp.tril(jnp.ones((T, T), bool)), (q_BTHE.shape[2] // K, 1))
        seen = _weigh(scores, v_BTKE.swapaxes(1, 2), triangle_QT[None])
        for segments, where in zip(cache, pages, strict=True):
            seen = _look_back(seen, q_BKQE, segments, where)
        return _outputs(seen, q_BTHE)

    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any) -> Any:
        heads = _head_spec(k_BTKE.shape[2], mesh)
        run = on_parts(local, mesh, inputs=(*[heads(2)] * 3, heads(1), ROWS), outputs=heads(2))
        return run(q_BTHE, k_BTKE, v_BTKE, cache, (prompt, own)), (k_BTKE, v_BTKE)

    return attend


def _look_back(seen: Look, q_BKQE: Array, segments: Sequence[KeyValues], where: Where) -> Look:
    """Add the pages of every row to what its queries have seen, as many as the longest row has."""
    if not segments:
        return seen
    length = segments[0].v.shape[2]

    def body(at: Array, seen: Look) -> Look:
        kept = _take(segments, where.pages_BM[:, at])
        left_B = where.tokens_B - at * length
        mask_B1L = jnp.arange(length)[None, None] < left_B[:, None, None]
        return _join(seen, look(q_BKQE, kept, mask_B1L))

    pages = (where.tokens_B.max() + length - 1) // length
    return jax.lax.fori_loop(0, pages, body, seen)


def _take(segments: Sequence[KeyValues], pages_B: Array) -> KeyValues:
    """Read a page for each row, in whatever segment it lies."""
    kept, first = None, 0
    for segment in segments:
        X = segment.k.shape[0]
        inside_B = (pages_B >= first) & (pages_B < first + X)
        part = KeyValues(*[pages[jnp.clip(pages_B - first, 0, X - 1)] for pages in segment])
        kept = part if kept is None else _choose(inside_B, part, kept)
        first += X
    assert kept is not None
    return kept


def _choose(is_first_B: Array, first: KeyValues, second: KeyValues) -> KeyValues:
    chosen = [
        jnp.where(is_first_B[:, None, None, None], one, other)
        for one, other in zip(first, second, strict=True)
    ]
    return KeyValues(*chosen)


def write(
    segments: Sequence[KeyValues],
    pages_BT: Int[Array, "B T"],
    columns_BT: Int[Array, "B T"],
    k_BTKE: Array,
    v_BTKE: Array,
    *,
    mesh: Mesh | None,
) -> list[KeyValues]:
    """Put one layer's keys and values at (page, column).

    Args:
        segments: The layer's pages of every segment.
        pages_BT: Page of each token; less than 0 drops the token.
        columns_BT: Column of its page.
        k_BTKE: Keys, rotated.
        v_BTKE: Values.
        mesh: On which rows and pages are split.
    """

    def local(segments: Any, pages_BT: Array, columns_BT: Array, k: Array, v: Array) -> Any:
        written, first = [], 0
        for kept in segments:
            X = kept.k.shape[0]
            # An index before the start would count from the end; past the end it is dropped.
            at = jnp.where(pages_BT >= first, pages_BT - first, X)
            written.append(
                KeyValues(
                    kept.k.at[at, :, :, columns_BT].set(k.astype(kept.k.dtype), mode="drop"),
                    kept.v.at[at, :, columns_BT].set(v.astype(kept.v.dtype), mode="drop"),
                )
            )
            first += X
        return written

    heads = _head_spec(k_BTKE.shape[2], mesh)
    run = on_parts(local, mesh, inputs=(heads(1), ROWS, ROWS, heads(2), heads(2)), outputs=heads(1))
    return run(list(segments), pages_BT, columns_BT, k_BTKE, v_BTKE)


# Rows, slots and pages are split alike.
ROWS = Spec(("data", "fsdp"))


def _head_spec(heads: int, mesh: Mesh | None) -> Callable[[int], Spec]:
    """Return what says how an array is split whose key/value heads, or groups of query heads, are
    its axis of a number: over `tensor`, if that divides them.
    """
    over = None if mesh is None or heads % mesh.shape["tensor"] else "tensor"
    return lambda axis: Spec(*ROWS, *[None] * (axis - 1), over)


def on_parts(run: Callable[..., Any], mesh: Mesh | None, *, inputs: Any, outputs: Any) -> Any:
    """Run a function on every part of the mesh with what lies there; as it is without a mesh."""
    if mesh is None:
        return run
    return jax.shard_map(run, mesh=mesh, in_specs=tuple(inputs), out_specs=outputs, check_vma=False)
