"""What a client sends after the chunks of a body is not among the headers of its request.

uvicorn's httptools protocol appends trailers to the list of headers that the application has been given. A proxy in
front neither removes nor checks them, so they would pass for what it has set or let through: X-Forwarded-For, names of
requests, credentials. HAProxy 2.8 cannot drop them.
"""

from __future__ import annotations

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class HttpWithoutTrailers(HttpToolsProtocol):
    """uvicorn's own protocol, but for trailers, which nobody gets to see."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.headers = []  # the request keeps the list as it is now


def drop_trailers() -> None:
    """For the servers that this process starts from now on: Ray lets uvicorn choose its protocol by itself."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{HttpWithoutTrailers.__name__}"
