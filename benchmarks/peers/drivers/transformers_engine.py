"""Driver of transformers' continuous batching: `python transformers_engine.py DIRECTORY`."""

from __future__ import annotations

import sys

import protocol


def load() -> protocol.Run:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.bfloat16, attn_implementation="paged|sdpa"
    ).eval()
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)

    def run(prompts: list[list[int]], limits: list[int]) -> protocol.Answer:
        manager = model.init_continuous_batching(generation_config=config)
        manager.start()
        names = [manager.add_request(ids, max_new_tokens=n) for ids, n in zip(prompts, limits, strict=True)]
        counts: dict[str, int] = {}
        while len(counts) < len(names):
            result = manager.get_result(timeout=600)
            if result is not None and result.is_finished():
                counts[result.request_id] = len(result.generated_tokens)
        manager.stop(block=True)
        return protocol.Answer([counts[name] for name in names])

    return run


if __name__ == "__main__":
    protocol.serve("transformers", "bfloat16", load)
