"""The header of a GGUF file: metadata and the table of tensors, without touching the weights.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). The
reader of the `gguf` library keeps a numpy array per string and takes seconds for a vocabulary; this one takes
well under 0.2 s.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_actor.loading.source import LoadError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensorInfo:
    """One tensor: `shape` in row-major order (the file stores it reversed), `ggml_type` the number of its
    type, `offset` in bytes from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key (arrays as lists) and tensors by name, in file order."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensorInfo]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header. Raises LoadError when the file is not GGUF, has another version or ends too early."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(data, path).header()
    except (struct.error, ValueError, OSError) as error:
        if isinstance(error, LoadError):
            raise
        raise LoadError(f"{path}: the GGUF header is damaged or cut short ({error})") from error


class _Parser:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def header(self) -> GgufHeader:
        if self.data[:4] != b"GGUF":
            raise LoadError(f"{self.path} is not a GGUF file")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise LoadError(f"{self.path}: GGUF version {version} is not supported (2 and 3 are)")
        tensor_count, key_count = self.scalar("Q"), self.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        infos = [self.tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensorInfo] = {}
        for info in infos:
            if info.name in tensors:
                raise LoadError(f"{self.path}: tensor {info.name!r} occurs twice")
            tensors[info.name] = GgufTensorInfo(info.name, info.shape, info.ggml_type, start + info.offset)
        return GgufHeader(metadata, tensors)

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        begin, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise ValueError("a string ends behind the end of the file")
        return self.data[begin : self.at].decode("utf-8", errors="surrogateescape")

    def value(self, value_type: int) -> Any:
        if value_type == _STRING:
            return self.string()
        if value_type == _ARRAY:
            item_type, count = self.scalar("I"), self.scalar("Q")
            if item_type in _SCALARS:
                layout = f"<{count}{_SCALARS[item_type]}"
                items = struct.unpack_from(layout, self.data, self.at)
                self.at += struct.calcsize(layout)
                return list(items)
            return [self.value(item_type) for _ in range(count)]
        if value_type not in _SCALARS:
            raise ValueError(f"unknown metadata type {value_type}")
        return self.scalar(_SCALARS[value_type])

    def tensor_info(self) -> GgufTensorInfo:
        name = self.string()
        dimensions = self.scalar("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))
        return GgufTensorInfo(name, shape[::-1], self.scalar("I"), self.scalar("Q"))
