"""Whose address counts, whatever X-Forwarded-For says."""

from __future__ import annotations

import pytest

from serve_app.client_address import ClientAddresses


def source(peer: str | None, *forwarded: str, trusted: tuple[str, ...] = (), behind: bool = False) -> str:
    headers = [(b"x-forwarded-for", line.encode("latin-1")) for line in forwarded]
    scope = {"type": "http", "client": None if peer is None else (peer, 1), "headers": headers}
    return ClientAddresses(trusted, behind_haproxy=behind).source(scope)


@pytest.mark.parametrize(
    ("peer", "forwarded", "trusted", "behind", "expected"),
    [
        ("198.51.100.7", (), (), False, "198.51.100.7"),
        ("198.51.100.7", ("10.1.1.1",), (), False, "198.51.100.7"),  # nobody vouches for the header
        ("127.0.0.1", ("198.51.100.7",), (), True, "198.51.100.7"),
        (
            "127.0.0.1",
            ("10.1.1.1, 10.2.2.2", "198.51.100.7"),
            (),
            True,
            "198.51.100.7",
        ),  # forged, then HAProxy
        ("127.0.0.1", ("10.1.1.1", "127.0.0.1"), (), True, "127.0.0.1"),  # forged on this machine
        ("10.0.0.9", ("203.0.113.5", "10.0.0.8"), ("10.0.0.0/8",), False, "203.0.113.5"),
        ("127.0.0.1", ("6.6.6.6, 203.0.113.5, 10.0.0.8",), ("10.0.0.0/8",), True, "203.0.113.5"),
        ("10.0.0.9", (), ("10.0.0.0/8",), False, "10.0.0.9"),
        ("10.0.0.9", ("unknown",), ("10.0.0.0/8",), False, "10.0.0.9"),
        ("10.0.0.9", ("203.0.113.5:4711",), ("10.0.0.9",), False, "203.0.113.5"),
        ("10.0.0.9", ("[2001:db8:1:2:3::4]:80",), ("10.0.0.9",), False, "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", (), (), False, "2001:db8:1:2::/64"),
        ("::ffff:198.51.100.7", (), (), False, "198.51.100.7"),
        ("fe80::1%eth0", (), (), False, "fe80::/64"),
        (None, ("198.51.100.7",), (), False, "unknown"),
        ("127.0.0.1", (",".join(["10.0.0.1"] * 1000),), ("10.0.0.0/8",), True, "10.0.0.1"),
        ("127.0.0.1", ("\xff\x00, ",), (), True, "127.0.0.1"),
    ],
)
def test_e13_a_source_is_what_a_trusted_proxy_saw(
    peer: str | None, forwarded: tuple[str, ...], trusted: tuple[str, ...], behind: bool, expected: str
) -> None:
    assert source(peer, *forwarded, trusted=trusted, behind=behind) == expected
