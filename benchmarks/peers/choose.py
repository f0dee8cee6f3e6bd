"""From the names on the command line to started drivers' commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.compare import Peer
from benchmarks.workload import BenchmarkError
from engine_actor.build import available_cores

_SLOTS = 32
_MODEL = "model"
_ALLOWED = "openvino-fp16, openvino-int8, vllm, transformers, llamacpp=MODEL.gguf, llamacpp-bench=MODEL.gguf"


@dataclass(frozen=True)
class Choice:
    """What the command line says. `budget` is the token budget of our engine, None its default."""

    environments: Path
    source: str
    quantization: str = "none"
    budget: int | None = None
    prefix_cache: bool = False
    llama_server: Path | None = None


def choose(names: Sequence[str], choice: Choice) -> list[Peer]:
    """Our engine first, then the named ones; the model is exported for them once.

    Raises BenchmarkError for a name that is not known, has no prefix cache but shall, or whose environment is missing.
    """
    model = choice.environments.resolve() / _MODEL
    cache = "cache" if choice.prefix_cache else "no-cache"
    budget = "default" if choice.budget is None else str(choice.budget)
    ours = (choice.source, choice.quantization, budget, cache)
    peers = [Peer("evenhand", sys.executable, "evenhand_engine.py", ours)]
    for name in names:
        kind, _, argument = name.partition("=")
        if name in ("openvino-fp16", "openvino-int8"):
            python = _python(choice.environments, "openvino")
            weights = name.removeprefix("openvino-")
            peers.append(Peer(name, python, "openvino_engine.py", (str(model), weights, cache)))
        elif name == "vllm":
            python = _python(choice.environments, "vllm")
            peers.append(Peer(name, python, "vllm_engine.py", (str(model), cache)))
        elif name == "transformers" and not choice.prefix_cache:
            peers.append(Peer(name, sys.executable, "transformers_engine.py", (str(model),)))
        elif kind == "llamacpp" and argument:
            arguments = (str(_server(choice)), argument, str(available_cores()), str(_SLOTS), cache)
            label = f"llama.cpp {Path(argument).stem}"
            peers.append(Peer(label, sys.executable, "llamacpp_engine.py", arguments))
        elif kind == "llamacpp-bench" and argument and not choice.prefix_cache:
            binary = _server(choice).with_name("llama-batched-bench")
            label = f"llama.cpp batched-bench {Path(argument).stem}"
            shape = (str(binary), argument, str(available_cores()))
            peers.append(Peer(label, sys.executable, "llamacpp_bench.py", shape))
        else:
            without = (
                " (transformers and llamacpp-bench without --prefix-cache)" if choice.prefix_cache else ""
            )
            raise BenchmarkError(f"--peer {name!r} is not allowed; allowed: {_ALLOWED}{without}")
    if not (model / "model.safetensors").exists():
        from benchmarks.peers.export import export

        export(choice.source, model)
    return peers


def _python(environments: Path, name: str) -> str:
    python = environments.resolve() / name / "bin" / "python"
    if not python.exists():
        raise BenchmarkError(f"{python} does not exist; `make bench-peers` makes it")
    return str(python)


def _server(choice: Choice) -> Path:
    if choice.llama_server is None:
        raise BenchmarkError("llamacpp needs --llama-server, the path of its binary")
    return choice.llama_server
