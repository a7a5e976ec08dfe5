"""Groups share flat lists of tokens: all are there, within the budget, with little padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.config import BatchingConfig
from minirl.train.layout import Extent, largest_shape, layouts, padding, round_up

G = 4
EXTENTS = st.lists(
    st.builds(Extent, st.integers(0, 50), st.tuples(*[st.integers(1, 60) for _ in range(G)])),
    min_size=1,
    max_size=12,
).map(tuple)


def sizes(tokens):
    return BatchingConfig(micro_batch_tokens=tokens, prompt_multiple=8, answer_multiple=8)


@given(EXTENTS, st.integers(1, 400), st.integers(1, 3))
def test_every_answer_is_computed_once_and_beside_its_prompt(extents, tokens, parts):
    found = layouts(extents, sizes(tokens), parts=parts)
    pieces = [piece for layout in found for part in layout.parts for piece in part]
    answers = [(piece.group, g) for piece in pieces for g in piece.answers]
    assert sorted(answers) == [(n, g) for n in range(len(extents)) for g in range(G)]
    for piece in pieces:
        whole = extents[piece.group]
        assert piece.extent == (whole.prompt, tuple(whole.answers[g] for g in piece.answers))
    for layout in found:
        shape = layout.shape
        assert len(layout.parts) == parts
        for part in layout.parts:
            assert len(part) <= shape.prompts
            assert sum(piece.tokens for piece in part) <= shape.tokens
            for piece in part:
                assert len(piece.answers) <= shape.answers
                assert piece.extent.prompt <= shape.prompt_columns
                assert max(piece.extent.answers) <= shape.answer_columns
    lists = sum(layout.shape.tokens * parts for layout in found)
    assert padding(found) == pytest.approx(1 - sum(piece.tokens for piece in pieces) / lists)


@given(EXTENTS, st.integers(1, 400))
def test_no_micro_batch_takes_more_than_the_plan_of_the_longest(extents, tokens):
    largest = largest_shape(Extent(50, (60,) * G), sizes(tokens))
    for layout in layouts(extents, sizes(tokens)):
        assert layout.shape.tokens <= largest.tokens
        assert layout.shape.cells <= max(largest.cells, 2 * largest.tokens)


def test_micro_batches_by_hand():
    # 4 + 4 x 5 = 24 tokens each, in rows of 8 x (1 + 4) = 40 cells: two groups take 48 of 50.
    group = Extent(4, (5, 5, 5, 5))
    (one, two) = layouts((group,) * 4, sizes(50))
    assert [[piece.group for piece in part] for part in one.parts + two.parts] == [[0, 1], [2, 3]]
    assert one.shape == (48, 2, 8, 4, 8)
    assert padding((one, two)) == 0
    # On two parts one micro-batch does.
    (both,) = layouts((group,) * 4, sizes(50), parts=2)
    assert [len(part) for part in both.parts] == [2, 2]
    # A group that is over the budget is cut: its short answers, and its long ones.
    cut = layouts((Extent(4, (9, 1, 8, 2)),), sizes(24))
    assert [layout.parts[0][0].answers for layout in cut] == [(2, 0), (1, 3)]


def test_micro_batches_are_evenly_full():
    # Five groups of 24 tokens within 96 are 3 + 2, and not 4 + 1.
    found = layouts((Extent(4, (5, 5, 5, 5)),) * 5, sizes(96))
    assert [len(layout.parts[0]) for layout in found] == [3, 2]


def test_padding_of_real_lengths():
    """Prompts of 150 to 600 tokens, eight replies of 5 to 96 tokens each, mean 27."""
    rng = np.random.default_rng(0)
    for tokens, most in ((1024, 0.08), (2048, 0.08), (16_384, 0.2)):
        shares = []
        for _ in range(10):
            replies = np.clip(rng.lognormal(3.1, 0.6, (8, 8)).astype(int), 5, 96)
            prompts = rng.integers(150, 600, 8)
            groups = zip(prompts.tolist(), replies.tolist(), strict=True)
            extents = tuple(Extent(prompt, tuple(answers)) for prompt, answers in groups)
            found = layouts(extents, BatchingConfig(micro_batch_tokens=tokens))
            shares.append(padding(found))
        assert np.mean(shares) < most
        assert max(shares) < 0.2


def test_round_up():
    assert [round_up(n, multiple=16) for n in (0, 1, 16, 17, 33, 65)] == [16, 16, 16, 32, 48, 96]
    sizes = [round_up(n, multiple=1) for n in range(1, 14)]
    assert sizes == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]


def test_shapes_are_few():
    """Each compiles a program: steps of 1 to 10 groups whose lists differ in length."""
    rng = np.random.default_rng(0)
    for tokens, most in ((2048, 20), (16_384, 16)):
        shapes = set()
        for _ in range(40):
            extents = tuple(
                Extent(int(prompt), tuple(rng.integers(10, 60, 8).tolist()))
                for prompt in rng.integers(100, 400, rng.integers(1, 11))
            )
            found = layouts(extents, BatchingConfig(micro_batch_tokens=tokens))
            shapes |= {layout.shape for layout in found}
        assert len(shapes) <= most
