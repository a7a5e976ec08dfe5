"""The sampler's attention: new tokens are written into the cache, then look at what is there.

A row's queries look at its own tokens, the new ones among them, and at the prompt kept once for its
group. The queries of a prompt's rows are put side by side, so that its keys are read once.

Linear attention has states beside keys and values, of prompts and of slots. A slot begins with the
state in which its prompt ends. The programs take the states of their rows out of the cache, go on
from them, and put them back (`opened`, `closed`); a row without new tokens keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from minirl.model import linear_attention
from minirl.model.attention import state_specs
from minirl.model.decoder import Attend
from minirl.model.kernels import MASKED, Attended, attend_to_keys, join
from minirl.model.linear_attention import Inputs, Kernels, Recur, State
from minirl.model.sharding import axis_parts, on_parts, platform_of
from minirl.sample.cache import KeyValues

# Rows, slots and prompts are split alike.
ROWS = Spec(("data", "fsdp"))
# Keys of a row that are attended to at a time.
_BLOCK = 256
_LEAST_HEAD = 16  # a product's on tensor cores

# How to attend to rows of the cache: a function of queries XKQE, keys, the rows X (None for all in
# order), and how many keys each new token sees, XT.
_Way = Callable[[Array, KeyValues, Any, Array], Attended]


class CacheRows(NamedTuple):
    """Where new tokens, padded on the right, go in the cache, and which rows look at which prompt.

    Rows and prompts are numbered inside of a part.
    """

    row_B: Any  # the prompt or slot that is written; None for all in order
    start_B: Any  # how many tokens it has already
    count_B: Any  # how many are new; 0 leaves it as it is
    member_B: Any  # which query of which prompt it is, n x G + g
    row_NG: Any  # the number of the row that is each; any number where there is none
    prompt_N: Any  # the prompt of each n; None for all in order
    prompt_tokens_N: Any  # its length


def attend_to_cache(rows: CacheRows, *, mesh: Mesh | None) -> Attend:
    """Let new tokens look at earlier ones of their row, at themselves, and at their prompt.

    A layer's cache is (what is written to, prompts or None for none); its new cache is the first of
    them.
    """

    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any) -> tuple[Array, Any]:
        written, prompts = cache
        spec = _spec(k_BTKE.shape[2], mesh)
        run = on_parts(
            partial(_attend, ways=_ways(q_BTHE, mesh)),
            mesh,
            inputs=(*[spec] * 5, ROWS),
            outputs=(spec, spec),
        )
        return run(q_BTHE, k_BTKE, v_BTKE, written, prompts, rows)

    return attend


def copied(
    keys: KeyValues, source_B: Array, row_B: Array, *, heads: int, mesh: Mesh | None
) -> KeyValues:
    """Copy one row of a layer's keys and values over another in every part."""

    def copy(keys: KeyValues, source_B: Array, row_B: Array) -> KeyValues:
        return jax.tree.map(lambda array: array.at[row_B].set(array[source_B]), keys)

    spec = _spec(heads, mesh)
    return on_parts(copy, mesh, inputs=(spec, ROWS, ROWS), outputs=spec)(keys, source_B, row_B)


def has_kernel(head_size: int, mesh: Mesh | None) -> bool:
    """Tell whether `gpu_attention` takes heads of a size here: a power of two, on GPUs."""
    return platform_of(mesh) == "gpu" and head_size >= _LEAST_HEAD and head_size.bit_count() == 1


def _ways(q_BTHE: Array, mesh: Mesh | None) -> tuple[_Way, _Way]:
    """Return how to attend to the rows that are written, and how to prompts.

    By the device: the host of a GPU would have to wait for the length of every loop.
    """
    if q_BTHE.shape[1] == 1 and has_kernel(q_BTHE.shape[-1], mesh):
        return _to_first, _to_first
    if platform_of(mesh) == "gpu":
        return _to_seen, _to_seen
    return _to_blocks, _to_blocks_in_turn


def _spec(heads: int, mesh: Mesh | None) -> Spec:
    """Return how queries, keys and values are split, by rows and by the heads of the third axis."""
    over = None if mesh is None or heads % mesh.shape["tensor"] else "tensor"
    return Spec(*ROWS, None, over)


def _attend(
    q_BTHE: Array,
    k_BTKE: Array,
    v_BTKE: Array,
    written: KeyValues,
    prompts: KeyValues | None,
    rows: CacheRows,
    *,
    ways: tuple[_Way, _Way],
) -> tuple[Array, KeyValues]:
    """Write and attend on one part."""
    B, T, H, E = q_BTHE.shape
    K = k_BTKE.shape[2]
    to_written, to_prompts = ways
    position_BT = rows.start_B[:, None] + jnp.arange(T)[None]
    written = _write(written, k_BTKE, v_BTKE, rows, position_BT)
    # Q counts the query heads of a key/value head, and the new tokens.
    q_BKQE = q_BTHE.reshape(B, T, K, H // K, E).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, E)
    attended = to_written(q_BKQE, written, rows.row_B, position_BT + 1)
    if prompts is not None:
        N, G = rows.row_NG.shape
        q_NKME = q_BKQE[rows.row_NG].swapaxes(1, 2).reshape(N, K, -1, E)
        beside = to_prompts(q_NKME, prompts, rows.prompt_N, rows.prompt_tokens_N[:, None])

        def by_row(array_NKM: Array) -> Array:
            parts = array_NKM.reshape(N, K, G, -1, *array_NKM.shape[3:]).swapaxes(1, 2)
            return parts.reshape(N * G, *parts.shape[2:])[rows.member_B]

        attended = join([attended, jax.tree.map(by_row, beside)])
    out = attended[0].reshape(B, K, H // K, T, E).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, H, E).astype(q_BTHE.dtype), written


def _to_seen(q_XKQE: Array, keys: KeyValues, row_X: Any, count_XT: Array) -> Attended:
    """Attend to all that there is room for, and mask what a new token does not see."""
    keys = _rows(keys, row_X)
    return _masked(q_XKQE, keys, jnp.arange(keys.length)[None, None] < count_XT[..., None])


def _to_first(q_XKQE: Array, keys: KeyValues, row_X: Any, count_X1: Array) -> Attended:
    """Attend by a kernel, from one new token."""
    # With Pallas, which other platforms are not to need.
    from minirl.sample import gpu_attention

    return gpu_attention.attend_to_first(q_XKQE, *_rows(keys, row_X), count_X1[:, 0])


def _to_blocks(q_XKQE: Array, keys: KeyValues, row_X: Any, count_XT: Array) -> Attended:
    """Attend to a block of every row at a time, up to the last key that any of them sees."""
    length = keys.length
    size = min(_BLOCK, length)

    def add(n: Array, known: Attended) -> Attended:
        # The last block begins earlier, so that it ends with the row.
        start = jnp.minimum(n * size, length - size)
        position_L = start + jnp.arange(size)
        is_new_L = position_L >= n * size
        is_seen_XTL = is_new_L[None, None] & (position_L[None, None] < count_XT[..., None])
        block = KeyValues(*(_positions(array, row_X, start, size) for array in keys))
        return join([known, _masked(q_XKQE, block, is_seen_XTL)])

    blocks = jax.lax.div(jnp.minimum(count_XT.max(), length) + (size - 1), size)
    return jax.lax.fori_loop(0, blocks, add, _nothing(q_XKQE))


def _to_blocks_in_turn(q_XKQE: Array, keys: KeyValues, row_X: Any, count_XT: Array) -> Attended:
    """Attend to the blocks of one row after the other: their lengths may differ much."""

    def add(x: Array, known: Attended) -> Attended:
        row = x if row_X is None else row_X[x]
        of_row = _to_blocks(q_XKQE[x][None], keys, row[None], count_XT[x][None])
        return jax.tree.map(lambda array_X, array: array_X.at[x].set(array[0]), known, of_row)

    numbers_X = jnp.arange(1, len(count_XT) + 1)
    last = jnp.max(jnp.where(count_XT.max(axis=1) > 0, numbers_X, 0))
    return jax.lax.fori_loop(0, last, add, _nothing(q_XKQE))


def _nothing(q_XKQE: Array) -> Attended:
    """Return attention to no key."""
    return jnp.zeros(q_XKQE.shape, jnp.float32), jnp.full(q_XKQE.shape[:-1], MASKED, jnp.float32)


def _masked(q_XKQE: Array, keys: KeyValues, is_seen_XTL: Array) -> Attended:
    """Attend to what each of the T new tokens of a row sees; Q goes over heads, and then T."""
    is_seen_XQL = jnp.tile(is_seen_XTL, (1, q_XKQE.shape[2] // is_seen_XTL.shape[1], 1))
    X, K, _, E = q_XKQE.shape
    k_XKLE, v_XKLE = (array.reshape(X, -1, K, E).swapaxes(1, 2) for array in keys)
    scores = jnp.einsum("xkqe,xkle->xkql", q_XKQE, k_XKLE, preferred_element_type=jnp.float32)
    scores *= E**-0.5
    return attend_to_keys(jnp.where(is_seen_XQL[:, None], scores, MASKED), v_XKLE)


def _rows(layer: Any, row_X: Any) -> Any:
    """Copy rows of keys and values, or of states; None for all of them as they are."""
    return layer if row_X is None else jax.tree.map(lambda array: array[row_X], layer)


def _positions(array: Array, row_X: Any, start: Array, size: int) -> Array:
    """Copy positions of rows, of all of them in order for None."""
    if row_X is None:
        block = jax.lax.dynamic_slice_in_dim(array, start, size, 1)
    else:
        sizes = 1, size, array.shape[2]
        block = jax.vmap(lambda row: jax.lax.dynamic_slice(array, (row, start, 0), sizes)[0])(row_X)
    # Or the compiler would have all of a prompt's keys in the order that its products like.
    return with_layout_constraint(block, Layout((0, 1, 2)))


def _write(
    keys: KeyValues, k_BTKE: Array, v_BTKE: Array, rows: CacheRows, position_BT: Array
) -> KeyValues:
    """Put new keys and values into rows."""
    row_B = jnp.arange(len(position_BT)) if rows.row_B is None else rows.row_B
    # Padding is dropped: there is no such position.
    is_new_BT = jnp.arange(position_BT.shape[1])[None] < rows.count_B[:, None]
    position_BT = jnp.where(is_new_BT, position_BT, keys.length)
    at = row_B[:, None], position_BT

    def put(array: Array, new_BTKE: Array) -> Array:
        new = new_BTKE.reshape(*position_BT.shape, -1).astype(array.dtype)
        return array.at[at].set(new, mode="drop")

    return KeyValues(put(keys.k, k_BTKE), put(keys.v, v_BTKE))


def state_spec(state: State, mesh: Mesh | None) -> State:
    """Return how states are split: by rows, and by heads where the mesh divides those of keys."""
    head = "tensor" if axis_parts("heads", state.tails[1].shape[2], mesh) > 1 else None
    return State(Spec(*ROWS, head), (Spec(*ROWS, None, head),) * 3)


def recur_from_cache(rows: CacheRows, *, mesh: Mesh | None) -> Recur:
    """Let the new tokens of rows go on from their states, which are the layer's cache."""

    def recur(inputs: Inputs, kernels: Kernels, cache: State) -> tuple[Array, State]:
        run: Any = linear_attention.run
        if mesh is not None:
            *specs, outputs = state_specs(inputs, mesh)
            state = state_spec(cache, mesh)
            run = on_parts(run, mesh, inputs=(*specs, state, ROWS), outputs=(outputs, state))
        return run(inputs, kernels, cache, rows.count_B)

    return recur


def opened(
    written: Sequence[Any], prompts: Sequence[Any] | None, rows: CacheRows, *, mesh: Mesh | None
) -> list[Any]:
    """Take the states of rows out of the cache; keys and values stay as they are."""
    running, before = list[Any](), None
    for layer, of_prompts in zip(written, prompts or [None] * len(written), strict=True):
        if isinstance(layer, State):
            spec = state_spec(layer, mesh)
            known = ROWS if of_prompts is None else spec
            run = on_parts(_opened, mesh, inputs=(spec, known, ROWS), outputs=spec)
            # One layer after the other: the prompts' states would else be copied of all at once.
            of_prompts, before = jax.lax.optimization_barrier((of_prompts, before))
            layer = before = run(layer, of_prompts, rows)
        running.append(layer)
    return running


def closed(
    written: Sequence[Any], new: Sequence[Any], rows: CacheRows, *, mesh: Mesh | None
) -> list[Any]:
    """Put the states of rows back."""

    def close_layer(layer: Any, new: Any) -> Any:
        if not isinstance(layer, State):
            return new
        spec = state_spec(layer, mesh)
        return on_parts(_closed, mesh, inputs=(spec, spec, ROWS), outputs=spec)(layer, new, rows)

    return [close_layer(*layer) for layer in zip(written, new, strict=True)]


def _opened(state: State, prompts: State | None, rows: CacheRows) -> State:
    # Rows of a prompt, and slots without one, begin with nothing.
    own, is_new_B = _rows(state, rows.row_B), (rows.count_B > 0) & (rows.start_B == 0)
    start = jax.tree.map(jnp.zeros_like, own)
    if prompts is not None:
        n_B = rows.member_B // rows.row_NG.shape[1]
        of_prompt = _rows(prompts, n_B if rows.prompt_N is None else rows.prompt_N[n_B])
        start = jax.tree.map(partial(_where, rows.prompt_tokens_N[n_B] > 0), of_prompt, start)
    return jax.tree.map(partial(_where, is_new_B), start, own)


def _closed(state: State, new: State, rows: CacheRows) -> State:
    if rows.row_B is None:
        return new
    # Several rows without new tokens may be of one number, which another one may have too.
    row_B = jnp.where(rows.count_B > 0, rows.row_B, len(state.memory_BHUE))
    return jax.tree.map(lambda array, x: array.at[row_B].set(x, mode="drop"), state, new)


def _where(is_first_B: Array, first: Array, second: Array) -> Array:
    return jnp.where(jnp.expand_dims(is_first_B, range(1, first.ndim)), first, second)
