"""The prefix cache is a tenant's own: nobody else's answer, usage or time tells of it (cases of group D)."""

from __future__ import annotations

import http.client
import json
import math
import random
import string
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
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


PREFIX = 64  # tokens: four pages, and as much as the stub engine takes in one step
PAIRS = 5000
TOGETHER = 25  # secrets that the victim sends in one request


class Asker:
    """One tenant on one connection that stays open."""

    def __init__(self, server: Any, tenant: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._headers = server.headers(tenant, **{"Content-Type": "application/json"})

    def post(self, path: str, **fields: Any) -> tuple[float, Any]:
        """Milliseconds to the answer, and the answer."""
        body = json.dumps({"model": "default", **fields})
        begin = time.perf_counter()
        self._connection.request("POST", path, body, self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        elapsed = time.perf_counter() - begin
        assert answer.status == 200, content
        return 1000 * elapsed, json.loads(content)

    def ask(self, prompt: list[int] | list[list[int]]) -> tuple[float, int]:
        """Milliseconds to the answer, which is one token, and the cached tokens it tells of."""
        milliseconds, answer = self.post("/v1/completions", prompt=prompt, max_tokens=1)
        return milliseconds, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def area(first: list[float], second: list[float]) -> tuple[float, float]:
    """Area under the ROC curve of two times per pair, and its standard error.

    The area is the probability that a time of `first` is below one of `second`. The error is DeLong's
    (Biometrics 44, 1988) from the placements of both, kept together by pair: times of a pair are not independent.
    """
    a, b = np.array(first), np.array(second)
    above = 1 - (np.searchsorted(np.sort(b), a) + np.searchsorted(np.sort(b), a, "right")) / (2 * len(b))
    below = (np.searchsorted(np.sort(a), b) + np.searchsorted(np.sort(a), b, "right")) / (2 * len(a))
    return float(above.mean()), float((above + below).std(ddof=1) / math.sqrt(len(a)))


def interval(times: dict[str, list[float]], errors: float = 1.96) -> tuple[float, float]:
    """The confidence interval, 95 % unless told, of the area of "theirs" against "nobody's"."""
    theirs, error = area(times["theirs"], times["nobody's"])
    low, high = theirs - errors * error, theirs + errors * error
    medians = {name: round(float(np.median(values)), 3) for name, values in times.items()}
    print(f"area {theirs:.4f}, within {errors} errors [{low:.4f}, {high:.4f}]; medians in ms {medians}")
    return low, high


def tells_nothing(sample: Callable[[int], tuple[float, float]]) -> bool:
    """Whether the interval of a sample (by its seed) contains 0.5.

    Of a sound cache one interval in twenty does not. So, laid down beforehand: where the first pairs say that one of
    the two is quicker, as many others, drawn anew, decide whether it is. Sound caches fail once in 800 runs.
    """
    low, high = sample(1)
    if low <= 0.5 <= high:
        return True
    low_again, high_again = sample(2)
    return low_again <= 0.5 if low > 0.5 else high_again >= 0.5


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_D01_no_time_tells_of_another_tenants_prefix(stub: Any) -> None:
    """Over HTTP, through gateway, fair queue and engine."""

    def sample(seed: int) -> tuple[float, float]:
        rng = random.Random(seed)
        victim, attacker = Asker(stub, "alpha"), Asker(stub, "beta")
        times: dict[str, list[float]] = {name: [] for name in ("theirs", "nobody's", "own", "new")}

        def fresh() -> list[int]:
            return [rng.randrange(256) for _ in range(PREFIX + 1)]

        secrets: list[list[int]] = []
        for pair in range(PAIRS):
            if not secrets:
                secrets = [fresh() for _ in range(TOGETHER)]
                victim.ask(secrets)
            secret = secrets.pop()
            trials = [("theirs", attacker, secret), ("nobody's", attacker, fresh())]
            if pair < PAIRS // 20:
                trials += [("own", victim, secret), ("new", victim, fresh())]
            rng.shuffle(trials)
            for name, asker, prompt in trials:
                milliseconds, cached = asker.ask(prompt)
                times[name].append(milliseconds)
                assert cached == (PREFIX if name == "own" else 0)
        assert area(times["own"], times["new"])[0] > 0.8, "the tenant's own prefix is served from the cache"
        return interval(times)

    assert tells_nothing(sample), "the time tells of another's prefix"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_D01_no_time_tells_of_another_tenants_words(real: Any) -> None:
    """What the gateway knows of texts: a word that somebody has sent before takes as long to tokenise as a new one.

    A cache of words is full one day and then tells no more, so there is no second sample: the first must agree with
    0.5 within 3.2 errors, which a tokenizer without a cache fails once in 700 runs.
    """
    rng = random.Random(1)
    victim, attacker = Asker(real, "alpha"), Asker(real, "beta")
    times: dict[str, list[float]] = {"theirs": [], "nobody's": []}

    def fresh() -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=200))

    secrets: list[str] = []
    for _ in range(PAIRS):
        if not secrets:
            secrets = [fresh() for _ in range(TOGETHER)]
            victim.post("/tokenize", prompt=" ".join(secrets))
        trials = [("theirs", secrets.pop()), ("nobody's", fresh())]
        rng.shuffle(trials)
        for name, word in trials:
            times[name].append(attacker.post("/tokenize", prompt=f"a {word}")[0])
    low, high = interval(times, errors=3.2)
    assert low <= 0.5 <= high, "the time tells of another's words"


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
