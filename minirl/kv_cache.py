"""Keys and values that the sampler keeps: each prompt once, and every slot's own tokens.

A row of the prompt store holds one prompt for all the slots that sample from it, so that a group's
prompt is read once a step and not once a trajectory. Attention looks at the prompt and at the own
tokens apart and joins the two (the rescaling of arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from minirl.model import Attend, ModelConfig
from minirl.sharding import axes_sharding

# Finite, so that a part with nothing to look at gets the weight exp(-1e30 - peak) = 0 and no NaN.
_HIDDEN = -1e30


class KeyValues(NamedTuple):
    """What one layer keeps, by row of the store; prompts as N, slots as S."""

    k: Array  # [rows, K, E, L]: positions last, so that scores are read in order
    v: Array  # [rows, K, L, E]


class Look(NamedTuple):
    """Attention over one set of keys before normalising; X is any batch, Q its queries."""

    out_XKQE: Array
    peak_XKQ: Array
    total_XKQ: Array


# Logical axes of keys and of values.
_AXES = (
    ("batch", "kv_heads", "head_size", "position"),
    ("batch", "kv_heads", "position", "head_size"),
)


def empty_store(
    config: ModelConfig, *, rows: int, length: int, dtype: Any, mesh: Mesh | None
) -> list[KeyValues]:
    """Allocate the store of every layer, in zeros; rows and heads are split over the mesh."""
    heads, size = config.num_key_value_heads, config.head_dim
    shapes = ((rows, heads, size, length), (rows, heads, length, size))

    places = [
        None if mesh is None else axes_sharding(axes, shape, mesh, name="key/value store")
        for axes, shape in zip(_AXES, shapes, strict=True)
    ]
    return [
        KeyValues(
            jnp.zeros(shapes[0], dtype, device=places[0]),
            jnp.zeros(shapes[1], dtype, device=places[1]),
        )
        for _ in range(config.num_hidden_layers)
    ]


def add_rows(store: list[KeyValues], rows: int) -> list[KeyValues]:
    """Lengthen a store to so many rows."""
    missing = rows - store[0].k.shape[0]

    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, missing), (0, 0), (0, 0), (0, 0)))

    return [KeyValues(pad(kept.k), pad(kept.v)) for kept in store]


def look(q_XKQE: Array, kept: KeyValues, mask_XQL: Bool[Array, "X Q L"]) -> Look:
    """Weigh the kept values by the queries, each query relative to its own highest score."""
    scores = jnp.einsum("xkqe,xkel->xkql", q_XKQE, kept.k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask_XQL[:, None], scores, _HIDDEN)
    peak_XKQ = scores.max(axis=-1)
    weights = jnp.exp(scores - peak_XKQ[..., None])
    out_XKQE = jnp.einsum(
        "xkql,xkle->xkqe",
        weights.astype(kept.v.dtype),
        kept.v,
        preferred_element_type=jnp.float32,
    )
    return Look(out_XKQE, peak_XKQ, weights.sum(axis=-1))


def join(looks: Sequence[Look]) -> Array:
    """Normalise over all the keys that were looked at."""
    peak_XKQ = jnp.stack([one.peak_XKQ for one in looks]).max(axis=0)
    total_XKQ, out_XKQE = jnp.zeros_like(peak_XKQ), jnp.zeros_like(looks[0].out_XKQE)
    for one in looks:
        scale_XKQ = jnp.exp(one.peak_XKQ - peak_XKQ)
        total_XKQ += one.total_XKQ * scale_XKQ
        out_XKQE += one.out_XKQE * scale_XKQ[..., None]
    return out_XKQE / total_XKQ[..., None]


def _queries(q_BTHE: Array, K: int) -> Array:
    """Scale queries and bring them as BKQE, Q = (heads of one key/value head) x T."""
    B, T, H, E = q_BTHE.shape
    q = (q_BTHE * E**-0.5).reshape(B, T, K, H // K, E)
    return q.transpose(0, 2, 3, 1, 4).reshape(B, K, H // K * T, E)


def _outputs(out_BKQE: Array, q_BTHE: Array) -> Array:
    """Undo `_queries` on the attended values."""
    B, T, H, E = q_BTHE.shape
    K = out_BKQE.shape[1]
    out = out_BKQE.reshape(B, K, H // K, T, E).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, H, E).astype(q_BTHE.dtype)


def _write(kept: KeyValues, rows: Array, columns: Array, k: Array, v: Array) -> KeyValues:
    """Put keys and values at (row, column); columns past the end are dropped."""
    return KeyValues(
        kept.k.at[rows, :, :, columns].set(k.astype(kept.k.dtype), mode="drop"),
        kept.v.at[rows, :, columns].set(v.astype(kept.v.dtype), mode="drop"),
    )


def first_columns(kept: KeyValues, length: int) -> KeyValues:
    """Cut every row of a store down to its first columns."""
    return KeyValues(kept.k[..., :length], kept.v[:, :, :length])


def _rows(kept: KeyValues, rows_B: Array, length: int) -> KeyValues:
    return KeyValues(kept.k[rows_B, ..., :length], kept.v[rows_B, :, :length])


def _up_to(columns_BT: Array, heads: int, length: int) -> Bool[Array, "B Q L"]:
    """Mask columns after the query's own, for queries as `_queries` orders them."""
    columns_BQ = jnp.tile(columns_BT, (1, heads))
    return jnp.arange(length)[None, None, :] <= columns_BQ[..., None]


def _shorter(lengths_X: Array, length: int) -> Bool[Array, "X 1 L"]:
    """Mask columns from each row's length on."""
    return jnp.arange(length)[None, None, :] < lengths_X[:, None, None]


def fill_prompts(rows_B: Int[Array, "B"], columns_BT: Int[Array, "B T"], *, length: int) -> Attend:
    """Append tokens to prompts; a layer's cache is its prompt store.

    Args:
        rows_B: Row of the store.
        columns_BT: Where in the row each token goes; padding points past the end of the store.
        length: No column looked at is as large as this.
    """

    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, kept: KeyValues) -> Any:
        K, heads = k_BTKE.shape[2], q_BTHE.shape[2] // k_BTKE.shape[2]
        kept = _write(kept, rows_B[:, None], columns_BT, k_BTKE, v_BTKE)
        mask_BQL = _up_to(columns_BT, heads, length)
        seen = look(_queries(q_BTHE, K), _rows(kept, rows_B, length), mask_BQL)
        return _outputs(join([seen]), q_BTHE), kept

    return attend


def fill_slots(
    slots_B: Int[Array, "B"],
    columns_BT: Int[Array, "B T"],
    prompts_B: Int[Array, "B"],
    prompt_lengths_B: Int[Array, "B"],
    *,
    prompt_length: int,
    length: int,
) -> Attend:
    """Append tokens to slots; a layer's cache is (prompt store, slot store).

    Args:
        slots_B: Row of the slot store.
        columns_BT: Where in the row each token goes; padding points past the end of the store.
        prompts_B: Row of the slot's prompt.
        prompt_lengths_B: Its length in tokens.
        prompt_length: No prompt looked at is longer than this.
        length: No column looked at is as large as this.
    """

    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any) -> Any:
        prompts, own = cache
        K, heads = k_BTKE.shape[2], q_BTHE.shape[2] // k_BTKE.shape[2]
        own = _write(own, slots_B[:, None], columns_BT, k_BTKE, v_BTKE)
        q_BKQE = _queries(q_BTHE, K)
        prompt_mask_B1P = _shorter(prompt_lengths_B, prompt_length)
        seen = [
            look(q_BKQE, _rows(prompts, prompts_B, prompt_length), prompt_mask_B1P),
            look(q_BKQE, _rows(own, slots_B, length), _up_to(columns_BT, heads, length)),
        ]
        return _outputs(join(seen), q_BTHE), (prompts, own)

    return attend


def decode_slots(
    columns_S: Int[Array, "S"],
    slot_NG: Int[Array, "N G"],
    cell_S: Int[Array, "S"],
    prompt_lengths_N: Int[Array, "N"],
    *,
    length: int,
) -> Attend:
    """Append one token to every slot; a layer's cache is (prompt store, slot store).

    A prompt is read once for all its slots: their queries are brought together beside it.

    Args:
        columns_S: Where in its row the slot's token goes.
        slot_NG: The slots that sample from each prompt; any slot where the place is empty.
        cell_S: The inverse: where a slot is in the flattened `slot_NG`.
        prompt_lengths_N: Length of each prompt in tokens; all columns of its store are read.
        length: No column looked at is as large as this.
    """

    def attend(q_S1HE: Array, k_S1KE: Array, v_S1KE: Array, cache: Any) -> Any:
        prompts, own = cache
        S, _, K, E = k_S1KE.shape
        N, G = slot_NG.shape
        heads = q_S1HE.shape[2] // K
        own = _write(own, jnp.arange(S), columns_S, k_S1KE[:, 0], v_S1KE[:, 0])
        q_SKQE = _queries(q_S1HE, K)
        own_mask_S1L = _shorter(columns_S + 1, length)
        seen = look(q_SKQE, first_columns(own, length), own_mask_S1L)

        by_prompt = q_SKQE[slot_NG].transpose(0, 2, 1, 3, 4).reshape(N, K, G * heads, E)
        prompt_mask_N1P = _shorter(prompt_lengths_N, prompts.v.shape[2])
        prompt_look = look(by_prompt, prompts, prompt_mask_N1P)

        def to_slots(part: Array) -> Array:
            part = part.reshape(N, K, G, heads, *part.shape[3:]).swapaxes(1, 2)
            return part.reshape(N * G, K, heads, *part.shape[4:])[cell_S]

        prompt_seen = Look(*[to_slots(part) for part in prompt_look])
        return _outputs(join([seen, prompt_seen]), q_S1HE), (prompts, own)

    return attend
