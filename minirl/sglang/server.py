"""One SGLang server over HTTP (written for SGLang 0.5.23): endpoints, answers, and how it stands.

Every request has a deadline, and every answer is checked for what cannot be true. What follows from
a failure is for the pool to decide.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import aiohttp
from pydantic import (
    AliasPath,
    BaseModel,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import to_json

from minirl.config import SglangConfig
from minirl.exchange import UserError
from minirl.sglang import Failure
from minirl.sglang.process import ChildServer
from minirl.types import Request

TESTED = "0.5.23"
_OLDEST = (0, 5)
# What a server calls the weights that it was started with.
_STARTED = "default"
# Longest wait for what a server does at once.
BRIEF_S = 30.0
_CONNECT_S = 10.0
# Characters of a useless answer that a message shows.
_SHOWN = 160
_Read = TypeVar("_Read", bound=BaseModel)


class ServerError(Exception):
    """A server failed in a way that `kind` names; another one, or this one later, may do better."""

    def __init__(self, kind: Failure, message: str) -> None:
        super().__init__(message)
        self.kind: Failure = kind


class RejectedError(ServerError):
    """A server understood a request and will never accept it (a status of 400 to 499); it is well,
    and serves others.
    """


@dataclass(frozen=True, slots=True)
class PushedWeights:
    """Weights of the learner: as servers call them, each name used once; in the order of pushes; as
    the learner counts them; and where servers read them.
    """

    name: str
    number: int
    version: int
    folder: Path


class ServerInfo(BaseModel):
    """What a server says of itself and its model."""

    version: str
    weight_version: str = _STARTED
    dp_size: PositiveInt = 1
    max_req_input_len: NonNegativeInt | None = None
    max_model_len: NonNegativeInt = Field(validation_alias=AliasPath("data", 0, "max_model_len"))

    @property
    def context(self) -> int:
        """Return the longest episode: a prompt has fewer tokens than `max_req_input_len`, which a
        small cache makes less than the model's context.
        """
        held = math.inf if self.max_req_input_len is None else self.max_req_input_len
        return int(min(self.max_model_len, held))

    def check(self, url: str, *, context: int, has_adapters: bool) -> None:
        """Raise a `UserError` for a server that cannot serve the model, in episodes of so many
        tokens, and with adapters if it is given any.
        """
        version = tuple(int(part) for part in self.version.split(".")[:2] if part.isdigit())
        flaws = {
            f"is SGLang {self.version}; use {TESTED}": version < _OLDEST,
            f"takes {self.context} tokens, and episodes have up to {context}; set fewer "
            "(sampler.max_prompt_tokens, evaluation.max_prompt_tokens, ...), or start it with "
            "a larger --context-length, or a larger cache (--max-total-tokens, "
            "--mem-fraction-static)": self.context < context,
            "loads no adapters with --dp-size; start several servers in its place": (
                has_adapters and self.dp_size > 1
            ),
            f"has weights {self.weight_version} in place of those that it was started with, which "
            "adapters belong to; start it anew": has_adapters and self.weight_version != _STARTED,
        }
        for words, is_so in flaws.items():
            if is_so:
                raise UserError(f"rollout.sglang: {url} {words}")


class _Span(BaseModel):
    """Which ids some weights have sampled."""

    version: str
    start: NonNegativeInt
    end: NonNegativeInt


def _meta(*path: str) -> Any:
    return Field(validation_alias=AliasPath("meta_info", *path))


_IdLogprob = tuple[FiniteFloat, NonNegativeInt, Any]


class Generated(BaseModel):
    """What a server sampled, validated with the request as context.

    Of each id, `scored` has the log-probability under softmax(logits / temperature), the id, and
    text or null. Without `spans`, `version` has sampled all.
    """

    ids: Annotated[tuple[NonNegativeInt, ...], Field(validation_alias="output_ids")]
    finish: Annotated[Literal["stop", "length"], _meta("finish_reason", "type")]
    cached: Annotated[NonNegativeInt, _meta("cached_tokens")] = 0
    version: Annotated[str, _meta("weight_version")]
    spans: Annotated[list[_Span], _meta("weight_versions")] = []
    scored: Annotated[list[_IdLogprob], _meta("output_token_logprobs")]

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Return the log-probability of each id."""
        return tuple(value for value, *_ in self.scored)

    @property
    def versions(self) -> tuple[str, ...]:
        """Return the name of the weights that sampled each id."""
        spans = self.spans or [_Span(version=self.version, start=0, end=len(self.ids))]
        return tuple(span.version for span in spans for _ in range(span.start, span.end))

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Generated:
        assert info.context is not None
        ids, most = self.ids, info.context.max_tokens
        end, follow = 0 if self.spans else len(ids), True
        for span in self.spans:  # before they are written out, however long
            follow, end = follow and span.start == end <= span.end, span.end
        flaws = {
            f"{len(ids)} ids, not 1 to {most}": not 0 < len(ids) <= most,
            "log-probabilities of other ids": list(ids) != [i for _, i, _ in self.scored],
            "weight versions of other tokens": not follow or end != len(ids),
        }
        for flaw, is_so in flaws.items():
            if is_so:
                raise ValueError(flaw)
        return self


def make_session() -> aiohttp.ClientSession:
    """Open what all servers are talked to by; to be called in a running event loop."""
    return aiohttp.ClientSession(
        # Servers close idle connections, which a busy client would notice by a failing request.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class Server:
    """A server and what is known of it. To be made in a running event loop.

    Methods that ask it raise `ServerError` where it does not answer, or its answer cannot be true;
    that is a `RejectedError` where it will never do what was asked.

    Args:
        context: Tokens of the longest episode.
        has_adapters: Whether it is given adapters.

    Attributes:
        child: Its process, if this process started it.
        slots: For replies under way.
        lock: Held while weights are brought to it.
        left_out: Set while it is not in use.
        weights: Those that it has; None where nobody knows.
        failed_loads: How often it did not take weights: nobody knows what it replied with since.
    """

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        config: SglangConfig,
        child: ChildServer | None = None,
        *,
        context: int,
        has_adapters: bool,
    ) -> None:
        self.url, self.child = url.rstrip("/"), child
        self._session, self._config = session, config
        self._context, self._has_adapters = context, has_adapters
        # Adapters that it is asked with, and those before, with which replies are under way.
        self._adapter: str | None = None
        self._former: str | None = None
        self.slots, self.lock = asyncio.Semaphore(config.parallel), asyncio.Lock()
        self.left_out = asyncio.Event()
        self.weights: PushedWeights | None = None
        self.failed_loads = 0

    @property
    def is_used(self) -> bool:
        """Tell whether it is asked."""
        return not self.left_out.is_set()

    async def generate(self, request: Request, stop_ids: Sequence[int], *, rid: str) -> Generated:
        """Sample a reply; `rid` names the request for `abort`."""
        adapter = self._adapter
        body = {
            "rid": rid,
            "input_ids": request.ids,
            "lora_path": adapter,
            "return_logprob": True,
            # A server may have presets of its own: leave nothing to them.
            "sampling_params": {
                "max_new_tokens": request.max_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": -1,
                "min_p": 0.0,
                "min_new_tokens": 0,
                "repetition_penalty": 1.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "stop_token_ids": stop_ids,
            },
        }
        try:
            content = await self._post("/generate", body, timeout_s=self._config.timeout_s)
        except RejectedError as error:
            # One that was restarted has no adapters, and names those that it lacks.
            if adapter is None or adapter not in str(error):
                raise
            raise self.error("stale", f"has no adapters {adapter} ({error})") from None
        generated = self._read(Generated, content, request)
        if adapter is None:
            return generated
        if {*generated.versions} != {_STARTED}:
            raise self.error("stale", f"replies with {generated.version} below its adapters")
        return generated.model_copy(update={"version": adapter, "spans": []})

    async def abort(self, rid: str) -> None:
        """Stop a request; a server that cannot be told is left alone."""
        with suppress(ServerError):
            await self._post("/abort_request", {"rid": rid})

    async def check_ready(self) -> None:
        """See that it samples, also if a run that was killed left it paused, and what."""
        await self._resume()
        await self._ask("GET", "/health", timeout_s=BRIEF_S)
        facts: dict[str, Any] = {}
        for path in ("/server_info", "/model_info", "/v1/models"):
            with suppress(ValueError, TypeError):  # what is missing then, validation tells
                facts |= json.loads(await self._ask("GET", path, timeout_s=BRIEF_S))
        info = self._read(ServerInfo, to_json(facts))
        info.check(self.url, context=self._context, has_adapters=self._has_adapters)

    async def load(self, weights: PushedWeights) -> None:
        """Bring it to these weights."""
        load = self._load_adapters if self._has_adapters else self._load_weights
        try:
            await load(weights.name, str(weights.folder))
        except ServerError:
            self.failed_loads += 1
            raise
        self.weights = weights

    def error(self, kind: Failure, message: str) -> ServerError:
        """Return a failure of this server."""
        return ServerError(kind, f"{self.url}: {message}")

    async def _load_weights(self, name: str, folder: str) -> None:
        """Take all weights; what it samples goes on with them, and an empty cache."""
        await self._post("/pause_generation", {"mode": "retract"})
        try:
            await self._post("/flush_cache", {})
            body = {"model_path": folder, "weight_version": name, "flush_cache": True}
            await self._post("/update_weights_from_disk", body, timeout_s=self._config.wait_s)
        finally:
            await self._resume()

    async def _load_adapters(self, name: str, folder: str) -> None:
        """Take adapters, beside its weights, and be asked with them from now on.

        Each version has a name, and so have its keys in the cache: nothing is paused, and a reply
        ends with the adapters that it began with.
        """
        body = {"lora_name": name, "lora_path": folder}
        try:
            await self._post("/load_lora_adapter", body, timeout_s=self._config.wait_s)
        except RejectedError as error:
            # Its answer was lost the last time, or came too late.
            if "already" not in str(error):
                raise
        if name == self._adapter:
            return
        oldest, self._former, self._adapter = self._former, self._adapter, name
        if oldest is not None:
            with suppress(RejectedError):  # a server that was restarted has none
                # It waits for the replies under way with them.
                body, timeout_s = {"lora_name": oldest}, self._config.wait_s
                await self._post("/unload_lora_adapter", body, timeout_s=timeout_s)

    async def _resume(self) -> None:
        await self._post("/continue_generation", {})

    async def _post(self, path: str, body: Any, *, timeout_s: float | None = None) -> bytes:
        # The standard library takes three times as long for the ids of a long prompt.
        return await self._ask("POST", path, to_json(body), timeout_s=timeout_s or BRIEF_S)

    async def _ask(
        self, method: str, path: str, data: bytes | None = None, *, timeout_s: float
    ) -> bytes:
        url, headers = self.url + path, {"Content-Type": "application/json"}
        call = self._session.request(method, url, data=data, headers=headers, allow_redirects=False)
        try:
            async with asyncio.timeout(timeout_s), call as response:
                content = await response.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            message = f"{path}: {type(error).__name__} {error}".strip()
            raise self.error("connection", message) from None
        except TimeoutError:
            raise self.error("deadline", f"{path}: no answer within {timeout_s:g} s") from None
        message = f"{path}: {response.status} {_shown(content)}"
        if 400 <= response.status < 500 and response.status not in (408, 429):
            raise RejectedError("status", f"{self.url}: {message}")
        if not 200 <= response.status < 300:
            raise self.error("status", message)
        return content

    def _read(self, model: type[_Read], content: bytes, context: Any = None) -> _Read:
        try:
            return model.model_validate_json(content, context=context)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            message = f"{where} {first['msg']} in {_shown(content)!r}".strip()
            raise self.error("garbage", message) from None


def _shown(content: bytes) -> str:
    return content[: 4 * _SHOWN].decode(errors="replace")[:_SHOWN]
