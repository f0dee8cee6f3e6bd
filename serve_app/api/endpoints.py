"""From a request body to what the engine needs: prompts in token ids, sampling parameters, the shape of the answer."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace
from typing import Literal

from engine_actor.channel_messages import MAX_SUBMIT_TOKENS
from engine_actor.request import SamplingParams
from serve_app.api.errors import context_length_exceeded, invalid_request
from serve_app.api.responses import ChatResponses, CompletionResponses, ResponseBuilder
from serve_app.api.schemas import ChatCompletionRequest, CompletionRequest
from serve_app.text.model_text import ModelText
from serve_app.text.token_entries import PromptEcho


@dataclass(frozen=True)
class ParsedRequest:
    """A valid request, tokenised. Each prompt has `n` choices; `max_tokens` is the effective limit of each."""

    prompts: list[list[int]]
    sampling: SamplingParams
    stop: list[str]
    n: int
    stream: bool
    builder: ResponseBuilder
    max_tokens_given: bool = True
    """Whether the client set the limit itself."""
    service_tier: Literal["auto", "default", "flex", "priority"] = "auto"
    echoes: list[PromptEcho] | None = None
    """Each prompt as text, where the answer is to begin with it."""

    @property
    def max_tokens(self) -> int:
        return self.sampling.max_tokens


def parse_chat(body: ChatCompletionRequest, text: ModelText, max_model_len: int) -> ParsedRequest:
    """POST /v1/chat/completions. Raises ApiError 400."""
    prompt = text.render_chat(body.template_messages())
    limit_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    builder = ChatResponses(
        f"chatcmpl-{uuid.uuid4().hex}",
        int(time.time()),
        body.model,
        body.include_usage,
        body.continuous_usage,
    )
    return _parse(body, [prompt], "messages", limit_field, builder, text, max_model_len)


def parse_completion(body: CompletionRequest, text: ModelText, max_model_len: int) -> ParsedRequest:
    """POST /v1/completions. Raises ApiError 400."""
    prompts = [
        text.encode_prompt(prompt, add_bos=body.add_special_tokens)
        if isinstance(prompt, str)
        else text.check_ids(prompt)
        for prompt in body.prompts
    ]
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise invalid_request(f"prompt[{index}]: must not be empty.", "prompt")
    builder = CompletionResponses(
        f"cmpl-{uuid.uuid4().hex}",
        int(time.time()),
        body.model,
        body.include_usage,
        body.continuous_usage,
    )
    parsed = _parse(body, prompts, "prompt", "max_tokens", builder, text, max_model_len)
    if not body.echo:
        return parsed
    echoes = [
        text.echo(ids, prompt if isinstance(prompt, str) else None)
        for ids, prompt in zip(prompts, body.prompts, strict=True)
    ]
    sampling = replace(parsed.sampling, prompt_logprobs=body.likeliest)
    return replace(parsed, sampling=sampling, echoes=echoes)


def _parse(
    body: ChatCompletionRequest | CompletionRequest,
    prompts: list[list[int]],
    prompt_field: str,
    limit_field: str,
    builder: ResponseBuilder,
    text: ModelText,
    max_model_len: int,
) -> ParsedRequest:
    total = body.n * sum(map(len, prompts))
    if total > MAX_SUBMIT_TOKENS:
        raise invalid_request(
            f"{prompt_field}: has {total} tokens in all, each prompt counted n times; allowed are {MAX_SUBMIT_TOKENS}.",
            prompt_field,
        )
    longest = max(len(prompt) for prompt in prompts)
    room = max_model_len - longest
    asked = body.output_limit
    if room < (1 if asked is None else min(1, asked)):
        raise context_length_exceeded(max_model_len, longest, asked or 1, prompt_field)
    if limit_field not in body.model_fields_set and asked is not None:
        asked = min(asked, room)  # a default, not a wish
    if asked is not None and asked > room:
        raise context_length_exceeded(max_model_len, longest, asked, limit_field)
    sampling = SamplingParams(
        max_tokens=room if asked is None else asked,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        seed=body.seed,
        stop_token_ids=() if body.ignore_eos else text.eos_token_ids,
        logprobs=body.likeliest,
    )
    text.check_ids(body.biased_token_ids, "logit_bias")
    text.check_ids(body.stop_token_ids, "stop_token_ids")
    if body.min_tokens > sampling.max_tokens:
        raise invalid_request(
            f"min_tokens: must be at most {limit_field}, {sampling.max_tokens} here.", "min_tokens"
        )
    sampling = replace(sampling, **body.into(sampling))
    given = limit_field in body.model_fields_set and asked is not None
    return ParsedRequest(prompts, sampling, body.stop, body.n, body.stream, builder, given, body.service_tier)
