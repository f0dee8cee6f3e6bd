"""From the names on the command line to started drivers' commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.compare import Peer
from benchmarks.workload import BenchmarkError
from engine_actor.build import available_cores

_SLOTS = 32
_MODEL = "model"
_ALLOWED = "openvino-fp16, openvino-int8, vllm, transformers, llamacpp=MODEL.gguf"


def choose(
    names: Sequence[str], environments: Path, source: str, quantization: str, llama_server: Path | None
) -> list[Peer]:
    """Our engine first, then the named ones; the model is exported for them once.

    Raises BenchmarkError for a name that is not known or whose environment is missing.
    """
    model = environments.resolve() / _MODEL
    peers = [Peer("evenhand", sys.executable, "evenhand_engine.py", (source, quantization))]
    for name in names:
        kind, _, argument = name.partition("=")
        if name in ("openvino-fp16", "openvino-int8"):
            python = _python(environments, "openvino")
            peers.append(
                Peer(name, python, "openvino_engine.py", (str(model), name.removeprefix("openvino-")))
            )
        elif name == "vllm":
            peers.append(Peer(name, _python(environments, "vllm"), "vllm_engine.py", (str(model),)))
        elif name == "transformers":
            peers.append(Peer(name, sys.executable, "transformers_engine.py", (str(model),)))
        elif kind == "llamacpp" and argument:
            if llama_server is None:
                raise BenchmarkError("llamacpp needs --llama-server, the path of its binary")
            arguments = (str(llama_server), argument, str(available_cores()), str(_SLOTS))
            peers.append(
                Peer(f"llama.cpp {Path(argument).stem}", sys.executable, "llamacpp_engine.py", arguments)
            )
        else:
            raise BenchmarkError(f"--peer {name!r} is not allowed; allowed: {_ALLOWED}")
    if not (model / "model.safetensors").exists():
        from benchmarks.peers.export import export

        export(source, model)
    return peers


def _python(environments: Path, name: str) -> str:
    python = environments.resolve() / name / "bin" / "python"
    if not python.exists():
        raise BenchmarkError(f"{python} does not exist; `make bench-peers` makes it")
    return str(python)
