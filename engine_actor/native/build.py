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
from dataclasses import dataclass
from pathlib import Path

import torch  # noqa: F401  its OpenMP library comes first, so that both share one pool of threads

SOURCES = Path(__file__).parent / "src"
_COMPILER_FLAGS = ("-std=c++20", "-O3", "-fopenmp", "-fPIC", "-shared")


@dataclass(frozen=True)
class InstructionSet:
    """What the kernels can be compiled for: the flags a CPU must have, by the names of /proc/cpuinfo."""

    name: str
    cpu_flags: tuple[str, ...]
    compiler_flags: tuple[str, ...]


AVX512 = InstructionSet(
    "avx512",
    ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma"),
    (*(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16", "vnni")), "-mfma"),
)
AVX2 = InstructionSet("avx2", ("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c"))
INSTRUCTION_SETS = (AVX512, AVX2)
"""The best one first."""

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


def load_library(instructions: InstructionSet | None = None) -> ctypes.CDLL:
    """The compiled kernels, from the cache or compiled now (some seconds); None takes the best that the CPU has.

    Raises NativeUnavailable without the CPU's instructions, a working compiler or a place to keep the result.
    """
    cpu = _cpu_flags()
    chosen = instructions or best_instructions(cpu)
    try:
        library = ctypes.CDLL(str(_compiled(cpu, chosen)))
    except OSError as error:
        raise NativeUnavailable(f"the native kernels can not be built or loaded: {error}") from None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.evenhand_workspace_bytes.argtypes = [_pointer, _pointer, _int]
    library.evenhand_workspace_bytes.restype = ctypes.c_int64
    return library


def best_instructions(cpu: frozenset[str] | None = None) -> InstructionSet:
    """The best instruction set of this CPU. Raises NativeUnavailable, naming what it lacks, when it has none."""
    cpu = _cpu_flags() if cpu is None else cpu
    for instructions in INSTRUCTION_SETS:
        missing = [flag for flag in instructions.cpu_flags if flag not in cpu]
        if not missing:
            return instructions
    raise NativeUnavailable(f"the CPU has no {', '.join(missing)}")


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


def _compiled(cpu: frozenset[str], instructions: InstructionSet) -> Path:
    import fcntl

    files = sorted(SOURCES.iterdir())
    flags = [*_COMPILER_FLAGS, *instructions.compiler_flags]
    parts = [*(file.read_bytes() for file in files), " ".join([*flags, *sorted(cpu)]).encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    directory = cache_directory()
    library = directory / f"step-{instructions.name}-{key}.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    # Engines of one machine start together: one compiles, the others wait for it.
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile([str(file) for file in files if file.suffix == ".cpp"], flags, library)
    return library


def _compile(sources: list[str], flags: list[str], library: Path) -> None:
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise NativeUnavailable(f"there is no C++ compiler ({name})")
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        output = Path(directory) / library.name
        command = [compiler, *flags, "-o", str(output), *sources]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            raise NativeUnavailable(f"{compiler} took longer than {_COMPILE_SECONDS} s") from None
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise NativeUnavailable(f"{compiler} failed: {first}")
        os.replace(output, library)


def main() -> None:
    """Compile the kernels ahead of the first start. Says what will run, and never fails."""
    try:
        load_library()
        print(f"native kernels: {best_instructions().name}, in {cache_directory()}")
    except NativeUnavailable as reason:
        print(f"no native kernels, torch runs instead: {reason}")


if __name__ == "__main__":
    main()
