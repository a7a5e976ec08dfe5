"""The sampler's states of linear attention, which prompts and slots have beside keys and values.

A slot begins with the state in which its prompt ends. The programs take the states of their rows
out of the cache, go on from them, and put them back (`opened`, `closed`); a row without new tokens
keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from minirl.model import linear_attention
from minirl.model.attention import state_specs
from minirl.model.linear_attention import Inputs, Kernels, Recur, State
from minirl.model.sharding import axis_parts, on_parts
from minirl.sample.attention import ROWS, CacheRows


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
    start, is_new_B = jax.tree.map(jnp.zeros_like, state), (rows.count_B > 0) & (rows.start_B == 0)
    own = _rows(state, rows.row_B)
    if prompts is None:
        start = _rows(start, rows.row_B)
    else:
        n_B = rows.member_B // rows.row_NG.shape[1]
        start = _rows(prompts, n_B if rows.prompt_N is None else rows.prompt_N[n_B])
        has_prompt_B = rows.prompt_tokens_N[n_B] > 0
        start = jax.tree.map(
            partial(_where, has_prompt_B), start, jax.tree.map(jnp.zeros_like, own)
        )
    return jax.tree.map(partial(_where, is_new_B), start, own)


def _closed(state: State, new: State, rows: CacheRows) -> State:
    if rows.row_B is None:
        return new
    # Several rows without new tokens may be of one number, which another one may have too.
    row_B = jnp.where(rows.count_B > 0, rows.row_B, len(state.memory_BHUE))
    return jax.tree.map(lambda array, x: array.at[row_B].set(x, mode="drop"), state, new)


def _rows(state: State, row_B: Any) -> State:
    return state if row_B is None else jax.tree.map(lambda array: array[row_B], state)


def _where(is_first_B: Array, first: Array, second: Array) -> Array:
    return jnp.where(jnp.expand_dims(is_first_B, range(1, first.ndim)), first, second)
