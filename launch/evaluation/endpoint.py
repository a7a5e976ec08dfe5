"""Answers from whatever speaks OpenAI's chat completions: a service, SGLang, vLLM."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from threading import Event, Lock
from typing import Any

from exchange import UserError
from launch import cli
from launch.config import VerbalConfig
from launch.evaluation.client import Answer, ModelRequest
from launch.evaluation.outcomes import End

KEY = "OPENAI_API_KEY"
"""The environment variable that holds the key; there is no other way to give one."""
_REFUSED = (400, 413, 422)
"""Statuses of one request that will never be taken: too long, or against a policy."""
_TOO_LONG = re.compile(r"413:|context.{0,20}(length|size|window)|too (long|many tokens)", re.I)
"""How OpenAI, vLLM, SGLang and llama.cpp say that a prompt is too long."""
_PASSING = (408, 409, 429)  # statuses below 500 that the client asks again after
_FAILED_FINISH = ("error", "abort", "insufficient_system_resource")
"""Reasons to finish, of services and of SGLang, that are failures of the server."""
_REFUSED_FINISH = {"content_filter": "the reply was filtered"}
_MOST_FAILURES = 20
"""Requests in a row that fail at the server before it is given up."""
_log = logging.getLogger(__name__)

Record = Callable[[ModelRequest, Answer], None]


class Endpoint:
    """Asks over HTTP, several requests at a time.

    The `openai` client repeats what fails and may pass (408, 409, 429, 5xx, no connection), as a
    `retry-after` says; answers that are no completion are asked for again here. A request at which
    the server still fails (5xx) has no answer, and the others go on: it may be the request's fault.
    """

    def __init__(self, url: str, model: str, config: VerbalConfig, *, top_p: float = 1.0) -> None:
        openai: Any = import_module("openai")  # of an extra, which launch.eval looks for
        self._openai, self._url, self._model, self._config = openai, url, model, config
        self._top_p = top_p if top_p < 1 else None
        self._stopped = Event()
        self._client = openai.OpenAI(
            base_url=url,
            api_key=os.environ.get(KEY) or "none",  # servers of one's own take none
            timeout=config.timeout_s,
            max_retries=config.retries,
            http_client=openai.DefaultHttpxClient(event_hooks={"request": [self._check]}),
        )
        self._calls = ThreadPoolExecutor(config.parallel, thread_name_prefix="endpoint")
        self._recording = Lock()
        self._warned: set[str] = set()
        self._failures = 0  # in a row

    def answer(self, requests: Sequence[ModelRequest], record: Record) -> None:
        """Ask, and record every answer as it arrives.

        Raises:
            UserError: The endpoint is not there, takes no request, or keeps failing.
        """

        def call(request: ModelRequest) -> None:
            answer = self._call(request)
            # Here and not in the main thread, which an interruption would take out of the middle.
            with self._recording:
                record(request, answer)
                self._failures = self._failures + 1 if answer.end == "failed" else 0
            if self._failures >= _MOST_FAILURES:
                raise self._given_up(answer.refusal)

        try:
            for future in as_completed([self._calls.submit(call, one) for one in requests]):
                future.result()
        except BaseException as error:
            self._stopped.set()
            if isinstance(error, KeyboardInterrupt):
                _log.warning(
                    "calls under way end, in %g s at most; interrupt again not to wait for them",
                    self._config.timeout_s,
                )
            try:
                self.close()  # calls under way are paid for all the same
            except KeyboardInterrupt:
                cli.give_up()
            raise

    def close(self) -> None:
        """Wait for the calls under way."""
        self._calls.shutdown(cancel_futures=True)
        self._client.close()

    def _check(self, _request: object) -> None:
        """Send nothing after the end; the client passes its own errors on."""
        if self._stopped.is_set():
            raise self._openai.OpenAIError("stopped")

    def _call(self, request: ModelRequest) -> Answer:
        problem, end = "", None
        for _ in range(self._config.retries + 1):
            try:
                return self._read(self._client.chat.completions.create(**self._body(request)))
            except self._openai.APIStatusError as error:
                problem, end = self._status(error)
                break
            except self._openai.OpenAIError as error:
                problem, end = _brief(error), None
                break
            except (ValueError, RecursionError) as error:  # no completion, though all went well
                problem, end = _brief(error), "failed" if isinstance(error, _FailedError) else None
                self._warn(f"{problem}; trying again")
        if end is None:
            raise self._given_up(problem)
        self._warn(f"{'failed at' if end == 'failed' else 'refused'} a request: {problem}")
        return Answer(None, refusal=problem, end=end)

    def _status(self, error: Any) -> tuple[str, End | None]:
        """Say what is wrong, and how the request ended; None where it is not the request's own."""
        status, problem = error.status_code, f"{error.status_code}: {_brief(error)}"
        if status in _REFUSED:
            told = f"{problem} {getattr(error, 'code', '')}"
            return problem, "too_long" if _TOO_LONG.search(told) else "refused"
        if status < 500 and status not in _PASSING:
            raise UserError(self._advice(status, problem)) from None
        tries = f", after {self._config.retries + 1} tries"
        return problem + tries * (status >= 500), "failed" if status >= 500 else None

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
            "messages": [{"role": m.role, "content": _sound(m.content)} for m in request.messages],
            "max_completion_tokens": config.max_tokens,
            **{name: value for name, value in optional.items() if value is not None},
        }

    def _read(self, completion: Any) -> Answer:
        try:
            choice = completion.choices[0]
            message = choice.message
            content = message.content
        except (AttributeError, LookupError, TypeError):
            raise ValueError("the answer is no chat completion") from None
        finish = getattr(choice, "finish_reason", None)
        if finish in _FAILED_FINISH:
            raise _FailedError(f"the server gave a reply up ({finish})")
        usage = getattr(completion, "usage", None)
        told = [getattr(usage, f"{name}_tokens", None) for name in ("prompt", "completion")]
        read, written = (count if isinstance(count, int) else 0 for count in told)
        if [read, written] != told:
            self._warn("answers do not tell their tokens, which count as 0")
        if refusal := getattr(message, "refusal", None) or _REFUSED_FINISH.get(finish):
            self._warn(f"refused a request: {_sound(str(refusal))[:200]}")
            return Answer(None, read, written, _sound(str(refusal)), "refused")
        end: End = "length" if finish == "length" else "stop"
        return Answer(_text(message, content), read, written, end=end)

    def _warn(self, problem: str) -> None:
        """Say what is wrong once, whatever numbers of tokens come with it."""
        kind = re.sub(r"\d+", "", problem)
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s: %s", self._url, problem)

    def _advice(self, status: int, problem: str) -> str:
        what = {
            401: f"set {KEY} to a key that it takes",
            403: f"set {KEY} to a key that may use {self._model}",
            404: f"check --endpoint (it ends with /v1) and --model {self._model}",
        }
        return f"{self._url}: {problem}; {what.get(status, 'check --endpoint and --model')}"


class _FailedError(ValueError):
    """The server began a reply, and did not end it."""


def _text(message: Any, content: Any) -> str:
    """Return a reply with its reasoning, which some servers give apart, as the model wrote both:
    while nothing follows it, it has not ended.
    """
    text = content if isinstance(content, str) else ""
    # SGLang, DeepSeek and older vLLM; newer vLLM and OpenRouter.
    told = (getattr(message, name, None) for name in ("reasoning_content", "reasoning"))
    reasoning = next((one for one in told if isinstance(one, str) and one.strip()), "")
    if reasoning:
        text = f"<think>\n{reasoning}" + f"\n</think>\n\n{text}" * bool(text)
    return _sound(text)


def _brief(error: Exception) -> str:
    """Describe an error in a line; of a connection that failed, also why."""
    words = " ".join(f"{error} {error.__cause__ or ''}".split())
    return words[:200] or type(error).__name__


def _sound(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
