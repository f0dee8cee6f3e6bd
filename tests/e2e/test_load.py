"""Many requests at once, and many that leave at once."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.e2e


def test_32_at_once_decode_together(real: Any) -> None:
    async def ask_all() -> list[Any]:
        async with real.async_openai("alpha") as alpha, real.async_openai("beta") as beta:
            return await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=real.model,
                        messages=[{"role": "user", "content": f"Tell me {number} things about France."}],
                        max_tokens=24,
                        extra_body={"ignore_eos": True},
                    )
                    for number in range(16)
                    for client in (alpha, beta)
                )
            )

    before = large_batches(real)
    answers = asyncio.run(ask_all())
    assert [answer.usage.completion_tokens for answer in answers] == [24] * 32
    assert all(answer.choices[0].message.content for answer in answers)
    assert large_batches(real) > before, "no decode batch was above 16"
    real.wait_until(real.is_idle, 5)
    assert real.slots("alpha") == real.slots("beta") == 0


def large_batches(server: Any) -> float:
    """Steps so far with more than 16 decoding sequences."""
    name = "decode_batch_size_requests_bucket"
    return float(server.metric(name, le="+Inf") - server.metric(name, le="16.0"))


def test_both_tenants_progress(stub: Any) -> None:
    """A small tenant is not stuck behind the flood of another that came first."""

    async def push() -> dict[str, list[float]]:
        ends: dict[str, list[float]] = {"alpha": [], "beta": []}
        async with stub.async_openai("alpha") as alpha, stub.async_openai("beta") as beta:

            async def ask(tenant: str, client: Any) -> None:
                answer = await client.completions.create(model=stub.model, prompt="Hello", max_tokens=160)
                assert answer.usage.completion_tokens == 160
                ends[tenant].append(time.monotonic())

            flood = [asyncio.create_task(ask("alpha", alpha)) for _ in range(96)]
            await flood[0]
            await asyncio.gather(*flood, *(ask("beta", beta) for _ in range(8)))
        return ends

    before = {tenant: served(stub, tenant) for tenant in ("alpha", "beta")}
    ends = asyncio.run(push())
    assert len(ends["alpha"]) == 96 and len(ends["beta"]) == 8
    after_beta = sum(end > max(ends["beta"]) for end in ends["alpha"])
    assert after_beta >= 16, f"beta waited for all but {after_beta} of alpha's requests"
    for tenant in ends:  # counted just after the answer has gone out
        stub.wait_until(lambda t=tenant: served(stub, t) - before[t] == 160 * len(ends[t]), 5)


def served(server: Any, tenant: str) -> float:
    """Output tokens so far."""
    return float(server.metric("served_tokens_total", tenant=tenant, kind="output"))


def test_dropped_streams_leave_nothing_behind(stub: Any) -> None:
    count = 60
    pauses = random.Random(7)

    async def drop(client: openai.AsyncOpenAI) -> None:
        stream = asyncio.create_task(
            client.chat.completions.create(
                model=stub.model,
                messages=[{"role": "user", "content": "word " * pauses.randrange(400)}],
                max_tokens=4000,
                stream=True,
            )
        )
        await asyncio.sleep(pauses.uniform(0, 1.5))
        if not stream.done():
            stream.cancel()
            await asyncio.wait({stream})
        else:
            await (await stream).close()

    async def drop_all() -> None:
        async with stub.async_openai("beta") as client:
            await asyncio.gather(*(drop(client) for _ in range(count)))

    stub.wait_until(stub.is_idle, 5)
    cancelled = stub.metric("requests_cancelled_total", tenant="beta")
    asyncio.run(drop_all())
    stub.wait_until(lambda: stub.is_idle() and stub.slots("beta") == 0, 5)
    gone = stub.metric("requests_cancelled_total", tenant="beta") - cancelled
    assert count / 3 < gone <= count  # the rest left before it was sent
    with stub.openai("beta") as client:
        answer = client.completions.create(model=stub.model, prompt=["Hello"] * 32, max_tokens=8)
    assert answer.usage.completion_tokens == 32 * 8


@pytest.mark.parametrize("how", ["at once", "head first"])
def test_a_whole_answer_that_nobody_waits_for_is_dropped_too(stub: Any, how: str) -> None:
    """Nothing is written to a client that waits for a whole answer: its leaving must be seen all the same."""
    stub.wait_until(stub.is_idle, 5)
    body = json.dumps({"model": stub.model, "prompt": "Hello", "max_tokens": 4000}).encode()
    fields = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body))}
    head = "POST /v1/completions HTTP/1.1\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in {**fields, **stub.headers("beta")}.items()
    )
    parts = [head.encode() + b"\r\n", body]
    with socket.create_connection(("127.0.0.1", stub.port)) as connection:
        for part in parts if how == "head first" else [b"".join(parts)]:
            connection.sendall(part)
            time.sleep(0.1)  # so that the parts travel alone
        stub.wait_until(lambda: stub.metric("num_requests_running") == 1, 5)
    stub.wait_until(lambda: stub.is_idle() and stub.slots("beta") == 0, 5)
