"""The sampler's attention: to a prompt kept once a group, to a row's own tokens, and to new ones.

The queries of a prompt's rows are put side by side, so that its keys are read once a step, and all
scores of a query are normalised by one softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool

from minirl.model.decoder import Attend
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


def attend_decode(sharing: Sharing, own_tokens_S: Array, *, mesh: Mesh | None) -> Attend:
    """Let the one new token of every slot look at its prompt, its own tokens, and itself.

    A layer's cache is its `KeyValues` of (prompts, slots); its new cache is the new keys and
    values, (k_S1KE, v_S1KE).

    Args:
        sharing: Which slots look at which prompt.
        own_tokens_S: Tokens that a slot has in the cache.
        mesh: What slots, prompts and heads are split over.
    """

    def local(q: Array, k: Array, v: Array, cache: Any, tables: Any) -> Array:
        sharing, own_tokens_S = tables
        return _attend(q, k, v, *cache, sharing, own_tokens_S)

    return _attend_on_parts(local, (sharing, own_tokens_S), mesh)


def attend_fill(rows: FillRows, *, mesh: Mesh | None) -> Attend:
    """Let new tokens of rows look at what their prompt and slot have in the cache, and at earlier
    new ones. Caches are those of `attend_decode`; without a slot's keys the second is None.

    Args:
        rows: What each row continues.
        mesh: What rows and heads are split over.
    """

    def local(q: Array, k: Array, v: Array, cache: Any, rows: FillRows) -> Array:
        prompts, own = cache
        count = jnp.arange(len(q))
        # Each row has a copy of its prompt's keys.
        sharing = Sharing(count[:, None], count, rows.prompt_tokens_B)
        prompts, own = (
            None if kept is None else KeyValues(kept.k[at_B], kept.v[at_B])
            for kept, at_B in ((prompts, rows.prompt_B), (own, rows.slot_B))
        )
        return _attend(q, k, v, prompts, own, sharing, rows.own_tokens_B)

    return _attend_on_parts(local, rows, mesh)


def _attend_on_parts(local: Callable[..., Array], tables: Any, mesh: Mesh | None) -> Attend:
    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any) -> Any:
        heads = head_spec(k_BTKE.shape[2], mesh)
        run = on_parts(local, mesh, inputs=(*[heads(2)] * 3, heads(1), ROWS), outputs=heads(2))
        return run(q_BTHE, k_BTKE, v_BTKE, cache, tables), (k_BTKE, v_BTKE)

    return attend


def _attend(
    q_BTHE: Array,
    k_BTKE: Array,
    v_BTKE: Array,
    prompts: KeyValues | None,
    own: KeyValues | None,
    sharing: Sharing,
    own_tokens_B: Array,
) -> Array:
    """Attend to new keys, a row's own and its prompt's with one softmax, in fp32."""
    B, T, H, E = q_BTHE.shape
    K = k_BTKE.shape[2]
    # Q counts the query heads of a key/value head, and the new tokens.
    q = (q_BTHE * E**-0.5).reshape(B, T, K, H // K, E)
    q_BKQE = q.transpose(0, 2, 3, 1, 4).reshape(B, K, H // K * T, E)
    causal_QT = jnp.tile(jnp.tril(jnp.ones((T, T), bool)), (H // K, 1))
    scores = [_masked(_product("bkqe,btke->bkqt", q_BKQE, k_BTKE), causal_QT)]
    if own is not None:
        seen = _before(own_tokens_B, own.k.shape[-1])
        scores.append(_masked(_product("bkqe,bkel->bkql", q_BKQE, own.k), seen))
    if prompts is not None:
        seen = _before(sharing.tokens_N, prompts.k.shape[-1])
        to_prompt = _product("nkme,nkel->nkml", _by_prompt(q_BKQE, sharing), prompts.k)
        scores.append(_by_row(_masked(to_prompt, seen), sharing))
    joined = jax.nn.softmax(jnp.concatenate(scores, axis=-1)).astype(v_BTKE.dtype)
    ends = [sum(part.shape[-1] for part in scores[: n + 1]) for n in range(len(scores) - 1)]
    weights = jnp.split(joined, ends, axis=-1)
    out = _product("bkqt,btke->bkqe", weights[0], v_BTKE)
    if own is not None:
        out += _product("bkql,bkle->bkqe", weights[1], own.v)
    if prompts is not None:
        weights_NKML = _by_prompt(weights[-1], sharing)
        out += _by_row(_product("nkml,nkle->nkme", weights_NKML, prompts.v), sharing)
    out = out.reshape(B, K, H // K, T, E).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, H, E).astype(q_BTHE.dtype)


def _product(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _before(tokens_X: Array, length: int) -> Bool[Array, "X 1 1 L"]:
    """Tell which positions of a row hold one of its tokens."""
    return (jnp.arange(length)[None] < tokens_X[:, None])[:, None, None]


def _masked(scores: Array, seen: Array) -> Array:
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
