"""The live state of one request inside the engine. Only the scheduler changes it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_actor.kv.cache import SequencePages, pages_for
from engine_actor.request import EngineRequest, RequestTimings, RequestUsage
from engine_actor.sampling.state import SamplingState

if TYPE_CHECKING:
    from engine_actor.tenant import Tenant


@dataclass(eq=False, slots=True)
class SequenceState:
    """One live request.

    `token_ids` is the prompt followed by the output. Positions below `computed` have their KV in pages (or in the
    step in flight); `served` is the highest position computed before the last preemption or as prompt, so recomputed
    tokens are known as such. `decoding` is set once a step has all known tokens: from then on it needs the newest one
    alone, which may be in flight (`pending` 0). `slot` is its row in the running set, -1 while it waits.
    `predicted_length` counts prompt and output. `epoch` rises with each preemption: a result of an older epoch is
    ignored. `wishes` is None for a request that asks for no more than temperature, top_k and top_p.
    """

    id: int
    request: EngineRequest
    tenant: Tenant
    token_ids: list[int]
    max_tokens: int
    seed: int
    accepted_at: float
    table: SequencePages
    key: tuple[str, int] = field(init=False)
    stop_token_ids: tuple[int, ...] = field(init=False)
    prompt_tokens: int = field(init=False)
    max_length: int = field(init=False)
    predicted_length: int = field(init=False)
    epoch: int = 0
    slot: int = -1
    decoding: bool = False
    computed: int = 0
    served: int = 0
    cached_input: int = 0
    aborted: bool = False
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    prefill_chunks: list[tuple[float, int]] = field(default_factory=list)
    preemptions: int = 0
    wishes: SamplingState | None = None

    def __post_init__(self) -> None:
        self.key = (self.request.request, self.request.attempt)
        self.stop_token_ids = self.request.sampling.stop_token_ids
        self.prompt_tokens = len(self.request.prompt_token_ids)
        self.max_length = self.prompt_tokens + self.max_tokens
        self.predicted_length = min(
            self.prompt_tokens + self.request.predicted_output_tokens, self.max_length
        )

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Known tokens not computed yet."""
        return len(self.token_ids) - self.computed

    @property
    def wants_prompt_logits(self) -> bool:
        """Log probabilities of prompt tokens are still owed: no position may be skipped."""
        return self.wishes is not None and self.wishes.prompt_logprobs_left > 0

    @property
    def pages_to_start(self) -> int:
        """Pages for the known tokens and the next one, if there may be one."""
        return pages_for(min(len(self.token_ids) + 1, self.max_length))

    @property
    def predicted_output(self) -> int:
        """Output tokens in all, by prediction."""
        return self.predicted_length - self.prompt_tokens

    @property
    def predicted_output_left(self) -> int:
        """Output tokens still to come, by prediction."""
        return max(0, self.predicted_length - len(self.token_ids))

    def usage(self) -> RequestUsage:
        """What was used so far: prompt tokens count once they are computed or found in the cache."""
        return RequestUsage(
            computed_input=max(0, min(self.served, self.prompt_tokens) - self.cached_input),
            cached_input=self.cached_input,
            output=self.output_tokens,
        )

    def timings(self, now: float) -> RequestTimings:
        """Durations since the engine accepted the request, in milliseconds."""

        def since(moment: float | None) -> float | None:
            return None if moment is None else (moment - self.accepted_at) * 1e3

        return RequestTimings(
            scheduled_ms=since(self.scheduled_at),
            first_token_ms=since(self.first_token_at),
            finished_ms=since(now),
            prefill_chunks=tuple(self.prefill_chunks),
            preemptions=self.preemptions,
        )


def derive_seed(request: EngineRequest) -> int:
    """The seed given by the client, else one derived from the request id, so that a second attempt repeats it."""
    if request.sampling.seed is not None:
        return request.sampling.seed % 2**64
    digest = hashlib.blake2b(request.request.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
