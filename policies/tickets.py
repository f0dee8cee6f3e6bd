"""What the fair queue sees and answers: tickets in, grants or refusals out, reports from engines.

Prompts never pass through here: a ticket carries counts, identities and hashes only. Only ages and remaining
durations cross processes, never clock readings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from policies.latency_model import StepEstimate

ServiceClass = Literal["interactive", "default", "batch"]


@dataclass(frozen=True)
class Ticket:
    """A request asking for entry (gateway -> fair queue).

    `request` is unique per tenant request; `attempt` counts the times the gateway submitted it to an engine.
    `sequences` is n times the number of prompts. Token counts are sums over all sequences.
    `remaining_ttft_ms` is left until the first token must be out, `remaining_deadline_ms` until the last one; each of
    them asks for a promise. `demotable`: where none can be given, the request goes on as batch work instead of being
    refused; the fair queue then marks it `demoted`. `output_tokens_bound` is what the longest sequence hardly exceeds
    (a high quantile), for the deadline of the last token. `kv_share`, in (0, 1], is the part of an engine's KV pages
    that the tenant may hold while another one waits.
    """

    request: str
    attempt: int
    tenant: str
    weight: float
    input_tokens: int
    predicted_output_tokens: int
    sequences: int = 1
    service_class: ServiceClass = "default"
    adapter: str | None = None
    remaining_ttft_ms: float | None = None
    remaining_deadline_ms: float | None = None
    demotable: bool = False
    demoted: bool = False
    output_tokens_bound: int = 0
    age_ms: float = 0.0
    kv_share: float = 1.0
    page_hashes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Grant:
    """Leave to submit now to one engine. Void after `time_to_live_ms`, or once a higher queue epoch is known.

    `demoted`: a deadline was asked for, could not be promised, and the request goes on without. `predicted_ttft_ms`
    comes with a promise: when it was given, the first token was predicted to come within that time of the arrival.
    """

    request: str
    attempt: int
    queue_epoch: int
    engine: str
    engine_epoch: int
    queued_ms: float
    time_to_live_ms: float = 2000.0
    demoted: bool = False
    predicted_ttft_ms: float | None = None


@dataclass(frozen=True)
class Refusal:
    """No entry. `code` is an error code of the HTTP API; `retry_after_ms` is None where a retry cannot help.

    `earliest_deadline_ms`, counted like the deadline that was asked for (of the first token where both were), is the
    earliest that could have been promised.
    """

    request: str
    attempt: int
    code: str
    message: str
    retry_after_ms: float | None = None
    earliest_deadline_ms: float | None = None


@dataclass(frozen=True)
class EngineReport:
    """State of one engine after a step (engine -> fair queue).

    `served` and every counter are cumulative since the engine epoch began, so a lost report does no harm. Tenants whose
    service has not changed since the report before may be left out; the first report of a connection has all.
    `outstanding` is, per tenant, the priced work of the live requests that is not served yet: what is left of their
    input plus what is left of their predicted output. `accepted` names the requests taken since the report before;
    one that is lost costs a grant its time to live and no more. `free_pages` are those that the live requests neither
    hold nor need for the tokens they have. `live_sequences` counts running and waiting requests per tenant,
    `tenant_pages` the KV pages that each tenant's running requests hold, `tenant_prefill_tokens` each tenant's part of
    `waiting_prefill_tokens`.
    `first_tokens` and `completed` name, like `accepted`, the tickets of the sequences whose first token came, or that
    ended by themselves, since the report before. `step_estimate` is what a step takes, None before anything is
    known; `decode_context` the context tokens of the decoding sequences; `peak_kv_tokens` the most KV tokens that
    the live requests will hold at once; `decode_step_seconds` what the last step took, if it had decodes in it.
    `remaining` holds, per running request, the output tokens that are still to come by prediction (1 when it has run
    over) and the KV pages that its end sets free. Page hashes are changes since the report before; the first report
    of a connection adds all.
    """

    engine: str
    engine_epoch: int
    step: int
    served: dict[str, float]
    outstanding: dict[str, float]
    running: int
    waiting: int
    waiting_prefill_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    free_pages: int
    total_pages: int
    page_size: int
    accepted: tuple[tuple[str, int], ...] = ()
    draining: bool = False
    live_sequences: dict[str, int] = field(default_factory=dict)
    tenant_pages: dict[str, int] = field(default_factory=dict)
    tenant_prefill_tokens: dict[str, int] = field(default_factory=dict)
    first_tokens: tuple[tuple[str, int], ...] = ()
    completed: tuple[tuple[str, int], ...] = ()
    step_estimate: StepEstimate | None = None
    decode_context: int = 0
    peak_kv_tokens: int = 0
    decode_step_seconds: float | None = None
    remaining: tuple[tuple[int, int], ...] = ()
    page_hashes_added: tuple[int, ...] = field(default=())
    page_hashes_removed: tuple[int, ...] = field(default=())
