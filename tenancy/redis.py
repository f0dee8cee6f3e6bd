"""The client for Redis, with the timeouts that the request path needs, and the embedded server."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tenancy.embedded_redis import EmbeddedRedis, RedisServerError

__all__ = ["EmbeddedRedis", "RedisServerError", "connect"]

SOCKET_TIMEOUT_S = 0.1
CONNECT_TIMEOUT_S = 0.5
BLOCKING_TIMEOUT_S = 3.0
"""For a client that waits for news: longer than it blocks, short enough to notice a dead server in time."""


def connect(url: str, *, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> Redis:
    """A client for a redis://, rediss:// or unix:// URL, of the event loop it is first used on. Nothing is
    sent yet.

    An answer may take `socket_timeout_s` and a connection 500 ms (a query string in the URL overrides both, as redis-py
    documents). Nothing is retried: a script that timed out may have run. Close it with `aclose()`. Raises
    ValueError for another kind of URL.
    """
    return Redis.from_url(
        url,
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=30,
        # RESP3 would turn on maintenance notifications, which may relax the timeouts above.
        protocol=2,
    )
