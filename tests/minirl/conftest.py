"""Fake servers, the folder of a model that they serve, kernels on a CPU, and smaller programs."""

from functools import partial
from types import SimpleNamespace

import pytest
from jax.experimental import pallas as pl

from minirl.model import splash
from minirl.sglang import pool
from minirl.train import update

from .fake_sglang import Fake


@pytest.fixture
def fakes():
    """Two servers on 127.0.0.1."""
    made = [Fake(), Fake()]
    yield made
    for fake in made:
        fake.close()


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The folder of a model that the fakes serve."""
    shape = SimpleNamespace(hybrid=None)
    monkeypatch.setattr("minirl.sglang.sampler.read_config", lambda _: shape)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "toy", "architectures": ["Toy"]}')
    return folder


@pytest.fixture
def soon(monkeypatch):
    """Let a pool look after its servers more often."""
    monkeypatch.setattr(pool, "_FIRST_PAUSE_S", 0.05)


@pytest.fixture
def interpreted(monkeypatch):
    """Let Pallas' interpreter run the kernels of accelerators."""
    kernels = splash.splash_attention_kernel
    for owner, name in ((kernels, "make_splash_mha_single_device"), (pl, "pallas_call")):
        monkeypatch.setattr(owner, name, partial(getattr(owner, name), interpret=True))
    splash._kernel.cache_clear()
    yield
    splash._kernel.cache_clear()


@pytest.fixture
def loops(monkeypatch):
    """Let an update loop over a hybrid's four layers, as it does over the dozens that models have:
    a layer of each kind is compiled, and not all four.
    """
    monkeypatch.setattr(update, "_UNROLLED_LAYERS", 3)
