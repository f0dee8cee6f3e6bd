"""Request fields that steer sampling beyond temperature, top_p and top_k: ranges, and the form the engine takes."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, field_validator

from engine_actor.request import SamplingParams
from serve_app.api.body import Body
from serve_app.api.unsupported import refuse

MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 64

_INT32_MAX = 2**31 - 1
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class SamplingFields(Body):
    """min_p, penalties, biases and what ends an answer. Every default changes nothing.

    Token ids are checked against the vocabulary later, in `check_ids`.
    """

    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] = 1.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default={})
    min_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] = 0
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] = Field(default=[])

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_of_token_ids(cls, bias: Any) -> Any:
        if isinstance(bias, dict):
            if len(bias) > MAX_LOGIT_BIAS:
                refuse("", f"must hold at most {MAX_LOGIT_BIAS} tokens")
            for key, value in bias.items():
                if not _TOKEN_ID.fullmatch(key):
                    refuse("", f"has a key that is not a token id: {key[:40]!r}")
                if type(value) not in (int, float) or not -100 <= value <= 100:
                    refuse(f"[{key}]", "must be a number from -100 to 100")
        return bias

    @property
    def biased_token_ids(self) -> list[int]:
        return [int(token) for token in self.logit_bias]

    def into(self, params: SamplingParams) -> dict[str, Any]:
        """What changes in the parameters of the engine, by field."""
        return {
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": tuple((int(token), bias) for token, bias in self.logit_bias.items()),
            "min_tokens": self.min_tokens,
            "stop_token_ids": tuple(sorted({*params.stop_token_ids, *self.stop_token_ids})),
        }
