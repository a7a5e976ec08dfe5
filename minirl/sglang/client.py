"""One SGLang server over HTTP (written for SGLang 0.5.23).

Every request has a deadline and every answer is checked. What follows from a failure is for the
pool to decide.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import aiohttp
import numpy as np
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

from minirl.sglang.metrics import Failure
from minirl.types import Request, TopTokens

TESTED = "0.5.23"
BRIEF_S = 30.0
"""Longest wait for what a server does at once."""
_CONNECT_S = 10.0
# Characters of a useless answer that a message shows.
_SHOWN = 160
# The context length less `max_req_input_len`, which is about prompts alone.
_INPUT_MARGIN = 4
# Rounding may put the probability of a certain token above 1.
_MAX_LOGPROB = 1e-3


class ServerError(Exception):
    """A server failed in a way that `kind` names; another one, or this one later, may do better."""

    def __init__(self, kind: Failure, message: str) -> None:
        super().__init__(message)
        self.kind: Failure = kind


class RejectedError(Exception):
    """A server understood a request and will never accept it (a status of 400 to 499)."""


class ServerInfo(BaseModel):
    """What a server says of itself and its model."""

    version: str
    architectures: tuple[str, ...] | None = None
    dp_size: PositiveInt = 1
    max_req_input_len: NonNegativeInt | None = None
    max_model_len: NonNegativeInt = Field(validation_alias=AliasPath("data", 0, "max_model_len"))

    @property
    def context(self) -> int:
        """Return the longest prompt and reply together: a small cache holds less than the model."""
        held = math.inf if self.max_req_input_len is None else self.max_req_input_len
        return int(min(self.max_model_len, held + _INPUT_MARGIN))


class _Span(BaseModel):
    """Which ids some weights have sampled."""

    version: str
    start: NonNegativeInt
    end: NonNegativeInt


def _meta(*path: str) -> Any:
    return Field(validation_alias=AliasPath("meta_info", *path))


_IdLogprob = tuple[FiniteFloat, NonNegativeInt, Any]


class Generated(BaseModel):
    """What a server sampled; validated with (rid, request, stop ids, size of the vocabulary) as
    context, which refuses what cannot be true.

    Of each id, `scored` has the log-probability under softmax(logits / temperature), the id, and
    text or null; `likeliest` has the same of the likeliest ids in its place. Without `spans`,
    `version` has sampled all.
    """

    ids: Annotated[tuple[NonNegativeInt, ...], Field(validation_alias="output_ids")]
    rid: Annotated[str, _meta("id")]
    finish: Annotated[Literal["stop", "length"], _meta("finish_reason", "type")]
    prompt_tokens: Annotated[int, _meta("prompt_tokens")]
    cached: Annotated[NonNegativeInt, _meta("cached_tokens")] = 0
    version: Annotated[str, _meta("weight_version")]
    spans: Annotated[list[_Span], _meta("weight_versions")] = []
    scored: Annotated[list[_IdLogprob], _meta("output_token_logprobs")]
    likeliest: Annotated[list[list[_IdLogprob]] | None, _meta("output_top_logprobs")] = None

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Return the log-probability of each id."""
        return tuple(value for value, *_ in self.scored)

    @property
    def top(self) -> TopTokens | None:
        """Return the likeliest ids in the place of each id."""
        if not self.likeliest:
            return None
        ids = [[one[1] for one in each] for each in self.likeliest]
        values = [[one[0] for one in each] for each in self.likeliest]
        return TopTokens(np.array(ids, np.int32), np.array(values, np.float32))

    @property
    def versions(self) -> tuple[str, ...]:
        """Return the name of the weights that sampled each id."""
        spans = self.spans or [_Span(version=self.version, start=0, end=len(self.ids))]
        return tuple(span.version for span in spans for _ in range(span.start, span.end))

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Generated:
        assert info.context is not None
        rid, request, stop_ids, vocab_size = info.context
        ids, is_stopped = self.ids, bool(self.ids) and self.ids[-1] in stop_ids
        spans = [(span.start, span.end) for span in self.spans] or [(0, len(ids))]
        borders, top = [0, *(end for _, end in spans)], request.decoding.top_logprobs
        flaws = {
            "of another request": (self.rid, self.prompt_tokens) != (rid, len(request.ids)),
            "empty": not ids,
            "longer than asked": len(ids) > request.max_tokens,
            "log-probabilities of other ids": list(ids) != [one[1] for one in self.scored],
            "another number of likeliest ids": top > 0
            and [len(each) for each in self.likeliest or ()] != [top] * len(ids),
            "ids outside of the vocabulary": any(i >= vocab_size for i in ids),
            "log-probabilities above 0": any(one[0] > _MAX_LOGPROB for one in self.scored),
            "tokens after a stop token": any(i in stop_ids for i in ids[:-1]),
            "an end without a reason": not is_stopped and len(ids) != request.max_tokens,
            "weight versions of other tokens": borders != sorted(borders)
            or [*(start for start, _ in spans), len(ids)] != borders,
        }
        for flaw, is_so in flaws.items():
            if is_so:
                raise ValueError(flaw)
        return self


class _Scored(BaseModel):
    version: Annotated[str, _meta("weight_version")]
    # Nothing predicts the first token: its log-probability is null.
    logprobs: Annotated[list[tuple[FiniteFloat | None, int, Any]], _meta("input_token_logprobs")]


_Read = TypeVar("_Read", bound=BaseModel)


def make_session() -> aiohttp.ClientSession:
    """Open what all servers are talked to by; to be called in a running event loop."""
    return aiohttp.ClientSession(
        # Servers close idle connections, which a busy client would notice by a failing request.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class Server:
    """The endpoints of a server.

    All methods raise `ServerError` where it does not answer, or its answer cannot be true, and
    `RejectedError` where it will never do what was asked.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self._session = url.rstrip("/"), session
        # Adapters that it is asked with, and those before, with which replies are under way.
        self._adapter: str | None = None
        self._former: str | None = None

    async def generate(
        self,
        request: Request,
        *,
        rid: str,
        stop_ids: Sequence[int],
        vocab_size: int,
        timeout_s: float,
    ) -> Generated:
        """Sample a reply; `rid` names the request for `abort`."""
        adapter = self._adapter
        body = {
            "rid": rid,
            "input_ids": request.ids,
            "lora_path": adapter,
            "return_logprob": True,
            "top_logprobs_num": request.decoding.top_logprobs,
            # A server may have presets of its own: leave nothing to them.
            "sampling_params": {
                "max_new_tokens": request.max_tokens,
                "temperature": request.decoding.temperature,
                "top_p": request.decoding.top_p,
                "top_k": -1,
                "min_p": 0.0,
                "min_new_tokens": 0,
                "repetition_penalty": 1.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "stop_token_ids": stop_ids,
            },
        }
        content = await self._post("/generate", body, timeout_s=timeout_s)
        found = self._read(Generated, content, (rid, request, stop_ids, vocab_size))
        # The server's own version is that of the weights below the adapters.
        return found.model_copy(update={"version": adapter, "spans": []} if adapter else {})

    async def score(self, ids: Sequence[int], *, timeout_s: float) -> tuple[list[float], str]:
        """Return the log-probability of each id but the first, and the name of the weights."""
        adapter = self._adapter
        body = {
            "input_ids": ids,
            "lora_path": adapter,
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        }
        try:
            content = await self._post("/generate", body, timeout_s=timeout_s)
        except RejectedError as error:
            if adapter is None:
                raise
            raise self.error("stale", f"has no adapters {adapter} ({error})") from None
        scored = self._read(_Scored, content)
        values = [value for value, *_ in scored.logprobs[1:] if value is not None]
        if [one[1] for one in scored.logprobs] != list(ids) or len(values) != len(ids) - 1:
            raise self.error("garbage", "scored other ids than were sent, or not all")
        return values, adapter or scored.version

    async def load_weights(self, folder: Path, name: str, *, timeout_s: float) -> None:
        """Take the weights of a folder that it sees; what it samples goes on with them."""
        await self._post("/pause_generation", {"mode": "retract"})
        try:
            await self._post("/flush_cache", {})
            body = {"model_path": str(folder), "weight_version": name, "flush_cache": True}
            await self._post("/update_weights_from_disk", body, timeout_s=timeout_s)
        finally:
            await self.resume()

    async def load_adapters(self, folder: Path, name: str, *, timeout_s: float) -> None:
        """Take the adapters of a folder, beside its weights, and be asked with them from now on.

        Each version has a name, and so have its keys in the cache: nothing is paused, and a reply
        ends with the adapters that it began with.
        """
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._post("/load_lora_adapter", body, timeout_s=timeout_s)
        if name == self._adapter:
            return
        oldest, self._former, self._adapter = self._former, self._adapter, name
        if oldest is not None:
            with suppress(RejectedError):  # a server that was restarted has none
                await self._post("/unload_lora_adapter", {"lora_name": oldest}, timeout_s=timeout_s)

    async def abort(self, rid: str) -> None:
        """Stop a request; a server that cannot be told is left alone."""
        with suppress(ServerError, RejectedError):
            await self._post("/abort_request", {"rid": rid})

    async def check_health(self, *, timeout_s: float) -> None:
        """See that it samples."""
        await self._ask("GET", "/health", timeout_s=timeout_s)

    async def info(self) -> ServerInfo:
        """Ask what it serves."""
        found: dict[str, Any] = {}
        for path in ("/server_info", "/model_info", "/v1/models"):
            with suppress(ValueError, TypeError):  # what is missing then, validation tells
                found |= json.loads(await self._ask("GET", path, timeout_s=BRIEF_S))
        return self._read(ServerInfo, to_json(found))

    async def resume(self) -> None:
        """Let it sample again."""
        await self._post("/continue_generation", {})

    def error(self, kind: Failure, message: str) -> ServerError:
        """Return a failure of this server."""
        return ServerError(kind, f"{self.url}: {message}")

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
            raise RejectedError(f"{self.url}: {message}")
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
