"""Low-rank adapters (LoRA, arXiv:2106.09685): W stays as it is, and A and B of W + scale B A learn.

With adapters, weights, gradients, optimizer state and checkpoints are those of the adapters alone
(`split`). The reference of a KL is the adapters as they began, which add nothing.

The learner multiplies by A and by B: neither the sum nor the gradient of W, a third of an update's
work, is computed. The sampler, which reads every weight once a token, takes the sum.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minirl.config import LoraConfig
from minirl.model.config import ModelConfig
from minirl.model.decoder import Block, Decoder
from minirl.model.sharding import MATRICES, param_shardings


def add_adapters(model: Decoder, lora: LoraConfig, *, seed: int) -> None:
    """Give the matrices of every layer adapters, in float32, that add nothing yet.

    The seed decides A, which depends neither on the mesh nor on the other targets.

    Note:
        The paper draws A from a Gaussian of a width it does not tell: here a unit input makes unit
        products. B is 0, as there.
    """
    layers: Block = model.layers
    shapes = {name: getattr(layers, name).shape for name in MATRICES if name in lora.targets}

    def draw(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
        found = {}
        for name, (depth, outputs, inputs) in shapes.items():
            own_key = jax.random.fold_in(key, MATRICES.index(name))
            normal = jax.random.normal(own_key, (depth, lora.rank, inputs))
            found[f"{name}_a"] = normal * inputs**-0.5
            found[f"{name}_b"] = jnp.zeros((depth, outputs, lora.rank))
        return {"layers": found}

    key = jax.random.key(seed)
    mesh = model.mesh
    places = None if mesh is None else param_shardings(jax.eval_shape(draw, key), mesh)
    for name, array in jax.jit(draw, out_shardings=places)(key)["layers"].items():
        setattr(layers, name, nnx.LoRAParam(array))
    layers.lora = lora


def adapter_shapes(config: ModelConfig, lora: LoraConfig) -> nnx.State:
    """Return the shapes of a model's adapters."""

    def make() -> Decoder:
        model = Decoder(config, key=jax.random.key(0))
        add_adapters(model, lora, seed=0)
        return model

    return split(nnx.eval_shape(make))[1]


def split(model: Decoder) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Take a model apart.

    Returns:
        Its structure; what is trained: adapters where it has them, else all weights; and the rest,
        which may be empty.
    """
    kind = nnx.Param if model.layers.lora is None else nnx.LoRAParam
    graph, trained, rest = nnx.split(model, kind, ...)
    return graph, trained, rest


def merged(model: Decoder) -> Decoder:
    """Return a model without adapters that computes the same; the model itself if it has none."""
    lora = model.layers.lora
    if lora is None:
        return model
    layers = copy.copy(model.layers)
    for name in dict.fromkeys(lora.targets):
        matrix = getattr(layers, name)[...]
        a, b = (getattr(layers, f"{name}_{end}")[...] for end in "ab")
        product = jnp.einsum("lor,lri->loi", b, a, precision="highest")
        whole = matrix.astype(jnp.float32) + lora.scale * product
        setattr(layers, name, nnx.Param(whole.astype(matrix.dtype)))
        for end in "ab":
            delattr(layers, f"{name}_{end}")
    layers.lora = None
    whole_model = copy.copy(model)
    whole_model.layers = layers
    return whole_model


def merged_tensors(
    weights: Iterable[tuple[str, np.ndarray]], adapters: Mapping[str, np.ndarray], lora: LoraConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """Add adapters to weights that come one by one, all under their names in files."""
    for name, array in weights:
        a, b = (adapters.get(f"{name.removesuffix('weight')}lora_{end}.weight") for end in "AB")
        yield name, array if a is None or b is None else array + lora.scale * (b @ a)
