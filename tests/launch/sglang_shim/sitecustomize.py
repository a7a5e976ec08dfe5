"""Lets SGLang (0.5.23) start without a GPU: this folder goes on the server's PYTHONPATH.

SGLang imports packages for CUDA and for pictures at module level, and of a text model on a CPU
calls none of them. Imports of these give stand-ins: any name is there, Triton's decorators return
what they decorate, and anything else that is called raises; but linear attention, which SGLang runs
only on CPUs with AMX, is computed in PyTorch (`gated_delta`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import MutableSequence

STAND_INS = ("sgl_kernel", "triton", "torchvision", "soundfile", "gguf", "IPython")


class _Constants(type):
    """A class that may be a base, or hold constants: InterpolationMode.BICUBIC."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandIn(types.ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012  (what makes a module a package)
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        made = (
            _Constants(name, (), {"__init__": lambda self, *_, **__: None})
            if name[0].isupper()
            else _StandIn(full)
        )
        setattr(self, name, made)
        return made

    def __call__(self, *args, **options):
        if not self.__name__.startswith("triton"):
            raise NotImplementedError(f"{self.__name__} is a stand-in")
        is_decorator = args and not options and not isinstance(args[0], dict | list)
        return args[0] if is_decorator else lambda decorated: decorated

    def __getitem__(self, _item):
        return self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        if module.__name__ == "sgl_kernel":  # imported after PyTorch, and before models
            _pin_no_memory()
            _add_operations()
        elif module.__name__ == "sgl_kernel.mamba":
            _add_functions(module)


def _pin_no_memory():
    """Let LoRA's tables and weights lie in common memory: only a GPU has use for pinned one."""
    import torch  # ty: ignore[import-not-found]  (that of the servers)

    def unpinned(make):
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    for name in ("tensor", "zeros", "empty", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def _add_operations():
    import gated_delta  # this folder is on the servers' path
    import torch  # ty: ignore[import-not-found]

    for name, function in gated_delta.OPERATIONS.items():
        setattr(torch.ops.sgl_kernel, name, function)


def _add_functions(module):
    import gated_delta
    from sglang.kernels.ops.attention.fla import layernorm_gated  # ty: ignore[import-not-found]

    vars(module).update(gated_delta.FUNCTIONS)
    layernorm_gated.RMSNorm.forward = gated_delta.normal_and_gated


sys.meta_path.insert(0, _Finder())
