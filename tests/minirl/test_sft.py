"""Supervised training: what is a target, the order of demonstrations, and the shapes of a plan."""

from collections import Counter
from itertools import chain
from unittest.mock import patch

import numpy as np
import pytest

from minirl.config import (
    BatchingConfig,
    ModelSource,
    SamplerConfig,
    SftConfig,
    SftOptimizerConfig,
)
from minirl.plan.fit import Devices, WarmStart, abstract_model
from minirl.train.batching import BatchShape
from minirl.train.supervised import (
    Demonstration,
    Lessons,
    encode,
    epoch_groups,
    share_prefix,
    supervise,
)
from minirl.train.update import Learner
from minirl.types import TokenRow

from . import toy

CONFIG = SftConfig(
    steps=4,
    groups_per_step=2,
    group_size=2,
    optimizer=SftOptimizerConfig(kind="muon", learning_rate=1e-2, schedule="constant"),
    batching=BatchingConfig(micro_batch_tokens=128, prompt_multiple=16, answer_multiple=16),
    checkpoint_every=2,
)


def shown(*texts):
    return tuple((toy.Message("user", text),) for text in texts)


def test_only_the_target_is_trained_on():
    # AB asks, C is a mistake, D tells so, EF mends it. 2 and 3 stand around a message, 1 ends.
    repair = Demonstration(shown("AB", "D"), ("C", "EF"))
    row = encode(repair, toy.Tokenizer())
    assert row.ids.tolist() == [2, 4, 5, 3, 6, 1, 2, 7, 3, 8, 9, 1]
    assert row.is_action.tolist() == [False] * 9 + [True] * 3
    assert (row.prompt_length, row.advantage) == (9, 1.0)
    assert not row.logprobs.any()
    assert encode(repair, toy.Tokenizer(), learn_prompt=True).is_action.all()


def test_of_a_transcript_several_replies_are_learnt_and_responses_never():
    # AB asks, C is a call, D its response, E another call, F its response, G the answer.
    texts = shown("AB", "D", "F")
    transcript = Demonstration(texts, ("C", "E", "G"), learnt=2, learn_responses=False)
    row = encode(transcript, toy.Tokenizer())
    assert row.ids.tolist() == [2, 4, 5, 3, 6, 1, 2, 7, 3, 8, 1, 2, 9, 3, 10, 1]
    learnt = [number for number, learns in enumerate(row.is_action) if learns]
    assert (learnt, row.prompt_length) == ([9, 10, 14, 15], 9)
    # With the prompt, all that the model wrote and was asked; not what the tool said.
    row = encode(transcript, toy.Tokenizer(), learn_prompt=True)
    assert np.flatnonzero(~row.is_action).tolist() == [6, 7, 8, 11, 12, 13]


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        (["ABCD", "ABXY", "ABCX"], 3),
        (["AB", "AB"], 4),
        # 2 A B 3 against 2 A B C 3.
        (["AB", "ABC"], 3),
        # Of the only row every token but the first is learnt.
        (["AB"], 1),
    ],
)
def test_rows_share_what_all_prompts_begin_with(prompts, shared):
    texts = [Demonstration(shown(text), ("Z",)) for text in prompts]
    rows = [encode(one, toy.Tokenizer(), learn_prompt=True) for one in texts]
    for row, new in zip(rows, share_prefix(rows), strict=True):
        assert new.prompt_length == shared
        assert (new.ids[:shared] == rows[0].ids[:shared]).all()
        np.testing.assert_array_equal(new.ids, row.ids)
        # What is shared is no target.
        assert not new.is_action[:shared].any()
        np.testing.assert_array_equal(new.is_action[shared:], row.is_action[shared:])
    (alone,) = share_prefix([encode(texts[0], toy.Tokenizer())])
    assert alone.prompt_length == rows[0].prompt_length  # what is not learnt stays a prompt
    rows[0].ids[0] = 50
    # They share nothing.
    assert {row.prompt_length for row in share_prefix(rows)} == {1}


# Three keys of 5, 3 and 1 demonstrations.
KINDS = tuple((key, 10 + number) for number, key in enumerate("aababaabc"))


def test_an_epoch_covers_every_demonstration_in_an_order_of_its_own():
    groups = epoch_groups(KINDS, group_size=2, seed=1, epoch=0)
    others = [epoch_groups(KINDS, group_size=2, seed=1, epoch=1)]
    others.append(epoch_groups(KINDS, group_size=2, seed=2, epoch=0))
    epoch_groups.cache_clear()
    assert groups not in others
    assert groups == epoch_groups(KINDS, group_size=2, seed=1, epoch=0)
    assert all(len(group) == 2 for group in groups)
    assert all(len({KINDS[number][0] for number in group}) == 1 for group in groups)
    counts = Counter(number for group in groups for number in group)
    assert set(counts) == set(range(len(KINDS)))
    # Each key fills its last group up with one of its own.
    assert len(groups) == 3 + 2 + 1
    assert max(counts.values()) == 2
    assert sum(counts.values()) - len(KINDS) == 3


def test_steps_go_through_epoch_after_epoch():
    config = SftConfig(groups_per_step=4, group_size=2)
    none = np.zeros(2, np.float32)
    ids = (np.array([number, 0]) for number in range(len(KINDS)))
    lessons = Lessons([TokenRow(one, one > 0, none, 1.0, 1) for one in ids], KINDS, 0, seed=1)
    groups = chain(*(lessons.groups(step, config) for step in range(3)))
    epochs = [epoch_groups(KINDS, group_size=2, seed=1, epoch=epoch) for epoch in range(2)]
    assert [[row.ids[0] for row in group] for group in groups] == list(chain(*epochs))


def demonstrations():
    """Four questions of one beginning, a repair among them."""
    return [
        Demonstration(shown("SCHEMAQA"), ("AA",), "db"),
        Demonstration(shown("SCHEMAQB"), ("BBBB",), "db"),
        Demonstration(shown("SCHEMAQC", "NO"), ("XY", "C"), "db"),
        Demonstration(shown("SCHEMAD"), ("DD",), "db"),
    ]


def test_the_loss_is_the_mean_over_target_tokens_and_falls(tmp_path):
    lessons = Lessons.of(demonstrations(), toy.Tokenizer(), CONFIG, seed=0)
    model, costs = toy.model(layers=1), []
    supervise(toy.spread(model, None), lessons, CONFIG, folder=tmp_path)
    losses = [record["sft/loss"] for record in toy.metrics_of(tmp_path)]
    for demonstration in demonstrations():
        row = encode(demonstration, toy.Tokenizer())
        table = toy.next_logprobs(model, row.ids.tolist())
        costs += [-table[t - 1, row.ids[t]] for t in np.flatnonzero(row.is_action)]
    assert len(costs) == 3 + 5 + 2 + 3
    # A step takes all four demonstrations.
    assert losses[0] == pytest.approx(np.mean(costs), rel=1e-5)
    assert losses[3] < losses[0] - 0.2


def test_a_plan_compiles_the_largest_of_the_shapes_that_are_computed(tmp_path):
    computed = set()

    class Recorder(Learner):
        def update(self, state, batches, **_named):
            for batch in batches:
                (N, P), (B, C) = batch.rows.token_NP.shape, batch.rows.token_BC.shape
                computed.add(BatchShape(batch.ids_XT.shape[1], N, P, B // N, C))
            return state, {"loss": 0.0, "skipped": 0.0}, iter(())

    batching = BatchingConfig(micro_batch_tokens=32, prompt_multiple=4, answer_multiple=4)
    config = CONFIG.model_copy(update={"batching": batching, "steps": 3})
    lessons = Lessons.of(demonstrations(), toy.Tokenizer(), config, seed=0)
    model = toy.model()
    with patch("minirl.train.supervised.Learner", Recorder):
        supervise(model, lessons, config, folder=tmp_path)
    assert len(computed) > 1
    assert lessons.shapes(config, parts=1) == computed
    # Whatever its size is set to, a plan looks for those of the size that it tries.
    batching = batching.model_copy(update={"micro_batch_tokens": "auto"})
    asked = config.model_copy(update={"batching": batching})
    limits = SamplerConfig(max_prompt_tokens=20, max_response_tokens=20)
    given = abstract_model(model.config, ModelSource(), None), asked, limits, Devices((), 0.0)
    planned = WarmStart(*given, lessons).largest_shape(32)
    assert planned == max(computed, key=lambda shape: (shape.tokens, shape.cells))
    # Not known, they are as long as the limits let them be.
    bound = WarmStart(*given).largest_shape(32)
    assert (bound.tokens, bound.answer_columns) >= (planned.tokens, planned.answer_columns)
    assert bound.tokens == 19 + 20 + 1  # rounded up to even
