"""Weights that are no numbers end sampling with a line, whatever they are multiplied with."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

from minirl.exchange import UserError
from minirl.model.lora import trained
from minirl.types import Decoding, Request

# What is spoilt (one number of it), by what, and how tokens are drawn.
SPOILT = [
    ("final_norm", np.nan, Decoding()),
    ("final_norm", np.inf, Decoding(temperature=0.0)),
    ("embed", np.nan, Decoding()),
    ("unembed", np.nan, Decoding(temperature=0.0)),
    ("unembed", -np.inf, Decoding(top_p=0.5)),
    ("attn_norm", np.nan, Decoding(temperature=0.0)),
    ("q", np.inf, Decoding()),
]


@pytest.mark.parametrize(("name", "value", "decoding"), SPOILT, ids=str)
def test_no_token_is_drawn_from_what_are_no_numbers(toy, name, value, decoding):
    sampler = toy.sampler(toy.model())
    weights = {path: leaf[...] for path, leaf in nnx.to_flat_state(trained(toy.model()))}
    path = next(path for path in weights if path[-1] == name)
    # Token 7, which the prompt has; of others the first number.
    place = (7, 0) if name in ("embed", "unembed") else (0,) * weights[path].ndim
    weights[path] = weights[path].at[place].set(value)
    spoilt = nnx.from_flat_state({path: nnx.Param(array) for path, array in weights.items()})
    sampler.set_weights(spoilt, version=1)
    with pytest.raises(UserError, match="no numbers to draw from"):
        toy.run(sampler, [Request(0, (7, 8, 9), 6, decoding)])
