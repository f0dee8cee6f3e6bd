"""The kernel tests once more with AddressSanitizer and UndefinedBehaviorSanitizer in the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = ("test_native_kernels.py", "test_native_shapes.py", "test_native_executor.py")
OF_OTHER_THINGS = "compiler or reused or kl_from or engine_takes or kernels_that_compute or transformers"

READS_BEYOND = """
import torch
import sanitized_kernels
from engine_actor.native.build import load_library
sanitized_kernels.use()
x, out = torch.ones(64), torch.empty(80, dtype=torch.bfloat16)
load_library().evenhand_rms_norm_row(x.data_ptr(), torch.ones(80).data_ptr(), 1e-5, 80, out.data_ptr())
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """For a process that loads kernels with sanitizers, which are compiled once for all tests."""
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True)
    runtime = found.stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"{compiler} has no AddressSanitizer")
    settings = {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("sanitized")),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    return os.environ | settings


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_kernels_read_and_write_nothing_that_is_not_theirs(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "sanitized_kernels"]
    files = [str(HERE / file) for file in FILES]
    done = subprocess.run(
        [*command, "--timeout=0", *files, "-k", f"not ({OF_OTHER_THINGS})"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_read_beyond_an_array_would_be_seen(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READS_BEYOND], env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr[-4000:]
