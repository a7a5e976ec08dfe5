"""Groups and answers in shared rows: all are there, none stands on another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.config import BatchingConfig
from minirl.train.packing import Extent, layouts, packed_shapes, padding

G = 4
EXTENTS = st.lists(
    st.builds(Extent, st.integers(0, 50), st.tuples(*[st.integers(1, 60) for _ in range(G)])),
    min_size=1,
    max_size=12,
)


def sizes(*, pack=True, units=2):
    return BatchingConfig(groups_per_batch=units, pack=pack, prompt_multiple=8, answer_multiple=8)


def columns(layout, extents):
    """Count how often each cell of the prompt rows and of the answer rows is taken."""
    prompts = np.zeros((layout.units, layout.prompt_columns), int)
    answers = np.zeros((layout.units, layout.rows, layout.answer_columns), int)
    for place in layout.places:
        extent = extents[place.group]
        assert place.start + extent.prompt <= layout.prompt_columns
        prompts[place.unit, place.start : place.start + extent.prompt] += 1
        for at, length in zip(place.answers, extent.answers, strict=True):
            assert at.start + length <= layout.answer_columns
            answers[place.unit, at.row, at.start : at.start + length] += 1
    return prompts, answers


@given(EXTENTS, st.booleans(), st.integers(1, 3))
def test_every_group_has_room_of_its_own(extents, pack, units):
    found = layouts(extents, sizes(pack=pack, units=units))
    assert sorted(place.group for layout in found for place in layout.places) == [
        *range(len(extents))
    ]
    used = 0
    for layout in found:
        for taken in columns(layout, extents):
            assert taken.max(initial=0) <= 1
            used += int(taken.sum())
        for unit in range(layout.units):
            inside = [place for place in layout.places if place.unit == unit]
            # Numbers tell the groups of a unit apart, and the answers of a row.
            assert [place.number for place in inside] == [*range(1, len(inside) + 1)]
            answers = [(at.row, at.number) for place in inside for at in place.answers]
            assert len(set(answers)) == len(answers)
    assert used == sum(extent.prompt + sum(extent.answers) for extent in extents)
    share = padding(extents, sizes(pack=pack, units=units))
    assert share == pytest.approx(1 - used / sum(layout.cells for layout in found))
    assert 0 <= share < 1


@given(EXTENTS)
def test_all_batches_of_a_run_have_one_of_three_shapes(extents):
    longest = Extent(50, (60,) * G)
    shapes = packed_shapes(longest, sizes())
    assert len(shapes) == 3
    for layout in layouts(extents, sizes(), longest=longest):
        assert replace(layout, places=()) in shapes
        for taken in columns(layout, extents):
            assert taken.max(initial=0) <= 1


def test_packed_by_hand():
    # 20 + 12 tokens fill four rows of 8; the third group's prompt has no room beside the others.
    extents = [Extent(4, (8, 4, 4, 4)), Extent(4, (2, 4, 2, 4)), Extent(8, (1, 1, 1, 1))]
    small, full = layouts(extents, sizes(units=1))
    assert (full.rows, full.prompt_columns, full.answer_columns) == (4, 8, 8)
    first, second = full.places
    assert (first.group, first.start, first.number) == (0, 0, 1)
    assert (second.group, second.start, second.number) == (1, 4, 2)
    assert first.answers == ((0, 0, 1), (1, 0, 1), (1, 4, 2), (2, 0, 1))
    # The longest first.
    assert second.answers == ((3, 4, 2), (2, 4, 2), (3, 6, 3), (3, 0, 1))
    assert small.rows == 1
    assert [(at.row, at.start) for at in small.places[0].answers] == [(0, n) for n in range(4)]
