"""One SGLang server over HTTP (written for SGLang 0.5.23).

Every request has a deadline and every answer is checked. What follows from a failure is for the
pool to decide.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
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

from minirl.types import Request, TopTokens

TESTED = "0.5.23"
BRIEF_S = 30.0
"""Longest wait for what a server does at once."""
Failure = Literal["connection", "deadline", "hung", "status", "garbage", "stale", "differs"]
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
    tp_size: PositiveInt = 1
    pp_size: PositiveInt = 1
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
    `RejectedError` where it will never do what was asked. `ranks` are its tensor-parallel ones;
    `adapters` those that it was given, of which it is asked with the last.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self._session, self.ranks = url.rstrip("/"), session, 1
        self.adapters: tuple[str, ...] = ()

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
        adapters = self.adapters[-1:]
        body = {
            "rid": rid,
            "input_ids": request.ids,
            "return_logprob": True,
            "top_logprobs_num": request.decoding.top_logprobs,
            **_lora_path(adapters),
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
        content = await self.post("/generate", body, timeout_s=timeout_s)
        found = _read(Generated, content, (rid, request, stop_ids, vocab_size))
        # The server's own version is that of the weights below the adapters.
        return found.model_copy(update={"version": adapters[0], "spans": []} if adapters else {})

    async def score(
        self, ids: Sequence[int], *, rid: str, timeout_s: float
    ) -> tuple[list[float], str]:
        """Return the log-probability of each id but the first, and the name of the weights."""
        adapters = self.adapters[-1:]
        body = {
            "rid": rid,
            "input_ids": ids,
            "return_logprob": True,
            **_lora_path(adapters),
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        }
        try:
            scored = _read(_Scored, await self.post("/generate", body, timeout_s=timeout_s))
        except RejectedError as error:
            if not adapters:
                raise
            raise ServerError("stale", f"has no adapters {adapters[0]} ({error})") from None
        values = [value for value, *_ in scored.logprobs[1:] if value is not None]
        if [one[1] for one in scored.logprobs] != list(ids) or len(values) != len(ids) - 1:
            raise ServerError("garbage", "scored other ids than were sent, or not all")
        return values, adapters[0] if adapters else scored.version

    async def abort(self, rid: str) -> None:
        """Stop a request; a server that cannot be told is left alone."""
        with suppress(ServerError, RejectedError):
            await self.post("/abort_request", {"rid": rid})

    async def check_health(self, *, timeout_s: float) -> None:
        """See that it samples."""
        await self._ask("GET", "/health", timeout_s=timeout_s)

    async def info(self) -> ServerInfo:
        """Ask what it serves."""
        found: dict[str, Any] = {}
        for path in ("/server_info", "/model_info", "/v1/models"):
            with suppress(ValueError, TypeError):  # what is missing then, validation tells
                found |= json.loads(await self._ask("GET", path, timeout_s=BRIEF_S))
        info = _read(ServerInfo, to_json(found))
        self.ranks = info.tp_size
        return info

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """Interrupt generation with an empty cache; requests go on after the block."""
        await self.post("/pause_generation", {"mode": "retract"})
        try:
            await self.post("/flush_cache", {})
            yield
        finally:
            await self.resume()

    async def resume(self) -> None:
        """Let it sample again."""
        await self.post("/continue_generation", {})

    async def post(self, path: str, body: Any, *, timeout_s: float | None = None) -> bytes:
        """Send a request of JSON, and return the answer."""
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
            raise ServerError("connection", message) from None
        except TimeoutError:
            raise ServerError("deadline", f"{path}: no answer within {timeout_s:g} s") from None
        message = f"{path}: {response.status} {_shown(content)}"
        if 400 <= response.status < 500 and response.status not in (408, 429):
            raise RejectedError(message)
        if not 200 <= response.status < 300:
            raise ServerError("status", message)
        return content


def _lora_path(adapters: Sequence[str]) -> dict[str, str]:
    """Name the adapters that a request is computed with, if there are any."""
    return {"lora_path": adapters[0]} if adapters else {}


def _shown(content: bytes) -> str:
    return content[: 4 * _SHOWN].decode(errors="replace")[:_SHOWN]


def _read(model: type[_Read], content: bytes, context: Any = None) -> _Read:
    try:
        return model.model_validate_json(content, context=context)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = f"{where} {first['msg']} in {_shown(content)!r}".strip()
        raise ServerError("garbage", message) from None
