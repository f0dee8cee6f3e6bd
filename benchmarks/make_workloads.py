"""Makes the workload files: `python -m benchmarks.make_workloads`. The same files come out every time.

Lengths are in tokens of the default model. Prompts are cut from the texts in workloads/texts.jsonl; no text
is used twice in a workload, so that the prefix cache has nothing to find.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cli import DEFAULT_SOURCE
from engine_actor.loading.source import resolve_source
from serve_app.text.load import load_tokenizer
from serve_app.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "workloads"
SEED = 48


class Texts:
    """Prompts of given lengths out of the source texts, in a shuffled order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        lines = (FOLDER / "texts.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        random.Random(SEED).shuffle(texts)
        self._texts: Iterator[str] = iter(texts)
        self._tokenizer = tokenizer

    def prompt(self, tokens: int, prefix: str = "") -> str:
        """`prefix` and the next texts, cut so that they make exactly `tokens` tokens."""
        text = prefix + next(self._texts)
        while len(ids := self._tokenizer.encode_text(text)) < tokens:
            text += "\n\n" + next(self._texts)
        cut = self._tokenizer.decode(ids[:tokens])
        # Cut text may be split into tokens in another way at the cut: then other texts have to do.
        return cut if len(self._tokenizer.encode_text(cut)) == tokens else self.prompt(tokens, prefix)


def lognormal_lengths(
    rng: np.random.Generator, count: int, total: int, sigma: float, low: int, high: int
) -> list[int]:
    """`count` lognormal lengths between `low` and `high`, scaled to a sum of about `total`."""
    draws = rng.lognormal(0.0, sigma, count)
    scale = total / draws.sum()
    for _ in range(50):
        lengths = np.clip(np.rint(draws * scale), low, high)
        scale *= total / lengths.sum()
    return [int(length) for length in lengths]


def mixed(texts: Texts) -> list[dict[str, Any]]:
    """48 requests at once, short and long ones mixed."""
    rng = np.random.default_rng(SEED)
    prompts = lognormal_lengths(rng, 48, 8000, 0.9, 16, 700)
    outputs = lognormal_lengths(rng, 48, 3460, 0.7, 8, 250)
    return [
        {"prompt": texts.prompt(prompt), "max_tokens": output}
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def long_among_streams(texts: Texts) -> list[dict[str, Any]]:
    """Eight streams decode; a long prompt comes among them after two seconds."""
    streams = [{"prompt": texts.prompt(32), "max_tokens": 400, "group": "stream"} for _ in range(8)]
    return [*streams, {"prompt": texts.prompt(1500), "max_tokens": 32, "arrival_s": 2.0, "group": "long"}]


def single(texts: Texts) -> list[dict[str, Any]]:
    """One stream."""
    return [{"prompt": texts.prompt(106), "max_tokens": 128}]


def decode_heavy(texts: Texts) -> list[dict[str, Any]]:
    """32 streams with short prompts."""
    return [{"prompt": texts.prompt(128), "max_tokens": 64} for _ in range(32)]


def prefill_heavy(texts: Texts) -> list[dict[str, Any]]:
    """Long prompts, short answers."""
    return [{"prompt": texts.prompt(750), "max_tokens": 16} for _ in range(16)]


def prefill1500(texts: Texts) -> list[dict[str, Any]]:
    """One long prompt and its first token."""
    return [{"prompt": texts.prompt(1500), "max_tokens": 1}]


def shared_prefix(texts: Texts) -> list[dict[str, Any]]:
    """The same 1,000 tokens, then 32 of each request's own. The first request finds nothing in the cache."""
    prefix = texts.prompt(998) + "\n\n"
    return [
        {
            "prompt": texts.prompt(1032, prefix),
            "max_tokens": 1,
            "group": "warm" if number else "cold",
        }
        for number in range(16)
    ]


WORKLOADS = {
    "mixed48": mixed,
    "decode_heavy": decode_heavy,
    "prefill_heavy": prefill_heavy,
    "prefill1500": prefill1500,
    "shared_prefix": shared_prefix,
    "long_among_streams": long_among_streams,
    "single": single,
}


def main() -> None:
    tokenizer = load_tokenizer(resolve_source(DEFAULT_SOURCE))
    for name, make in WORKLOADS.items():
        rows = make(Texts(tokenizer))
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (FOLDER / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        prompts = [len(tokenizer.encode_text(row["prompt"])) for row in rows]
        outputs = [row["max_tokens"] for row in rows]
        print(f"{name}: {len(rows)} requests; prompts {_summary(prompts)}; outputs {_summary(outputs)}")


def _summary(lengths: list[int]) -> str:
    return f"{min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all"


if __name__ == "__main__":
    main()
