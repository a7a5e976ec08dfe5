"""Low-rank adapters (LoRA, arXiv:2106.09685): W stays as it is, and A and B of W + scale B A learn.

With adapters, weights, gradients, optimizer state and checkpoints are those of the adapters alone
(`split`). The reference of a KL is the adapters as they began, which add nothing.

Learner and samplers multiply by A and by B: the learner needs neither the sum nor the gradient of
W, a third of an update's work, and a sum in bfloat16 would be another policy. The step of an update
is far below the rounding of W. Only what is exported has the sum, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from minirl.config import LoraConfig
from minirl.exchange import UserError
from minirl.model.config import ModelConfig
from minirl.model.decoder import Decoder, Layer
from minirl.model.sharding import MATRICES, PARAM_AXES, axes_sharding


def add_adapters(model: Decoder, lora: LoraConfig, *, seed: int) -> None:
    """Give the matrices of every layer adapters, in float32, that add nothing yet.

    The seed decides A, which depends neither on the mesh nor on the other targets.

    Note:
        The paper draws A from a Gaussian of a width it does not tell: here a unit input makes unit
        products. B is 0, as there.

    Raises:
        UserError: The model has none of the matrices.
    """
    kinds: list[Layer] = [model.layers]
    if model.config.hybrid:
        kinds = [model.layers.full, model.layers.linear]
    has = {name for name in MATRICES if any(hasattr(layers, name) for layers in kinds)}
    if has.isdisjoint(lora.targets):
        raise UserError(
            f"lora.targets: the model has no {', '.join(lora.targets)}; it has "
            f"{', '.join(sorted(has))}"
        )

    key, mesh = jax.random.key(seed), model.mesh
    for number, layers in enumerate(kinds):
        for name in MATRICES:
            if name not in lora.targets or not hasattr(layers, name):
                continue
            *depth, outputs, inputs = getattr(layers, name).shape
            matrix_key = jax.random.fold_in(key, MATRICES.index(name) + number * len(MATRICES))
            stack = ("layer",) * len(depth)
            for end, matrix in (("a", (lora.rank, inputs)), ("b", (outputs, lora.rank))):
                axes, shape = (*stack, *PARAM_AXES[f"{name}_{end}"]), (*depth, *matrix)
                start = _start(shape, axes_sharding(axes, shape, mesh), is_drawn=end == "a")
                setattr(layers, f"{name}_{end}", nnx.LoRAParam(start(matrix_key)))
        layers.lora = lora


@cache
def _start(
    shape: Sequence[int], sharding: NamedSharding | None, *, is_drawn: bool
) -> Callable[[jax.Array], jax.Array]:
    """Return the program that makes adapters of a shape of a key, one for all such matrices."""

    def start(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, shape) * shape[-1] ** -0.5 if is_drawn else jnp.zeros(shape)

    return jax.jit(start, out_shardings=sharding)


def described(config: ModelConfig, *, lora: LoraConfig | None = None, **kinds: Any) -> Decoder:
    """Return a model whose weights are shapes; `kinds` are options of `Decoder`."""

    def make() -> Decoder:
        model = Decoder(config, key=jax.random.key(0), **kinds)
        if lora is not None:
            add_adapters(model, lora, seed=0)
        return model

    return nnx.eval_shape(make)


def trained(model: Decoder) -> nnx.State:
    """Return the weights that are trained: adapters where a model has them, else all."""
    return split(model)[1]


def split(model: Decoder) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Return a model's structure, the weights that are trained, and the others, if any."""
    kind = nnx.Param if model.layers.lora is None else nnx.LoRAParam
    graph, params, frozen = nnx.split(model, kind, ...)
    return graph, params, frozen


def merged_tensors(
    weights: Iterable[tuple[str, np.ndarray]], adapters: Mapping[str, np.ndarray], lora: LoraConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """Add adapters to weights that come one by one, all under their names in files, in float32."""
    for name, array in weights:
        a, b = (adapters.get(f"{name.removesuffix('weight')}lora_{end}.weight") for end in "AB")
        if a is None or b is None:
            yield name, array
            continue
        yield name, array.astype(np.float32) + np.float32(lora.scale) * (b @ a)
