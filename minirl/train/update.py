"""One update: log-probabilities, the objective, its gradient over micro-batches, Optax."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Lowered
from jaxtyping import Array, Float

from minirl.model import attention, logprobs
from minirl.model.decoder import Decoder, unstacked
from minirl.model.lora import split
from minirl.model.sharding import axes_sharding, constrain_params, row_parts, split_rows
from minirl.run import distributed
from minirl.train.batching import Batch, BatchLayout, BatchShape, fill

# A deeper model is compiled as a loop over its layers; without the loop a step is quicker (by half
# for three layers on a CPU), but compile time grows with depth.
_UNROLLED_LAYERS = 8
# Shapes of micro-batches whose programs are kept, those of latest use. On a CPU a program takes up
# to 3,000 memory maps, of which Linux allows a process 65,530.
_KEPT_SHAPES = 16
# Micro-batches computed at a time where the device is a CPU and the model has fewer parameters: its
# operations are too small to keep more than one core busy.
_CPU_MICRO_BATCHES, _SMALL_MODEL = 2, 50_000_000

Loss = Callable[[Array, Array, Batch, Array], tuple[Array, dict[str, Array]]]
"""(log-probabilities BC, those of the reference, the batch, the entropy BC) -> (scalar to minimise,
statistics), as `losses.policy_loss`."""


class TrainState(NamedTuple):
    """What an update changes; and the average of the weights over steps, if one is kept."""

    params: nnx.State
    opt_state: optax.OptState
    average: nnx.State | None = None

    @property
    def policy(self) -> nnx.State:
        """Return the weights that are measured, exported and started from: the average, if any."""
        return self.params if self.average is None else self.average


def token_logprobs(
    model: Decoder, batch: Batch, *, temperature: float
) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
    """Return log-probability and entropy at every sampled target, 0 elsewhere.

    The prompt is computed once a group, and its gradient flows through its keys and values.
    """
    if model.remat == "none" and model.config.num_hidden_layers <= _UNROLLED_LAYERS:
        model = unstacked(model)
    attend = attention.shared_prefix(batch.rows, mesh=model.mesh)
    recur = attention.shared_state(batch.rows, mesh=model.mesh)
    hidden_XTD, _ = model(batch.ids_XT, batch.position_XT, attend, recur=recur)
    projected = logprobs.project(
        hidden_XTD,
        model.output_table,
        jnp.maximum(batch.target_XT, 0),
        batch.target_XT >= 0,
        temperature=temperature,
        mesh=model.mesh,
    )
    logp_BC, entropy_BC = (attention.answers(values_XT, batch.rows) for values_XT in projected)
    return logp_BC, entropy_BC


class _ByShape:
    """A function of a batch, compiled apart for each shape of it; those of latest use are kept."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._function, self._options = function, options
        self._kept: dict[tuple[Any, ...], Any] = {}  # the least recently used first
        self._given_up = 0

    def __call__(self, batch: Batch) -> Any:
        """Return what to call with a batch of this shape."""
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        # JAX keeps the programs of a function, so each shape has one of its own.
        compiled = self._kept.pop(shapes, None)
        self._kept[shapes] = compiled or jax.jit(partial(self._function), **self._options)
        if len(self._kept) > _KEPT_SHAPES:
            self._given_up += self._kept.pop(next(iter(self._kept)))._cache_size()
        return self._kept[shapes]

    def _cache_size(self) -> int:
        # The programs compiled so far, as JAX's own functions tell theirs.
        return self._given_up + sum(kept._cache_size() for kept in self._kept.values())


class Learner:
    """The compiled functions of an update; holds no weights but the frozen ones.

    The loss is of log-probabilities of logits / temperature.
    """

    def __init__(
        self,
        model: Decoder,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        *,
        temperature: float = 1.0,
    ) -> None:
        graph, _, self._frozen = split(model)
        self._mesh = mesh = model.mesh
        self._optimizer = optimizer

        def logprobs_of(params: nnx.State, frozen: nnx.State, batch: Batch) -> tuple[Array, Array]:
            model = nnx.merge(graph, constrain_params(params, mesh), frozen)
            return token_logprobs(model, batch, temperature=temperature)

        def logp(params: nnx.State, frozen: nnx.State, batch: Batch) -> Array:
            return logprobs_of(params, frozen, batch)[0]

        def batch_loss(
            params: nnx.State, frozen: nnx.State, batch: Batch, reference_logp_BC: Array
        ) -> tuple[Array, Any]:
            logp_BC, entropy_BC = logprobs_of(params, frozen, batch)
            value, stats = loss(logp_BC, reference_logp_BC, batch, entropy_BC)
            return value, (stats | {"loss": value}, logp_BC)

        def accumulate(
            total: nnx.State, params: nnx.State, frozen: nnx.State, batch: Batch, logp_BC: Array
        ) -> tuple[nnx.State, Any]:
            gradient, known = jax.grad(batch_loss, has_aux=True)(params, frozen, batch, logp_BC)
            return jax.tree.map(jnp.add, total, gradient), known

        def zeros(params: nnx.State) -> nnx.State:
            return constrain_params(jax.tree.map(jnp.zeros_like, params), mesh)

        def apply(
            params: Any, opt_state: Any, gradient: Any, rate: Array
        ) -> tuple[Any, Any, dict[str, Array]]:
            norm = optax.tree.norm(gradient)
            updates, opt_state = optimizer.update(gradient, opt_state, params)
            params = optax.apply_updates(params, optax.tree.scale(rate, updates))
            skipped = jnp.where(optax.tree.get(opt_state, "last_finite", default=True), 0.0, 1.0)
            params, opt_state = (constrain_params(tree, mesh) for tree in (params, opt_state))
            return params, opt_state, {"grad_norm": norm, "skipped": skipped}

        def follow(average: nnx.State, params: nnx.State, decay: Array) -> nnx.State:
            return constrain_params(optax.incremental_update(params, average, 1 - decay), mesh)

        # One gradient lies beside the sum of those before.
        self._accumulate = _ByShape(accumulate, donate_argnums=0)
        self._zeros, self._logp = jax.jit(zeros), _ByShape(logp)
        self._add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)
        self._apply = jax.jit(apply, donate_argnums=(0, 1))
        self._follow = jax.jit(follow, donate_argnums=0)
        by_shape = self._accumulate, self._logp
        self._compiled: Any = (*by_shape, self._zeros, self._add, self._apply, self._follow)

    @property
    def programs(self) -> int:
        """Return the number of programs compiled so far."""
        return sum(function._cache_size() for function in self._compiled)

    def init(self, params: nnx.State, *, has_average: bool = False) -> TrainState:
        """Start from weights with fresh optimizer state, which is split as the weights are; with
        `has_average` from these weights as their average too.
        """

        def init(params: nnx.State) -> tuple[optax.OptState, nnx.State | None]:
            average = jax.tree.map(jnp.copy, params) if has_average else None
            return constrain_params((self._optimizer.init(params), average), self._mesh)

        return TrainState(params, *jax.jit(init)(params))

    def average(self, state: TrainState, *, decay: float) -> TrainState:
        """Let the average follow the weights: decay x average + (1 - decay) x weights."""
        average = self._follow(state.average, state.params, np.float32(decay))
        return state._replace(average=average)

    def update(
        self,
        state: TrainState,
        batches: Iterable[Batch],
        *,
        rate: float,
        reference: nnx.State | None = None,
        can_stop: bool = True,
    ) -> tuple[TrainState, dict[str, float], Iterator[np.ndarray]]:
        """Apply the gradient of a whole batch, given as micro-batches; the state is donated.

        `rate` is the learning rate. With `can_stop` a signal ends the update before any of them,
        and it leaves no trace.

        Returns:
            The new state; the batch's statistics: `loss`, `grad_norm`, `skipped` (0 or 1),
            `learning_rate`, and what the objective adds (see `losses.policy_loss`; `kl` where there
            is a reference); and what `logprobs` yields, of the weights before.
        """
        waiting, totals, numbers = map(self._put, batches), list[nnx.State](), list[Any]()
        lanes = self._lanes(state.params)
        with ThreadPoolExecutor(lanes) as pool:
            while chunk := list(islice(waiting, lanes)):
                # Keep one micro-batch queued; otherwise all are dispatched and a signal waits for
                # the whole update.
                jax.block_until_ready([stats["loss"] for stats, _ in numbers[:-lanes][-1:]])
                if can_stop:
                    distributed.check()
                totals += [self._zeros(state.params) for _ in range(len(chunk) - len(totals))]
                # Without a reference another array of its shape: one program serves both.
                known = [batch.sampler_logp_BC for batch in chunk]
                if reference is not None:
                    known = [self._logp(batch)(reference, self._frozen, batch) for batch in chunk]
                weights = state.params, self._frozen
                running = [
                    pool.submit(self._accumulate(batch), total, *weights, batch, logp_BC)
                    for total, batch, logp_BC in zip(totals, chunk, known, strict=False)
                ]
                results = [one.result() for one in running]
                totals[: len(chunk)] = [total for total, _ in results]
                numbers += [found for _, found in results]
        (parts, logp), gradient = zip(*numbers, strict=True), reduce(self._add, totals)
        parts = jax.device_get(parts)
        stats = {name: float(sum(part[name] for part in parts)) for name in parts[0]}
        weights = state.params, state.opt_state
        params, opt_state, added = self._apply(*weights, gradient, np.float32(rate))
        stats |= {name: float(value) for name, value in added.items()}
        stats["learning_rate"] = rate
        if reference is None:
            stats.pop("kl", None)
        state = state._replace(params=params, opt_state=opt_state)
        return state, stats, map(distributed.whole, logp)

    def _lanes(self, params: nnx.State) -> int:
        """Return how many micro-batches are computed at a time, each lane with a sum of its own.

        Programs of one mesh run one after the other: their collectives would wait for each other.
        """
        is_cpu = self._mesh is None and jax.default_backend() == "cpu"
        size = sum(leaf.size for leaf in jax.tree.leaves((params, self._frozen)))
        return _CPU_MICRO_BATCHES if is_cpu and size < _SMALL_MODEL else 1

    def logprobs(self, params: nnx.State, batches: Iterable[Batch]) -> Iterator[np.ndarray]:
        """Yield the log-probabilities of the targets, BC, of each micro-batch; a signal is noticed
        before each of them.
        """
        for batch in map(self._put, batches):
            distributed.check()
            yield distributed.whole(self._logp(batch)(params, self._frozen, batch))

    def lower(self, state: TrainState, shape: BatchShape) -> dict[str, Lowered]:
        """Lower the programs of an update for micro-batches of a shape; the state is shapes with
        their places.
        """
        batch, gradient = abstract_batch(shape, self._mesh), state.params  # split as they are
        arguments = (gradient, state.params, self._frozen, batch, batch.sampler_logp_BC)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        return {
            "gradient": self._accumulate(batch).lower(*arguments),
            "apply": self._apply.lower(state.params, state.opt_state, gradient, rate),
        }

    def _put(self, batch: Batch) -> Batch:
        return batch if self._mesh is None else split_rows(batch, self._mesh)


def abstract_batch(shape: BatchShape, mesh: Mesh | None) -> Batch:
    """Return the shapes and shardings of a micro-batch, on all devices."""

    def abstract(array: Any) -> Any:
        axes = ("batch", *("position",) * (array.ndim - 1))
        sharding = axes_sharding(axes, array.shape, mesh)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    empty = fill(BatchLayout(shape, [[]] * row_parts(mesh)), {}, pad_id=0)
    return jax.tree.map(abstract, empty)
