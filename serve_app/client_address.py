"""Where a request comes from, as far as trusted proxies can tell."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import Scope

HAPROXY_VARIABLE = "EVENHAND_HAPROXY"
"""Set where HAProxy is in front that adds who connected to it to X-Forwarded-For (serve_app.haproxy)."""

_MAX_HOPS = 16
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ClientAddresses:
    """Each trusted proxy adds the address it was called from at the end of X-Forwarded-For. So the list is read from
    its end, for as long as the address before was a trusted one: what a client writes into it itself is never used.
    """

    def __init__(self, trusted_proxies: Iterable[str], *, behind_haproxy: bool) -> None:
        """`trusted_proxies` are addresses and networks. `behind_haproxy`: whoever calls is the HAProxy in front."""
        self._trusted = [ipaddress.ip_network(proxy) for proxy in trusted_proxies]
        self._behind_haproxy = behind_haproxy

    def source(self, scope: Scope) -> str:
        """The client of a request: an IPv4 address, or the /64 network of an IPv6 one, which is one customer's."""
        address = _parse((scope.get("client") or ("",))[0])
        hops = [hop for line in Headers(scope=scope).getlist("x-forwarded-for") for hop in line.split(",")]
        trusted = self._behind_haproxy or self._trusts(address)
        for hop in reversed(hops[-_MAX_HOPS:]):
            found = _parse(hop.strip()) if trusted else None
            if found is None:
                break
            address, trusted = found, self._trusts(found)
        if isinstance(address, ipaddress.IPv6Address):
            return str(ipaddress.ip_network((address, 64), strict=False))
        return str(address) if address is not None else "unknown"

    def _trusts(self, address: _Address | None) -> bool:
        return address is not None and any(address in network for network in self._trusted)


def _parse(text: str) -> _Address | None:
    """An address as proxies write it, maybe with a port. IPv4 in IPv6 is IPv4."""
    host, port = text.partition("]")[0].removeprefix("["), text.rpartition(":")[2]
    if text.count(":") == 1 and port.isdecimal():
        host = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
