"""One update is the same on one device and on every mesh, and runs move between meshes."""

from __future__ import annotations

from contextlib import closing

import jax
import numpy as np
import pytest
from flax import nnx

from minirl.model.sharding import param_path, row_parts
from minirl.run.checkpoint import Checkpoints, stored_params
from tests.plain_model import arrays

from .mesh_update import batches, start

# Weights are what they have moved by.
RATE = 1024.0


def assert_same(state, other):
    ours, theirs = arrays(state.params), arrays(other.params)
    for name, array in ours.items():
        scale = np.abs(theirs[name]).max()
        np.testing.assert_allclose(array, theirs[name], rtol=0, atol=1e-4 * scale, err_msg=name)


WIDE = {"micro_batch_tokens": 1024, "answer_multiple": 384}


@pytest.fixture(scope="module")
def plain(toy):
    """What one device computes."""
    found = {}
    for name in ("gspo", "adapters", "hybrid", "hybrid_adapters"):
        learner, state = start(toy, None, algorithm=name)
        reference = jax.tree.map(lambda leaf: leaf.copy(), state.params)
        found[name] = learner.update(state, batches(), reference=reference, rate=RATE)[:2]
    return found


# One micro-batch, and two of one shape: rows so wide that each part has a single group at a time.
# The last does not divide the two heads of linear attention's keys.
@pytest.mark.parametrize(
    ("shape", "algorithm", "sizes"),
    [
        ({"fsdp": 4, "tensor": 2}, "adapters", {}),
        ({"fsdp": 8}, "gspo", {}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, "gspo", WIDE),
        ({"data": 2, "fsdp": 2, "tensor": 2}, "hybrid", {}),
        ({"fsdp": 2, "tensor": 4}, "hybrid_adapters", {}),
    ],
)
def test_an_update_on_a_mesh_equals_one_on_a_device(toy, plain, shape, algorithm, sizes):
    learner, state = start(toy, shape, algorithm=algorithm)
    state = learner.init(state.params, has_average=True)
    began = arrays(state.average)
    reference = jax.tree.map(lambda leaf: leaf.copy(), state.params)
    parts = row_parts(learner._mesh)
    state, stats, _ = learner.update(
        state, batches(parts=parts, **sizes), reference=reference, rate=RATE
    )
    expected_state, expected = plain[algorithm]
    assert stats["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
    # The weights move by the gradient's direction alone: its size is told apart.
    assert stats["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert_same(state, expected_state)
    whole, tensor = shape["fsdp"] * shape.get("tensor", 1), shape.get("tensor", 1)
    parts = {".q": whole, ".gate": whole, "embed": whole, ".gate_b": tensor, ".down_a": tensor}
    state, ended = learner.average(state, decay=0.75), arrays(state.params)
    for name, average in arrays(state.average).items():
        mean = 0.75 * began[name] + 0.25 * ended[name]
        np.testing.assert_allclose(average, mean, rtol=1e-5, atol=1e-6)
    for path, leaf in jax.tree.leaves_with_path(state):
        for name, count in parts.items():
            if param_path(path).endswith(name):
                assert leaf.addressable_shards[0].data.size == leaf.size // count, name


def test_a_checkpoint_goes_on_on_another_mesh(toy, plain, tmp_path):
    trained, _ = plain["gspo"]
    _, like = start(toy, {"fsdp": 8})
    state = jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding), trained, like)
    _, other = start(toy, {"fsdp": 2, "tensor": 2})
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, state, {}, score=0.0)
        checkpoints.wait()
        moved, _ = checkpoints.restore_newest(other, dict)
    assert len(moved.params["layers"]["gate"][...].sharding.device_set) == 4
    for leaf, twin, place in zip(*map(jax.tree.leaves, (moved, trained, other)), strict=True):
        np.testing.assert_array_equal(leaf, twin)
        assert leaf.sharding == place.sharding


def test_weights_of_a_mesh_are_read_one_by_one_without_it(toy, tmp_path):
    _, state = start(toy, {"fsdp": 4, "tensor": 2})
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, state, {}, score=0.0)
    expected = arrays(state.params)
    with stored_params(tmp_path / "1", nnx.eval_shape(lambda: state.params)) as read:
        for name, array in expected.items():
            found = read(name)
            assert type(found) is np.ndarray
            np.testing.assert_array_equal(found, array, err_msg=name)
