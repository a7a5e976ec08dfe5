"""The learner's side of a job: model, mesh and servers, and what its phases take of a device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from launch import cli
from launch.build import SqlSide
from launch.config import JobConfig
from launch.data.prompts import ReplyFormat, read_tokenizer
from launch.files import write_json
from launch.tiny import make_tiny, tiny_shape
from minirl.config import LoraConfig, SamplerConfig
from minirl.exchange import UserError
from minirl.exchange.memory import trim
from minirl.model import huggingface
from minirl.model.config import ModelConfig, read_config
from minirl.model.decoder import Decoder
from minirl.model.lora import add_adapters, trained
from minirl.model.sharding import choose_mesh, make_mesh
from minirl.model.tokenizer import ChatTokenizer
from minirl.plan import fit
from minirl.plan.fit import SECTIONS, Devices, Phase, Plan, Section
from minirl.run import distributed, memory
from minirl.run.checkpoint import read_params
from minirl.run.files import check, read_json
from minirl.train.supervised import Lessons
from sqlenv.types import Example

# A native run does without what talks to servers.
if TYPE_CHECKING:
    from minirl.sglang.sampler import Servers

_log = logging.getLogger(__name__)

PLAN = "plan.json"
_BASIS = "basis"  # in plan.json: what it was made from
_GIB = 2**30
# Share of the memory free beside a CPU that a plan fills: other programs want more at times, and
# the run itself has data and processes of queries there.
_CPU_FILLED = 0.8
# A model whose weights and optimizer take less of a device's memory fits, whatever else it needs.
_SMALL_SHARE = 1 / 256


def model_folder(sql: SqlSide, train: Sequence[Example]) -> Path:
    """Return the Hugging Face folder of the policy; a tiny one is made in the run folder."""
    config, made = sql.config, sql.folder / "model"
    if config.model.path is not None:
        return config.model.path
    assert config.model.tiny is not None
    if not (made / "model.safetensors").exists():
        form = ReplyFormat.of(config)
        texts = (
            f"{sql.prompts.training(example)[-1].content}\n{form.answer(example.gold_sql)}"
            for example in train
        )
        make_tiny(made, texts, config.model.tiny, config.seed, marks=form.marks)
    return made


def load_model(
    config: JobConfig,
    folder: Path,
    *,
    lora: LoraConfig | None = None,
    checkpoint: Path | None = None,
) -> tuple[Decoder, ChatTokenizer]:
    """Read the policy and its tokenizer from a Hugging Face folder, for the devices and the dtype
    of a job; add adapters, and take the trained weights from a checkpoint, if there is one.
    """
    tokenizer = read_tokenizer(config, folder)
    dtype = jnp.dtype(config.model.dtype)
    # Frozen weights need no more precision than the computation has.
    param_dtype = jnp.float32 if lora is None else dtype
    mesh = arrange(config, read_config(folder))
    model = huggingface.load(folder, mesh=mesh, param_dtype=param_dtype, dtype=dtype)
    model.remat = config.model.remat
    if lora is not None:
        add_adapters(model, lora, seed=config.seed)
    if checkpoint is not None:
        nnx.update(model, read_params(checkpoint, trained(model)))
    return model, tokenizer


def arrange(config: JobConfig, shape: ModelConfig) -> Mesh | None:
    """Arrange the devices that are there as the job says; None for a single one."""
    mesh = make_mesh(mesh_sizes(config, shape, jax.device_count()))
    if config.mesh == "auto" and mesh.size > 1:
        sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
        _log.info("mesh: %s; each device holds its share of everything", sizes)
    return mesh if mesh.size > 1 else None


def serving(
    config: JobConfig,
    model: Path,
    folder: Path,
    limits: SamplerConfig,
    *others: SamplerConfig,
    lora: LoraConfig | None,
) -> AbstractContextManager[Servers | None]:
    """Return the servers that sample from a model's folder, with adapters or without, within any of
    the token limits; None for the native sampler.
    """
    if config.rollout.sampler == "native":
        return nullcontext()
    from minirl.sglang.sampler import Servers

    every = (limits, *others)
    longest = max(every, key=lambda one: one.max_prompt_tokens + one.max_response_tokens)
    return Servers(
        config.rollout.sglang, model, longest,
        dtype=config.model.dtype, seed=config.seed, folder=folder, lora=lora,
    )  # fmt: skip


def mesh_sizes(config: JobConfig, shape: ModelConfig, devices: int) -> Mapping[str, int]:
    """Return how many devices lie along each axis of the job's mesh."""
    if config.mesh != "auto":
        return config.mesh.model_dump()
    prompts = config.train.prompts_per_step // config.train.mini_batches
    return choose_mesh(
        devices, prompts=prompts, heads=shape.num_attention_heads, width=shape.hidden_size
    )


def phase_of(
    config: JobConfig,
    shape: ModelConfig,
    section: Section,
    mesh: Mesh | None,
    devices: Devices,
    lessons: Lessons | None = None,
) -> Phase:
    """Build a phase of a job, of weights that are shapes.

    Without lessons those of the warm start may be as long as the longest prompt and response.
    """

    def model(lora: LoraConfig | None) -> Decoder:
        return fit.abstract_model(shape, config.model, mesh, lora=lora)

    train, warm = config.train, config.warm_start
    if section == "warm_start":
        assert warm is not None
        return fit.WarmStart(model(warm.lora), warm, config.sampler, devices, lessons)
    return fit.Learning(
        model(train.lora), train, config.sampler, devices,
        evaluation=config.evaluation_sampler, first=model(None) if config.has_base else None,
        has_sampler=config.rollout.sampler == "native",
    )  # fmt: skip


def plan_memory(
    config: JobConfig, folder: Path, section: Section = "train", lessons: Lessons | None = None
) -> JobConfig:
    """Compile the largest programs of a phase for the devices that are here, and refuse what does
    not fit; return the job with micro-batches and a cache of a size where they had none.

    The plan is kept in the folder: a run that is resumed on the same devices has the same
    micro-batches. A model that is small beside the memory is not compiled for it.

    Raises:
        UserError: The phase needs more than there is.
    """
    plan = kept_plan(config, folder, section)
    if plan is None:
        plans = distributed.gather(lambda: plan_phase(config, section, lessons))
        plan = min(plans, key=lambda plan: plan.micro_batch_tokens)
        kept = {**plan.model_dump(), _BASIS: _basis(config, section)}
        distributed.from_first(lambda: write_json(folder / PLAN, kept))
    _log.info("memory of %s: %s", SECTIONS[section], plan)
    phase, sampler, changed = getattr(config, section), config.sampler, dict[str, Any]()
    if sampler.cache_gb is None:
        changed["sampler"] = sampler.model_copy(update={"cache_gb": plan.cache_gb})
    if phase.batching.micro_batch_tokens == "auto":
        tokens = {"micro_batch_tokens": plan.micro_batch_tokens}
        batching = phase.batching.model_copy(update=tokens)
        changed[section] = phase.model_copy(update={"batching": batching})
    return config.model_copy(update=changed)


def kept_plan(config: JobConfig, folder: Path, section: Section) -> Plan | None:
    """Return the plan that a folder keeps, if it was made for devices and settings like these."""
    path, advice, basis = folder / PLAN, "delete it to plan again", _basis(config, section)

    def read() -> Plan | None:
        kept = read_json(path, dict[str, Any], advice=advice) if path.exists() else {}
        is_same = kept.get(_BASIS) == basis
        return check(Plan, kept, where=str(path), advice=advice) if is_same else None

    return distributed.from_first(read)  # hosts that share a disk may see it later


def _basis(config: JobConfig, section: Section) -> dict[str, Any]:
    """Tell what a plan is made from, of what may change while a run goes on: the devices of each
    process, of how much memory, which machines of a kind have to a few megabytes, and settings.
    """
    own = jax.local_devices()
    device = own[0].device_kind, len(own), round(memory.capacity_bytes(own[0]) / _GIB)
    settings: dict[str, Any] = {"mesh": True, "model": {"remat"}, section: {"batching"}}
    basis = {"devices": [[*one] for one in distributed.gather(lambda: device)]}
    if section == "train":  # a warm start samples nothing
        settings["sampler"] = {"slots", "cache_gb"}
        basis["backend"] = config.rollout.sampler
    return basis | config.model_dump(mode="json", include=settings)


def plan_phase(config: JobConfig, section: Section, lessons: Lessons | None = None) -> Plan:
    """Plan a phase of a job for this process's devices."""
    own = jax.local_devices()
    free, taken = memory.free_bytes(own[0]), 0.0
    if own[0].platform == "cpu":
        trim()  # of what was planned before
        taken = memory.resident_bytes() / len(own)
        room = taken + _CPU_FILLED * free / len(own)
    else:
        room = fit.FILLED * free
    devices = Devices(own, room, taken)
    shape = model_shape(config)
    phase = phase_of(config, shape, section, arrange(config, shape), devices, lessons)
    if sum(phase.memory.values()) < _SMALL_SHARE * room:
        return Plan(micro_batch_tokens=getattr(config, section).batching.budget)
    with cli.progress_bar(f"memory of {SECTIONS[section]}") as progress:
        plan = phase.fit(progress)
    trim()
    return plan


def model_shape(config: JobConfig, name: str | None = None) -> ModelConfig:
    """Return the shape of the named model, or of the job's own."""
    if name is not None:
        return fit.published_shape(name)
    if config.model.tiny is not None:
        return tiny_shape(config.model.tiny)
    path = config.model.path
    assert path is not None
    if not (path / "config.json").exists():
        raise UserError(
            f"{path}: no config.json there; download the model, or plan by name: "
            "--model qwen2.5-coder-7b"
        )
    return read_config(path)
