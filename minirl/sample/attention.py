"""The sampler's attention: to a prompt kept once a group, to a row's own tokens, and to new ones.

The queries of a prompt's rows are put side by side, so that its keys are read once a step, and all
scores of a query are normalised by one softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool

from minirl.model.decoder import Attend
from minirl.model.sharding import row_parts
from minirl.sample.cache import ROWS, KeyValues, head_spec, on_parts

# Finite, so that what no query sees gets the weight exp(-1e30 - peak) = 0 and no NaN.
_HIDDEN = -1e30


class Sharing(NamedTuple):
    """Which rows look at which prompt, numbered inside of a part.

    Attributes:
        row_NG: The row at each place of a prompt; any row where the place is empty.
        place_B: The place of each row, n x G + g.
        tokens_N: Length of each prompt.
    """

    row_NG: Any
    place_B: Any
    tokens_N: Any


class FillRows(NamedTuple):
    """New tokens of rows, as many rows in every part, padded on the right.

    Attributes:
        tokens_BT: The tokens.
        new_B: How many they are; 0 for an empty row.
        prompt_B: The prompt that the row writes or continues.
        prompt_tokens_B: How many tokens of it are in the cache.
        slot_B: The slot that the row writes.
        own_tokens_B: How many tokens of it are in the cache.
    """

    tokens_BT: Any
    new_B: Any
    prompt_B: Any
    prompt_tokens_B: Any
    slot_B: Any
    own_tokens_B: Any


def attend_decode(
    sharing: Sharing, own_tokens_S: Array, *, put: Callable[..., Any] | None, mesh: Mesh | None
) -> Attend:
    """Let the one new token of every slot look at its prompt, its own tokens, and itself.

    A layer's cache is its keys and values of (prompts, slots).

    Args:
        sharing: Which slots look at which prompt.
        own_tokens_S: Tokens that a slot has in the cache.
        put: Writes new keys and values into a part of the cache, of one layer: the layer's new
            cache is then that of its slots. None leaves the writing to the caller, who gets the new
            keys and values, (k_S1KE, v_S1KE).
        mesh: What slots, prompts and heads are split over.
    """

    def attend(q_S1HE: Array, k_S1KE: Array, v_S1KE: Array, cache: Any) -> Any:
        prompts, own = cache
        new, tokens_S, changed = (k_S1KE, v_S1KE), own_tokens_S, (k_S1KE, v_S1KE)
        if put is not None:
            (changed,) = put([own], [new])
            new, tokens_S, own = None, own_tokens_S + 1, KeyValues(changed.k[0], changed.v[0])
        return _attend(q_S1HE, new, prompts, own, sharing, tokens_S, mesh=mesh), changed

    return attend


def attend_fill(rows: FillRows, *, mesh: Mesh | None) -> Attend:
    """Let new tokens of rows look at what their prompt and slot have in the cache, and at earlier
    new ones.

    A layer's cache is its keys and values of (prompts, slots), each None where there is nothing to
    look at; its new cache is the new keys and values, (k_BTKE, v_BTKE).

    Args:
        rows: What each row continues.
        mesh: What rows and heads are split over.
    """
    count = jnp.arange(len(rows.new_B) // row_parts(mesh))
    places = jnp.tile(count, row_parts(mesh))
    # Each row has a copy of its prompt's keys.
    sharing = Sharing(places[:, None], places, rows.prompt_tokens_B)

    def taken(kept: KeyValues | None, at_B: Array) -> KeyValues | None:
        if kept is None:
            return None
        heads = head_spec(kept.k.shape[1], mesh)(1)
        run = on_parts(lambda a, at_B: a[at_B], mesh, inputs=(heads, ROWS), outputs=heads)
        return KeyValues(run(kept.k, at_B), run(kept.v, at_B))

    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any) -> Any:
        new = (k_BTKE, v_BTKE)
        prompts, own = taken(cache[0], rows.prompt_B), taken(cache[1], rows.slot_B)
        return _attend(q_BTHE, new, prompts, own, sharing, rows.own_tokens_B, mesh=mesh), new

    return attend


def _attend(
    q_BTHE: Array,
    new: tuple[Array, Array] | None,
    prompts: KeyValues | None,
    own: KeyValues | None,
    sharing: Sharing,
    own_tokens_B: Array,
    *,
    mesh: Mesh | None,
) -> Array:
    """Attend to new keys, a row's own and its prompt's, on every part of the mesh."""
    arrays = (new, own, prompts)
    heads = head_spec(_key_heads(*arrays), mesh)
    inputs = (heads(2), (heads(2), heads(1), heads(1)), ROWS)
    run = on_parts(_attend_local, mesh, inputs=inputs, outputs=heads(2))
    return run(q_BTHE, arrays, (sharing, own_tokens_B))


def _key_heads(new: Any, own: KeyValues | None, prompts: KeyValues | None) -> int:
    kept = own or prompts
    return new[0].shape[2] if kept is None else kept.k.shape[1]


def _attend_local(q_BTHE: Array, arrays: Any, tables: Any) -> Array:
    """Attend with one softmax over all keys, in fp32."""
    (new, own, prompts), (sharing, own_tokens_B) = arrays, tables
    B, T, H, E = q_BTHE.shape
    K = _key_heads(*arrays)
    # Q counts the query heads of a key/value head, and the new tokens.
    q = (q_BTHE * E**-0.5).reshape(B, T, K, H // K, E)
    q_BKQE = q.transpose(0, 2, 3, 1, 4).reshape(B, K, H // K * T, E)
    scores, values = [], []
    if own is not None:
        seen = jnp.arange(own.k.shape[-1])[None] < own_tokens_B[:, None]
        scores.append(_masked(_product("bkqe,bkel->bkql", q_BKQE, own.k), seen[:, None, None]))
        values.append(own.v)
    if new is not None:
        k_BTKE, v_BTKE = new
        causal_QT = jnp.tile(jnp.tril(jnp.ones((T, T), bool)), (H // K, 1))
        scores.append(_masked(_product("bkqe,btke->bkqt", q_BKQE, k_BTKE), causal_QT))
        values.append(v_BTKE.swapaxes(1, 2))
    if prompts is not None:
        seen = jnp.arange(prompts.k.shape[-1])[None] < sharing.tokens_N[:, None]
        to_prompt = _product("nkme,nkel->nkml", _by_prompt(q_BKQE, sharing), prompts.k)
        scores.append(_by_row(_masked(to_prompt, seen[:, None, None]), sharing))
    joined = jax.nn.softmax(jnp.concatenate(scores, axis=-1)).astype(q_BTHE.dtype)
    ends = np.cumsum([part.shape[-1] for part in scores[:-1]])
    weights = jnp.split(joined, ends, axis=-1)
    found = [
        _product("bkql,bkle->bkqe", weight, value)
        for weight, value in zip(weights, values, strict=False)
    ]
    if prompts is not None:
        weights_NKML = _by_prompt(weights[-1], sharing)
        found.append(_by_row(_product("nkml,nkle->nkme", weights_NKML, prompts.v), sharing))
    out = sum(found[1:], found[0])
    out = out.reshape(B, K, H // K, T, E).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, H, E).astype(q_BTHE.dtype)


def _product(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _masked(scores: Array, seen: Bool[Array, "..."]) -> Array:
    return jnp.where(seen, scores, _HIDDEN)


def _by_prompt(rows_BKQ: Array, sharing: Sharing) -> Array:
    """Put rows beside their prompt: BKQ to NKM, M = G x Q; any last axis."""
    N, G = sharing.row_NG.shape
    _, K, Q, last = rows_BKQ.shape
    return rows_BKQ[sharing.row_NG].transpose(0, 2, 1, 3, 4).reshape(N, K, G * Q, last)


def _by_row(prompts_NKM: Array, sharing: Sharing) -> Array:
    """Undo `_by_prompt`."""
    N, G = sharing.row_NG.shape
    _, K, M, last = prompts_NKM.shape
    by_place = prompts_NKM.reshape(N, K, G, M // G, last).swapaxes(1, 2)
    return by_place.reshape(N * G, K, M // G, last)[sharing.place_B]
