"""From rows to padded arrays: nothing is lost, nothing but samples is trained on, and groups share
flat lists of tokens within the budget, with little padding.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.config import BatchingConfig
from minirl.train import batching
from minirl.train.batching import MicroBatches, layouts
from minirl.types import Finish, Reply, TokenRow, Trajectory, Turn

PAD = 99


def row(ids, actions, *, prompt_length, advantage=1.0):
    """Make a row; the log-probability of an action at place t is -t."""
    is_action = np.isin(np.arange(len(ids)), actions)
    logprobs = np.where(is_action, -np.arange(len(ids)), 0).astype(np.float32)
    return TokenRow(np.array(ids, np.int32), is_action, logprobs, advantage, prompt_length)


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
    group = batching.without_cut_off(rows, cut)
    (batch,) = batches_of([group], aggregation="token_mean")
    # The one row has all of the mean over tokens, and half of the mean over rows.
    assert batch.weight_BC.tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0, 0]]
    assert batch.target_XT[batch.target_XT >= 0].tolist() == [5, 6]
    (batch,) = batches_of([group])
    assert batch.weight_BC.tolist() == [[0.25, 0.25, 0, 0], [0, 0, 0, 0]]


@given(st.integers(0, 40), st.integers(1, 12))
def test_mini_batches_are_all_groups_in_order_and_as_even_as_can_be(count, parts):
    groups = list(range(count))
    found = batching.split_evenly(groups, count=parts)
    assert [group for part in found for group in part] == groups
    assert len(found) == min(parts, count)
    sizes = [len(part) for part in found]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert all(sizes)


G = 4


def group(prompt, *answers):
    """Make a group whose prefix and answers have these lengths."""
    lengths = [prompt + 1 + answer for answer in answers]
    arrays = (np.zeros((3, length)) for length in lengths)
    return [TokenRow(*array, advantage=0.0, prompt_length=prompt + 1) for array in arrays]


GROUPS = st.lists(
    st.builds(group, st.integers(0, 50), *[st.integers(1, 60) for _ in range(G)]),
    min_size=1,
    max_size=12,
)


def sizes(tokens):
    return BatchingConfig(micro_batch_tokens=tokens, prompt_multiple=8, answer_multiple=8)


def padding(groups, sizes, *, parts=1):
    cut = MicroBatches(groups, aggregation="token_mean", sizes=sizes, pad_id=0, parts=parts)
    return cut.padding


@given(GROUPS, st.integers(1, 400), st.integers(1, 3))
def test_every_answer_is_computed_once_and_beside_its_prompt(groups, tokens, parts):
    """And no micro-batch takes more than a plan says of the longest."""
    found = layouts(groups, sizes(tokens), parts=parts)
    largest = batching.largest_shape(50, 60, sizes(tokens))
    pieces = [piece for layout in found for part in layout.parts for piece in part]
    number_of = {id(row): n for n, rows in enumerate(groups) for row in rows}
    assert sorted(id(row) for piece in pieces for row in piece.rows) == sorted(number_of)
    for piece in pieces:
        assert len({number_of[id(row)] for row in piece.rows}) == 1
        lengths = [piece.prompt + 1 + answer for answer in piece.answers]
        assert lengths == [len(row.ids) for row in piece.rows]
    for layout in found:
        shape = layout.shape
        assert len(layout.parts) == parts
        assert shape.tokens <= largest.tokens
        assert shape.cells <= max(largest.cells, 2 * largest.tokens)
        for part in layout.parts:
            assert len(part) <= shape.prompts
            assert sum(piece.tokens for piece in part) <= shape.tokens
            for piece in part:
                assert len(piece.answers) <= shape.answers
                assert piece.prompt <= shape.prompt_columns
                assert max(piece.answers) <= shape.answer_columns
    lists = sum(layout.shape.tokens * parts for layout in found)
    share = padding(groups, sizes(tokens), parts=parts)
    assert share == pytest.approx(1 - sum(piece.tokens for piece in pieces) / lists)


def test_micro_batches_by_hand():
    # 4 + 4 x 5 = 24 tokens each, in rows of 8 x (1 + 4) = 40 cells: two groups take 48 of 50.
    groups = [group(4, 5, 5, 5, 5) for _ in range(4)]
    (one, two) = layouts(groups, sizes(50))
    found = [[piece.rows for piece in part] for part in (*one.parts, *two.parts)]
    assert found == [groups[:2], groups[2:]]
    assert one.shape == (48, 2, 8, 4, 8)
    assert padding(groups, sizes(50)) == 0
    # On two parts one micro-batch does.
    (both,) = layouts(groups, sizes(50), parts=2)
    assert [len(part) for part in both.parts] == [2, 2]
    # A group that is over the budget is cut: its short answers, and its long ones.
    cut = layouts([group(4, 9, 1, 8, 2)], sizes(24))
    assert [layout.parts[0][0].answers for layout in cut] == [(8, 9), (1, 2)]
    # They are evenly full: five groups of 24 tokens within 96 are 3 + 2, and not 4 + 1.
    found = layouts([group(4, 5, 5, 5, 5)] * 5, sizes(96))
    assert [len(layout.parts[0]) for layout in found] == [3, 2]


def test_padding_of_real_lengths():
    """Prompts of 150 to 600 tokens, eight replies of 5 to 96 tokens each, mean 27."""
    rng = np.random.default_rng(0)
    for tokens, most in ((1024, 0.08), (2048, 0.08), (16_384, 0.2)):
        shares = []
        for _ in range(10):
            replies = np.clip(rng.lognormal(3.1, 0.6, (8, 8)).astype(int), 5, 96)
            prompts = rng.integers(150, 600, 8)
            groups = [group(*lengths) for lengths in np.column_stack([prompts, replies]).tolist()]
            shares.append(padding(groups, BatchingConfig(micro_batch_tokens=tokens)))
        assert np.mean(shares) < most
        assert max(shares) < 0.2


def test_shapes_are_few():
    """Each compiles a program: steps of 1 to 10 groups whose lists differ in length."""
    rng = np.random.default_rng(0)
    for tokens, most in ((2048, 20), (16_384, 16)):
        shapes = set()
        for _ in range(40):
            prompts = rng.integers(100, 400, rng.integers(1, 11))
            groups = [group(p, *rng.integers(10, 60, 8).tolist()) for p in prompts.tolist()]
            found = layouts(groups, BatchingConfig(micro_batch_tokens=tokens))
            shapes |= {layout.shape for layout in found}
        assert len(shapes) <= most
