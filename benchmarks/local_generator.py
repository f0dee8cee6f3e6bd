"""A stream as bare as Serve can make it: tokens come from a generator in the process that answers, at a set pace.

What a gateway, its queue and its channel to an engine cost is the CPU time over this: HTTP, HAProxy and what Ray
burns when idle are the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

_CHUNK = {
    "id": "cmpl-" + 32 * "0",
    "object": "text_completion",
    "created": 1_700_000_000,
    "model": "default",
    "choices": [{"index": 0, "text": "e", "logprobs": None, "finish_reason": None}],
}


async def _stream(request: Request) -> StreamingResponse:
    """`max_tokens` chunks, one each `step_seconds`."""
    body = await request.json()
    return StreamingResponse(
        _events(body["max_tokens"], body["step_seconds"]), media_type="text/event-stream"
    )


async def _events(tokens: int, step_seconds: float) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    begin = clock()
    for number in range(tokens):
        await asyncio.sleep(max(0.0, begin + number * step_seconds - clock()))
        yield b"data: " + json.dumps(_CHUNK, separators=(",", ":")).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


class LocalGenerator:
    """The ingress deployment."""


def build(args: dict[str, Any]) -> serve.Application:
    """The application, for a config file."""
    app = Starlette(routes=[Route("/stream", _stream, methods=["POST"])])
    deployment = serve.deployment(
        name="LocalGenerator", num_replicas=1, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
    )(serve.ingress(app)(LocalGenerator))
    return deployment.bind()
