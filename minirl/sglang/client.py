"""One SGLang server over HTTP: requests with deadlines, answers that are read with suspicion.

Written for SGLang 0.5.23. Nothing here decides what follows from a failure: that is the fleet's.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from io import BytesIO
from typing import Annotated, Any, Literal, TypeVar

import aiohttp
from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, PositiveInt, ValidationError
from pydantic_core import to_json

from minirl.types import Decoding

NEEDED = (
    *("/generate", "/abort_request", "/health", "/model_info", "/server_info"),
    *("/pause_generation", "/continue_generation", "/flush_cache"),
)
"""Endpoints that a server must have, besides those of the way of its weights."""

BRIEF_S = 30.0
"""Longest wait for what a server does at once."""

Kind = Literal["connection", "deadline", "hung", "status", "garbage", "stale", "differs"]
_CONNECT_S = 10.0
# Servers close connections that nobody used for 5 s; one that is being closed takes no request.
_IDLE_S = 2.0
# Of an answer that is no use: how much of it a message shows.
_SHOWN = 160
# Tokens by which a prompt and its reply may be longer than what a server says of prompts alone.
_MARGIN = 4
_JSON = {"Content-Type": "application/json"}
_VALID_RANGE = re.compile(r"valid range is \[0, (\d+)\)")
# Rounding may put the probability of a sure token above 1.
_MOST_LOGPROB = 1e-3


class ServerError(Exception):
    """A server did not do its part.

    Attributes:
        kind: In what way; the name of a metric.
    """

    def __init__(self, kind: Kind, words: str) -> None:
        super().__init__(words)
        self.kind: Kind = kind


class RefusedError(Exception):
    """A server understood a request and will never take it (a status of 400 to 499)."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a server is asked to write.

    Attributes:
        ids: All tokens so far.
        max_tokens: Longest reply.
        decoding: How tokens are drawn.
        stop_ids: Tokens that end it.
        vocab_size: Ids are below this.
    """

    ids: tuple[int, ...]
    max_tokens: int
    decoding: Decoding
    stop_ids: tuple[int, ...]
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """What it wrote.

    Attributes:
        ids: With the stop token, if one ended it.
        logprobs: Of each, under softmax(logits / temperature).
        versions: Names of the weights that sampled each.
        cached: Tokens of the prompt that were in the prefix cache.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str, ...]
    cached: int


class _Finish(BaseModel):
    type: Literal["stop", "length", "abort"]


class _Span(BaseModel):
    version: str
    start: NonNegativeInt
    end: NonNegativeInt


class _Meta(BaseModel):
    id: str
    finish_reason: _Finish
    prompt_tokens: NonNegativeInt
    cached_tokens: NonNegativeInt = 0
    weight_version: str
    weight_versions: list[_Span] = []
    output_token_logprobs: list[tuple[FiniteFloat, NonNegativeInt, Any]]


class _Answer(BaseModel):
    output_ids: list[NonNegativeInt]
    meta_info: _Meta


class _ScoredMeta(BaseModel):
    id: str
    weight_version: str
    # The first token is predicted by nothing.
    input_token_logprobs: Annotated[
        list[tuple[FiniteFloat | None, NonNegativeInt, Any]], Field(min_length=2)
    ]


class _Scored(BaseModel):
    meta_info: _ScoredMeta


class _ModelInfo(BaseModel):
    is_generation: bool
    weight_version: str
    architectures: list[str] | None = None


class _ServerInfo(BaseModel):
    version: str
    tp_size: PositiveInt = 1
    pp_size: PositiveInt = 1
    dp_size: PositiveInt = 1
    max_req_input_len: NonNegativeInt | None = None


class _Card(BaseModel):
    max_model_len: NonNegativeInt


class _Cards(BaseModel):
    data: Annotated[list[_Card], Field(min_length=1)]


class _Paths(BaseModel):
    paths: dict[str, Any]


class _Worker(BaseModel):
    url: str


class _Workers(BaseModel):
    workers: list[_Worker]


_Read = TypeVar("_Read", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of itself.

    Attributes:
        version: Of SGLang.
        missing: Needed endpoints that it has not.
        is_generation: Whether its model writes.
        architectures: As in the model's `config.json`; empty where it does not tell.
        vocab_size: Rows of the model's embedding; None where it does not tell.
        context: Longest prompt and reply together, in tokens.
        ranks: Over how many tensor-parallel ranks it is split.
        groups: How many such groups it has, in a pipeline or side by side.
    """

    version: str
    missing: tuple[str, ...]
    is_generation: bool
    architectures: tuple[str, ...]
    vocab_size: int | None
    context: int
    ranks: int = 1
    groups: int = 1


class Clients:
    """Connections to all servers. To be made in a running event loop.

    Attributes:
        kept: For replies, of which there are many: connections are used again.
        fresh: For all else: each request has a connection of its own. A server closes one that was
            left alone for some seconds, and a loop that had to wait for a processor does not know.
    """

    def __init__(self) -> None:
        self.kept = _session(aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S))
        self.fresh = _session(aiohttp.TCPConnector(limit=0, force_close=True))

    async def close(self) -> None:
        """Close all connections."""
        await self.kept.close()
        await self.fresh.close()


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    # Deadlines are those of each request; a proxy of the world outside is none of a cluster's.
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class Server:
    """A server's endpoints.

    Args:
        url: Without a path.
        clients: Shared by all servers.
    """

    def __init__(self, url: str, clients: Clients) -> None:
        self.url, self._clients = url.rstrip("/"), clients

    async def sample(self, wish: Wish, *, rid: str, timeout_s: float) -> Sampled:
        """Let the model write.

        Args:
            wish: What.
            rid: Names the request, for `abort`; no other ever has this name.
            timeout_s: Longest wait.

        Raises:
            ServerError: No answer, or none that can be true.
            RefusedError: The request cannot be met.
        """
        decoding = wish.decoding
        body = {
            "rid": rid,
            "input_ids": wish.ids,
            "return_logprob": True,
            # All that could be preset at the server is said.
            "sampling_params": {
                "max_new_tokens": wish.max_tokens,
                "temperature": decoding.temperature,
                "top_p": decoding.top_p,
                "top_k": -1,
                "min_p": 0.0,
                "min_new_tokens": 0,
                "repetition_penalty": 1.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "stop_token_ids": wish.stop_ids,
            },
        }
        client = self._clients.kept
        answer = await self._ask(client, "POST", "/generate", body, _Answer, timeout_s=timeout_s)
        return _sampled(answer, wish, rid)

    async def score(
        self, ids: Sequence[int], *, rid: str, timeout_s: float
    ) -> tuple[list[float], str]:
        """Return the log-probability of each id but the first, at temperature 1, and the weights'
        version.

        Raises:
            ServerError: No answer, or none that can be true.
            RefusedError: The ids cannot be scored.
        """
        body = {
            "rid": rid,
            "input_ids": list(ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        }
        meta = (await self._post("/generate", body, _Scored, timeout_s=timeout_s)).meta_info
        first, *others = meta.input_token_logprobs
        if [first[1], *(one[1] for one in others)] != list(ids):
            raise ServerError("garbage", "scored other ids than were sent")
        values = [one[0] for one in others if one[0] is not None]
        if len(values) < len(others):
            raise ServerError("garbage", "a log-probability is not a number")
        return values, meta.weight_version

    async def abort(self, rid: str) -> None:
        """Stop a request; what cannot be told to the server is left."""
        try:
            await self._post("/abort_request", {"rid": rid}, None, timeout_s=BRIEF_S)
        except (ServerError, RefusedError):
            return

    async def check_health(self, *, timeout_s: float) -> None:
        """Let it draw a token, or see that it is at work.

        Raises:
            ServerError: It does not.
        """
        try:
            await self._get("/health", None, timeout_s=timeout_s)
        except RefusedError as error:
            raise ServerError("status", str(error)) from None

    async def workers(self) -> list[Server]:
        """Ask a router for the servers behind it.

        Raises:
            ServerError: No answer, or nonsense.
            RefusedError: It is no router.
        """
        found = await self._get("/workers", _Workers, timeout_s=BRIEF_S)
        return [Server(worker.url, self._clients) for worker in found.workers]

    async def go_on(self) -> None:
        """Let it sample again, if a run that was killed has left it paused.

        Raises:
            ServerError: It does not answer.
            RefusedError: It cannot be paused.
        """
        await self._post("/continue_generation", {}, None, timeout_s=BRIEF_S)

    async def facts(self, needed: Sequence[str]) -> Facts:
        """Ask what it serves.

        Args:
            needed: Endpoints that it must have.

        Raises:
            ServerError: No answer, or nonsense.
            RefusedError: It is no SGLang server.
        """
        paths = (await self._get("/openapi.json", _Paths, timeout_s=BRIEF_S)).paths
        missing = tuple(path for path in needed if path not in paths)
        if missing:
            return Facts(
                "", missing, is_generation=False, architectures=(), vocab_size=0, context=0
            )
        await self.go_on()
        info = await self._get("/model_info", _ModelInfo, timeout_s=BRIEF_S)
        cards = await self._get("/v1/models", _Cards, timeout_s=BRIEF_S)
        server = await self._get("/server_info", _ServerInfo, timeout_s=BRIEF_S)
        # A small cache holds less than the model would take.
        room = math.inf if server.max_req_input_len is None else server.max_req_input_len + _MARGIN
        return Facts(
            server.version,
            (),
            is_generation=info.is_generation,
            architectures=tuple(info.architectures or ()),
            vocab_size=await self._vocab_size(),
            context=int(min(cards.data[0].max_model_len, room)),
            ranks=server.tp_size,
            groups=server.pp_size * server.dp_size,
        )

    async def load(
        self,
        parcels: AsyncIterator[Any],
        version: str,
        taking: AbstractAsyncContextManager[Callable[[Any], Awaitable[None]]],
    ) -> None:
        """Take other weights: requests under way wait, and go on with the new ones.

        Args:
            parcels: Of the weights, one at least; until the first is there it goes on.
            version: Their name.
            taking: Gives what takes a parcel, from a paused server.

        Raises:
            ServerError: It has them not, or still has others.
            RefusedError: It cannot take them.
        """
        first = await anext(parcels)
        await self.tell("/pause_generation", {"mode": "retract"}, timeout_s=BRIEF_S)
        try:
            await self.tell("/flush_cache", {}, timeout_s=BRIEF_S)
            async with taking as take:
                await take(first)
                async for parcel in parcels:
                    await take(parcel)
            found = await self._get("/model_info", _ModelInfo, timeout_s=BRIEF_S)
        finally:
            await self.go_on()
        if found.weight_version != version:
            raise ServerError("stale", f"has weights {found.weight_version}, not {version}")

    async def tell(self, path: str, body: dict[str, Any] | BytesIO, *, timeout_s: float) -> None:
        """Ask for something whose answer says no more than that it was done.

        Args:
            path: The endpoint.
            body: Of the request, or its JSON where that is long: it is sent piece by piece.
            timeout_s: Longest wait.

        Raises:
            ServerError: No answer, or an error of the server.
            RefusedError: It will not.
        """
        await self._post(path, body, None, timeout_s=timeout_s)

    async def _vocab_size(self) -> int | None:
        """Read the size from the refusal of an id that no vocabulary has."""
        body = {
            "input_ids": [0],
            "return_logprob": True,
            "token_ids_logprob": [2**31 - 1],
            "sampling_params": {"max_new_tokens": 1},
        }
        try:
            await self._post("/generate", body, None, timeout_s=BRIEF_S)
        except RefusedError as error:
            size = _VALID_RANGE.search(str(error))
            return int(size[1]) if size else None
        return None

    async def _get(self, path: str, kind: type[_Read] | None, *, timeout_s: float) -> _Read:
        client = self._clients.fresh
        return await self._ask(client, "GET", path, None, kind, timeout_s=timeout_s)

    async def _post(
        self, path: str, body: Any, kind: type[_Read] | None, *, timeout_s: float
    ) -> _Read:
        client = self._clients.fresh
        return await self._ask(client, "POST", path, body, kind, timeout_s=timeout_s)

    async def _ask(
        self,
        client: aiohttp.ClientSession,
        method: str,
        path: str,
        body: Any,
        kind: type[_Read] | None,
        *,
        timeout_s: float,
    ) -> Any:
        # The standard library takes three times as long for the ids of a long prompt.
        data = body if body is None or isinstance(body, BytesIO) else to_json(body)
        try:
            async with (
                asyncio.timeout(timeout_s),
                client.request(
                    method, self.url + path, data=data, headers=_JSON, allow_redirects=False
                ) as response,
            ):
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            # Two kinds are time-outs: that of connecting, and the deadline.
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                words = f"{path}: no answer within {timeout_s:g} s"
                raise ServerError("deadline", words) from None
            words = f"{path}: {type(error).__name__} {error}".strip()
            raise ServerError("connection", words) from None
        status = response.status
        shown = content[: 4 * _SHOWN].decode(errors="replace")[:_SHOWN]
        if 400 <= status < 500 and status not in (408, 429):
            raise RefusedError(f"{path}: {status} {shown}")
        if not 200 <= status < 300:
            raise ServerError("status", f"{path}: {status} {shown}")
        if kind is None:
            return None
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ServerError("garbage", f"{path}: {where} {first['msg']} in {shown!r}") from None


def _sampled(answer: _Answer, wish: Wish, rid: str) -> Sampled:
    """Take a reply out of an answer.

    Raises:
        ServerError: It is not the answer to this wish, or impossible.
    """
    meta, ids = answer.meta_info, tuple(answer.output_ids)
    logprobs = tuple(triple[0] for triple in meta.output_token_logprobs)
    if meta.finish_reason.type == "abort":
        raise ServerError("status", "the server aborted the request")
    spans = meta.weight_versions or [_Span(version=meta.weight_version, start=0, end=len(ids))]
    bounds = [0, *(span.end for span in spans)]
    is_stopped = bool(ids) and ids[-1] in wish.stop_ids
    flaws = {
        "of another request": meta.id != rid or meta.prompt_tokens != len(wish.ids),
        "empty": not ids,
        "longer than asked": len(ids) > wish.max_tokens,
        "with ids and log-probabilities that differ": ids
        != tuple(triple[1] for triple in meta.output_token_logprobs),
        "with ids outside of the vocabulary": any(i >= wish.vocab_size for i in ids),
        "with log-probabilities above 0": any(value > _MOST_LOGPROB for value in logprobs),
        "that goes on after a stop token": any(i in wish.stop_ids for i in ids[:-1]),
        "that ended for no reason": not is_stopped and len(ids) != wish.max_tokens,
        "with weights for other tokens": bounds != sorted(bounds)
        or [*(span.start for span in spans), len(ids)] != bounds,
    }
    for words, is_so in flaws.items():
        if is_so:
            raise ServerError("garbage", f"a reply {words}")
    versions = tuple(span.version for span in spans for _ in range(span.start, span.end))
    return Sampled(ids, logprobs, versions, meta.cached_tokens)
