"""A CPU as one of verl's platforms, and a rollout for it; loaded by VERL_USE_EXTERNAL_MODULES.

verl trains on a CPU once it is told of one: VERL_PLATFORM=cpu, and VERL_ENGINE_DEVICE=cuda for the
engine, which is the same on all devices. Its rollouts, vLLM and SGLang, need their GPU builds;
`actor_rollout_ref.rollout.name=tiny` samples without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import ray
import torch  # ty: ignore[import-not-found]  (no dependency of ours)
from tiny_policy import Sampler
from torch import Tensor  # ty: ignore[import-not-found]
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.workers.rollout import base, replica

SERVER = "tiny_server"


def _gives(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


# What verl asks of torch.cuda, and torch.cpu does not have.
MEMORY = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
DEVICE = SimpleNamespace(
    **{name: _gives(0) for name in MEMORY},
    mem_get_info=_gives((0, 0)),
    empty_cache=_gives(None),
    get_device_name=_gives("CPU"),
    is_available=_gives(False),  # without memory of its own
    synchronize=_gives(None),
)
PLATFORM = {
    **{name: _gives(None) for name in PlatformBase.__abstractmethods__},
    "device_name": "cpu",
    "vendor_name": "cpu",
    "device_module": DEVICE,
    "is_available": _gives(True),
    "current_device": _gives("cpu"),
    "device_count": _gives(1),
    "communication_backend_name": _gives("gloo"),
    "visible_devices_envvar": _gives("CUDA_VISIBLE_DEVICES"),
    # verl counts the GPUs that Ray was told of.
    "ray_resource_name": _gives("GPU"),
    "ray_noset_envvars": _gives([]),
    "get_device_capability": _gives((None, None)),
    "nvtx_range": _gives(nullcontext()),
}
PlatformRegistry.register(platform="cpu")(type("CpuPlatform", (PlatformBase,), PLATFORM))

init_process_group = torch.distributed.init_process_group


def _init_process_group(backend: str, **settings: Any) -> None:
    """Take gloo once: verl names it for the CPU and for the device, which PyTorch refuses."""
    init_process_group(backend.removeprefix("cpu:gloo,"), **settings)


torch.distributed.init_process_group = _init_process_group


class Server(Sampler):
    """The rollout server, a Ray actor, which verl's agent loop asks."""

    async def generate(self, *, prompt_ids: Sequence[int], **_: Any) -> replica.TokenOutput:
        ids, logprobs = self.sample(list(prompt_ids))
        return replica.TokenOutput(
            token_ids=ids,
            log_probs=logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": self.version},
        )

    async def sleep(self) -> None: ...


class Replica(replica.RolloutReplica):
    """Starts the server."""

    async def launch_servers(self) -> None:
        self._server_address = SERVER
        self._server_handle = ray.remote(Server).options(name=SERVER).remote(self.model_config.path)
        self.servers = [self._server_handle]


class Adapter(base.BaseRollout):
    """Sends the actor's weights to the server."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int = 0, **_: Any
    ) -> None:
        await ray.get_actor(SERVER).load.remote(dict(weights), global_steps)


replica.RolloutReplicaRegistry.register("tiny", lambda: Replica)
base._ROLLOUT_REGISTRY["tiny", "async"] = "verl_cpu.Adapter"
