"""API keys: their form, and the keyed hash that is kept instead of them."""

from __future__ import annotations

import hashlib
import re
import secrets

MAX_KEY_CHARS = 256
_WELL_FORMED = re.compile(r"eh_[a-z0-9][a-z0-9_-]*_[A-Za-z0-9_-]+")


def is_well_formed(key: str) -> bool:
    """Whether `key` has the form eh_<id>_<secret>. For keys from a config: requests are never judged by
    form."""
    return len(key) <= MAX_KEY_CHARS and _WELL_FORMED.fullmatch(key) is not None


def new_key() -> tuple[str, str]:
    """A new key's id (12 hex digits) and the key itself, which is shown once and kept nowhere."""
    id = secrets.token_hex(6)
    return id, f"eh_{id}_{secrets.token_urlsafe(32)}"


class KeyHasher:
    """Keyed hashes (BLAKE2b, RFC 7693) under one server secret, with one personalisation per use.

    Nobody without the secret can predict a digest, so looking one up in a dict tells nothing about stored
    keys. `secret` is 16 to 64 bytes; ValueError otherwise.
    """

    def __init__(self, secret: bytes) -> None:
        if not 16 <= len(secret) <= hashlib.blake2b.MAX_KEY_SIZE:
            raise ValueError(f"the server secret must be 16 to {hashlib.blake2b.MAX_KEY_SIZE} bytes")
        self._secret = secret

    def __repr__(self) -> str:
        return "KeyHasher()"

    def digest(self, key: str) -> bytes:
        """The 32 bytes stored for a key. Safe for any string: a longer one is cut just above what a key may
        be, so it costs no more than a key and equals none."""
        return self._hash(key[: MAX_KEY_CHARS + 1], b"eh-api-key", 32)

    def fingerprint(self, key: str) -> str:
        """8 hex digits that tell keys apart in logs and lead back to neither the key nor its digest."""
        return self._hash(key[: MAX_KEY_CHARS + 1], b"eh-fingerprint", 4).hex()

    def cache_salt(self, tenant_id: str) -> str:
        """The prefix-cache namespace of a tenant, 32 hex digits: the same on every gateway with the same
        secret."""
        return self._hash(tenant_id, b"eh-cache-salt", 16).hex()

    def request_digest(self, content: bytes) -> str:
        """32 hex digits for what a client sent, to be compared and not to be kept as it is."""
        return hashlib.blake2b(content, digest_size=16, key=self._secret, person=b"eh-request").hexdigest()

    def _hash(self, text: str, use: bytes, size: int) -> bytes:
        data = text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=size, key=self._secret, person=use).digest()
