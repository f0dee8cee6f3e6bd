"""The live state of one request inside the engine. Only the scheduler changes it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from engine_actor.kv.cache import SequencePages
from engine_actor.request import EngineRequest, RequestTimings, RequestUsage
from engine_actor.sampling.state import SamplingState


@dataclass(eq=False)
class SequenceState:
    """One live request.

    `token_ids` is the prompt followed by the output. Positions below `computed` have their KV in pages (or in the
    step in flight); `served` is the highest position ever computed, so recomputed tokens are known as such.
    `epoch` rises with each preemption: a result of an older epoch is ignored. `wishes` is None for a request that asks
    for no more than temperature, top_k and top_p.
    """

    id: int
    request: EngineRequest
    token_ids: list[int]
    max_tokens: int
    seed: int
    accepted_at: float
    table: SequencePages
    epoch: int = 0
    computed: int = 0
    served: int = 0
    cached_input: int = 0
    admitted: bool = False
    aborted: bool = False
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    prefill_chunks: list[tuple[float, int]] = field(default_factory=list)
    preemptions: int = 0
    wishes: SamplingState | None = None

    @property
    def key(self) -> tuple[str, int]:
        return (self.request.request, self.request.attempt)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def pending(self) -> int:
        """Known tokens not computed yet: 1 means decoding, more means prefill."""
        return len(self.token_ids) - self.computed

    @property
    def wants_prompt_logits(self) -> bool:
        """Log probabilities of prompt tokens are still owed: no position may be skipped."""
        return self.wishes is not None and self.wishes.prompt_logprobs_left > 0

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
