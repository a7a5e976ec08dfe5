"""Answers of a policy: what launch.verbal asks for, from the sampler of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launch.config import VerbalConfig
from launch.journal import Answer, Request
from minirl.config import SamplerConfig
from minirl.model.decoder import Decoder
from minirl.model.lora import split
from minirl.model.tokenizer import ChatTokenizer
from minirl.sglang.sampler import Servers
from minirl.train.rollouts import make_sampler
from minirl.types import Decoding
from minirl.types import Request as Sample

# Episode numbers name random streams: these lie above those of evaluations.
_FIRST_EPISODE = 2**30
_STREAMS = 2**30
_STEPS = 32


class PolicyAnswers:
    """Samples answers.

    Args:
        model: The policy.
        tokenizer: Its tokenizer.
        sampler: Slots and token limits.
        config: Temperature and the longest answer.
        seed: With a request's own seed it decides the answer.
        servers: Those that sample in place of the native sampler.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: ChatTokenizer,
        sampler: SamplerConfig,
        config: VerbalConfig,
        *,
        seed: int,
        servers: Servers | None = None,
    ) -> None:
        self._tokenizer, self._limits = tokenizer, sampler
        group = max(config.candidates, config.judgements)
        self._sampler = make_sampler(
            model, sampler, tokenizer, group_size=group, seed=seed, servers=servers
        )
        self._sampler.set_weights(split(model)[1], version=0)
        temperature = 1.0 if config.temperature is None else config.temperature
        self._decoding = Decoding(temperature, sampler.top_p)
        longest = (sampler.max_response_tokens, sampler.max_reply_tokens, config.max_tokens)
        self._max_tokens = min(tokens for tokens in longest if tokens is not None)

    def answer(
        self, requests: Sequence[Request], record: Callable[[Request, Answer], None]
    ) -> None:
        """Sample an answer to each request, and record it; a prompt too long has none."""
        waiting: dict[int, tuple[Request, int]] = {}
        for request in requests:
            ids = self._tokenizer.encode_chat(request.messages)
            if len(ids) > self._limits.max_prompt_tokens:
                record(request, Answer(None, refusal="prompt over sampler.max_prompt_tokens"))
                continue
            episode = _FIRST_EPISODE + request.seed % _STREAMS
            while episode in waiting:
                episode += 1
            waiting[episode] = request, len(ids)
            self._sampler.submit(Sample(episode, tuple(ids), self._max_tokens, self._decoding))
        while waiting:
            for episode, reply in self._sampler.advance(max_steps=_STEPS):
                self._sampler.release(episode)
                request, prompt_tokens = waiting.pop(episode)
                record(request, Answer(reply.text, prompt_tokens, len(reply.ids)))
