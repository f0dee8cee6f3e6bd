"""A request as the engine sees it: token ids, sampling parameters, limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when to stop. Everything has been checked against the vocabulary.

    temperature 0 is greedy. top_k 0, top_p 1.0 and min_p 0.0 switch the filters off. `seed` None means the engine
    derives one from the request id; the randomness of a token depends on (seed, position) alone. `stop_token_ids`
    (the model's end tokens among them, unless the client ignores those) end the request with reason "stop" and are
    part of the reported ids; the first `min_tokens` tokens are none of them. Presence and frequency penalties are
    subtracted from the logits of tokens in the output, once and per occurrence; the repetition penalty divides
    positive and multiplies negative logits of tokens in prompt and output. `logit_bias` holds (token, added to its
    logit).

    `logprobs` asks for the log probability of every output token and of that many likeliest ones, `prompt_logprobs`
    the same of the prompt's tokens from the second on. max_tokens 0 computes the prompt alone.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class EngineRequest:
    """One sequence to generate (gateway -> engine). Submitting is idempotent by (request, attempt).

    `ticket` names the fair queue's ticket that let it in: several sequences (n, prompt lists) share one.
    `namespace` isolates the prefix cache: pages are shared only between requests of equal namespace.
    `predicted_output_tokens` is an estimate for scheduling, never a limit. `tpot_ms` is a target for the mean time per
    output token, `itl_ms` for each gap between two; both steer the size of steps and are best effort. `kv_share`, in
    (0, 1], is the part of the KV pages that the tenant may hold while another one waits.
    """

    request: str
    attempt: int
    ticket: str
    tenant: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    namespace: str = ""
    weight: float = 1.0
    kv_share: float = 1.0
    predicted_output_tokens: int = 64
    queue_epoch: int = 0
    tpot_ms: float | None = None
    itl_ms: float | None = None


@dataclass(frozen=True)
class RequestTimings:
    """Durations inside the engine in milliseconds since the request was accepted there; None if never reached.

    `prefill_chunks` holds (offset of the step's end, tokens) of each prompt chunk.
    """

    scheduled_ms: float | None
    first_token_ms: float | None
    finished_ms: float | None
    prefill_chunks: tuple[tuple[float, int], ...] = ()
    preemptions: int = 0


@dataclass(frozen=True)
class RequestUsage:
    """Tokens by kind. `computed_input` excludes what the prefix cache held; recomputation is not counted."""

    computed_input: int = 0
    cached_input: int = 0
    output: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log probability of a token, and (token, log probability) of the likeliest ones in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StreamRow(NamedTuple):
    """New tokens of one request after one step. `finish_reason` set means it is the last row of the request.

    `usage` comes with the first token and with the last row. `logprobs` has one entry per new token where they are
    wanted. `prompt_logprobs` come as the prompt is computed, in rows of their own or with the first token: all rows'
    entries together are those of the prompt's tokens from the second on.
    """

    request: str
    attempt: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    usage: RequestUsage | None = None
    timings: RequestTimings | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
