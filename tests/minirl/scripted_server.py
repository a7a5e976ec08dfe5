"""A server of canned bytes that speaks as SGLang does: for measuring clients, never the server.

    python tests/minirl/scripted_server.py ANSWER_S ID,ID,...

Prints its port. Every reply is the ids given here, some time after its request; requests are not
parsed but looked through. Nothing is checked.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager

_PUSH = "/update_weights_from_disk"
_RID = re.compile(rb'"rid": ?"([^"]*)"')
_IDS = re.compile(rb'"input_ids": ?\[([^\]]*)\]')
_VERSION = re.compile(rb'"weight_version": ?"([^"]*)"')


@contextmanager
def scripted(answer_s: float, ids: Iterable[int]) -> Generator[str]:
    """Serve in a process of its own until the block ends; give the address."""
    line = [sys.executable, __file__, str(answer_s), ",".join(map(str, ids))]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


class Scripted(asyncio.Protocol):
    """One connection."""

    answer_s = 0.05
    version = b"default"
    template = b""
    replies = connections = most_connections = at_once = most_at_once = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._buffer = transport, bytearray()
        Scripted.connections += 1
        Scripted.most_connections = max(Scripted.most_connections, Scripted.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        Scripted.connections -= 1

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            size = re.search(rb"content-length: *(\d+)", head)
            whole = end + 4 + (int(size[1]) if size else 0)
            if len(self._buffer) < whole:
                return
            body = bytes(self._buffer[end + 4 : whole])
            path = head.split(b" ", 2)[1].decode()
            del self._buffer[:whole]
            self._answer(path, body)

    def _answer(self, path: str, body: bytes) -> None:
        if path == "/generate" and b'"max_new_tokens": 0' in body.replace(b":0", b": 0"):
            self._send(self._score(body))
        elif path == "/generate":
            Scripted.at_once += 1
            Scripted.most_at_once = max(Scripted.most_at_once, Scripted.at_once)
            asyncio.get_running_loop().call_later(self.answer_s, self._finish, self._reply(body))
        else:
            if path == _PUSH:
                found = _VERSION.search(body)
                assert found
                Scripted.version = found[1]
            self._send(self._canned(path))

    def _finish(self, reply: bytes) -> None:
        Scripted.at_once -= 1
        self._send(reply)

    def _canned(self, path: str) -> bytes:
        told = {
            "/model_info": {"is_generation": True, "weight_version": self.version.decode()},
            "/server_info": {"version": "0.5.23"},
            "/v1/models": {"data": [{"max_model_len": 1 << 20}]},
            "/replies": {
                "replies": self.replies,
                "most_connections": self.most_connections,
                "most_at_once": self.most_at_once,
            },
        }
        return json.dumps(told.get(path, {})).encode()

    def _score(self, body: bytes) -> bytes:
        rid, ids = _RID.search(body), _IDS.search(body)
        assert rid
        assert ids
        scored = [[-1.0, int(i), None] for i in ids[1].split(b",")]
        scored[0][0] = None
        meta = {"id": rid[1].decode(), "weight_version": self.version.decode()}
        return json.dumps({"meta_info": meta | {"input_token_logprobs": scored}}).encode()

    def _reply(self, body: bytes) -> bytes:
        rid, ids = _RID.search(body), _IDS.search(body)
        assert rid
        assert ids
        Scripted.replies += 1
        count = ids[1].count(b",") + 1
        return self.template % (rid[1], count, self.version, count - 1)

    def _send(self, body: bytes) -> None:
        if not self._transport.is_closing():
            head = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            )
            self._transport.write(head % len(body) + body)


def _template(ids: tuple[int, ...]) -> bytes:
    """Make a reply with places for the request's name, its length, the weights, and the cache."""
    triples = [[-0.6931471824645996, i, None] for i in ids]
    ids_json, triples_json = json.dumps(ids), json.dumps(triples)
    text = (
        f'{{"text":"","output_ids":{ids_json},"meta_info":{{"id":"%s","prompt_tokens":%d,'
        '"weight_version":"%s","finish_reason":{"type":"stop","matched":1},"cached_tokens":%d,'
        f'"output_token_logprobs":{triples_json},"e2e_latency":0.05}}}}'
    )
    return text.encode()


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(Scripted, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201
    await server.serve_forever()


if __name__ == "__main__":
    Scripted.answer_s = float(sys.argv[1])
    Scripted.template = _template(tuple(map(int, sys.argv[2].split(","))))
    asyncio.run(_serve())
