"""Driver of OpenVINO GenAI's continuous batching: `python openvino_engine.py DIRECTORY fp16|int8 cache|no-cache`.

DIRECTORY is the exported Hugging Face model; its conversion is kept beside it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import protocol


def load() -> protocol.Run:
    import numpy as np
    import openvino
    import openvino_genai

    source, weights = Path(sys.argv[1]), sys.argv[2]
    converted = source.with_name(f"{source.name}-openvino-{weights}")
    if not (converted / "openvino_model.xml").exists():
        command = [
            "optimum-cli",
            "export",
            "openvino",
            "--model",
            str(source),
            "--task",
            "text-generation-with-past",
        ]
        subprocess.run(
            [
                str(Path(sys.executable).with_name(command[0])),
                *command[1:],
                "--weight-format",
                weights,
                str(converted),
            ],
            check=True,
        )
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = sys.argv[3] == "cache"
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(converted), scheduler, "CPU")

    def run(prompts: list[list[int]], limits: list[int]) -> protocol.Answer:
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        configs = []
        for n in limits:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = n, True, False
            configs.append(config)
        results = pipeline.generate(inputs, configs)
        return protocol.Answer([len(result.m_generation_ids[0]) for result in results])

    return run


if __name__ == "__main__":
    protocol.serve("openvino-genai", sys.argv[2], load)
