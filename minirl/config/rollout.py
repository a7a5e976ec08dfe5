"""Settings of sampling: by whom, how far ahead of the learner, and how tokens are drawn."""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from minirl.exchange import UserError
from minirl.exchange.settings import Place, Settings, contradiction

SGLANG_PYTHON = "MINIRL_SGLANG_PYTHON"
"""Environment variable that names the interpreter where `rollout.sglang.python` does not."""
_NAME = r"[\w-]{1,63}(?:\.[\w-]{1,63})*\.?"
_ADDRESS = re.compile(rf"https?://(?:\[[\da-fA-F:.]+\]|{_NAME})(?::(\d{{1,5}}))?/?")
_PORTS = range(1, 2**16)


class SamplerConfig(Settings):
    """How episodes are sampled."""

    slots: PositiveInt = 64
    """Episodes that the native sampler decodes in parallel."""
    max_prompt_tokens: PositiveInt = 6000
    """Longest first observation."""
    max_response_tokens: PositiveInt = 8192
    """Longest rest of an episode: all replies and later observations."""
    max_reply_tokens: PositiveInt | None = None
    """Longest single reply; None for what is left of the response."""
    cache_gb: float | None = Field(default=None, gt=0)
    """Key/value cache of a device, in 10^9 bytes; None for what all slots need, at most 90 % of the
    memory that weights and optimizer leave (CPU a quarter of all)."""
    repeatable: bool | None = None
    """Handle environments' results in the order of the replies, so that runs repeat bit by bit;
    None for true on CPUs only."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; below 1 the gradient is biased (docs/training.md)."""

    @model_validator(mode="after")
    def _check(self) -> SamplerConfig:
        if (self.max_reply_tokens or 0) > self.max_response_tokens:
            raise contradiction("max_reply_tokens", "use sampler.max_response_tokens or less")
        return self


class SglangConfig(Settings):
    """SGLang servers (written for 0.5.23)."""

    urls: tuple[str, ...] = ()
    """Running servers, http://HOST:PORT each."""
    launch: int = Field(default=0, ge=0)
    """Servers that each process starts on its host, and stops."""
    python: str | None = None
    """Interpreter of SGLang's environment; None for MINIRL_SGLANG_PYTHON, else this one."""
    arguments: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Options of launched servers, such as {mem-fraction-static: 0.8}; true for flags."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables of launched servers."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each launched server, such as ["0,1", "2,3"]; none for the run's."""
    weights: Place | None = None
    """Folder for new weights, at the same path on all hosts, with room for two copies; None for
    `weights` in the run folder."""
    parallel: PositiveInt = 256
    """Concurrent requests to a server."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait for a reply before a server is taken out."""
    wait_s: PositiveFloat = 600.0
    """Longest wait for a server to start, to load weights, or to come back when none is left; then
    the run is saved and stops."""

    def find_python(self) -> str:
        """Return the program that launched servers run in; a `UserError` if there is none."""
        python = self.python or os.environ.get(SGLANG_PYTHON) or sys.executable
        program = shutil.which(python)
        if program is None:
            raise UserError(
                f"rollout.sglang.python (or {SGLANG_PYTHON}): there is no program {python}"
            )
        return program

    @model_validator(mode="after")
    def _check(self) -> SglangConfig:
        matches = {url: _ADDRESS.fullmatch(url) for url in self.urls}
        wrong = [url for url, m in matches.items() if not m or int(m[1] or 1) not in _PORTS]
        if wrong:
            raise contradiction("urls", f"{wrong[:1]} is not http://HOST:PORT")
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise contradiction("urls", "a server is named twice")
        if {"host", "port"} & self.arguments.keys():
            raise contradiction("arguments", "leave out host and port: each server has its own")
        if len(self.devices) not in (0, self.launch):
            raise contradiction(
                "devices", f"{len(self.devices)} for launch = {self.launch} servers; one for each"
            )
        return self


class RolloutConfig(Settings):
    """The sampler of training and evaluation."""

    backend: Literal["auto", "native", "sglang"] = "auto"
    """Sampler; `auto` for SGLang where servers are named or launched, else the native one."""
    sglang: SglangConfig = SglangConfig()
    lag: int = Field(default=0, ge=0)
    """Rollouts that servers sample ahead of training."""

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        sglang = self.sglang
        if self.sampler == "sglang" and bool(sglang.urls) == bool(sglang.launch):
            raise contradiction(
                "sglang", "give either urls (servers that run) or launch (how many to start)"
            )
        if self.sampler == "native" and self.lag:
            raise contradiction(
                "lag",
                "the native sampler takes turns with the learner; set rollout.sglang.launch=N",
            )
        return self

    @property
    def sampler(self) -> Literal["native", "sglang"]:
        """Return who samples."""
        if self.backend != "auto":
            return self.backend
        return "sglang" if self.sglang.urls or self.sglang.launch else "native"

    def __str__(self) -> str:
        """Say who samples, and why."""
        sglang = self.sglang
        if self.sampler == "native":
            reason = "no server in rollout.sglang" if self.backend == "auto" else "rollout.backend"
            return f"the native sampler ({reason})"
        if sglang.launch:
            return f"{sglang.launch} SGLang servers of each host (rollout.sglang.launch)"
        return f"{len(sglang.urls)} SGLang servers (rollout.sglang.urls)"
