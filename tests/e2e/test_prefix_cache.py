"""The prefix cache is a tenant's own: nobody else's answer, usage or time tells of it (cases of group D)."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


def ask(server: Any, tenant: str, prompt: Any, max_tokens: int = 4) -> Any:
    with server.openai(tenant) as client:
        return client.completions.create(
            model=server.model, prompt=prompt, max_tokens=max_tokens, temperature=0
        )


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_D01_a_prefix_is_cached_for_its_own_tenant_alone(real: Any) -> None:
    secret = f"The password of {uuid.uuid4().hex} is {uuid.uuid4().hex}. " * 8
    assert cached(ask(real, "alpha", secret)) == 0
    for number in range(3):
        other = ask(real, "beta", secret + str(number))
        random = ask(real, "beta", f"{uuid.uuid4().hex} " * 20)
        assert cached(random) == 0
        # From the second time on the attacker sees his own prefix, never the victim's.
        assert (cached(other) > 0) is (number > 0)
    assert cached(ask(real, "alpha", secret)) > 100


def test_D03_prompts_whose_weak_hashes_agree_do_not_share(real: Any) -> None:
    """Neighbours swapped, a step of 31 against one of 1, the same tokens in another order."""
    base = [(index * 7919) % 40_000 + 1000 for index in range(96)]
    variants = []
    for position in (3, 20, 50):
        swapped = [*base]
        swapped[position], swapped[position + 1] = swapped[position + 1], swapped[position]
        shifted = [*base]
        shifted[position], shifted[position + 1] = shifted[position] + 1, shifted[position + 1] - 31
        variants += [swapped, shifted]
    variants.append(base[::-1])
    first = ask(real, "alpha", base, 8).choices[0].text
    for variant in variants:
        cold = ask(real, "beta", variant, 8)  # beta's cache has none of it
        warm = ask(real, "alpha", variant, 8)
        shared = next(i for i, (a, b) in enumerate(zip(base, variant, strict=True)) if a != b)
        assert cached(warm) <= shared
        assert warm.choices[0].text == cold.choices[0].text
    assert ask(real, "alpha", base, 8).choices[0].text == first
