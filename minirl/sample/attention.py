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
from minirl.sample import gpu_attention
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
        is_one = q_BTHE.shape[1] == 1 and gpu_attention.serves(q_BTHE.shape[-1], mesh)
        attend_to = _to_first if is_one else _to_seen
        heads = _head_spec(own.k.shape[1], mesh)
        run = on_parts(
            partial(_attend, own_tokens=own_tokens, attend_to=attend_to),
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
    attend_to: Callable[[Array, KeyValues, Array], Partial],
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
    attended = attend_to(q_BKQE, KeyValues(k_BKEL, v_BKLE), place_BT + 1)
    if prompts is not None and sharing is not None:
        to_prompt = attend_to(_by_prompt(q_BKQE, sharing), prompts, sharing.tokens_N[:, None])
        attended = join([attended, Partial(*(_by_row(one, sharing) for one in to_prompt))])
    out = attended.out.reshape(B, K, H // K, T, E).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, H, E).astype(q_BTHE.dtype), own


def _to_seen(q_XKQE: Array, keys: KeyValues, count_XT: Array) -> Partial:
    """Attend to as many keys as each of the T new tokens of a row sees."""
    seen_XTL = jnp.arange(keys.k.shape[-1])[None, None] < count_XT[..., None]
    seen_XQL = jnp.tile(seen_XTL, (1, q_XKQE.shape[2] // count_XT.shape[1], 1))
    scores = jnp.einsum("xkqe,xkel->xkql", q_XKQE, keys.k, preferred_element_type=jnp.float32)
    return partial_attention(jnp.where(seen_XQL[:, None], scores, MASKED), keys.v)


def _to_first(q_XKQE: Array, keys: KeyValues, count_X1: Array) -> Partial:
    """Do the same for one new token, on a GPU."""
    X, K, Q, _ = q_XKQE.shape
    q, k, v = (array.reshape(X * K, *array.shape[2:]) for array in (q_XKQE, *keys))
    attended = gpu_attention.attend_to_first(q, k, v, jnp.repeat(count_X1[:, 0], K))
    return Partial(*(one.reshape(X, K, Q, -1) for one in attended))


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
