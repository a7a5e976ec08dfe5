"""The sampler's attention: new tokens are written into the cache, then look at what is there.

A row's queries look at its own tokens, the new ones among them, and at the prompt kept once for its
group. The queries of a prompt's rows are put side by side, so that its keys are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from minirl.model.decoder import Attend
from minirl.model.kernels import MASKED, Partial, join, partial_attention
from minirl.sample.cache import KeyValues

# Rows, slots and prompts are split alike.
_ROWS = Spec(("data", "fsdp"))


class NewTokens(NamedTuple):
    """New tokens of rows of the cache, padded on the right."""

    row_B: Any  # the prompt or slot, inside of its part; None for all slots in order
    start_B: Any  # how many tokens it has already
    count_B: Any  # how many are new; 0 leaves it as it is


class Sharing(NamedTuple):
    """Which rows look at which prompt, numbered inside of a part."""

    row_NG: Any  # the row at each place of a prompt; any row where the place is empty
    place_B: Any  # the place of each row, n x G + g
    tokens_N: Any  # length of each prompt


def attend_to_cache(
    new: NewTokens, sharing: Sharing | None, *, own_tokens: int, mesh: Mesh | None
) -> Attend:
    """Let new tokens look at earlier ones of their row, at themselves, and at their prompt.

    A layer's cache is (what is written to, prompts); its new cache is the first of them. Where rows
    have no prompts, `sharing` and prompts are None. `own_tokens` positions of a row are looked at.
    """

    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any) -> tuple[Array, Any]:
        own, prompts = cache
        heads = _head_spec(own.k.shape[1], mesh)
        run = on_parts(
            partial(_attend, own_tokens=own_tokens),
            mesh,
            inputs=(*[heads(2)] * 3, *[heads(1)] * 2, *[_ROWS] * 2),
            outputs=(heads(2), heads(1)),
        )
        return run(q_BTHE, k_BTKE, v_BTKE, own, prompts, new, sharing)

    return attend


def kept_rows(layers: Sequence[KeyValues], row_N: Array, mesh: Mesh | None) -> list[KeyValues]:
    """Copy rows of every layer, numbered inside of their parts."""
    heads = _head_spec(layers[0].k.shape[1], mesh)(1)
    run = on_parts(
        lambda layers, row_N: jax.tree.map(lambda array: array[row_N], layers),
        mesh,
        inputs=(heads, _ROWS),
        outputs=heads,
    )
    return run(list(layers), row_N)


def _head_spec(heads: int, mesh: Mesh | None) -> Callable[[int], Spec]:
    """Return how an array of rows is split whose axis of that number is heads."""
    over = None if mesh is None or heads % mesh.shape["tensor"] else "tensor"
    return lambda axis: Spec(*_ROWS, *[None] * (axis - 1), over)


def on_parts(run: Callable[..., Any], mesh: Mesh | None, *, inputs: Any, outputs: Any) -> Any:
    """Run a function on every part of the mesh with what lies there; as it is without a mesh."""
    if mesh is None:
        return run
    return jax.shard_map(run, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def _attend(
    q_BTHE: Array,
    k_BTKE: Array,
    v_BTKE: Array,
    own: KeyValues,
    prompts: KeyValues | None,
    new: NewTokens,
    sharing: Sharing | None,
    *,
    own_tokens: int,
) -> tuple[Array, KeyValues]:
    """Write and attend on one part."""
    B, T, H, E = q_BTHE.shape
    K = k_BTKE.shape[2]
    place_BT = new.start_B[:, None] + jnp.arange(T)[None]
    own = _written(own, k_BTKE, v_BTKE, new, place_BT)
    k_BKEL, v_BKLE = own if new.row_B is None else (array[new.row_B] for array in own)
    k_BKEL, v_BKLE = k_BKEL[..., :own_tokens], v_BKLE[..., :own_tokens, :]
    # Q counts the query heads of a key/value head, and the new tokens.
    q = (q_BTHE * E**-0.5).reshape(B, T, K, H // K, E)
    q_BKQE = q.transpose(0, 2, 3, 1, 4).reshape(B, K, H // K * T, E)
    seen_BTL = jnp.arange(own_tokens)[None, None] <= place_BT[..., None]
    seen_BKQL = jnp.tile(seen_BTL, (1, H // K, 1))[:, None]
    scores = jnp.where(seen_BKQL, _product("bkqe,bkel->bkql", q_BKQE, k_BKEL), MASKED)
    attended = partial_attention(scores, v_BKLE)
    if prompts is not None and sharing is not None:
        seen_NL = jnp.arange(prompts.k.shape[-1])[None] < sharing.tokens_N[:, None]
        scores = _product("nkme,nkel->nkml", _by_prompt(q_BKQE, sharing), prompts.k)
        scores = jnp.where(seen_NL[:, None, None], scores, MASKED)
        to_prompt = partial_attention(scores, prompts.v)
        attended = join([attended, Partial(*(_by_row(one, sharing) for one in to_prompt))])
    out = attended.out.reshape(B, K, H // K, T, E).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, H, E).astype(q_BTHE.dtype), own


def _written(
    own: KeyValues, k_BTKE: Array, v_BTKE: Array, new: NewTokens, place_BT: Array
) -> KeyValues:
    """Put new keys and values into rows."""
    rows_B = jnp.arange(len(place_BT)) if new.row_B is None else new.row_B
    # Padding is dropped: there is no such column.
    is_new_BT = jnp.arange(place_BT.shape[1])[None] < new.count_B[:, None]
    column_BT = jnp.where(is_new_BT, place_BT, own.k.shape[-1])
    k, v = (array.astype(own.k.dtype) for array in (k_BTKE, v_BTKE))
    return KeyValues(
        own.k.at[rows_B[:, None], :, :, column_BT].set(k, mode="drop"),
        own.v.at[rows_B[:, None], :, column_BT].set(v, mode="drop"),
    )


def _product(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


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
