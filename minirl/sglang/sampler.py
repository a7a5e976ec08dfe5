"""Sampling by SGLang servers: the servers of a run, and the sampler before them.

Token ids go in; token ids and their log-probabilities come back. Everything that waits for a server
runs in one event loop, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import queue
import resource
import time
import uuid
import zlib
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from weakref import ref

import aiohttp
import jax
from flax import nnx

from minirl.config import LoraConfig, SamplerConfig, SglangConfig
from minirl.exchange import UserError
from minirl.model.config import read_config
from minirl.run import distributed, preemption
from minirl.sglang import process
from minirl.sglang.pool import ServerPool
from minirl.sglang.process import ChildServer
from minirl.sglang.server import Generated, PushedWeights, Server, make_session
from minirl.sglang.transfer import lora_options, remove_versions, write_adapters, write_version
from minirl.types import Reply, Request, Tokenizer

_CLOSE_S = 10.0
# Longest wait for a reply before `advance` returns.
_PAUSE_S = 0.2
_Made = TypeVar("_Made")


class Servers:
    """The servers of this process, which serve the model of a folder, inside of a `with` block;
    with `lora` they are given adapters, and keep its weights.

    The seed decides what launched servers draw.

    Attributes:
        times: Metrics of the last push: its seconds, and those while the learner did other things.
    """

    def __init__(
        self,
        config: SglangConfig,
        model: Path,
        sampler: SamplerConfig,
        *,
        dtype: str,
        seed: int,
        folder: Path,
        lora: LoraConfig | None = None,
    ) -> None:
        self._config, self._model, self._dtype, self._lora = config, model, dtype, lora
        self._seed, self._folder, self.root = seed, folder, (folder / "weights").absolute()
        if config.weights is not None:
            # Other runs may write there too.
            mark = zlib.crc32(str(folder.absolute()).encode())
            self.root = config.weights.absolute() / f"{folder.name}-{mark:08x}"
        self._hybrid = read_config(model).hybrid
        self._context = sampler.max_prompt_tokens + sampler.max_response_tokens
        self.pool: ServerPool
        self.times: dict[str, float] = {}
        # Servers may still have weights of another run.
        self._name, self._pushes = distributed.from_first(lambda: uuid.uuid4().hex[:8]), 0
        # The last version that was sent, with its first array: an update makes new ones.
        self._sent: tuple[int, ref[Any]] | None = None
        self._end_push: Callable[[], None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop
        self._stack = ExitStack()

    def __enter__(self) -> Servers:
        """Start what is to be launched; a `UserError` tells who does not serve the model."""
        config, count = self._config, distributed.count()
        remove_versions(self.root)  # of a run that was killed
        with ExitStack() as stack:
            children = process.launch(
                config, self._model, dtype=self._dtype,
                options=lora_options(self._lora, self._hybrid) if self._lora else (),
                seed=self._seed * config.launch * count,
                logs=self._folder, first=jax.process_index() * config.launch,
            )  # fmt: skip
            stack.callback(process.close, children)
            self._loop = asyncio.new_event_loop()
            thread = Thread(target=self._loop.run_forever, name="sglang", daemon=True)
            thread.start()
            stack.callback(self._stop, thread)
            self.run(self._open(children))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        # A running server ends where files go while it reads them: the next start removes these.
        is_read = any(exception) and self.pool.is_loading
        self._stack.close()
        if not is_read:
            remove_versions(self.root)

    def start(self, work: Coroutine[Any, Any, _Made]) -> Future[_Made]:
        """Do something in the loop; return at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, _Made]) -> _Made:
        """Do something in the loop, and wait for it; a signal abandons it."""
        return _result(self.start(work))

    def send(self, weights: nnx.State, *, version: int) -> None:
        """Begin to bring all servers to new weights, unless they have them or are about to.

        All processes have to call this. Returns when the files are written that servers read.
        """
        first = jax.tree.leaves(weights)[0]
        if self._sent is not None and self._sent[0] == version and self._sent[1]() is first:
            return
        self.settle()
        begun = time.monotonic()
        # A version may come twice: as it was trained, and from its checkpoint.
        self._pushes += 1
        name = f"{self._name}-{version}-{self._pushes}"
        folder, written = self._write(weights, name), time.monotonic()
        pushed = PushedWeights(name, self._pushes, version, folder)
        taken = self.start(self.pool.push(pushed))

        def end_push() -> None:
            apart_s = time.monotonic() - written
            servers_s = max(distributed.gather(lambda: _result(taken)))
            remove_versions(self.root, but=folder)
            self.times = {
                "time/push_s": written - begun + servers_s,
                "time/push_hidden_s": min(apart_s, servers_s),
            }

        self._sent, self._end_push = (version, ref(first)), end_push

    def settle(self) -> None:
        """Wait until all servers have what was sent; all processes have to call this.

        Raises:
            UserError: A server does not take the first weights.
            LostError: No server took it.
        """
        end_push, sent = self._end_push, self._sent
        if end_push is not None:
            self._end_push = self._sent = None
            end_push()
            self._sent = sent

    def _write(self, weights: nnx.State, name: str) -> Path:
        if self._lora is not None:
            return write_adapters(
                self.root, name, weights, self._lora, base=self._model, hybrid=self._hybrid
            )
        return write_version(self.root, name, weights, dtype=self._dtype)

    async def _open(self, children: Sequence[ChildServer]) -> None:
        config, count = self._config, distributed.count()
        if 0 < len(config.urls) < count:  # a server to which two bring weights at a time ends
            raise UserError(
                f"rollout.sglang.urls: {len(config.urls)} servers for {count} processes; each "
                "needs one of its own"
            )
        urls = config.urls[jax.process_index() :: count]
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError):  # of what a system does not let through the default is left
            # Each request under way is an open file.
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._session = make_session()
        launched, given = ((child.url, child) for child in children), ((url, None) for url in urls)
        made = partial(Server, context=self._context, has_adapters=self._lora is not None)
        servers = [made(url, self._session, config, child) for url, child in (*launched, *given)]
        self.pool = ServerPool(servers, config)
        await self.pool.check()

    def _stop(self, thread: Thread) -> None:
        async def end() -> None:
            me = asyncio.current_task()
            for task in asyncio.all_tasks() - {me}:
                if not task.cancelling():  # and resumes a server
                    task.cancel()
            # Of a request that is given up the server is told by another task.
            while others := asyncio.all_tasks() - {me}:
                await asyncio.gather(*others, return_exceptions=True)
            if self._session is not None:
                await self._session.close()
            self._loop.stop()

        self.start(end())
        thread.join(_CLOSE_S)
        # A slow shutdown must not mask the original error.
        if not thread.is_alive():
            self._loop.close()


def _result(future: Future[_Made]) -> _Made:
    """Wait for something in the loop; a signal abandons it."""
    while not wait([future], preemption.POLL_S).done:
        try:
            preemption.check()
        except BaseException:
            future.cancel()
            raise
    return future.result()


class SglangSampler:
    """Samples with SGLang servers. What they draw is not repeatable."""

    is_repeatable = False

    def __init__(self, tokenizer: Tokenizer, servers: Servers) -> None:
        self._servers, self._tokenizer = servers, tokenizer
        self._asked: dict[int, Future[Generated]] = {}
        # Episodes whose requests ended, with these; None to wake up.
        self._ended: queue.SimpleQueue[tuple[int, Future[Generated]] | None] = queue.SimpleQueue()

    def apart(self) -> SglangSampler:
        """Return another sampler of the same servers and their weights, for another thread."""
        return SglangSampler(self._tokenizer, self._servers)

    def send_weights(self, weights: nnx.State, *, version: int) -> None:
        """Begin to bring the servers to these weights; what they sample goes on with them."""
        self._servers.send(weights, version=version)

    def set_weights(self, weights: nnx.State, *, version: int) -> None:
        """Bring the servers to these weights; raises as `Servers.settle` does."""
        self.send_weights(weights, version=version)
        self._servers.settle()

    def numbers(self) -> dict[str, float]:
        """Return metrics of what happened since this was last asked."""
        return self._servers.run(self._servers.pool.numbers()) | self._servers.times

    def free_memory(self) -> None:
        """Give nothing back: servers keep their memory."""

    def submit(self, request: Request) -> None:
        """Ask for a reply; return at once."""
        # Ids that the embedding lacks, of which servers die, are refused in tokenizers and answers.
        episode, stop_ids = request.episode, tuple(self._tokenizer.stop_ids)
        future = self._servers.start(self._servers.pool.sample(request, stop_ids))
        self._asked[episode] = future
        future.add_done_callback(lambda ended: self._ended.put((episode, ended)))

    def advance(self, *, max_steps: int) -> list[tuple[int, Reply]]:
        """Wait a moment for replies, or for `wake`; raises as `ServerPool.sample` does."""
        del max_steps
        replies: list[tuple[int, Reply]] = []
        with suppress(queue.Empty):
            ended = self._ended.get(timeout=_PAUSE_S)
            while True:
                # Some were released meanwhile.
                if ended is not None and self._asked.get(ended[0]) is ended[1]:
                    del self._asked[ended[0]]
                    replies.append((ended[0], self._reply(ended[1].result())))
                ended = self._ended.get_nowait()
        return replies

    def wake(self) -> None:
        """Let `advance` return; from any thread."""
        self._ended.put(None)

    def release(self, episode: int) -> None:
        """Forget what was asked for an episode."""
        future = self._asked.pop(episode, None)
        if future is not None:
            future.cancel()

    def _reply(self, generated: Generated) -> Reply:
        ids = generated.ids
        is_stopped = ids[-1] in self._tokenizer.stop_ids
        text = self._tokenizer.decode(ids[:-1] if is_stopped else ids)
        versions = tuple(map(self._servers.pool.version_of, generated.versions))
        finish = "stop" if is_stopped else "length"
        return Reply(ids, generated.logprobs, text, finish, versions)
