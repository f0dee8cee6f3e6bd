"""Processes that die, and an end in order."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "Hello"}]
SLOTS = 4


@pytest.fixture(scope="module")
def victim(start_server: Any) -> Iterator[Any]:
    """A stub server of this file's own, with few places, so that requests wait."""

    def few_places(config: dict[str, Any]) -> None:
        config["applications"][0]["args"]["models"][0]["scheduler"]["max_num_seqs"] = SLOTS

    with start_server("--engine", "stub", change=few_places) as server:
        yield server


async def begin(client: Any, max_tokens: int) -> Any:
    """A stream whose first token has come."""
    stream = await client.chat.completions.create(
        model="default", messages=MESSAGES, max_tokens=max_tokens, stream=True
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            return stream
    raise AssertionError("the stream ended before its first token")


def test_the_engine_is_killed(victim: Any) -> None:
    """Streams end with an error, what was not sent yet is run again, and a new engine comes by itself."""

    async def scenario() -> None:
        async with victim.async_openai() as client:
            streams = [await begin(client, 8000) for _ in range(2)]
            whole = asyncio.create_task(
                client.chat.completions.create(
                    model="default",
                    messages=MESSAGES,
                    max_tokens=500,
                    extra_headers={"x-request-id": "run-again"},
                )
            )
            await asyncio.to_thread(victim.wait_until, lambda: victim.metric("num_requests_running") == 3, 10)
            engine = victim.find_process("ray::EngineActor")
            engine.kill()
            killed = time.monotonic()
            for stream in streams:
                with pytest.raises(openai.APIError) as broken:
                    async for _ in stream:
                        pass
                assert broken.value.code == "engine_unavailable"
                assert time.monotonic() - killed < 5
            answer = await whole
        assert len(answer.choices[0].message.content) == 500
        assert answer.usage.completion_tokens == 500
        await asyncio.to_thread(victim.wait_until, lambda: victim.health() == 200, 30)
        assert victim.find_process("ray::EngineActor") != engine

    asyncio.run(scenario())
    victim.wait_until(lambda: any(line["request"] == "run-again" for line in victim.access_log()), 5)
    [line] = [line for line in victim.access_log() if line["request"] == "run-again"]
    assert line["status"] == 200 and line["attempts"] >= 2
    with victim.openai("beta") as client:
        answer = client.chat.completions.create(model="default", messages=MESSAGES, max_tokens=3)
    assert answer.usage.completion_tokens == 3
    victim.wait_until(lambda: victim.is_idle() and victim.slots("alpha") == 0, 5)


def service(server: Any) -> float:
    """What the fair queue has counted for alpha; 0 while it does not answer."""
    return float(server.metric("tenant_service_tokens_total", tenant="alpha"))


def test_the_fair_queue_is_killed(victim: Any) -> None:
    """Those that wait keep their place in time and get their turn from its successor."""

    async def ask(client: Any, max_tokens: int) -> Any:
        return await client.chat.completions.create(model="default", messages=MESSAGES, max_tokens=max_tokens)

    async def scenario() -> None:
        async with victim.async_openai() as client:
            running = [await begin(client, 8000) for _ in range(SLOTS)]
            waiting = [asyncio.create_task(ask(client, 3)) for _ in range(6)]
            late = asyncio.create_task(begin(client, 3))
            await asyncio.sleep(1.0)
            assert not any(task.done() for task in (*waiting, late)), "these should be waiting"
            await asyncio.to_thread(victim.wait_until, lambda: service(victim) > 0, 5)
            served = service(victim)
            queue = victim.find_process("ray::FairQueueActor")
            queue.kill()
            waiting.append(asyncio.create_task(ask(client, 3)))
            for stream in running:
                chunk = await anext(aiter(stream))
                assert chunk.choices[0].finish_reason is None, "running streams do not notice"
                await stream.close()
            answers = await asyncio.wait_for(asyncio.gather(*waiting), 40)
            assert [answer.usage.completion_tokens for answer in answers] == [3] * 7
            await (await late).close()
        assert victim.find_process("ray::FairQueueActor") != queue
        # The engine of the test before is dead: only the predecessor knew what it had served.
        await asyncio.to_thread(victim.wait_until, lambda: service(victim) >= served, 10)

    asyncio.run(scenario())
    victim.wait_until(lambda: victim.health() == 200, 30)
    victim.wait_until(lambda: victim.is_idle() and victim.slots("alpha") == 0, 5)


def test_e08_the_embedded_redis_is_killed(victim: Any) -> None:
    """It comes back by itself on the same data: budgets and keys are those of before, and the log says so."""
    with victim.openai() as client:
        request = {"model": "default", "messages": MESSAGES, "max_tokens": 1}
        client.chat.completions.create(**request)
        [redis] = [process for process in victim.remember() if process.name() == "redis-server"]
        redis.kill()
        victim.wait_until(lambda: "the embedded Redis ended (signal 9); started again" in victim.log(), 10)
        victim.wait_until(lambda: victim.health() == 200, 20)
        client.with_options(max_retries=3).chat.completions.create(**request)


def test_sigterm_lets_streams_end(victim: Any) -> None:
    """Readiness goes first, nothing new gets in, what runs is answered whole. This server's last test."""
    tokens = 1200

    async def scenario() -> None:
        async with victim.async_openai() as client:
            stream = await begin(client, tokens)
            victim.remember()
            victim.process.terminate()
            chunks = []
            unhealthy_at = ended_at = 0.0

            async def watch_health() -> None:
                nonlocal unhealthy_at
                while await asyncio.to_thread(victim.health) == 200:
                    await asyncio.sleep(0.02)
                unhealthy_at = time.monotonic()
                with pytest.raises((openai.APIConnectionError, openai.InternalServerError)) as refused:
                    await client.chat.completions.create(model="default", messages=MESSAGES, max_tokens=1)
                if isinstance(refused.value, openai.InternalServerError):  # the port may be closed already
                    assert (refused.value.status_code, refused.value.code) == (503, "gateway_unavailable")
                    assert refused.value.response.headers["retry-after"] == "1"

            watch = asyncio.create_task(watch_health())
            async for chunk in stream:
                chunks.append(chunk)
            ended_at = time.monotonic()
            await watch
        assert unhealthy_at < ended_at, "the stream ended before readiness went"
        assert chunks[-1].choices[0].finish_reason == "length"
        assert sum(len(chunk.choices[0].delta.content or "") for chunk in chunks) == tokens - 1

    asyncio.run(scenario())
    assert victim.stop(send=False) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(victim.base_url, trust_env=False)


@pytest.mark.slow
def test_a_second_signal_cuts_off(start_server: Any) -> None:
    """Ctrl-C twice: gone at once, and still nothing left behind."""
    with start_server("--engine", "stub") as server:

        async def scenario() -> None:
            async with server.async_openai() as client:
                stream = await begin(client, 8000)
                server.remember()
                server.process.send_signal(signal.SIGINT)
                await asyncio.to_thread(server.wait_until, lambda: "stopping" in server.log(), 5)
                server.process.send_signal(signal.SIGINT)
                server.process.wait(5)
                with pytest.raises((openai.APIError, httpx.HTTPError)):
                    async for _ in stream:
                        pass

        asyncio.run(scenario())
        server.wait_until(lambda: not server.survivors(), 3)
        wrong = server.stop(send=False)
        assert [line for line in wrong if "exit code 130" not in line] == []
