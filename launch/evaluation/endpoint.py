"""Answers from whatever speaks OpenAI's chat completions (a service, SGLang, vLLM), each paid for
once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from launch.config import EndpointConfig
from launch.evaluation.answers import AnswerFile, End
from launch.files import short
from minirl.exchange import UserError, broken, reply_text
from rewards.verbal import ReplyRequest
from sqlenv.types import Observation

KEY = "OPENAI_API_KEY"
"""The environment variable that holds the key; there is no other way to give one."""
_REFUSED = (400, 413, 422)
"""Statuses of one request that will never be taken: too long, or against a policy."""
_TOO_LONG = re.compile(
    r"^413|context.{0,20}(length|size|window)|too (long|many tokens)|"
    r"(input|prompt|sequence) length|"
    r"(prompt|input|token).{0,80}(exceed|too large|must be <=)|"
    r"(prompt|message|token).{0,80}\b(max|maximum|limit)\b",
    re.I | re.S,
)
"""How servers say that a prompt is too long."""
_LIMITS = ("max_tokens", "max_completion_tokens")
"""What bounds a reply: all servers know the first, but for OpenAI's reasoning models."""
_PASSING = (408, 409, 429)  # statuses below 500 that the client asks again after
_FINISHES: Mapping[End, re.Pattern[str]] = {
    "failed": re.compile("error|abort|insufficient", re.I),
    "refused": re.compile("filter|safety|sensitive|recitation|prohibited", re.I),
    "length": re.compile("length|max_tokens", re.I),
}
"""Reasons to finish, of services and of SGLang, that are none of the model's."""
_MOST_FAILURES = 20
"""Requests in a row that fail at the server before it is given up."""
_SHOWN_CHARS = 300
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One call of a model: what the answer is for, and the seed, which names the random stream,
    since the same question is asked many times.
    """

    kind: str
    messages: Observation
    seed: int


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """A model's reply: its text and how it ended, or None and why there is none (`refusal`)."""

    text: str | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refusal: str = ""
    end: End = "stop"


class Endpoint:
    """Asks over HTTP, `endpoint.parallel` requests at a time.

    The `openai` client waits, and repeats what fails and may pass (408, 409, 429, 5xx, no
    connection). A request at which the server still fails, or to which it gives no completion, has
    no answer, and the others go on: it may be the request's fault.
    """

    def __init__(
        self,
        url: str,
        model: str,
        config: EndpointConfig,
        *,
        top_p: float = 1.0,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        self._openai: Any = import_module("openai")  # of an extra, which launch.eval looks for
        self._url, self._model, self._config = url, model, config
        self._top_p, self._template = top_p if top_p < 1 else None, template
        self._warned: set[str] = set()
        self._limit = _LIMITS[0]
        self._failures = 0  # in a row
        self._is_stopped = False

    def answer(
        self,
        requests: Sequence[ModelRequest],
        record: Callable[[ModelRequest, ModelResponse], None],
    ) -> None:
        """Ask, and record every answer as it arrives; at an interruption those under way, too,
        which are paid for.

        Raises:
            UserError: The endpoint is not there, takes no request, or keeps failing.
        """
        if requests:
            asyncio.run(self._answer_all(requests, record))

    async def _answer_all(
        self,
        requests: Sequence[ModelRequest],
        record: Callable[[ModelRequest, ModelResponse], None],
    ) -> None:
        room = asyncio.Semaphore(self._config.parallel)
        client = self._client()

        async def ask(request: ModelRequest) -> None:
            async with room:
                if self._is_stopped:
                    return
                try:
                    answer = await self._call(client, request)
                    record(request, answer)
                    self._failures = self._failures + 1 if answer.end == "failed" else 0
                    if self._failures >= _MOST_FAILURES:
                        raise self._given_up(answer.refusal)
                except BaseException:
                    self._is_stopped = True
                    raise

        loop, is_interrupted = asyncio.get_running_loop(), False

        def stop() -> None:
            nonlocal is_interrupted
            self._is_stopped = is_interrupted = True
            loop.remove_signal_handler(signal.SIGINT)  # the next one ends it at once
            seconds = self._config.timeout_s
            said = "calls under way end, in %g s at most; interrupt again not to wait for them"
            _log.warning(said, seconds)

        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            async with client:
                ends = await asyncio.gather(*map(ask, requests), return_exceptions=True)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        if is_interrupted:
            raise KeyboardInterrupt
        for error in filter(None, ends):
            raise error

    def _client(self) -> Any:
        """Make the client, which takes the environment's proxies but for servers of this host."""
        try:
            return self._openai.AsyncOpenAI(
                base_url=self._url,
                api_key=os.environ.get(KEY, "").strip() or "none",  # servers of one's own take none
                timeout=self._config.timeout_s,
                max_retries=self._config.retries,
                http_client=self._openai.DefaultAsyncHttpxClient(trust_env=not _is_here(self._url)),
            )
        except Exception as error:  # noqa: BLE001 (no kind that it knows, no address, no file)
            raise UserError(
                f"{self._url}: a proxy or a certificate of the environment (HTTP_PROXY, ALL_PROXY, "
                f"SSL_CERT_FILE, ...) cannot be used: {_brief(error)}"
            ) from None

    async def _call(self, client: Any, request: ModelRequest) -> ModelResponse:
        end: End = "failed"
        limit = self._limit
        try:
            return self._read(await client.chat.completions.create(**self._body(request)))
        except self._openai.APIStatusError as error:
            end, problem = self._status(error)
            if end == "refused" and limit == _LIMITS[0] and re.search(rf"\b{limit}\b", problem):
                self._limit = _LIMITS[1]
                return await self._call(client, request)
        except self._openai.OpenAIError as error:  # no connection, or out of time
            raise self._given_up(_brief(error)) from None
        except (ValueError, RecursionError) as error:  # no completion, though all went well
            problem = _brief(error)
        self._warn(f"{'failed at' if end == 'failed' else 'refused'} a request: {problem}")
        return ModelResponse(None, refusal=problem, end=end)

    def _status(self, error: Any) -> tuple[End, str]:
        """Say how a request ended and why; a `UserError` where that is not its own fault."""
        status = error.status_code
        problem = f"{status}: {_line(error.response.text) or _brief(error)}"
        # Some servers answer 500. A key without credit also speaks of a limit of tokens (402, 403).
        if (status in _REFUSED or status >= 500) and _TOO_LONG.search(problem):
            return "too_long", problem
        if status in _REFUSED:
            return "refused", problem
        if status in _PASSING:
            raise self._given_up(problem) from None
        if status < 500:
            raise UserError(
                f"{self._url}: {problem}; check --endpoint (it ends with /v1), --model "
                f"{self._model} and the key in {KEY}"
            ) from None
        return "failed", f"{problem}, after {self._config.retries + 1} tries"

    def _given_up(self, problem: str) -> UserError:
        return UserError(
            f"{self._url}: still failing after {self._config.retries + 1} tries ({problem}); "
            "answers so far are kept: run the same command again to resume"
        )

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        config = self._config
        optional = {
            "temperature": config.temperature,
            "top_p": self._top_p,
            "seed": request.seed if config.send_seed else None,
        }
        return {
            "model": self._model,
            "messages": [
                {"role": m.role, "content": _sound(broken(m.content))} for m in request.messages
            ],
            self._limit: config.max_tokens,
            **{name: value for name, value in optional.items() if value is not None},
            **({"extra_body": {"chat_template_kwargs": self._template}} if self._template else {}),
        }

    def _read(self, completion: Any) -> ModelResponse:
        try:
            choice = completion.choices[0]
            message = choice.message
            content = message.content
        except (AttributeError, LookupError, TypeError):
            raise ValueError(f"the answer is no chat completion: {_line(completion)}") from None
        finish = f"{getattr(choice, 'finish_reason', None)}"
        end = next((end for end, reason in _FINISHES.items() if reason.search(finish)), "stop")
        if end == "failed":
            raise ValueError(f"the server gave a reply up ({finish})")
        usage = getattr(completion, "usage", None)
        told = [getattr(usage, f"{name}_tokens", None) for name in ("prompt", "completion")]
        read, written = (count if isinstance(count, int) else 0 for count in told)
        if [read, written] != told:
            self._warn("answers do not tell their tokens, which count as 0")
        refusal = getattr(message, "refusal", None)
        if refusal or end == "refused":
            told = _sound(str(refusal or f"the reply was filtered ({finish})"))
            self._warn(f"refused a request: {told[:200]}")
            return ModelResponse(None, read, written, told, "refused")
        return ModelResponse(_text(message, content), read, written, end=end)

    def _warn(self, problem: str) -> None:
        """Say what is wrong once, whatever numbers of tokens come with it."""
        kind = re.sub(r"\d+", "", problem)
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s: %s", self._url, problem)


@dataclass(frozen=True, slots=True)
class PaidAnswer:
    """A line of `answers.jsonl` of an endpoint: which request of which question, and the answer.

    Attributes:
        kind: What the answer is for, so that costs can be told apart; `number` counts those of one
            kind and question.
        prompt: Digest of the messages.
    """

    id: str
    kind: str
    number: int
    prompt: str
    answer: ModelResponse


_AnswerKey = tuple[str, str, int, str]


class CachedClient:
    """Asks a model only what it has not answered before.

    A request without an answer costs nothing, and that is known until the end of the process only.
    `cost` counts calls and tokens by kind of request, thinking included; whoever answers may not
    count tokens.
    """

    def __init__(self, model: Endpoint, file: AnswerFile, *, seed: int) -> None:
        self._model, self._file, self._seed = model, file, seed
        self._known: dict[_AnswerKey, ModelResponse] = {}
        self._reasons: dict[str, ModelResponse] = {}  # the first without a text of each kind
        self.cost: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for one in file.lines(PaidAnswer):
            self._known[one.id, one.kind, one.number, one.prompt] = one.answer
            self._pay(one.kind, one.answer)

    def answers(
        self, wishes: Sequence[tuple[str, Sequence[ReplyRequest]]]
    ) -> list[list[ModelResponse]]:
        """Return the answers to what is asked about each question, which is given by its name."""
        keys = [[self._key(name, ask) for ask in asks] for name, asks in wishes]
        asked = {
            self._request(key, ask): key
            for each, (_, asks) in zip(keys, wishes, strict=True)
            for key, ask in zip(each, asks, strict=True)
            if key not in self._known
        }

        def record(request: ModelRequest, answer: ModelResponse) -> None:
            key = asked[request]
            self._known[key] = answer
            if answer.text is None:
                self._reasons.setdefault(request.kind, answer)
                return
            self._file.append([PaidAnswer(*key, answer)])
            self._pay(request.kind, answer)

        self._model.answer(list(asked), record)
        return [[self._known[key] for key in each] for each in keys]

    @property
    def written(self) -> int:
        """Count the tokens of all answers."""
        return sum(cost["completion_tokens"] for cost in self.cost.values())

    @property
    def refusal(self) -> str:
        """Say of which kind no request has an answer, and why; empty where there is none."""
        for kind, answer in self._reasons.items():
            if kind not in self.cost:
                what = "failed" if answer.end == "failed" else "was refused"
                longer = "; lower endpoint.max_tokens, or serve a longer context"
                advice = longer if answer.end == "too_long" else ""
                return f"every {kind} request {what}: {answer.refusal}{advice}"
        return ""

    def _pay(self, kind: str, answer: ModelResponse) -> None:
        tokens = {name: getattr(answer, name) for name in ("prompt_tokens", "completion_tokens")}
        self.cost[kind].update({"calls": 1, **tokens})

    def _key(self, name: str, ask: ReplyRequest) -> _AnswerKey:
        said = [(message.role, message.content) for message in ask.messages]
        return name, ask.kind, ask.number, short(json.dumps(said).encode())

    def _request(self, key: _AnswerKey, ask: ReplyRequest) -> ModelRequest:
        stream = f"{self._seed} {' '.join(map(str, key[:3]))}"
        seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:4]) % 2**31
        return ModelRequest(ask.kind, ask.messages, seed)


def _text(message: Any, content: Any) -> str:
    """Return a reply with its reasoning, which some servers give apart, as the model wrote both."""
    # SGLang, DeepSeek and older vLLM; newer vLLM, Ollama and OpenRouter.
    told = (getattr(message, name, None) for name in ("reasoning_content", "reasoning"))
    return _sound(reply_text(content, next((one for one in told if one), None)))


def _is_here(url: str) -> bool:
    """Tell whether a server is on this host, which no proxy stands before."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "0.0.0.0", "::1")


def _brief(error: Exception) -> str:
    """Describe an error in a line; of a connection that failed, also why."""
    return _line(f"{error} {error.__cause__ or ''}") or type(error).__name__


def _line(said: object) -> str:
    """Write what a server says in a line."""
    return " ".join(str(said).split())[:_SHOWN_CHARS]


def _sound(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
