"""Ray Serve's own command on the same config, without our front door."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


def test_serve_run(start_server: Any) -> None:
    """The app brings a Redis of its own, answers many who come at once, and everything ends with the command."""
    command = [str(Path(sys.executable).with_name("serve")), "run"]
    with start_server(
        command=command,
        change=stub_engine,
        ready=lambda server: server.health() == 200,
        environment={"RAY_ADDRESS": "local"},
        linger=10.0,  # what Ray started outlives its command by a moment
    ) as server:
        answers = asyncio.run(ask_at_once(server, 64))
        assert [answer.usage.completion_tokens for answer in answers] == [8] * 64
        server.wait_until(lambda: server.slots("alpha") == server.slots("beta") == 0, 5)


async def ask_at_once(server: Any, number: int) -> list[Any]:
    """The first requests of a server: nothing is connected or warm, and the client tries once."""
    async with server.async_openai("alpha") as alpha, server.async_openai("beta") as beta:
        return await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=server.model, messages=[{"role": "user", "content": "Hello"}], max_tokens=8
                )
                for _ in range(number // 2)
                for client in (alpha, beta)
            )
        )


def stub_engine(config: dict[str, Any]) -> None:
    config["applications"][0]["args"]["models"][0]["engine"] = "stub"
