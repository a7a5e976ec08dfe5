"""What these tests share: no GPU, no flags of the other tests, and a CUDA compiler or a skip."""

import importlib.util
import os

import pytest

# Before JAX is imported, or the plug-in looks for a GPU.
os.environ["JAX_PLATFORMS"] = "cpu"

HAS_COMPILER = (
    importlib.util.find_spec("jax_plugins") is not None
    and importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu_programs" in str(item.path):
            if not HAS_COMPILER:
                item.add_marker(pytest.mark.skip(reason="make test-gpu-programs installs it"))
            # Compilations of a minute each on two cores, much longer where others work too.
            item.add_marker(pytest.mark.timeout(3600))
