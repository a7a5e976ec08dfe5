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
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from launch.build import SqlSide
from launch.config import JobConfig
from launch.evaluation.answers import (
    FIRST,
    AnswerFile,
    Decode,
    End,
    Outcomes,
    Sampled,
    Source,
    SourceOutput,
    hint,
    look,
)
from launch.files import bytes_digest
from minirl.exchange import UserError, broken
from minirl.types import Progress
from rewards import verbal
from rewards.verbal import ReplyRequest
from sqlenv.dialects import run_many
from sqlenv.sql.answers import answer_of, reply_text
from sqlenv.types import Example, Observation, Result

KEY = "OPENAI_API_KEY"
"""The environment variable that holds the key; there is no other way to give one."""
_REFUSED = (400, 413, 422)
"""Statuses of one request that is never taken: too long, or against a policy."""
_LIMITS = ("max_tokens", "max_completion_tokens")
"""What bounds a reply: all servers know the first, but for OpenAI's reasoning models."""
_NO_REPLY = re.compile(
    "error|abort|insufficient|filter|safety|sensitive|recitation|prohibited", re.I
)
"""Reasons to finish, of services and of SGLang, that are none of the model's."""
_CUT_OFF = re.compile("length|max_tokens", re.I)
_MOST_FAILURES = 20
"""Requests with 5xx, and no answer between them, at which a server is given up."""
_SHOWN_CHARS = 300
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """A model's reply: its text and how it ended, or None and why there is none (`problem`)."""

    text: str | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    problem: str = ""
    end: End = "stop"


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
Play = Callable[[Example], Coroutine[Any, Any, Sampled]]
"""Asks about a question, and returns what came of it."""


class Endpoint:
    """Asks a model over HTTP what it has not answered before, `endpoint.parallel` requests at a
    time.

    The `openai` client waits, and repeats what fails and may pass (408, 409, 429, 5xx, no
    connection). A request that is refused, or at which the server still fails, has no answer, and
    the others go on: it may be the request's fault. That is known until the end of the process
    only.

    The temperature is that of the decoding, and with `judge@K` that of the settings; where these
    say null, none is sent.

    Attributes:
        cost: Calls and tokens by kind of request, thinking included; whoever answers may not count
            tokens.
        unread: Replies that were to hold a query, and hold none.
    """

    def __init__(
        self, url: str, model: str, job: JobConfig, decode: Decode, file: AnswerFile
    ) -> None:
        self._openai: Any = import_module("openai")  # of an extra, which launch.eval looks for
        self._url, self._model, self._config, self._seed = url, model, job.endpoint, job.seed
        self._template, self._wrapping = job.prompt.template, job.answer_wrapping
        is_judge, self._temperature = decode.kind == "judge", job.endpoint.temperature
        if not is_judge and self._temperature is not None:
            self._temperature = decode.temperature
        self._top_p = decode.top_p if decode.top_p < 1 and not is_judge else None
        self._file, self._known = file, dict[_AnswerKey, ModelResponse]()
        self._warned: set[str] = set()
        self._limit = _LIMITS[0]
        self._failures = 0  # since the last answer
        self._lost = dict[str, str]()  # of each kind of request, why one has no answer
        self._first: list[Outcomes] = []
        self._begun, self._looked = count(1), asyncio.Event()
        self.cost: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.unread: list[str] = []
        for one in file.lines(PaidAnswer):
            self._known[one.id, one.kind, one.number, one.prompt] = one.answer
            self._pay(one.kind, one.answer)

    async def run(self, examples: Sequence[Example], play: Play, show: Progress) -> list[Sampled]:
        """Play for all questions at once.

        Raises:
            UserError: The endpoint is not there, or keeps failing; no request of a kind has an
                answer, or none of the first replies a query.
        """
        self._room, done = asyncio.Semaphore(self._config.parallel), count(1)
        plays = asyncio.Semaphore(self._config.parallel)

        async def played(example: Example) -> Sampled:
            async with plays:
                found = await play(example)
            written = sum(cost["completion_tokens"] for cost in self.cost.values())
            show(next(done), len(examples), f"{written:,} tokens written")
            return found

        try:
            async with self._client() as self._http, asyncio.TaskGroup() as group:
                tasks = [group.create_task(played(example)) for example in examples]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        for kind, problem in self._lost.items():
            if kind not in self.cost:
                raise UserError(f"every {kind} request failed: {problem}")
        return [one.result() for one in tasks]

    async def ask(self, name: str, requests: Sequence[ReplyRequest]) -> list[ModelResponse]:
        """Return the answers to what is asked about a question, which is given by its name."""
        return await asyncio.gather(*(self._answer(name, request) for request in requests))

    async def _answer(self, name: str, request: ReplyRequest) -> ModelResponse:
        """Answer a request; the others wait until the first replies with queries are looked at."""
        is_reply = request.kind == "generate"
        said = [(message.role, message.content) for message in request.messages]
        key = (name, request.kind, request.number, bytes_digest(json.dumps(said).encode()))
        if is_reply and next(self._begun) > FIRST:
            await self._looked.wait()
        if key not in self._known:
            async with self._room:
                answer = self._known[key] = await self._call(key, request.messages)
            if answer.text is None:
                self._lost[request.kind] = answer.problem
            else:
                self._file.append([PaidAnswer(*key, answer)])
                self._pay(request.kind, answer)
        if is_reply:
            self._look(self._known[key])
        return self._known[key]

    def _pay(self, kind: str, answer: ModelResponse) -> None:
        tokens = {name: getattr(answer, name) for name in ("prompt_tokens", "completion_tokens")}
        self.cost[kind].update({"calls": 1, **tokens})

    def outcome(self, answer: ModelResponse) -> Outcomes:
        """Tell what became of an answer that is to hold a query."""
        return Outcomes.of(
            answer_of(answer.text or "", self._wrapping).sql,
            answer.end,
            prompt_tokens=answer.prompt_tokens,
            reply_tokens=answer.completion_tokens,
        )

    def _look(self, answer: ModelResponse) -> None:
        """Count a reply that is to hold a query, and look at the first ones."""
        outcome = self.outcome(answer)
        if answer.text and outcome.no_query:
            self.unread.append(answer.text)
        self._first.append(outcome)
        if len(self._first) == FIRST:
            look(Outcomes.total(self._first), self.unread, self._wrapping, stops=True)
            self._looked.set()

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

    async def _call(self, key: _AnswerKey, messages: Observation) -> ModelResponse:
        limit, body = self._limit, self._body(key, messages)
        try:
            answer = self._read(await self._http.chat.completions.create(**body))
        except self._openai.APIStatusError as error:
            problem = f"{error.status_code}: {_line(error.response.text) or _brief(error)}"
            is_refused = error.status_code in _REFUSED
            if is_refused and limit == _LIMITS[0] and _LIMITS[1] in problem:
                self._limit = _LIMITS[1]
                return await self._call(key, messages)
            self._failures += not is_refused
            if not is_refused and (error.status_code < 500 or self._failures >= _MOST_FAILURES):
                raise self._given_up(problem) from None
        except self._openai.OpenAIError as error:  # no connection, or out of time
            raise self._given_up(_brief(error)) from None
        except (ValueError, RecursionError) as error:  # no completion, though all went well
            problem = _brief(error)
        else:
            self._failures = 0
            return answer
        self._warn(f"a request has no answer: {problem}")
        return ModelResponse(None, problem=problem, end="failed")

    def _given_up(self, problem: str) -> UserError:
        return UserError(
            f"{self._url}: still failing ({problem}); check --endpoint (it ends with /v1), --model "
            f"{self._model} and the key in {KEY}; answers so far are kept: run the same command "
            "again to resume"
        )

    def _body(self, key: _AnswerKey, messages: Observation) -> dict[str, Any]:
        config = self._config
        # The same question is asked many times: the seed names the random stream.
        stream = f"{self._seed} {' '.join(map(str, key[:3]))}"
        seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:4]) % 2**31
        optional = {
            "temperature": self._temperature,
            "top_p": self._top_p,
            "seed": seed if config.send_seed else None,
        }
        return {
            "model": self._model,
            "messages": [{"role": m.role, "content": _sound(broken(m.content))} for m in messages],
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
        refusal = getattr(message, "refusal", None)
        if refusal or _NO_REPLY.search(finish):
            raise ValueError(_sound(f"no reply, but {refusal or finish}"))
        usage = getattr(completion, "usage", None)
        told = [getattr(usage, f"{name}_tokens", None) for name in ("prompt", "completion")]
        read, written = (count if isinstance(count, int) else 0 for count in told)
        if [read, written] != told:
            self._warn("answers do not tell their tokens, which count as 0")
        end: End = "length" if _CUT_OFF.search(finish) else "stop"
        return ModelResponse(_text(message, content), read, written, end=end)

    def _warn(self, problem: str) -> None:
        """Say what is wrong once, whatever numbers of tokens come with it."""
        kind = re.sub(r"\d+", "", problem)
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s: %s", self._url, problem)


# How calls are made may change between two starts.
_MANNERS = {"parallel", "timeout_s", "retries"}
_COUNTS = ("attempts", "executable", "refused", "judged", "left_out")


@dataclass(frozen=True, slots=True)
class EndpointSource(Source):
    """A model behind an endpoint; every answer is paid for once."""

    url: str

    def deciding(self) -> Mapping[str, Any]:
        """Name the model, whose server may move, and how it is asked; not how replies are read."""
        calls = set(type(self.config.endpoint).model_fields) - _MANNERS
        limits = set(type(self.config.evaluation).model_fields) - {"wrapping"}
        return {"model": self.facts.model, **self._of_job(endpoint=calls, evaluation=limits)}

    def answers(self, examples: Sequence[Example], sql: SqlSide, show: Progress) -> SourceOutput:
        """Ask what has no answer yet."""
        config, is_judge = self.config, self.decode.kind == "judge"
        file, model = AnswerFile(sql.folder), self.facts.model or ""
        endpoint = Endpoint(self.url, model, config, self.decode, file)
        play = self._judged if is_judge else self._once
        found = asyncio.run(endpoint.run(examples, partial(play, endpoint, sql), show))
        notes: dict[str, Any] = {"hint": hint(endpoint.unread, config.answer_wrapping)}
        if is_judge:
            choices = [one.choice or {} for one in found]
            notes |= {name: sum(choice[name] for choice in choices) for name in _COUNTS}
            notes["cost"] = {kind: dict(cost) for kind, cost in sorted(endpoint.cost.items())}
        return found, notes

    async def _once(self, endpoint: Endpoint, sql: SqlSide, example: Example) -> Sampled:
        """Ask a question for all samples, each for itself."""
        prompt = sql.evaluation_prompt(example)
        asked = [ReplyRequest("generate", number, prompt) for number in range(self.decode.samples)]
        answers = await endpoint.ask(example.id, asked)
        return Sampled.of(
            [answer_of(one.text or "", self.config.answer_wrapping) for one in answers],
            ends=tuple(one.end for one in answers),
            outcomes=Outcomes.total(map(endpoint.outcome, answers)),
        )

    async def _judged(self, endpoint: Endpoint, sql: SqlSide, example: Example) -> Sampled:
        """Let the model write several queries, judge them, and take the best."""

        def execute(queries: Sequence[str]) -> Sequence[Result]:
            return run_many(sql.executor.execute_many, [(example, query) for query in queries])

        task = verbal.Task(
            prompt=sql.evaluation_prompt(example),
            judge_prompt=partial(sql.prompts.judge, example),
            extract=lambda text: answer_of(text, self.config.answer_wrapping).sql,
            execute=execute,
            name=example.id,
        )
        game = verbal.deliberate(task, self.config.endpoint, seed=self.config.seed)
        asked, written = next(game), list[ModelResponse]()
        while True:
            answers = await endpoint.ask(example.id, asked)
            written += answers if asked[0].kind == "generate" else ()
            try:
                asked = game.send([one.text for one in answers])
            except StopIteration as end:
                outcomes = Outcomes.total(map(endpoint.outcome, written))
                return Sampled((end.value.sql,), choice=asdict(end.value), outcomes=outcomes)


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
