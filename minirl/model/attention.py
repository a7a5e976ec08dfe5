"""What a query may attend to: the functions that a `Decoder` takes as `attend` and as `recur`.

The learner computes the tokens of prompts and answers as one flat list without padding, and only
attention puts them into rows: those of prompts, computed once a group, and those of answers, which
attend to their group's prompt and to themselves. Attention to the two sets of keys is joined
(`minirl.model.kernels:join`), so that it equals attention to a copy of the prompt in every row.

Linear attention goes through the same rows: an answer begins with the state in which its group's
prompt ends, and the prompt's gradient is the sum over the group's.

The gradient of a set needs only the joined values and log-sum-exp: the probabilities are
exp(score - lse), and the gradient of a score is p (dout . v - dout . out), as in ring attention
(arXiv:2310.01889).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from minirl.model import linear_attention
from minirl.model.decoder import Attend
from minirl.model.kernels import Kernel, KeySet, blockwise, join
from minirl.model.linear_attention import Inputs, Kernels, Recur
from minirl.model.sharding import axes_spec, axis_parts, device_of, on_parts


class Rows(NamedTuple):
    """Where the tokens of X flat lists, T each, stand in rows: N of prompts and B of answers.

    Each list has as many rows as any other: N/X of prompts, and B/N of answers to each of them,
    side by side. Rows are padded on the right.

    Attributes:
        token_NP: The token of its list at each column of a prompt; T in padding.
        token_BC: The same of answers.
        cell_XT: The cell of each token, counted over the list's rows of prompts and then over those
            of answers; in padding the number of all cells.
    """

    token_NP: Any
    token_BC: Any
    cell_XT: Any


def shared_prefix(rows: Rows, *, mesh: Mesh | None = None) -> Attend:
    """Attend to all tokens of the group's prompt, and to earlier ones of the own row.

    Queries, keys and values are those of flat lists (`Rows`). What padding attends to has no
    meaning, and is finite. There is no cache.
    """

    def attend(q_XTHE: Array, k_XTKE: Array, v_XTKE: Array, cache: Any) -> tuple[Array, Any]:
        function = functools.partial(_attend_in_rows, _kernel(q_XTHE, mesh))
        if mesh is not None:
            # A kernel is opaque to the compiler: each device calls it with its part of rows and
            # heads. Key/value heads are repeated until the mesh divides them; where it does not
            # divide the query heads, all heads are on every device.
            heads, key_heads = q_XTHE.shape[2], k_XTKE.shape[2]
            times = math.lcm(key_heads, axis_parts("heads", heads, mesh)) // key_heads
            k_XTKE, v_XTKE = (jnp.repeat(array, times, axis=2) for array in (k_XTKE, v_XTKE))
            row, head = axes_spec(("batch", "heads"), (len(q_XTHE), heads), mesh)
            activations = PartitionSpec(row, None, head, None)
            inputs = (*[activations] * 3, PartitionSpec(row, None))
            function = on_parts(function, mesh, inputs=inputs, outputs=activations)
        return function(q_XTHE, k_XTKE, v_XTKE, rows), cache

    return attend


def shared_state(rows: Rows, *, mesh: Mesh | None = None) -> Recur:
    """Run linear attention over the group's prompt, and over each answer from where that ends.

    As `shared_prefix` otherwise. Whatever the rest of the model keeps, all of this is computed
    again in the backward pass: it takes much more memory than it needs time.
    """

    def recur(inputs: Inputs, kernels: Kernels, cache: Any) -> tuple[Array, Any]:
        function: Any = jax.checkpoint(_recur_in_rows)
        if mesh is not None:
            of_rows, of_heads, outputs = state_specs(inputs, mesh)
            parts = (of_rows, of_heads, PartitionSpec(outputs[0]))
            function = on_parts(function, mesh, inputs=parts, outputs=outputs)
        return function(inputs, kernels, rows), cache

    return recur


def state_specs(inputs: Inputs, mesh: Mesh) -> tuple[Inputs, Kernels, PartitionSpec]:
    """Return how what linear attention gets, and what it returns, is split: by rows, and by heads
    where the mesh divides those of keys.
    """
    sizes = (len(inputs.k_BTKE), inputs.k_BTKE.shape[2])
    row, head = axes_spec(("batch", "heads"), sizes, mesh)
    values, numbers = PartitionSpec(row, None, head, None), PartitionSpec(row, None, head)
    return Inputs(*[values] * 3, numbers, numbers), Kernels(*[PartitionSpec(head)] * 3), values


def answers(values_XT: Array, rows: Rows) -> Array:
    """Bring numbers of tokens to the rows of answers, BC; 0 in padding."""
    return _to_rows(values_XT, rows)[1]


def _attend_in_rows(
    kernel: Kernel, q_XTHE: Array, k_XTKE: Array, v_XTKE: Array, rows: Rows
) -> Array:
    """Attend from prompts to themselves, and from answers to their prompt and to themselves."""
    (q_N, q_B), (k_N, k_B), (v_N, v_B) = (_to_rows(x, rows) for x in (q_XTHE, k_XTKE, v_XTKE))
    length_N = jnp.sum(rows.token_NP < q_XTHE.shape[1], axis=1, dtype=jnp.int32)
    of_prompts = attend_to_sets(kernel, q_N, [KeySet(k_N, v_N)])
    of_answers = attend_to_sets(kernel, q_B, [KeySet(k_N, v_N, length_N), KeySet(k_B, v_B)])
    return _to_list((of_prompts, of_answers), rows)


def _recur_in_rows(inputs: Inputs, kernels: Kernels, rows: Rows) -> Array:
    """Run linear attention over prompts, and from their states over their answers."""
    T = inputs.g_BTH.shape[1]
    of_prompts, of_answers = (
        Inputs(*x) for x in zip(*(_to_rows(x, rows) for x in inputs), strict=True)
    )
    length_N, length_B = (jnp.sum(token < T, axis=1, dtype=jnp.int32) for token in rows[:2])
    start = linear_attention.no_state(of_prompts, kernels)
    o_N, state = linear_attention.run(of_prompts, kernels, start, length_N)
    each = len(length_B) // len(length_N)
    state = jax.tree.map(lambda array: jnp.repeat(array, each, axis=0), state)
    o_B, _ = linear_attention.run(of_answers, kernels, state, length_B)
    return _to_list((o_N, o_B), rows)


# Tokens go to rows and back by index both ways: the gradient of an index is a slow sum.
@jax.custom_vjp
def _to_rows(list_XT: Array, rows: Rows) -> tuple[Array, Array]:
    """Bring what tokens have to the rows of prompts, NP, and of answers, BC; 0 in padding."""
    X, rest = len(list_XT), list_XT.shape[2:]

    def to_rows(token: Array) -> Array:
        return _taken(list_XT, token.reshape(X, -1)).reshape(*token.shape, *rest)

    return to_rows(rows.token_NP), to_rows(rows.token_BC)


@jax.custom_vjp
def _to_list(arrays: tuple[Array, Array], rows: Rows) -> Array:
    """Undo `_to_rows`."""
    X, rest = len(rows.cell_XT), arrays[0].shape[2:]
    cells = [array.reshape(X, -1, *rest) for array in arrays]
    return _taken(jnp.concatenate(cells, axis=1), rows.cell_XT)


_to_rows.defvjp(
    lambda list_XT, rows: (_to_rows(list_XT, rows), rows),
    lambda rows, gradients: (_to_list(gradients, rows), None),
)
_to_list.defvjp(
    lambda arrays, rows: (_to_list(arrays, rows), rows),
    lambda rows, gradient_XT: (_to_rows(gradient_XT, rows), None),
)


def _taken(array_XA: Array, index_XR: Array) -> Array:
    """Return array[x, index[x, r]], XR and the rest; 0 where the index is too large."""
    take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)
    return jax.vmap(take)(array_XA, index_XR)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_to_sets(kernel: Kernel, q_BTHE: Array, sets: Sequence[KeySet]) -> Array:
    """Return the values of queries that attend to several sets of keys together."""
    return _forward(kernel, q_BTHE, sets)[0]


def _forward(kernel: Kernel, q_BTHE: Array, sets: Sequence[KeySet]) -> tuple[Array, Any]:
    parts = []
    for keys in sets:
        values, lse = kernel.forward(_by_key_row(q_BTHE, keys), keys)
        values = values.reshape(q_BTHE.shape).astype(jnp.float32)
        parts.append((values, lse.reshape(q_BTHE.shape[:3])))
    values_BTHE, lse_BTH = join(parts)
    out_BTHE = values_BTHE.astype(q_BTHE.dtype)
    return out_BTHE, (q_BTHE, sets, out_BTHE, lse_BTH)


def _backward(kernel: Kernel, saved: Any, dout_BTHE: Array) -> tuple[Array, list[KeySet]]:
    q_BTHE, sets, out_BTHE, lse_BTH = saved
    dq_BTHE, gradients = jnp.zeros(q_BTHE.shape, jnp.float32), []
    for keys in sets:
        arrays = (q_BTHE, out_BTHE, lse_BTH, dout_BTHE)
        q, *values = (_by_key_row(array, keys) for array in arrays)
        dq, dk, dv = kernel.backward(q, keys, *values)
        dq_BTHE += dq.reshape(q_BTHE.shape).astype(jnp.float32)
        gradients.append(KeySet(dk, dv))
    return dq_BTHE.astype(q_BTHE.dtype), gradients


attend_to_sets.defvjp(_forward, _backward)


def _by_key_row(array_BT: Array, keys: KeySet) -> Array:
    """Put all queries that attend to a row of keys into one row."""
    return array_BT.reshape(len(keys.k_XLKE), -1, *array_BT.shape[2:])


@functools.cache
def _kernel_of(platform: str) -> Kernel:
    """Make the kernel of a platform; the libraries' own are in private modules of JAX, which other
    platforms do without.
    """
    if platform == "tpu":
        from minirl.model.splash import SPLASH

        return SPLASH
    if platform == "gpu":
        from minirl.model.cudnn import CUDNN

        return CUDNN
    # Smaller blocks than 4 MB keep a CPU busy with small products.
    return blockwise(2**22 if platform == "cpu" else 2**29)


def _kernel(q_BTHE: Array, mesh: Mesh | None) -> Kernel:
    device = device_of(mesh)
    kernel = _kernel_of(device.platform)
    return kernel if kernel.serves(q_BTHE, device) else _kernel_of("another")
