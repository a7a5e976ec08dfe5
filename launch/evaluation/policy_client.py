"""Answers of a policy in this process, from the sampler of the job, for verbal judging."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launch.config import JobConfig
from launch.evaluation.client import Answer, ModelRequest
from minirl.model.decoder import Decoder
from minirl.model.lora import split
from minirl.model.tokenizer import ChatTokenizer
from minirl.sglang.sampler import Servers
from minirl.train.rollouts import make_sampler
from minirl.types import Decoding, Request

# Episode numbers name random streams: these lie above those of evaluations.
_FIRST_EPISODE = 2**30
_STREAMS = 2**30
_STEPS = 32


class PolicyModel:
    """Samples answers; the seed of the job and a request's own decide each."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: ChatTokenizer,
        config: JobConfig,
        servers: Servers | None = None,
    ) -> None:
        verbal, limits = config.verbal, config.sampler
        self._tokenizer, self._limits = tokenizer, limits
        group = max(verbal.candidates, verbal.judgements)
        self._sampler = make_sampler(
            model, limits, tokenizer, group_size=group, seed=config.seed, servers=servers
        )
        self._sampler.set_weights(split(model)[1], version=0)
        temperature = 1.0 if verbal.temperature is None else verbal.temperature
        self._decoding = Decoding(temperature, limits.top_p)
        longest = (limits.max_response_tokens, limits.max_reply_tokens, verbal.max_tokens)
        self._max_tokens = min(tokens for tokens in longest if tokens is not None)

    def answer(
        self, requests: Sequence[ModelRequest], record: Callable[[ModelRequest, Answer], None]
    ) -> None:
        """Sample an answer to each request, and record it; a prompt too long has none."""
        waiting: dict[int, tuple[ModelRequest, int]] = {}
        for request in requests:
            ids = self._tokenizer.encode_chat(request.messages)
            if len(ids) > self._limits.max_prompt_tokens:
                record(request, Answer(None, refusal="prompt over sampler.max_prompt_tokens"))
                continue
            episode = _FIRST_EPISODE + request.seed % _STREAMS
            while episode in waiting:
                episode += 1
            waiting[episode] = request, len(ids)
            self._sampler.submit(Request(episode, tuple(ids), self._max_tokens, self._decoding))
        while waiting:
            for episode, reply in self._sampler.advance(max_steps=_STEPS):
                self._sampler.release(episode)
                request, prompt_tokens = waiting.pop(episode)
                record(request, Answer(reply.text, prompt_tokens, len(reply.ids)))
