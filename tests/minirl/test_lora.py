"""Adapters: nothing at the start, the chain rule's gradients, merged the same, saved alone."""

import json
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from minirl.config import BatchingConfig, LoraConfig, OptimizerConfig
from minirl.config.algorithms import AlgorithmConfig
from minirl.exchange import UserError
from minirl.model import huggingface
from minirl.model.lora import add_adapters, split, trained
from minirl.model.sharding import param_path
from minirl.train.batching import MicroBatches
from minirl.train.losses import policy_loss
from minirl.train.update import Learner
from minirl.types import Request, TokenRow
from tests import plain_model
from tests.plain_model import arrays, assert_same

from . import toy
from .test_models import check_logits
from .toy import adapted, batches, gradient_of

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
PEFT, PREFIX = REFERENCE / "qwen3_lora", "base_model.model."
ALL = LoraConfig(rank=3, alpha=6)
SOME = LoraConfig(rank=2, alpha=1, targets=("v", "o", "down"))


def base():
    return toy.spread(toy.model(layers=1), None)


def fresh(lora=ALL):
    """Make a toy model with adapters that add nothing yet."""
    model = base()
    add_adapters(model, lora, seed=0)
    return model


def merged(model, folder):
    """Return the model without adapters that is written of one."""
    (folder / "config.json").write_text(model.config.model_dump_json())
    huggingface.save(model, folder / "merged", source=folder)
    return huggingface.load(folder / "merged", dtype=model.dtype)


def test_adapters_of_matrices_that_the_model_lacks_are_refused():
    with pytest.raises(UserError, match=r"lora\.targets: the model has no in_qkv; it has down, "):
        fresh(LoraConfig(rank=2, targets=("in_qkv",)))


def learner_of(model):
    """Return a learner whose step is the gradient itself, and the weights."""
    loss = partial(policy_loss, AlgorithmConfig(kl_coef=0.1))
    return Learner(model, loss, optax.sgd(1.0), temperature=0.8), trained(model)


def test_gradients_are_those_of_the_whole_matrices_by_the_chain_rule(tmp_path):
    model = adapted(base(), ALL)
    learner, params = learner_of(model)
    _, found = gradient_of(learner, params, batches())
    _, full = gradient_of(*learner_of(merged(model, tmp_path)), batches())
    ours, theirs, factors = arrays(found), arrays(full), arrays(params)
    assert set(ours) == set(factors)
    # Those of linear attention are of no matrix here.
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        a_LRI, b_LOR = (factors[f"layers.{name}_{end}"] for end in "ab")
        gradient_LOI = 2.0 * theirs[f"layers.{name}"]
        for end, expected in (
            ("a", b_LOR.swapaxes(1, 2) @ gradient_LOI),
            ("b", gradient_LOI @ a_LRI.swapaxes(1, 2)),
        ):
            part = ours[f"layers.{name}_{end}"]
            scale = np.abs(expected).max()
            assert scale > 1e-4
            np.testing.assert_allclose(part, expected, rtol=5e-5, atol=5e-5 * scale)


def sampled_groups(sampler):
    """Sample 16 groups of 4 replies of 32 tokens as rows."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(4, 60, 8).tolist()) for _ in range(16)]
    asked = [Request(n, prompts[n // 4], 32, 0.8) for n in range(64)]
    rows = []
    for number, reply in sorted(toy.run(sampler, asked).items()):
        ids = np.array([*prompts[number // 4], *reply.ids])
        logprobs = np.concatenate([np.zeros(8), reply.logprobs])
        rows.append(TokenRow(ids, np.arange(40) >= 8, logprobs, 0.0, 8))
    return [rows[n : n + 4] for n in range(0, 64, 4)]


def test_in_bfloat16_the_sampler_is_as_near_to_the_learner_as_in_full_training(tmp_path):
    """Mean |log p - log q| of 2,048 tokens: of adapters, and of all weights at the same policy.
    Weights that are merged and rounded to bfloat16 before sampling are 1.45 times as far, and these
    1.03 times: such means differ by a twentieth by chance.
    """
    base = huggingface.init(toy.CONFIG, 0, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    model = adapted(base, LoraConfig(rank=8, alpha=0.25))
    sizes = BatchingConfig(prompt_multiple=8, answer_multiple=32)
    gaps = []
    for one in (model, merged(model, tmp_path)):
        learner, params = learner_of(one)
        groups = sampled_groups(toy.sampler(one, slots=64, group_size=4, stop_ids=toy.NEVER))
        batches = MicroBatches(groups, aggregation="token_mean", sizes=sizes, pad_id=0)
        found = batches.read_back(learner.logprobs(params, batches))
        pairs = zip(chain(*found), chain(*groups), strict=True)
        gaps.append(np.mean([np.abs(logp - row.logprobs)[8:] for logp, row in pairs]))
    assert gaps[0] <= 1.25 * gaps[1]


def test_a_model_is_written_with_its_adapters_merged_in_float32(tmp_path):
    model = huggingface.load(REFERENCE / "qwen3", param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    model = adapted(model, SOME)  # in float32, beside weights in bfloat16
    found, (factors, rest) = (
        arrays(nnx.state(merged(model, tmp_path))),
        map(arrays, split(model)[1:]),
    )
    for name, array in rest.items():
        a, b = (factors.get(f"{name}_{end}") for end in "ab")
        wanted = array.astype(np.float32) + (0.0 if a is None else np.float32(1 / 2) * (b @ a))
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6, atol=1e-7, err_msg=name)


def peft_adapter():
    """Read PEFT's own adapter of the reference model: settings, and our adapters' state."""
    config = json.loads((PEFT / "adapter_config.json").read_text())
    lora = LoraConfig(rank=config["r"], alpha=config["lora_alpha"])
    model = huggingface.load(REFERENCE / "qwen3")
    add_adapters(model, lora, seed=0)
    graph, params, frozen = split(model)
    stored = load_file(PEFT / "adapter_model.safetensors")

    def read(path, leaf):
        names = huggingface.tensor_names(param_path(path), leaf.shape)
        return jnp.stack([stored[PREFIX + name] for name in names])

    return config, lora, nnx.merge(graph, jax.tree.map_with_path(read, params), frozen)


def test_logits_are_those_of_peft(tmp_path):
    model = peft_adapter()[2]
    for one in (model, merged(model, tmp_path)):
        check_logits(one, PEFT)
    expected, base = np.load(PEFT / "reference.npz"), huggingface.load(REFERENCE / "qwen3")
    difference = plain_model.logits(base, expected["ids_BT"]) - expected["logits_BTV"]
    assert np.abs(difference[2]).max() > 1


def test_an_adapter_is_written_as_peft_writes_it(tmp_path):
    config, lora, model = peft_adapter()
    params = trained(model)
    shapes, tensors = huggingface.tensor_shapes(params), huggingface.tensors(params)
    huggingface.write_adapter(tmp_path / "a", shapes, tensors, lora, base="qwen3")
    written = load_file(tmp_path / "a" / "adapter_model.safetensors")
    original = load_file(PEFT / "adapter_model.safetensors")
    assert written.keys() == original.keys()
    assert_same(written, original)
    ours = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert ours | {"task_type": None} == {key: config[key] for key in ours}
    tensors = huggingface.tensors(params)
    huggingface.write_adapter(tmp_path / "b", shapes, tensors, lora, base="x", dtype="bfloat16")
    with safe_open(tmp_path / "b" / "adapter_model.safetensors", "np") as file:
        assert {file.get_slice(name).get_dtype() for name in written} == {"BF16"}
        assert file.metadata() == {"format": "pt"}


def test_a_run_learns_with_adapters_and_saves_them_alone(tmp_path):
    model = fresh()
    # Louder, so that a turn of the last hidden state, all that adapters can do, decides on letters.
    model.unembed[...] = 6 * model.unembed[...]
    frozen = arrays(split(model)[2])
    optimizer = OptimizerConfig(learning_rate=0.05, weight_decay=0.0)
    make = partial(toy.trainer, tmp_path, source=model, steps=4, kl_every=1, optimizer=optimizer)
    trainer = make()
    trainer.run(toy.ignore)
    records = toy.metrics_of(tmp_path)
    rewards = [record["reward/total"] for record in records]
    assert rewards[-1] > rewards[0] + 0.25
    kl = [record["update/kl"] for record in records]
    assert kl[0] == pytest.approx(0, abs=1e-6)  # they add nothing at the start
    assert kl[-1] > 0.01
    assert max(record["mismatch/gap_max"] for record in records) < 1e-4
    assert all(array.any() for array in arrays(trainer.params).values())  # each B was 0
    assert_same(arrays(trainer._learner._frozen), frozen)
    # It goes on with what was saved.
    again = make()
    assert again.steps_done == 4
    assert_same(again._state, trainer._state)
    # What is saved are the adapters, and their two moments.
    for item, kinds in (("tree", 1), ("optimizer", 2)):
        with ocp.PyTreeCheckpointer() as reader:
            stored: Any = reader.metadata(tmp_path / "checkpoints" / "4" / item).item_metadata
        adapters = [name for name in stored if "_a'" in name or "_b'" in name]
        assert len(adapters) == kinds * 14
        assert not any("layers" in name for name in set(stored) - set(adapters))
