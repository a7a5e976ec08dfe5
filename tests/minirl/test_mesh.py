"""An update is the same on one device and on every mesh, and runs move between meshes."""

import math
from contextlib import closing

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from minirl.config import LoraConfig
from minirl.config.algorithms import AlgorithmConfig
from minirl.exchange import UserError
from minirl.model.lora import add_adapters, described, trained
from minirl.model.sharding import make_mesh, param_path, param_shardings, row_parts
from minirl.run.checkpoint import Checkpoints, read_params
from minirl.train import batching
from minirl.train.trainer import learner_of
from tests.plain_model import arrays, assert_close, assert_near, assert_same

from . import toy

# Room for the longest group, and not for the rows of two.
ONE_GROUP = {"micro_batch_tokens": 64}


def learner(shape, *, hybrid=False, algorithm=toy.TRAIN.algorithm, lora=None, **options):
    """Return a learner on a mesh (None for one device) and its start."""
    mesh = shape and make_mesh(shape, jax.devices()[: math.prod(shape.values())])
    source = toy.spread(toy.model(hybrid=hybrid), mesh)
    if lora:
        source = toy.adapted(source, lora)
    config = toy.TRAIN.model_copy(update={"algorithm": algorithm})
    found = learner_of(source, config, temperature=0.8)
    return found, found.init(trained(source), **options)


def update(shape, options, **sizes):
    """Return a learner, the weights it began with, what an update made of it, and its numbers."""
    made, state = learner(shape, hybrid=True, has_average=True, **options)
    began = arrays(state.average)
    batches = toy.batches(parts=row_parts(made._mesh) if shape else 1, **sizes)
    # Weights are what they have moved by.
    return made, began, *made.update(state, batches, rate=toy.RATE)[:2]


# A hybrid has the layers of all models. Two micro-batches of one shape, of a single group in each
# part; and one, on a mesh that does not divide the two heads of linear attention's keys.
@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(
    ("shape", "options", "sizes"),
    [
        (
            {"data": 2, "fsdp": 2, "tensor": 2},
            {"algorithm": AlgorithmConfig(kind="gspo")},
            ONE_GROUP,
        ),
        ({"fsdp": 2, "tensor": 4}, {"lora": LoraConfig(rank=3, alpha=6)}, {}),
    ],
)
def test_an_update_on_a_mesh_equals_one_on_a_device(shape, options, sizes, monkeypatch):
    monkeypatch.setattr(batching, "_LIST_LENGTHS", 1)
    *_, alone, expected = update(None, options)
    made, began, state, stats = update(shape, options, **sizes)
    assert stats["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
    # The weights move by the gradient's direction alone: its size is told apart.
    assert stats["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert_near(arrays(state.params), arrays(alone.params), rtol=1e-4)
    whole, tensor = shape["fsdp"] * shape["tensor"], shape["tensor"]
    parts = {".q": whole, ".gate": whole, "embed": whole, ".gate_b": tensor, ".down_a": tensor}
    state, ended = made.average(state, decay=0.75), arrays(state.params)
    means = {name: 0.75 * began[name] + 0.25 * ended[name] for name in began}
    assert_close(arrays(state.average), means, atol=1e-6)
    for path, leaf in jax.tree.leaves_with_path(state):
        for name, count in parts.items():
            if param_path(path).endswith(name):
                assert leaf.addressable_shards[0].data.size == leaf.size // count, name


def test_a_checkpoint_is_read_on_another_mesh_and_on_none(tmp_path):
    (_, state), (_, other) = map(learner, ({"fsdp": 8}, {"fsdp": 2, "tensor": 2}))
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, state, {}, score=0.0)
        checkpoints.wait()
        moved, _ = checkpoints.restore_newest(other, dict)
    assert_same(moved, state)
    assert len(moved.params["layers"]["gate"][...].sharding.device_set) == 4
    for leaf, place in zip(*map(jax.tree.leaves, (moved, other)), strict=True):
        assert leaf.sharding == place.sharding
    alone = read_params(tmp_path / "1", nnx.eval_shape(lambda: state.params))
    assert_same(alone, state.params)
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(alone))


# Parameters are split along named axes, and kept whole where the mesh does not divide them.


def specs(mesh, **changes):
    shapes = nnx.state(described(toy.CONFIG.model_copy(update=changes)))
    leaves = jax.tree.leaves_with_path(param_shardings(shapes, mesh))
    return {param_path(path): sharding.spec for path, sharding in leaves}


def test_axes_of_a_mesh():
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 2}
    with pytest.raises(UserError, match="data 1 x fsdp 3 x tensor 1 is not the 4 devices"):
        make_mesh({"fsdp": 3}, jax.devices()[:4])


def test_adapters_begin_in_their_places():
    """As they are named there: to XLA the same place by another name is another program."""
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    model = toy.spread(toy.model(), mesh)
    add_adapters(model, LoraConfig(), seed=0)
    adapters = trained(model)
    places = jax.tree.leaves(param_shardings(adapters, mesh))
    assert [leaf.sharding for leaf in jax.tree.leaves(adapters)] == places


def test_specs():
    found = specs(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    assert found["layers.q"] == PartitionSpec(None, "tensor", "fsdp")
    assert found["layers.q_bias"] == PartitionSpec(None, "tensor")
    assert found["layers.o"] == PartitionSpec(None, "fsdp", "tensor")
    assert found["layers.down"] == PartitionSpec(None, "fsdp", "tensor")
    assert found["embed"] == PartitionSpec("tensor", "fsdp")
    assert found["layers.q_norm"] == PartitionSpec(None, None)
    # What does not divide stays whole.
    found = specs(make_mesh({"fsdp": 2, "tensor": 4}), intermediate_size=26)
    assert found["layers.q"] == PartitionSpec(None, "tensor", "fsdp")
    assert found["layers.gate"] == PartitionSpec(None, None, "fsdp")
