"""One update: log-probabilities, the objective, its gradient over micro-batches, Optax."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers, muon

from minirl import attention, losses
from minirl.batching import Batch
from minirl.config import AlgorithmConfig, OptimizerConfig
from minirl.model import Decoder
from minirl.schedule import learning_rate
from minirl.sharding import param_path

# Largest array of logits that is held at once, in bytes; longer ones are computed in chunks.
LOGITS_BYTES = 2**29
# A deeper model is compiled as a loop over its layers; without the loop a step is quicker (by half
# for three layers on a CPU), but compile time grows with depth.
_UNROLLED_LAYERS = 8
# Micro-batches computed at a time where the device is a CPU.
_CPU_MICRO_BATCHES = 2
# Input and output axes of the layers' matrices, by the last part of their path.
_MATRICES = {
    **dict.fromkeys(("q", "k", "v"), MuonDimensionNumbers(0, (1, 2))),
    "o": MuonDimensionNumbers((0, 1), 2),
    **dict.fromkeys(("gate", "up", "down"), MuonDimensionNumbers(0, 1)),
}
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
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), rule)


def _matrices(params: Any) -> Any:
    """Say which axes of each layer's matrices are its input and its output; None for the rest."""

    def axes(path: tuple[Any, ...], _leaf: Any) -> MuonDimensionNumbers | None:
        return _MATRICES.get(param_path(path).rpartition(".")[2])

    return jax.tree.map_with_path(axes, params)


def token_logprobs(
    model: Decoder, batch: Batch, *, temperature: float
) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
    """Return the log-probability of every target, BC, and the entropy of its distribution, BC.

    The prompt is computed once a group, and its gradient flows through its keys and values.
    Log-probabilities are those of softmax(logits / temperature), as the sampler reports them.
    """
    N, P = batch.prefix_NP.shape
    B, C = batch.input_BC.shape
    position_NP = jnp.broadcast_to(jnp.arange(P)[None], (N, P))
    scan = model.remat or model.config.num_hidden_layers > _UNROLLED_LAYERS
    _, prefix = model(batch.prefix_NP, position_NP, attention.causal(), scan=scan)
    start_B1 = jnp.repeat(batch.prefix_length_N, B // N)[:, None]
    position_BC = start_B1 + jnp.arange(C)[None]
    attend = attention.shared_prefix(batch.prefix_length_N)
    hidden_BCD, _ = model(batch.input_BC, position_BC, attend, prefix, scan=scan)
    return _project(model, hidden_BCD, batch.target_BC, temperature=temperature)


def _project(
    model: Decoder, hidden_BCD: Array, target_BC: Array, *, temperature: float
) -> tuple[Array, Array]:
    """Compute log-probability and entropy without ever holding the logits of all positions."""

    def project(hidden_TD: Array, target_T: Array) -> tuple[Array, Array]:
        logits_TV = model.logits(hidden_TD) / temperature
        log_total_T = jax.nn.logsumexp(logits_TV, axis=-1)
        logp_T = jnp.take_along_axis(logits_TV, target_T[:, None], axis=-1)[:, 0] - log_total_T
        frozen_TV = jax.lax.stop_gradient(logits_TV)
        mean_T = jnp.sum(jax.nn.softmax(frozen_TV) * frozen_TV, axis=-1)
        return logp_T, jax.lax.stop_gradient(log_total_T) - mean_T

    B, C, D = hidden_BCD.shape
    per_token = 4 * model.config.vocab_size
    chunks = 1
    while B * C * per_token // chunks > LOGITS_BYTES and (B * C) % (2 * chunks) == 0:
        chunks *= 2
    hidden = hidden_BCD.reshape(chunks, B * C // chunks, D)
    target = target_BC.reshape(chunks, B * C // chunks)
    if chunks == 1:
        logp, entropy = project(hidden[0], target[0])
    else:
        logp, entropy = jax.lax.map(lambda xs: jax.checkpoint(project)(*xs), (hidden, target))
    return logp.reshape(B, C), entropy.reshape(B, C)


# (model, micro-batch, log-probabilities of the reference, BC) -> (loss, statistics)
Objective = Callable[[Any, Batch, Array], tuple[Array, dict[str, Array]]]


def policy_objective(algorithm: AlgorithmConfig, *, temperature: float) -> Objective:
    """Return the objective of reinforcement learning."""

    def objective(
        model: Any, batch: Batch, reference_logp_BC: Array
    ) -> tuple[Array, dict[str, Array]]:
        logp_BC, entropy_BC = token_logprobs(model, batch, temperature=temperature)
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
    """The compiled functions of an update; holds no weights.

    Args:
        graph: The model without its weights.
        objective: What is minimised.
        optimizer: How.
        temperature: That of the sampler, for the reference's log-probabilities.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        objective: Objective,
        optimizer: optax.GradientTransformation,
        *,
        temperature: float = 1.0,
    ) -> None:
        def loss(params: nnx.State, batch: Batch, reference_logp_BC: Array) -> Any:
            return objective(nnx.merge(graph, params), batch, reference_logp_BC)

        def reference_logp(params: nnx.State, batch: Batch) -> Array:
            return token_logprobs(nnx.merge(graph, params), batch, temperature=temperature)[0]

        self._gradient = jax.jit(jax.grad(loss, has_aux=True))
        self._reference_logp = jax.jit(reference_logp)
        self._accumulate = jax.jit(_accumulate, donate_argnums=0)
        self.use(optimizer)

    def use(self, optimizer: optax.GradientTransformation) -> None:
        """Take another optimizer from now on; gradients stay compiled."""
        self._optimizer = optimizer
        # A function of its own each time: what is compiled for one optimizer is not for another.
        self._apply = jax.jit(lambda *state: self._apply_gradient(*state), donate_argnums=(0, 1))
        self._init = jax.jit(optimizer.init)

    def logprobs(self, params: nnx.State, batches: Iterable[Batch]) -> Iterator[Array]:
        """Yield the log-probabilities of the targets of each micro-batch."""
        for batch in batches:
            yield self._reference_logp(params, batch)

    def init(self, params: nnx.State) -> TrainState:
        """Start from weights with fresh optimizer state."""
        return TrainState(params, self._init(params))

    def update(
        self,
        state: TrainState,
        batches: Iterable[Batch],
        *,
        reference: nnx.State | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """Apply the gradient of a whole batch, given as micro-batches.

        Args:
            state: Weights and optimizer state; donated.
            batches: At least one micro-batch.
            reference: Weights of the reference policy, where a KL is wanted.

        Returns:
            The new state and the batch's statistics: `loss`, `grad_norm`, and what the objective
            adds (`entropy`, and those of `losses.objective`; `kl` where there is a reference).
        """

        def part(batch: Batch) -> Any:
            # Without a reference another array of its shape: one program serves both.
            logp_BC = (
                batch.old_logp_BC if reference is None else self._reference_logp(reference, batch)
            )
            return self._gradient(state.params, batch, logp_BC)

        total = None
        for one in _side_by_side(part, batches):
            total = one if total is None else self._accumulate(total, one)
        if total is None:
            raise ValueError("an update needs at least one micro-batch")
        gradient, stats = total
        params, opt_state, grad_norm = self._apply(state.params, state.opt_state, gradient)
        numbers = {name: float(value) for name, value in stats.items()}
        if reference is None:
            numbers.pop("kl", None)
        return TrainState(params, opt_state), numbers | {"grad_norm": float(grad_norm)}

    def _apply_gradient(self, params: Any, opt_state: Any, gradient: Any) -> tuple[Any, Any, Any]:
        updates, opt_state = self._optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, optax.tree.norm(gradient)


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
