"""The client for Redis as it is run: alone, behind Sentinel or as a Cluster, with TLS and ACL users."""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import SplitResult, urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from tenancy.embedded_redis import EmbeddedRedis, RedisServerError
from tenancy.loop_time import loop_timed

__all__ = ["SCHEMES", "EmbeddedRedis", "RedisServerError", "check_url", "connect"]

SCHEMES = (
    "redis://", "rediss://", "unix://",
    "redis+sentinel://", "rediss+sentinel://", "redis+cluster://", "rediss+cluster://",
)  # fmt: skip
SOCKET_TIMEOUT_S = 0.1
CONNECT_TIMEOUT_S = 0.5
BLOCKING_TIMEOUT_S = 3.0
"""For a client that waits for news: longer than it blocks, short enough to notice a dead server in time."""

_DEFAULT_PORTS = {"sentinel": 26379, "cluster": 6379}


def connect(url: str, *, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> Redis:
    """A client of the event loop it is first used on. Nothing is sent yet.

    - `redis://` and `rediss://` (TLS) `[USER:PASSWORD@]HOST:PORT/DB`, `unix://PATH`
    - `redis+sentinel://[USER:PASSWORD@]HOST:PORT,HOST:PORT/SERVICE[/DB]`; `sentinel_username` and
      `sentinel_password` in the query, where the sentinels want them
    - `redis+cluster://[USER:PASSWORD@]HOST:PORT,HOST:PORT`

    An answer may take `socket_timeout_s` and a connection 500 ms, of time in which the loop was not held up (see
    `tenancy.loop_time`); a query string overrides both and sets what else redis-py documents, such as
    `ssl_ca_certs=/path`. Nothing is sent twice, since a script that timed out
    may have run; only in a Cluster may a node that was lost be asked once more at its new place. Close it with
    `aclose()`. Raises ValueError for another kind of URL.
    """
    parts, kind = _split(url)
    options: dict[str, Any] = {
        "socket_timeout": socket_timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": 30,
        # RESP3 would turn on maintenance notifications, which may relax the timeouts above.
        "protocol": 2,
    }
    never = Retry(NoBackoff(), 0)
    if not kind:
        return _loop_timed(Redis.from_url(url, retry=never, **options))
    hosts, given = _options(parts, kind)
    options |= given
    if kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in hosts]
        cluster = RedisCluster(startup_nodes=nodes, retry=Retry(NoBackoff(), 1), **options)
        # Nodes that are found later are made of these arguments too.
        connection_class = loop_timed(cluster.connection_kwargs["connection_class"])
        cluster.connection_kwargs["connection_class"] = connection_class
        for node in cluster.startup_nodes:
            node.connection_class = connection_class
        return cast(Redis, cluster)  # it has the commands that are used here
    service, _, database = parts.path.strip("/").partition("/")
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    timeouts = {name: options[name] for name in ("socket_timeout", "socket_connect_timeout")}
    tls = {name: value for name, value in options.items() if name.startswith("ssl")}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        hosts, sentinel_kwargs={**own, **timeouts, **tls, "retry": never}
    )
    client: Redis = sentinel.master_for(service, retry=never, db=int(database or 0), **options)
    return _loop_timed(client)


def _loop_timed(client: Redis) -> Redis:
    pool = client.connection_pool
    pool.connection_class = loop_timed(pool.connection_class)
    return client


def check_url(url: str) -> None:
    """Raise ValueError, without naming what is secret in it, for a URL that `connect` would not take."""
    parts, kind = _split(url)
    if not kind:
        parse_url(url)
        return
    _options(parts, kind)
    path = parts.path.strip("/")
    if kind == "cluster" and path not in ("", "0"):
        raise ValueError("a Redis Cluster has database 0 alone: leave the path out")
    if kind == "sentinel":
        service, _, database = path.partition("/")
        if not service or not (database or "0").isdecimal():
            raise ValueError(
                "a Sentinel URL ends with the name of the service: …HOST:PORT/SERVICE or /SERVICE/DB"
            )


def _split(url: str) -> tuple[SplitResult, str]:
    if not url.startswith(SCHEMES):
        raise ValueError(f"the value given is not allowed; allowed: {', '.join(SCHEMES)}")
    parts = urlsplit(url)
    return parts, parts.scheme.partition("+")[2]


def _options(parts: SplitResult, kind: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Hosts, and what redis-py makes of the rest of the URL."""
    credentials, at, places = parts.netloc.rpartition("@")
    hosts: list[tuple[str, int]] = []
    for place in places.split(","):
        host, _, port = place.rpartition(":") if ":" in place.rpartition("]")[2] else (place, "", "")
        if not host or not (port or "0").isdecimal():
            raise ValueError("hosts are given as HOST:PORT,HOST:PORT")
        hosts.append((host.strip("[]"), int(port or _DEFAULT_PORTS[kind])))
    tls = parts.scheme.startswith("rediss")
    single = urlunsplit(("rediss" if tls else "redis", f"{credentials}{at}host:1", "", parts.query, ""))
    options: dict[str, Any] = dict(parse_url(single))
    for name in ("host", "port", "db", "connection_class"):
        options.pop(name, None)
    return hosts, options | ({"ssl": True} if tls else {})
