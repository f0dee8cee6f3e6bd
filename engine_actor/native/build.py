"""Compiles the native kernels and loads them: a plain C interface through ctypes, no build system.

The library is cached per user, under a name made of the sources, the compiler's flags and the CPU's own.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch  # noqa: F401  its OpenMP library comes first, so that both share one pool of threads

SOURCES = Path(__file__).parent / "src"
CPU_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma")
_COMPILER_FLAGS = [
    *("-std=c++20", "-O3", "-fopenmp", "-fPIC", "-shared"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni", "-mfma"),
]
_COMPILE_SECONDS = 300

_pointer, _int = ctypes.c_void_p, ctypes.c_int32
_SIGNATURES = {
    "evenhand_step": [_pointer, _pointer, _pointer, _pointer, _int],
    "evenhand_gemm": [_pointer, _int, _pointer, _int, _pointer, _pointer, _int],
    "evenhand_highest": [_pointer, _int, _pointer, _pointer, _pointer, _int],
    "evenhand_read_row": [_pointer, _int, _pointer],
    "evenhand_quantise_row": [_pointer, _int, _int, _pointer, _pointer, _pointer],
    "evenhand_rms_norm_row": [_pointer, _pointer, ctypes.c_float, _int, _pointer],
    "evenhand_rope_angles": [_int, _pointer, _int, _pointer, _pointer],
    "evenhand_add_rms_norm_row": [_pointer, _pointer, ctypes.c_float, _int, _pointer],
    "evenhand_rope_store": [*[_pointer] * 5, _int, *[_pointer] * 3],
    "evenhand_attention": [_pointer, _pointer, _int, ctypes.c_float, *[_pointer] * 5, _int],
    "evenhand_ceilings": [_pointer, ctypes.c_int64, _pointer, _pointer, _pointer, _int],
}


class NativeUnavailable(Exception):
    """The native executor can not run here; the message says why."""


def load_library() -> ctypes.CDLL:
    """The compiled kernels, from the cache or compiled now (a few seconds).

    Raises NativeUnavailable without the CPU's instructions, a working compiler or a place to keep the result.
    """
    cpu = _cpu_flags()
    missing = [flag for flag in CPU_FLAGS if flag not in cpu]
    if missing:
        raise NativeUnavailable(f"the CPU has no {', '.join(missing)}")
    try:
        path = _compiled(cpu)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"the native kernels can not be built or loaded: {error}") from None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.evenhand_workspace_bytes.argtypes = [_pointer, _pointer, _int]
    library.evenhand_workspace_bytes.restype = ctypes.c_int64
    return library


def cache_directory() -> Path:
    """Where compiled kernels are kept: under XDG_CACHE_HOME, else ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "evenhand" / "native"


def _cpu_flags() -> frozenset[str]:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise NativeUnavailable(f"it needs Linux on x86-64, not {sys.platform} on {platform.machine()}")
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    raise NativeUnavailable("/proc/cpuinfo names no CPU flags")


def _compiled(cpu: frozenset[str]) -> Path:
    import fcntl

    files = sorted(SOURCES.iterdir())
    parts = [*(file.read_bytes() for file in files), " ".join([*_COMPILER_FLAGS, *sorted(cpu)]).encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    directory = cache_directory()
    library = directory / f"step-{key}.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    # Engines of one machine start together: one compiles, the others wait for it.
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile([str(file) for file in files if file.suffix == ".cpp"], library)
    return library


def _compile(sources: list[str], library: Path) -> None:
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise NativeUnavailable(f"there is no C++ compiler ({name})")
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        output = Path(directory) / library.name
        command = [compiler, *_COMPILER_FLAGS, "-o", str(output), *sources]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            raise NativeUnavailable(f"{compiler} took longer than {_COMPILE_SECONDS} s") from None
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise NativeUnavailable(f"{compiler} failed: {first}")
        os.replace(output, library)
