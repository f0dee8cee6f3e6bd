"""Streams kept going against a server, by a process of its own that does nothing but count."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int64
from typing import Any

import uvloop

from benchmarks.workload import BenchmarkError

EVENT = b"data: {"
END = b"data: [DONE]"
_POLL_SECONDS = 0.05
_START_INTERVAL_SECONDS = 0.02


def http_request(path: str, headers: dict[str, str], body: dict[str, Any]) -> bytes:
    """A whole POST of JSON, after which the server closes the connection."""
    content = json.dumps(body).encode()
    lines = {
        "Host": "localhost",
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content


class StreamLoad:
    """Running streams. `events` counts the chunks of all of them so far."""

    def __init__(self, process: multiprocessing.process.BaseProcess, events: Any, failure: Any) -> None:
        self._process = process
        self._events = events
        self._failure = failure

    @property
    def events(self) -> int:
        return int(self._events.value)

    def check(self) -> None:
        """Raises BenchmarkError once a stream has broken off."""
        if self._failure.poll():
            raise BenchmarkError(self._failure.recv())
        if self._process.exitcode is not None:
            raise BenchmarkError(f"the streams ended with status {self._process.exitcode}")

    def run_for(self, seconds: float) -> None:
        """Wait. Raises BenchmarkError as `check` does."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self.check()
            time.sleep(min(_POLL_SECONDS, left))


@contextmanager
def stream_load(
    port: int, path: str, headers: dict[str, str], body: dict[str, Any], streams: int
) -> Iterator[StreamLoad]:
    """Keep so many streams of `body` going; one that ends is followed by the next.

    The first ones are of staggered lengths: from then on streams begin and end evenly over time, not all at once.
    """
    context = multiprocessing.get_context("spawn")
    events = context.RawValue(c_int64, 0)
    failure, other_end = context.Pipe(duplex=False)
    tokens = body["max_tokens"]
    first = [
        http_request(path, headers, {**body, "max_tokens": max(1, tokens * (n + 1) // streams)})
        for n in range(streams)
    ]
    rest = http_request(path, headers, body)
    process = context.Process(target=_run, args=(port, first, rest, events, other_end), daemon=True)
    process.start()
    other_end.close()
    try:
        yield StreamLoad(process, events, failure)
    finally:
        process.terminate()
        process.join()


def _run(port: int, first: list[bytes], rest: bytes, events: Any, failure: Any) -> None:
    loop = uvloop.new_event_loop()

    def fail(message: str) -> None:
        loop.stop()
        failure.send(message)

    async def connect(request: bytes, delay: float = 0.0) -> None:
        await asyncio.sleep(delay)
        try:
            await loop.create_connection(lambda: _Stream(request, events, again, fail), "127.0.0.1", port)
        except OSError as error:
            fail(f"no connection: {error}")

    def again() -> None:
        tasks.add(task := loop.create_task(connect(rest)))
        task.add_done_callback(tasks.discard)

    tasks = {
        loop.create_task(connect(request, number * _START_INTERVAL_SECONDS))
        for number, request in enumerate(first)
    }
    loop.run_forever()


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, events: Any, again: Any, fail: Any) -> None:
        self._request, self._events, self._again, self._fail = request, events, again, fail
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._events.value += data.count(EVENT)
        self._tail = data if len(data) > len(END) + 16 else self._tail[-64:] + data

    def connection_lost(self, error: Exception | None) -> None:
        if END in self._tail:
            self._again()
        else:
            self._fail(f"a stream broke off: {self._tail[-300:]!r}")
