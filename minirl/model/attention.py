"""What a query may attend to: the functions that a `Decoder` takes as `attend`.

The learner computes the tokens of prompts and answers as one flat list without padding, and only
attention puts them into rows: those of prompts, computed once a group, and those of answers, which
attend to their group's prompt and to themselves. Attention to the two sets of keys is joined
(`minirl.model.kernels:join`), so that it equals attention to a copy of the prompt in every row.

The gradient of a set needs only the joined values and log-sum-exp: the probabilities are
exp(score - lse), and the gradient of a score is p (dout . v - dout . out), as in ring attention
(arXiv:2310.01889).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from minirl.model.cudnn import cudnn
from minirl.model.decoder import Attend
from minirl.model.kernels import Kernel, KeySet, Partial, blockwise, join
from minirl.model.sharding import axes_spec, axis_parts, platform_of
from minirl.model.splash import splash


class Rows(NamedTuple):
    """Where the tokens of X flat lists, T each, stand in rows: N of prompts and B of answers.

    Each list has as many rows as any other: N/X of prompts, and B/N of answers to each of them,
    side by side. Rows are padded on the right.

    Attributes:
        token_NP: The token of its list at each column of a prompt; T in padding.
        token_BC: The same of answers.
        cell_XT: The cell of each token, counted over the list's rows of prompts and then over those
            of answers; as many as there are cells in padding.
    """

    token_NP: Any
    token_BC: Any
    cell_XT: Any


def causal(*, mesh: Mesh | None = None) -> Attend:
    """Attend to earlier tokens of the row, and to the token itself; rows are padded on the right.

    There is no cache.
    """

    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any) -> tuple[Array, Any]:
        function = functools.partial(_causal, _kernel(q_BTHE, mesh))
        return _on_devices(function, (q_BTHE, k_BTKE, v_BTKE), (), mesh), cache

    return attend


def shared_prefix(rows: Rows, *, mesh: Mesh | None = None) -> Attend:
    """Attend to all tokens of the group's prompt, and to earlier ones of the own row.

    Queries, keys and values are those of flat lists (`Rows`). What padding attends to has no
    meaning, and is finite. There is no cache.
    """

    def attend(q_XTHE: Array, k_XTKE: Array, v_XTKE: Array, cache: Any) -> tuple[Array, Any]:
        function = functools.partial(_shared, _kernel(q_XTHE, mesh))
        return _on_devices(function, (q_XTHE, k_XTKE, v_XTKE), rows, mesh), cache

    return attend


def _on_devices(
    function: Callable[..., Array], arrays: tuple[Array, Array, Array], rows: Any, mesh: Mesh | None
) -> Array:
    """Call a function of (q, k, v, rows) with each device's part of rows and heads.

    A kernel is opaque to the compiler. Key/value heads are repeated until the mesh divides them;
    where it does not divide the query heads, all heads are on every device.
    """
    if mesh is None:
        return function(*arrays, rows)
    q, k, v = arrays
    heads, key_heads = q.shape[2], k.shape[2]
    row, head = axes_spec(("batch", "heads"), (len(q), heads), mesh)
    times = math.lcm(key_heads, axis_parts("heads", heads, mesh)) // key_heads
    if times > 1:
        k, v = (jnp.repeat(array, times, axis=2) for array in (k, v))
    activations = PartitionSpec(row, None, head, None)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(activations, activations, activations, PartitionSpec(row, None)),
        out_specs=activations,
        check_vma=False,
    )(q, k, v, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _causal(kernel: Kernel, q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, rows: Any) -> Array:
    return _causal_forward(kernel, q_BTHE, k_BTKE, v_BTKE, rows)[0]


def _causal_forward(
    kernel: Kernel, q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, rows: Any
) -> tuple[Array, Any]:
    del rows
    out_BTHE, lse_BTH = _attend_to_sets(kernel, q_BTHE, [KeySet(k_BTKE, v_BTKE)])
    return out_BTHE, (q_BTHE, k_BTKE, v_BTKE, out_BTHE, lse_BTH)


def _causal_backward(kernel: Kernel, saved: Any, dout_BTHE: Array) -> tuple[Any, ...]:
    q_BTHE, k_BTKE, v_BTKE, *values = saved
    dq, ((dk, dv),) = _pull_back(kernel, q_BTHE, [KeySet(k_BTKE, v_BTKE)], *values, dout_BTHE)
    return dq, dk, dv, None


_causal.defvjp(_causal_forward, _causal_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shared(kernel: Kernel, q_XTHE: Array, k_XTKE: Array, v_XTKE: Array, rows: Rows) -> Array:
    return _shared_forward(kernel, q_XTHE, k_XTKE, v_XTKE, rows)[0]


def _shared_forward(
    kernel: Kernel, q_XTHE: Array, k_XTKE: Array, v_XTKE: Array, rows: Rows
) -> tuple[Array, Any]:
    """Attend in rows. What the gradient needs is kept as flat lists."""
    cells = _Cells(rows)
    (q_N, q_B), prompts, sets = cells.queries_and_keys(q_XTHE, k_XTKE, v_XTKE)
    of_prompts = _attend_to_sets(kernel, q_N, [prompts])
    of_answers = _attend_to_sets(kernel, q_B, sets)
    out_XTHE, lse_XTH = map(cells.to_list, of_prompts, of_answers)
    return out_XTHE, (q_XTHE, k_XTKE, v_XTKE, rows, out_XTHE, lse_XTH)


def _shared_backward(kernel: Kernel, saved: Any, dout_XTHE: Array) -> tuple[Any, ...]:
    q_XTHE, k_XTKE, v_XTKE, rows, out_XTHE, lse_XTH = saved
    cells = _Cells(rows)
    (q_N, q_B), prompts, sets = cells.queries_and_keys(q_XTHE, k_XTKE, v_XTKE)
    values_N, values_B = zip(*map(cells.to_rows, (out_XTHE, lse_XTH, dout_XTHE)), strict=True)
    dq_N, (own_N,) = _pull_back(kernel, q_N, [prompts], *values_N)
    dq_B, (from_B, own_B) = _pull_back(kernel, q_B, sets, *values_B)
    dkv_N = (own + other for own, other in zip(own_N, from_B, strict=True))
    return (cells.to_list(dq_N, dq_B), *map(cells.to_list, dkv_N, own_B), None)


_shared.defvjp(_shared_forward, _shared_backward)


def answers(values_XT: Array, rows: Rows) -> Array:
    """Bring numbers of tokens to the rows of answers, BC; 0 in padding."""
    return _Cells(rows).to_rows(values_XT)[1]


class _Cells:
    """The rows of one device, and how tokens get there and back."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._length_N = jnp.sum(rows.token_NP < rows.cell_XT.shape[1], axis=1, dtype=jnp.int32)

    def to_rows(self, list_XT: Array) -> tuple[Array, Array]:
        """Bring what tokens have to the rows of prompts, NP, and of answers, BC; 0 in padding."""
        X = len(list_XT)
        tokens = (self._rows.token_NP, self._rows.token_BC)
        found_N, found_B = (_taken(list_XT, token.reshape(X, -1)) for token in tokens)
        rest = list_XT.shape[2:]
        return found_N.reshape(*tokens[0].shape, *rest), found_B.reshape(*tokens[1].shape, *rest)

    def to_list(self, array_NP: Array, array_BC: Array) -> Array:
        """Undo `to_rows`."""
        X, rest = len(self._rows.cell_XT), array_NP.shape[2:]
        cells = [array.reshape(X, -1, *rest) for array in (array_NP, array_BC)]
        return _taken(jnp.concatenate(cells, axis=1), self._rows.cell_XT)

    def queries_and_keys(
        self, q_XTHE: Array, k_XTKE: Array, v_XTKE: Array
    ) -> tuple[tuple[Array, Array], KeySet, list[KeySet]]:
        """Return queries by row, the keys of prompts to themselves, and the sets of answers."""
        (k_N, k_B), (v_N, v_B) = map(self.to_rows, (k_XTKE, v_XTKE))
        sets = [KeySet(k_N, v_N, self._length_N), KeySet(k_B, v_B)]
        return self.to_rows(q_XTHE), KeySet(k_N, v_N), sets


def _taken(array_XA: Array, index_XR: Array) -> Array:
    """Return array[x, index[x, r]], XR and the rest; 0 where the index is too large."""
    take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)
    return jax.vmap(take)(array_XA, index_XR)


def _attend_to_sets(kernel: Kernel, q_BTHE: Array, sets: Sequence[KeySet]) -> tuple[Array, Array]:
    """Return the values of queries that attend to several sets of keys together, and their
    log-sum-exp, BTH.
    """
    parts = []
    for keys in sets:
        out, lse = kernel.forward(_by_key_row(q_BTHE, keys), keys)
        values = out.reshape(q_BTHE.shape).astype(jnp.float32)
        lse_BTH1 = lse.reshape(*q_BTHE.shape[:3], 1)
        parts.append(Partial(values, lse_BTH1, jnp.ones_like(lse_BTH1)))
    joined = join(parts)
    return joined.out.astype(q_BTHE.dtype), joined.lse


def _pull_back(
    kernel: Kernel,
    q_BTHE: Array,
    sets: Sequence[KeySet],
    out_BTHE: Array,
    lse_BTH: Array,
    dout_BTHE: Array,
) -> tuple[Array, list[tuple[Array, Array]]]:
    """Return the gradient of the queries, and those of keys and values of each set."""
    dq_BTHE = jnp.zeros(q_BTHE.shape, jnp.float32)
    gradients = []
    for keys in sets:
        arrays = (q_BTHE, out_BTHE, lse_BTH, dout_BTHE)
        q, *values = (_by_key_row(array, keys) for array in arrays)
        dq, dk, dv = kernel.backward(q, keys, *values)
        dq_BTHE += dq.reshape(q_BTHE.shape).astype(jnp.float32)
        gradients.append((dk, dv))
    return dq_BTHE.astype(q_BTHE.dtype), gradients


def _by_key_row(array_BT: Array, keys: KeySet) -> Array:
    """Put all queries that attend to a row of keys into one row."""
    X = keys.k_XLKE.shape[0]
    return array_BT.reshape(X, -1, *array_BT.shape[2:])


# By the platform of the devices. Smaller blocks than 4 MB keep a CPU busy with small products.
_KERNELS = {"tpu": splash(), "gpu": cudnn(), "cpu": blockwise(2**22)}
# For other devices, and for calls that the libraries' kernels do not serve.
_FALLBACK = blockwise(2**29)


def _kernel(q_BTHE: Array, mesh: Mesh | None) -> Kernel:
    kernel = _KERNELS.get(platform_of(mesh), _FALLBACK)
    return kernel if kernel.serves(q_BTHE) else _FALLBACK
