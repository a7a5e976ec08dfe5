"""An update on a mesh: a batch, and a learner that starts from the same weights on each."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minirl.config import BatchingConfig, Grpo, Gspo, LoraConfig
from minirl.model.lora import add_adapters, described, split, trained
from minirl.model.sharding import make_mesh, param_path
from minirl.train.batching import MicroBatches
from minirl.train.losses import policy_loss
from minirl.train.optimizer import make_optimizer
from minirl.train.update import Learner
from minirl.types import TokenRow
from tests.plain_model import arrays

from .toy_run import SMOOTH, spread

ALGORITHMS = {"grpo": Grpo(kl_coef=0.1), "gspo": Gspo(kl_coef=0.1), "adapters": Grpo(kl_coef=0.1)}
# The same of a model with linear attention.
HYBRIDS = {"hybrid": "grpo", "hybrid_adapters": "adapters"}
GROUPS, G = 8, 4


def make_groups():
    """Make groups of one- and two-turn trajectories around a policy that the model is not."""
    rng = np.random.default_rng(0)
    groups = []
    for _ in range(GROUPS):
        prompt = rng.integers(4, 60, rng.integers(3, 12))
        group = []
        for _ in range(G):
            answer = rng.integers(4, 60, rng.integers(3, 14))
            is_action = rng.random(len(answer)) < 0.8
            is_action[-1] = True
            ids = np.concatenate([prompt, answer])
            mask = np.concatenate([np.zeros(len(prompt), bool), is_action])
            logprobs = np.where(mask, rng.normal(-4, 0.2, len(ids)), 0.0)
            group.append(TokenRow(ids, mask, logprobs, float(rng.normal()), len(prompt)))
        groups.append(group)
    return groups


def adapted(model, lora, *, seed=0):
    """Give a model adapters that add something already."""
    add_adapters(model, lora, seed=seed)
    graph, params, frozen = split(model)
    rng = np.random.default_rng(seed)

    def draw(leaf):
        return jax.device_put(rng.normal(0, 0.3, leaf.shape).astype(np.float32), leaf.sharding)

    return nnx.merge(graph, jax.tree.map(draw, params), frozen)


def merged(model):
    """Return a model without adapters that computes the same, in float32."""
    lora = model.layers.lora
    _, adapters, rest = split(model)
    adapters = arrays(adapters)

    def merge(path, leaf):
        a, b = (adapters.get(f"{param_path(path)}_{end}") for end in "ab")
        leaf = np.asarray(leaf).astype(np.float32)
        return jnp.asarray(leaf if a is None else leaf + np.float32(lora.scale) * (b @ a))

    plain = described(model.config, dtype=model.dtype)
    nnx.update(plain, jax.tree.map_with_path(merge, rest))
    return plain


def start(toy, shape, *, algorithm="grpo"):
    """Return a learner on a mesh (None for one device) and its start."""
    mesh = (
        None
        if shape is None
        else make_mesh(shape, jax.devices()[: int(np.prod([*shape.values()]))])
    )
    model = spread(toy.model(hybrid=algorithm in HYBRIDS), mesh)
    algorithm = HYBRIDS.get(algorithm, algorithm)
    if algorithm == "adapters":
        model = adapted(model, LoraConfig(rank=3, alpha=6))
    loss = partial(policy_loss, ALGORITHMS[algorithm])
    optimizer = make_optimizer(SMOOTH)
    learner = Learner(model, loss, optimizer, temperature=0.8)
    return learner, learner.init(trained(model))


def sizes_of(**sizes):
    return BatchingConfig(**{"prompt_multiple": 12, "answer_multiple": 16, **sizes})


def batches(*, parts=1, **sizes):
    return MicroBatches(
        make_groups(), aggregation="token_mean", sizes=sizes_of(**sizes), pad_id=0, parts=parts
    )
