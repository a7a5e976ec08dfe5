"""From rows to padded arrays: nothing is lost, nothing but samples is trained on."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minirl.config import BatchingConfig
from minirl.train.batching import MicroBatches, mini_batches, without_cut_off
from minirl.types import Finish, Reply, TokenRow, Trajectory, Turn

PAD = 99


def row(ids, actions, *, prompt_length, advantage=1.0):
    """Make a row; the log-probability of an action at place t is -t."""
    is_action = np.isin(np.arange(len(ids)), actions)
    logprobs = np.where(is_action, -np.arange(len(ids)), 0).astype(np.float32)
    return TokenRow(np.array(ids, np.int32), is_action, logprobs, advantage, prompt_length)


def random_groups(lengths, *, group_size=2, seed=0):
    """Make groups with prompts and longest answers of these lengths, two turns a row."""
    rng = np.random.default_rng(seed)
    groups = []
    for prompt_length, answer in lengths:
        prompt = rng.integers(10, 90, prompt_length).tolist()
        group = []
        for g in range(group_size):
            own = max(3, answer - g)
            ids = prompt + rng.integers(10, 90, own).tolist()
            # The second token of the answer is an observation.
            actions = [t for t in range(prompt_length, len(ids)) if t != prompt_length + 1]
            advantage = float(rng.normal())
            group.append(row(ids, actions, prompt_length=prompt_length, advantage=advantage))
        groups.append(group)
    return groups


def batches_of(groups, *, aggregation="sequence_mean", pad_id=PAD, **sizes):
    sizes = BatchingConfig(**{"prompt_multiple": 4, "answer_multiple": 4, **sizes})
    return list(MicroBatches(groups, aggregation=aggregation, sizes=sizes, pad_id=pad_id))


def test_one_group_by_hand():
    # Prompt 11 12 13; the first row says 21 22, is told 31, says 23; the second says 24.
    group = [
        row([11, 12, 13, 21, 22, 31, 23], [3, 4, 6], prompt_length=3, advantage=1.5),
        row([11, 12, 13, 24], [3], prompt_length=3, advantage=-0.5),
    ]
    # Lists have lengths of a sixteenth of the budget.
    (batch,) = batches_of([group], micro_batch_tokens=256)
    assert batch.ids_XT.tolist() == [[11, 12, 13, 13, 21, 22, 31] + [PAD] * 9]
    assert batch.position_XT.tolist() == [[0, 1, 2, 2, 3, 4, 5] + [0] * 9]
    # The 31 is not learned, nor is what follows the prompt's other tokens.
    assert batch.target_XT.tolist() == [[-1, -1, 24, 21, 22, -1, 23] + [-1] * 9]
    # Rows of prompts of 4 cells, then two rows of answers, the shorter one first.
    assert batch.rows.token_NP.tolist() == [[0, 1, 16, 16]]
    assert batch.rows.token_BC.tolist() == [[2, 16, 16, 16], [3, 4, 5, 6]]
    assert batch.rows.cell_XT.tolist() == [[0, 1, 4, 8, 9, 10, 11] + [12] * 9]
    assert batch.is_action_BC.tolist() == [[True, False, False, False], [True, True, False, True]]
    assert batch.sampler_logp_BC.tolist() == [[-3, 0, 0, 0], [-3, -4, 0, -6]]
    assert batch.advantage_BC[:, 0].tolist() == [-0.5, 1.5]
    # 1 / (2 rows x 3 actions), and 1 / (2 rows x 1 action).
    np.testing.assert_allclose(batch.weight_BC, [[0.5, 0, 0, 0], [1 / 6, 1 / 6, 0, 1 / 6]])
    # By the response the first row has a fourth token, the 31 that it was told.
    (batch,) = batches_of([group], aggregation="response_mean")
    np.testing.assert_allclose(batch.weight_BC, [[0.5, 0, 0, 0], [1 / 8, 1 / 8, 0, 1 / 8]])


def test_what_the_token_limit_cut_off_is_not_learned():
    rows = [row([1, 5, 6], [1, 2], prompt_length=1), row([1, 7, 8], [1, 2], prompt_length=1)]
    ends: tuple[Finish, ...] = ("stop", "length")
    replies = [Reply((5, 6), (-1.0, -2.0), "", finish, (0, 0)) for finish in ends]
    cut = [Trajectory((Turn((1,), reply),), None, "done") for reply in replies]
    (batch,) = batches_of([without_cut_off(rows, cut)], aggregation="token_mean")
    # The one row has all of the mean over tokens, and half of the mean over rows.
    assert batch.weight_BC.tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0, 0]]
    assert batch.target_XT[batch.target_XT >= 0].tolist() == [5, 6]
    (batch,) = batches_of([without_cut_off(rows, cut)])
    assert batch.weight_BC.tolist() == [[0.25, 0.25, 0, 0], [0, 0, 0, 0]]


@given(st.integers(0, 40), st.integers(1, 12))
def test_mini_batches_are_all_groups_in_order_and_as_even_as_can_be(count, parts):
    groups = list(range(count))
    found = mini_batches(groups, count=parts)
    assert [group for part in found for group in part] == groups
    assert len(found) == min(parts, count)
    sizes = [len(part) for part in found]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert all(sizes)
