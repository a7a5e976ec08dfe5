"""What a job holds on each device, counted from shapes; nothing is compiled.

An update and a rollout take turns, and so does what they need: gradients and activations for the
one, the sampler's copy of the weights and its cache for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from flax import nnx
from jax.sharding import Mesh

from minirl.config import LoraConfig, ModelSource, SamplerConfig, TrainConfig
from minirl.errors import UserError
from minirl.model.config import ModelConfig, parse_config
from minirl.model.decoder import Decoder
from minirl.model.logprobs import LOGITS_BYTES
from minirl.model.lora import add_adapters, split
from minirl.model.sharding import MESH_AXES, device_bytes, placed, row_parts
from minirl.sample.cache import MEMORY_SHARE, CacheShape, cache_shapes, plan_cache
from minirl.sample.weights import copy_shapes, local_mesh
from minirl.train.optimizer import make_optimizer
from minirl.train.packing import round_up
from minirl.train.rollouts import own_slots
from minirl.train.update import Learner, TrainState, policy_objective


@dataclass(frozen=True, slots=True)
class Workload:
    """The settings of a job that decide its memory."""

    model: ModelConfig
    source: ModelSource
    sampler: SamplerConfig
    train: TrainConfig

    @property
    def dtype(self) -> Any:
        """Return the type of the computation."""
        return jnp.dtype(self.source.dtype)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The padded tokens of a micro-batch: prompts, and rows of answers, of one length each."""

    prompts: int
    prompt: int
    answers: int
    answer: int

    @property
    def computed(self) -> int:
        """Count the tokens that pass through the layers."""
        return self.prompts * self.prompt + self.answers * self.answer


@dataclass(frozen=True, slots=True)
class Training:
    """The learner's side of a workload: shapes and shardings of the trained weights and of the
    optimizer's state, bytes of a device by kind that it holds all the time, numbers of the model.
    """

    learner: Learner
    state: TrainState
    memory: dict[str, float]
    parameters: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """The native sampler's side of a workload, on the devices of one of the processes that sample.

    Bytes are those of a device: by kind, while it samples (`memory`) and all the time (`kept`), and
    those that come from the learner before every rollout (`transfer`).
    """

    processes: int
    mesh: Mesh
    cache: CacheShape
    memory: dict[str, float]
    kept: dict[str, float]
    transfer: float


def published_shape(name: str) -> ModelConfig:
    """Return the shape of a model of `shapes.yaml`, for example qwen2.5-coder-7b."""
    shapes = yaml.safe_load((Path(__file__).parent / "shapes.yaml").read_text())
    key = name.lower().removeprefix("qwen/").removesuffix("-instruct")
    if key not in shapes:
        raise UserError(
            f"{name}: no such model among the published shapes ({', '.join(shapes)}); "
            "for another one set model.path to a folder with its config.json"
        )
    return parse_config(shapes[key], where=key)


def abstract_model(
    config: ModelConfig, source: ModelSource, mesh: Mesh | None, *, lora: LoraConfig | None = None
) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Return a model's structure, and shapes and shardings of its trained and frozen weights."""
    dtype = jnp.dtype(source.dtype)

    def make(key: jax.Array) -> Decoder:
        # As they are read: frozen weights need no more precision than the computation has.
        kept = jnp.float32 if lora is None else dtype
        kinds = {"dtype": dtype, "param_dtype": kept, "remat": source.remat}
        model = Decoder(config, key=key, mesh=mesh, **kinds)
        if lora is not None:
            add_adapters(model, lora, seed=0)
        return model

    graph, trained, frozen = split(nnx.eval_shape(make, jax.random.key(0)))
    return graph, placed(trained, mesh), placed(frozen, mesh)


def training_of(work: Workload, mesh: Mesh | None) -> Training:
    """Describe the learner's side of a workload on a mesh of all devices."""
    train = work.train
    graph, params, frozen = abstract_model(work.model, work.source, mesh, lora=train.lora)
    optimizer = make_optimizer(train.optimizer, steps=train.steps)
    objective = policy_objective(
        train.algorithm, temperature=work.sampler.temperature, top_p=work.sampler.ratio_top_p
    )
    state = TrainState(params, placed(jax.eval_shape(optimizer.init, params), mesh))
    memory = {
        "weights": device_bytes(params) + device_bytes(frozen),
        "optimizer": device_bytes(state.opt_state),
    }
    if train.has_reference:
        memory["start weights"] = device_bytes(copy_shapes(params, mesh, work.dtype))
    learner = Learner(graph, objective, optimizer, frozen=frozen, mesh=mesh)
    parameters = sum(leaf.size for leaf in jax.tree.leaves((params, frozen)))
    return Training(learner, state, memory, parameters)


def sampling_of(
    work: Workload, mesh: Mesh | None, own: Sequence[Any], *, memory_bytes: float
) -> Sampling:
    """Describe the native sampler's side of a workload; `own` are the devices of one process, of
    so much memory each.
    """
    _, *weights = abstract_model(work.model, work.source, mesh, lora=work.train.lora)
    local = local_mesh(nnx.merge_state(*weights), own, dtype=work.dtype, memory_bytes=memory_bytes)
    if local is None:
        local = Mesh(np.array(own).reshape(1, 1, 1), MESH_AXES)
    processes = 1 if mesh is None else mesh.size // len(own)
    config = own_slots(work.sampler, work.train, processes=processes)
    if config.cache_gb is None:
        # The most that the sampler would take.
        most = min(MEMORY_SHARE * memory_bytes / 1e9, 1e9)
        config = config.model_copy(update={"cache_gb": most})
    group_size, itemsize = work.train.group_size, work.dtype.itemsize
    shape = plan_cache(work.model, config, group_size=group_size, itemsize=itemsize, mesh=local)
    trained, frozen = (device_bytes(copy_shapes(part, local, work.dtype)) for part in weights)
    cache = device_bytes(cache_shapes(shape, work.model, dtype=work.dtype, mesh=local))
    # Adapters are added to frozen weights, which are copied once for all rollouts.
    memory = {"sampler's weights": frozen or trained, "cache": cache}
    is_spread = mesh is not None and mesh.size > 1
    kept = {"sampler's frozen weights": frozen} if frozen and is_spread else {}
    return Sampling(processes, local, shape, memory, kept, trained if is_spread else 0.0)


def estimate_memory(
    work: Workload,
    mesh: Mesh | None,
    own: Sequence[Any],
    *,
    memory_bytes: float,
    has_sampler: bool = True,
) -> list[dict[str, float]]:
    """Count what a run holds on each device, by kind; only "activations" are an estimate.

    Returns:
        What is held while the update runs, and while the sampler does if this process has one.
    """
    training, train = training_of(work, mesh), work.train
    answers = train.batching.answers_per_batch or train.group_size
    groups = -(-train.prompts_per_step // (train.mini_batches * row_parts(mesh)))
    batches = -(-groups * (train.group_size // answers) // train.batching.groups_per_batch)
    tokens = longest_batch(work, groups=train.batching.groups_per_batch, answers=answers)
    update = training.memory | {
        # With several micro-batches, their sum lies beside the gradient of the current one.
        "gradients": device_bytes(training.state.params) * min(batches, 2),
        "activations": activation_bytes(work, tokens, mesh),
    }
    if not has_sampler:
        return [update]
    sampling = sampling_of(work, mesh, own, memory_bytes=memory_bytes)
    return [sampling.kept | update, sampling.kept | training.memory | sampling.memory]


def longest_batch(work: Workload, *, groups: int, answers: int) -> Tokens:
    """Return the tokens of a micro-batch of the longest prompts and answers."""
    sampler, sizes = work.sampler, work.train.batching
    return Tokens(
        prompts=groups,
        # The last token of a prompt is the first input of every answer.
        prompt=round_up(sampler.max_prompt_tokens - 1, multiple=sizes.prompt_multiple),
        answers=groups * answers,
        answer=round_up(sampler.max_response_tokens, multiple=sizes.answer_multiple),
    )


def activation_bytes(work: Workload, tokens: Tokens, mesh: Mesh | None) -> float:
    """Estimate what the gradient of a micro-batch takes on a device beside weights and gradient.

    Counted are what the backward pass needs of every layer (with remat=full only its input), the
    working set of one layer, the logits of a chunk with their gradients, and the vocabulary's
    tables: one in the type of the computation, two gradients in fp32; attention is flash attention.
    It is within a factor of 2 of what XLA plans for CPUs, TPUs and the H100.
    """
    config, itemsize = work.model, work.dtype.itemsize
    tensor = 1 if mesh is None else mesh.shape["tensor"]
    D, F = config.hidden_size, config.intermediate_size / tensor
    H = config.num_attention_heads * config.head_dim / tensor
    K = config.num_key_value_heads * config.head_dim / tensor
    products = H + 2 * K + D + 2 * F
    kept = {"full": D, "dots": D + products, "none": 4 * D + 2 * products + F}[work.source.remat]
    working = (2 * D + 2 * products + F) * itemsize + 4 * 2 * D
    layers = tokens.computed * (config.num_hidden_layers * kept * itemsize + working)
    table = config.vocab_size * D / tensor * (itemsize + 2 * 4)
    logits = 4.0 * tokens.answers * tokens.answer * config.vocab_size / tensor
    return layers + table + 3 * min(LOGITS_BYTES, logits)


def cudnn_workspace(config: ModelConfig, tokens: Tokens, *, tensor: int) -> float:
    """Return the largest workspace of cuDNN's flash attention in a device's micro-batch, in bytes.

    XLA does not know it without a GPU. The backward kernel takes the gradient of the queries in
    fp32 and a number for each of their rows, and the gradients of keys and values in 16 bits for
    each query head; the forward kernel takes nothing. That is what cuDNN 9 plans for sm_90 (169,
    987 and 1,799 MiB for a 7B model's prompt, its prefix and eight answers of 8,192 tokens).
    """
    heads, size = config.num_attention_heads / tensor, config.head_dim
    prompts, answers = tokens.prompts * tokens.prompt, tokens.answers * tokens.answer
    # (queries, keys) of the prompt's own attention, of answers to prompts, of answers' own.
    pairs = ((prompts, prompts), (answers, prompts), (answers, answers))
    return max(4 * heads * (queries * (size + 1) + keys * size) for queries, keys in pairs)
