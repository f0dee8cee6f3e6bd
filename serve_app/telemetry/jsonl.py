"""A file of JSON lines that several processes append to and that cannot fill the disk."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)


class RotatingLines:
    """Appends whole lines to `path`; at `max_bytes` the file becomes path.1, path.1 becomes path.2, ...

    Lines of one call are one write to a file opened with O_APPEND, which a local Linux file system keeps
    whole among processes. Rotation happens under a lock file, and who still holds the old file notices by its
    inode. A write that fails (disk full, directory gone) loses its lines and is logged once until a write
    succeeds again: it never raises.
    """

    def __init__(self, path: Path, max_bytes: int = 64 * 1024 * 1024, backups: int = 4) -> None:
        """Raises OSError if the file cannot be opened: a bad path in the config shows at start."""
        self._path = path
        self._max_bytes = max_bytes
        self._backups = backups
        self._fd: int | None = self._open()
        self._failing = False

    def write(self, lines: Iterable[str]) -> bool:
        """Append the lines (without line ends). False if they were lost."""
        data = "".join(f"{line}\n" for line in lines).encode()
        try:
            fd = self._current(len(data))
            written = os.write(fd, data)
            if written < len(data):
                os.write(fd, b"\n")  # ends the torn line, if there is room for that
                raise OSError(f"short write of {written} of {len(data)} bytes")
        except OSError as error:
            if not self._failing:
                logger.warning("lines for %s are lost until it can be written again: %s", self._path, error)
            self._failing = True
            return False
        self._failing = False
        return True

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _current(self, incoming: int) -> int:
        """The descriptor of the file that has `path` now, with room for `incoming` bytes."""
        if self._fd is None or not self._is_at_path(self._fd):
            self.close()
            self._fd = self._open()
        if os.fstat(self._fd).st_size + incoming <= self._max_bytes or os.fstat(self._fd).st_size == 0:
            return self._fd
        lock = os.open(f"{self._path}.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._is_at_path(self._fd):  # else another process has rotated while we waited
                for index in range(self._backups, 1, -1):
                    older = Path(f"{self._path}.{index - 1}")
                    if older.exists():
                        older.replace(f"{self._path}.{index}")
                self._path.replace(f"{self._path}.1")
            self.close()
            self._fd = self._open()
        finally:
            os.close(lock)
        return self._fd

    def _is_at_path(self, fd: int) -> bool:
        try:
            at_path = os.stat(self._path)
        except FileNotFoundError:
            return False
        own = os.fstat(fd)
        return (own.st_dev, own.st_ino) == (at_path.st_dev, at_path.st_ino)
