"""SkyRL's trainer on a CPU: import this before the script that trains.

SkyRL names `cuda` in its workers and has no setting for it, imports flash-attn where it is not
used, and samples with vLLM. Here `cuda` is the CPU, and the replies are a tiny policy's; data,
environments, advantages, loss and optimizer are SkyRL's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
import torch  # ty: ignore[import-not-found]  (no dependency of ours)
from tiny_policy import Sampler
from torch.distributed import device_mesh  # ty: ignore[import-not-found]

init_device_mesh, init_process_group = (
    device_mesh.init_device_mesh,
    torch.distributed.init_process_group,
)
device_mesh.init_device_mesh = lambda _device, *shape, **names: init_device_mesh(
    "cpu", *shape, **names
)
torch.distributed.init_process_group = lambda backend, **settings: init_process_group(
    "gloo", **settings
)
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.set_device = lambda _device: None
torch.cuda.synchronize = lambda: None
torch.Tensor.cuda = lambda tensor: tensor
for name in ("flash_attn", "flash_attn.bert_padding"):
    sys.modules[name] = unused = ModuleType(name)
    unused.__spec__ = ModuleSpec(name, None)
    unused.__dict__.update(pad_input=None, unpad_input=None)

from skyrl.backends.skyrl_train.inference_servers.base import (  # noqa: E402
    InferenceEngineInterface,
)
from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker  # noqa: E402
from skyrl.train.dataset import PromptDataset  # noqa: E402
from skyrl.train.entrypoints import main_base  # noqa: E402
from skyrl.train.utils.tracking import Tracking  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

SERVER = "tiny_server"


async def _nothing(*_: Any, **__: Any) -> None: ...


class _Client(InferenceEngineInterface):
    """The sampler, a Ray actor, as SkyRL's generator asks it."""

    def __init__(self, model: str) -> None:
        self.model_name = model
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.server = ray.remote(Sampler).options(name=SERVER).remote(model)

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> Any:
        prompts = input_batch["prompt_token_ids"]
        replies = [await self.server.sample.remote(list(prompt)) for prompt in prompts]
        return {
            "responses": [
                self.tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in replies
            ],
            "response_ids": [ids for ids, _ in replies],
            "response_logprobs": [logprobs for _, logprobs in replies],
            "stop_reasons": ["stop"] * len(replies),
        }

    def increment_weight_version(self) -> None: ...


# The rest of the interface is for servers of their own.
Client: Any = type("Client", (_Client,), dict.fromkeys(_Client.__abstractmethods__, _nothing))


class Policy(fsdp_worker.FSDPPolicyWorkerBase):
    """SkyRL's worker, which sends its weights to the sampler."""

    async def init_weight_sync_state(self, *_: Any) -> None: ...

    async def broadcast_to_inference_engines(self, *_: Any, **__: Any) -> None:
        weights = self.model.model.state_dict()
        await ray.get_actor(SERVER).load.remote(
            {name: weight.full_tensor() for name, weight in weights.items()}
        )


class Tracker(Tracking):
    """Leaves the metrics of the last step in a file; Ray may end before it has printed them."""

    def log(self, data: Mapping[str, Any], *step: Any, **settings: Any) -> None:
        Path("skyrl.log").write_text(json.dumps(data, default=float))
        super().log(data, *step, **settings)


class Experiment(main_base.BasePPOExp):
    """SkyRL's experiment with another sampler, and no eight processes to read eight rows."""

    def get_tracker(self) -> Tracking:
        settings = self.cfg.trainer
        return Tracker(settings.project_name, settings.run_name, settings.logger, self.cfg)

    def get_inference_client(self) -> InferenceEngineInterface:
        return Client(self.cfg.trainer.policy.model.path)

    def get_train_dataset(self) -> PromptDataset:
        settings = self.cfg.trainer
        return PromptDataset(
            self.cfg.data.train_data, self.tokenizer, settings.max_prompt_length, 1
        )


def _init(**settings: Any) -> None:
    init(num_cpus=4, num_gpus=1, include_dashboard=False, **settings)


fsdp_worker.PolicyWorker = ray.remote(num_gpus=1)(Policy)
main_base.BasePPOExp = Experiment
# SkyRL asks Ray for a GPU for each worker.
init, ray.init = ray.init, _init
