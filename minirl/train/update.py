"""One update: log-probabilities, the objective, its gradient over micro-batches, Optax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from optax.contrib import MuonDimensionNumbers, muon

from minirl.config import AlgorithmConfig, OptimizerConfig
from minirl.model import attention, logprobs
from minirl.model.decoder import Decoder
from minirl.model.sharding import (
    MATRICES,
    param_path,
    param_shardings,
    placed,
    split_rows,
)
from minirl.run import distributed
from minirl.train import losses
from minirl.train.batching import Batch
from minirl.train.moments import in_bfloat16
from minirl.train.optimizer import learning_rate

# A deeper model is compiled as a loop over its layers; without the loop a step is quicker (by half
# for three layers on a CPU), but compile time grows with depth.
_UNROLLED_LAYERS = 8
# Micro-batches computed at a time where the device is a CPU.
_CPU_MICRO_BATCHES = 2
# A layer's matrices are [layer, out, in].
_MATRIX = MuonDimensionNumbers(reduction_axis=2, output_axis=1)
# Muon's own momentum, and the size of its steps relative to AdamW's (arXiv:2502.16982).
_MUON_MOMENTUM, _MUON_RMS = 0.95, 0.2


class TrainState(NamedTuple):
    """What an update changes."""

    params: nnx.State
    opt_state: optax.OptState


def make_optimizer(
    config: OptimizerConfig, *, steps: int, updates_per_step: int = 1
) -> optax.GradientTransformation:
    """Build AdamW or Muon with its course of the learning rate, and clipping by global norm.

    Args:
        config: Its settings.
        steps: Length of the whole run, where a cosine ends.
        updates_per_step: Updates of one step, which all have its learning rate.
    """
    course = learning_rate(config, steps=steps)
    rate = course if updates_per_step == 1 else lambda count: course(count // updates_per_step)
    decay = config.weight_decay
    if config.kind == "adamw":
        rule = optax.adamw(rate, b1=config.beta1, b2=config.beta2, weight_decay=decay)
    else:
        rule = muon(
            rate,
            beta=_MUON_MOMENTUM,
            weight_decay=decay,
            adam_weight_decay=decay,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=_matrices,
            consistent_rms=_MUON_RMS,
        )
    if config.moments == "bfloat16":
        rule = in_bfloat16(rule)
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), rule)


def _matrices(params: Any) -> Any:
    """Say which axes of each layer's matrices are its input and its output; None for the rest."""

    def axes(path: tuple[Any, ...], _leaf: Any) -> MuonDimensionNumbers | None:
        return _MATRIX if param_path(path).rpartition(".")[2] in MATRICES else None

    return jax.tree.map_with_path(axes, params)


def token_logprobs(
    model: Decoder, batch: Batch, *, temperature: float, top_p: float = 1.0
) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
    """Return the log-probability of every sampled target, BC, and the entropy there, BC; else 0.

    The prompt is computed once a group, and its gradient flows through its keys and values.
    Log-probabilities are those of softmax(logits / temperature), as the sampler reports them, or
    those of its nucleus.
    """
    scan = model.remat != "none" or model.config.num_hidden_layers > _UNROLLED_LAYERS
    packed, mesh = batch.packed is not None, model.mesh
    position_NP, position_BC, segments = _places(batch)
    own_prompt = attention.causal(segments.prefix_NP if packed else None, mesh=mesh)
    attend = attention.shared_prefix(segments, packed=packed, mesh=mesh)
    hidden_BCD = model.continued(
        (batch.prefix_NP, batch.input_BC),
        (position_NP, position_BC),
        (own_prompt, attend),
        scan=scan,
    )
    return logprobs.project(
        hidden_BCD,
        model.output_table,
        batch.target_BC,
        batch.is_action_BC,
        temperature=temperature,
        top_p=top_p,
        mesh=mesh,
    )


def _places(batch: Batch) -> tuple[Array, Array, attention.Segments]:
    """Return the positions of prompts and of answers, and what each token belongs to."""
    packed = batch.packed
    if packed is not None:
        segments = attention.Segments(packed.group_NP, packed.group_BC, packed.own_BC)
        return packed.position_NP, packed.position_BC, segments
    N, P = batch.prefix_NP.shape
    B, C = batch.input_BC.shape
    position_NP = jnp.broadcast_to(jnp.arange(P)[None], (N, P))
    start_B1 = jnp.repeat(batch.prefix_length_N, B // N)[:, None]
    is_prefix_NP = position_NP < batch.prefix_length_N[:, None]
    ones_BC = jnp.ones((B, C), jnp.int32)
    segments = attention.Segments(is_prefix_NP.astype(jnp.int32), ones_BC, ones_BC)
    return position_NP, start_B1 + jnp.arange(C)[None], segments


# (model, micro-batch, log-probabilities of the reference, BC) -> (loss, statistics)
Objective = Callable[[Any, Batch, Array], tuple[Array, dict[str, Array]]]


def policy_objective(
    algorithm: AlgorithmConfig, *, temperature: float, top_p: float = 1.0
) -> Objective:
    """Return the objective of reinforcement learning."""

    def objective(
        model: Any, batch: Batch, reference_logp_BC: Array
    ) -> tuple[Array, dict[str, Array]]:
        logp_BC, entropy_BC = token_logprobs(model, batch, temperature=temperature, top_p=top_p)
        loss, stats = losses.objective(logp_BC, reference_logp_BC, batch, algorithm)
        stats["entropy"] = jnp.sum(entropy_BC * batch.weight_BC)
        return loss, stats | {"loss": loss}

    return objective


def likelihood_objective() -> Objective:
    """Return the objective of supervised training: the mean negative log-likelihood."""

    def objective(
        model: Any, batch: Batch, reference_logp_BC: Array
    ) -> tuple[Array, dict[str, Array]]:
        del reference_logp_BC
        logp_BC, _ = token_logprobs(model, batch, temperature=1.0)
        loss = -jnp.sum(logp_BC * batch.weight_BC, where=batch.is_action_BC)
        return loss, {"loss": loss}

    return objective


class Learner:
    """The compiled functions of an update; holds no weights but those that it never changes.

    Args:
        graph: The model without its weights.
        objective: What is minimised.
        optimizer: How.
        frozen: Weights that are not trained (`lora.split`); what is called weights below are those
            that are.
        temperature: That of the sampler, for the reference's log-probabilities.
        mesh: What the weights are split over.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        objective: Objective,
        optimizer: optax.GradientTransformation,
        *,
        frozen: nnx.State | None = None,
        temperature: float = 1.0,
        mesh: Mesh | None = None,
    ) -> None:
        def loss(params: nnx.State, frozen: Any, batch: Batch, reference_logp_BC: Array) -> Any:
            return objective(nnx.merge(graph, params, frozen), batch, reference_logp_BC)

        def gradient(params: nnx.State, frozen: Any, batch: Batch, reference_logp_BC: Array) -> Any:
            values, stats = jax.grad(loss, has_aux=True)(params, frozen, batch, reference_logp_BC)
            return self._place(values), stats

        def reference_logp(
            params: nnx.State, frozen: Any, batch: Batch, temperature: float = temperature
        ) -> Array:
            model = nnx.merge(graph, params, frozen)
            return token_logprobs(model, batch, temperature=temperature)[0]

        self._frozen = nnx.State({}) if frozen is None else frozen
        self._mesh = mesh
        self._gradient = jax.jit(gradient)
        self._reference_logp = jax.jit(reference_logp, static_argnums=3)
        self._accumulate = jax.jit(_accumulate, donate_argnums=0)
        self.use(optimizer)

    def use(self, optimizer: optax.GradientTransformation) -> None:
        """Take another optimizer from now on; gradients stay compiled."""
        self._optimizer = optimizer
        # A function of its own each time: what is compiled for one optimizer is not for another.
        self._apply = jax.jit(lambda *state: self._apply_gradient(*state), donate_argnums=(0, 1))

    def logprobs(
        self, params: nnx.State, batches: Iterable[Batch], *, temperature: float | None = None
    ) -> Iterator[np.ndarray]:
        """Yield the log-probabilities of the targets of each micro-batch.

        Args:
            params: Weights.
            batches: Micro-batches.
            temperature: None for the sampler's.
        """
        more = () if temperature is None else (temperature,)
        for batch in batches:
            yield distributed.whole(
                self._reference_logp(params, self._frozen, self._split(batch), *more)
            )

    def init(self, params: nnx.State) -> TrainState:
        """Start from weights with fresh optimizer state, which is split as the weights are."""
        return TrainState(params, jax.jit(lambda p: self._place(self._optimizer.init(p)))(params))

    def update(
        self,
        state: TrainState,
        batches: Iterable[Batch],
        *,
        reference: nnx.State | None = None,
        max_norm: float = math.inf,
    ) -> tuple[TrainState, dict[str, float]]:
        """Apply the gradient of a whole batch, given as micro-batches.

        If the loss or the gradient is not finite or too large, the state stays as it is.

        Args:
            state: Weights and optimizer state; donated.
            batches: At least one micro-batch.
            reference: Weights of the reference policy, where a KL is wanted.
            max_norm: Largest global norm of a gradient that is applied.

        Returns:
            The new state and the batch's statistics: `loss`, `grad_norm`, `skipped` (0 or 1), and
            what the objective adds (`entropy`, and those of `losses.objective`; `kl` where there is
            a reference).
        """

        def part(batch: Batch) -> Any:
            batch = self._split(batch)
            # Without a reference another array of its shape: one program serves both.
            logp_BC = (
                batch.old_logp_BC
                if reference is None
                else self._reference_logp(reference, self._frozen, batch)
            )
            return self._gradient(state.params, self._frozen, batch, logp_BC)

        # Programs of one mesh run one after the other: their collectives would wait for each other.
        together = _side_by_side if self._mesh is None else map
        total = None
        for one in together(part, batches):
            total = one if total is None else self._accumulate(total, one)
        if total is None:
            raise ValueError("an update needs at least one micro-batch")
        gradient, stats = total
        limit = np.float32(max_norm)
        params, opt_state, added = self._apply(*state, gradient, stats["loss"], limit)
        numbers = {name: float(value) for name, value in (stats | added).items()}
        if reference is None:
            numbers.pop("kl", None)
        return TrainState(params, opt_state), numbers

    def lower(self, state: TrainState, batch: Batch) -> Iterator[tuple[str, Lowered]]:
        """Yield the programs of an update by name, ready to be compiled ahead of time.

        Args:
            state: Shapes and places of weights and optimizer state; nothing is computed.
            batch: Those of a micro-batch.
        """
        gradient = self._gradient.lower(state.params, self._frozen, batch, batch.old_logp_BC)
        yield "gradient", gradient
        total = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), gradient.out_info
        )
        total = (placed(total[0], self._mesh), total[1])
        yield "accumulate", self._accumulate.lower(total, total)
        loss, limit = total[1]["loss"], np.float32(math.inf)
        yield "apply", self._apply.lower(*state, total[0], loss, limit)

    def _apply_gradient(
        self, params: Any, opt_state: Any, gradient: Any, loss: Array, max_norm: Array
    ) -> tuple[Any, Any, dict[str, Array]]:
        norm = optax.tree.norm(gradient)
        is_sound = jnp.isfinite(loss) & jnp.isfinite(norm) & (norm <= max_norm)
        updates, new_opt_state = self._optimizer.update(gradient, opt_state, params)
        # Decided here: the caller gives the old arrays away.
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(is_sound, new, old),
            (optax.apply_updates(params, updates), new_opt_state),
            (params, opt_state),
        )
        numbers = {"grad_norm": norm, "skipped": 1.0 - is_sound}
        return self._place(params), self._place(opt_state), numbers

    def _split(self, batch: Batch) -> Batch:
        """Give every process its devices' rows of a batch that each has whole."""
        if self._mesh is None or distributed.count() == 1:
            return batch
        return split_rows(batch, self._mesh)

    def _place(self, tree: Any) -> Any:
        """Split what is shaped like the weights as they are split, whatever the compiler thinks."""
        if self._mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, param_shardings(tree, self._mesh))


def _side_by_side(function: Callable[[Batch], Any], batches: Iterable[Batch]) -> Iterator[Any]:
    """Yield the function of each micro-batch, in order; on a CPU, compute two at a time.

    The operations of a small model are too small to keep more than one core busy.
    """
    if jax.default_backend() != "cpu":
        yield from map(function, batches)
        return
    waiting = iter(batches)
    with ThreadPoolExecutor(_CPU_MICRO_BATCHES) as pool:
        while pair := list(islice(waiting, _CPU_MICRO_BATCHES)):
            yield from pool.map(lambda batch: jax.block_until_ready(function(batch)), pair)


def _accumulate(total: Any, part: Any) -> Any:
    """Add gradients and statistics of two micro-batches; of a `_max` the larger one."""
    gradient = jax.tree.map(jnp.add, total[0], part[0])
    stats = {
        name: jnp.maximum(value, part[1][name]) if name.endswith("_max") else value + part[1][name]
        for name, value in total[1].items()
    }
    return gradient, stats
