"""A random secret in a file that several processes share."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

_MIN_CHARS = 32


def load_or_create_secret(path: str | Path) -> bytes:
    """32 bytes derived from the file's text; a missing file is made with a random one, mode 0600.

    Processes that start at the same time end up with the same secret: the file appears under its name
    complete or not at all, and only the first one wins. Raises ValueError for a file with less than 32
    characters, OSError as the file system says.
    """
    path = Path(path)
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        _create(path)
        text = path.read_bytes()
    text = text.strip()
    if len(text) < _MIN_CHARS:
        raise ValueError(f"{path}: a secret of at least {_MIN_CHARS} characters is expected")
    return hashlib.blake2b(text, digest_size=32, person=b"eh-secret-file").digest()


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        # A link, unlike a rename, fails when another process was first.
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
