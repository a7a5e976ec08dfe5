"""A small server that speaks OpenAI's chat completions, on 127.0.0.1, and fails as it is told."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_server import Answer, Server
from tests.worlds import ASKED

Body = Mapping[str, Any]


@dataclass
class Failure:
    """An answer as it is sent, which most often is none."""

    status: int = 500
    text: str = '{"error": {"message": "told to fail"}}'
    headers: Mapping[str, str] = field(default_factory=dict)
    hang_up: bool = False
    delay_s: float = 0.0


def completion(
    content: Any, *, finish: str = "stop", usage: Any = (2, 3), **message: Any
) -> Failure:
    """Make a completion that ends for a reason; two numbers of tokens, or what stands for them."""
    if isinstance(usage, tuple):
        usage = dict(zip(("prompt_tokens", "completion_tokens"), usage, strict=True))
    choice = {"message": {"content": content, **message}, "finish_reason": finish}
    return Failure(200, json.dumps({"choices": [choice], "usage": usage}))


def knowing(*others: str) -> Callable[[Body, int], str]:
    """Return what answers greedily with the gold query, else with that or another one, which may be
    none; it judges that the gold query is the best candidate.
    """

    def answer(body: Body, earlier: int) -> str:
        text = body["messages"][-1]["content"]
        gold = next(gold for _, question, gold in ASKED if question in text)
        if "scoring machine" in text:
            queries = re.findall(r"SQL(\d+):\n```sql\n(.*?)\n```", text, re.DOTALL)
            scores = "\n".join(f"SQL{n}: {0.9 if sql == gold else 0.2}" for n, sql in queries)
            return f"<think>SQL1: 1</think>\n<scores>\n{scores}\n</scores>"
        said = (gold, *others)
        sql = said[body["seed"] % len(said)] if body.get("temperature") else gold
        return f"<think>…</think><sql>{sql}</sql>" if sql else "I would rather not."

    return answer


@dataclass
class Chat:
    """What the server answers, and what it has seen.

    Attributes:
        answer: From a request and how often this one came before, the text or a failure.
        before: Called with the number of requests so far, before each is answered.
        paid: How often each request was answered in full, by its content.
    """

    answer: Callable[[Body, int], str | Failure]
    before: Callable[[int], None] = lambda count: None
    url: str = ""
    bodies: list[Body] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    paid: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    under_way: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def requests(self) -> int:
        return len(self.bodies)

    def reply(self, handler: BaseHTTPRequestHandler, body: Body) -> Answer | None:
        """Answer a request."""
        with self.lock:
            earlier, count = self.bodies.count(body), len(self.bodies) + 1
            self.under_way += 1
            self.most_at_once = max(self.most_at_once, self.under_way)
            self.keys.add(handler.headers.get("authorization", ""))
            self.bodies.append(body)
        try:
            self.before(count)
            is_known = handler.path == "/v1/chat/completions"
            answer = self.answer(body, earlier) if is_known else Failure(404)
            if isinstance(answer, str):
                with self.lock:
                    self.paid[json.dumps(body, sort_keys=True)] += 1
                    self.tokens.update(prompt_tokens=7, completion_tokens=len(answer))
                answer = completion(answer, usage=(7, len(answer)))
            time.sleep(answer.delay_s)
            return None if answer.hang_up else (answer.status, answer.headers, answer.text.encode())
        finally:
            with self.lock:
                self.under_way -= 1


@contextmanager
def serve(chat: Chat) -> Generator[Chat]:
    """Serve until the block ends."""
    with closing(Server(chat.reply)) as server:
        chat.url = f"{server.url}/v1"
        yield chat
