"""What SGLang servers answer (written for SGLang 0.5.23), and what of it cannot be true."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AliasPath,
    BaseModel,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    model_validator,
)

from minirl.exchange import UserError

TESTED = "0.5.23"
_OLDEST = (0, 5)
# The context length less `max_req_input_len`, which is about prompts alone.
_INPUT_MARGIN = 4


class ServerInfo(BaseModel):
    """What a server says of itself and its model."""

    version: str
    weight_version: str = ""
    dp_size: PositiveInt = 1
    max_req_input_len: NonNegativeInt | None = None
    max_model_len: NonNegativeInt = Field(validation_alias=AliasPath("data", 0, "max_model_len"))

    @property
    def context(self) -> int:
        """Return the longest prompt and reply together: a small cache holds less than the model."""
        held = math.inf if self.max_req_input_len is None else self.max_req_input_len
        return int(min(self.max_model_len, held + _INPUT_MARGIN))


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a server has to be: tokens of the longest episode, and whether it is given adapters."""

    context: int
    has_adapters: bool

    def check(self, info: ServerInfo, url: str) -> None:
        """Raise a `UserError` for a server that cannot serve the model."""
        version = tuple(int(part) for part in info.version.split(".")[:2] if part.isdigit())
        flaws = {
            f"is SGLang {info.version}; use {TESTED}": version < _OLDEST,
            f"takes {info.context} tokens, and episodes have up to {self.context}; start it with "
            "a larger --context-length, or a larger cache (--max-total-tokens, "
            "--mem-fraction-static)": info.context < self.context,
            "loads no adapters with --dp-size; start several servers in its place": (
                self.has_adapters and info.dp_size > 1
            ),
        }
        for words, is_so in flaws.items():
            if is_so:
                raise UserError(f"rollout.sglang: {url} {words}")


class _Span(BaseModel):
    """Which ids some weights have sampled."""

    version: str
    start: NonNegativeInt
    end: NonNegativeInt


def _meta(*path: str) -> Any:
    return Field(validation_alias=AliasPath("meta_info", *path))


_IdLogprob = tuple[FiniteFloat, NonNegativeInt, Any]


class Generated(BaseModel):
    """What a server sampled, validated with the request as context.

    Of each id, `scored` has the log-probability under softmax(logits / temperature), the id, and
    text or null. Without `spans`, `version` has sampled all.
    """

    ids: Annotated[tuple[NonNegativeInt, ...], Field(validation_alias="output_ids")]
    finish: Annotated[Literal["stop", "length"], _meta("finish_reason", "type")]
    cached: Annotated[NonNegativeInt, _meta("cached_tokens")] = 0
    version: Annotated[str, _meta("weight_version")]
    spans: Annotated[list[_Span], _meta("weight_versions")] = []
    scored: Annotated[list[_IdLogprob], _meta("output_token_logprobs")]

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Return the log-probability of each id."""
        return tuple(value for value, *_ in self.scored)

    @property
    def versions(self) -> tuple[str, ...]:
        """Return the name of the weights that sampled each id."""
        spans = self.spans or [_Span(version=self.version, start=0, end=len(self.ids))]
        return tuple(span.version for span in spans for _ in range(span.start, span.end))

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Generated:
        assert info.context is not None
        ids, most = self.ids, info.context.max_tokens
        flaws = {
            f"{len(ids)} ids, not 1 to {most}": not 0 < len(ids) <= most,
            "log-probabilities of other ids": list(ids) != [i for _, i, _ in self.scored],
            "weight versions of other tokens": len(self.versions) != len(ids),
        }
        for flaw, is_so in flaws.items():
            if is_so:
                raise ValueError(flaw)
        return self
