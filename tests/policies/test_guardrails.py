"""Protection lines: what is given up when one is crossed, in which order, and when it comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_building import report, ticket

from policies.guardrails import (
    CLEAR_SECONDS,
    MOST_STEPS,
    STEP_SECONDS,
    WINDOW_SECONDS,
    Guardrails,
    ProtectionLines,
)
from policies.tickets import Grant


def grant(request: str, queued_ms: float = 0.0) -> Grant:
    return Grant(request, 0, 1, "e0", 1, queued_ms)


def waits(rails: Guardrails, milliseconds: float, start: float, seconds: float) -> float:
    """Ten grants a second that waited so long, evaluated each time; the time after them."""
    for tick in range(int(seconds * 10)):
        now = start + tick / 10
        rails.observe_grant(grant(f"r{now}", milliseconds), now)
        rails.evaluate(now)
    return start + seconds


def with_lines(**lines: float) -> Guardrails:
    rails = Guardrails()
    rails.lines = ProtectionLines(**lines)
    rails.observe_report(report(), 0.0)
    return rails


def test_batch_goes_first_then_long_prompts_then_the_size_of_batches() -> None:
    rails = with_lines(queue_wait_p95_ms=500.0)
    batch, long = ticket("b", service_class="batch"), ticket("l", input_tokens=1600)
    seen: list[tuple[bool, bool, int, int]] = []
    now = 0.0
    while len(seen) < MOST_STEPS + 1:
        limited = rails.observe_report(report(), now)
        state = (
            rails.shed(batch) is not None,
            rails.shed(long) is not None,
            limited.max_num_seqs,
            limited.max_num_batched_tokens,
        )
        assert rails.shed(ticket("n")) is None, "ordinary requests are never shed"
        if not seen or seen[-1] != state:
            seen.append(state)
        now = waits(rails, 900.0, now, 1.0)
    assert seen == [
        (False, False, 8, 100),
        (True, False, 8, 100),
        (True, True, 8, 100),
        (True, True, 6, 75),
        (True, True, 4, 56),
        (True, True, 3, 42),
        (True, True, 2, 31),
    ]
    refusal = rails.shed(batch)
    assert refusal is not None and refusal.code == "overloaded" and "queue_wait_p95_ms" in refusal.message
    waits(rails, 900.0, now, 30.0)
    assert rails.step == MOST_STEPS


def test_it_steps_back_only_when_well_below_the_line_for_a_while() -> None:
    rails = with_lines(queue_wait_p95_ms=500.0)
    now = waits(rails, 900.0, 0.0, STEP_SECONDS + 2.0)
    assert rails.step == 2
    now = waits(rails, 450.0, now, WINDOW_SECONDS + 3 * CLEAR_SECONDS)
    assert rails.step == 2, "90 % of the line is no reason to take more"
    step = rails.step
    now = waits(rails, 100.0, now, WINDOW_SECONDS + CLEAR_SECONDS + 1.0)
    assert rails.step == step - 1
    waits(rails, 100.0, now, (MOST_STEPS + 1) * CLEAR_SECONDS)
    assert rails.step == 0


def test_a_quiet_pool_recovers() -> None:
    rails = with_lines(queue_wait_p95_ms=500.0)
    now = waits(rails, 900.0, 0.0, 3.0)
    assert rails.step == 1
    for second in range(int(WINDOW_SECONDS + 2 * CLEAR_SECONDS)):
        rails.evaluate(now + second)
    assert rails.step == 0


@pytest.mark.parametrize("crossed", [True, False])
def test_every_line_has_its_measure(crossed: bool) -> None:
    factor = 2.0 if crossed else 0.5
    for name, line in (
        ("ttft_p95_ms", 1000.0),
        ("itl_p95_ms", 50.0),
        ("queue_wait_p95_ms", 300.0),
        ("kv_cache_utilization_max", 0.4),
        ("admission_reject_rate_max", 0.2),
    ):
        rails = with_lines(**{name: line})
        for index in range(30):
            now = index / 10
            request = f"r{index}"
            rails.observe_grant(grant(request, factor * 300.0), now)
            rails.observe_offer(crossed and index % 2 == 0, now)
            rails.observe_report(
                report(
                    free_pages=200 if crossed else 800,
                    decode_step_seconds=factor * 0.05,
                    first_tokens=((request, 0),),
                ),
                now + factor * 1.0 - factor * 0.3,
            )
        rails.evaluate(5.0)
        assert rails.step == (1 if crossed else 0), name
        assert rails.crossed == (name if crossed else None)


def test_without_lines_nothing_is_ever_given_up() -> None:
    rails = Guardrails()
    waits(rails, 1e6, 0.0, 20.0)
    assert rails.step == 0
    original = report()
    assert rails.observe_report(original, 20.0) is original


@given(
    st.lists(st.tuples(st.floats(0, 3000), st.floats(0, 4)), max_size=80),
    st.integers(1, 300),
    st.integers(1, 9000),
)
def test_never_a_larger_batch_and_never_none(
    history: list[tuple[float, float]], seqs: int, tokens: int
) -> None:
    rails = with_lines(queue_wait_p95_ms=500.0, ttft_p95_ms=900.0)
    now = 0.0
    for waited, pause in history:
        now += pause
        for number in range(20):
            rails.observe_grant(grant(f"{now}/{number}", waited), now)
        before = rails.step
        assert abs(rails.evaluate(now) - before) <= 1
        assert 0 <= rails.step <= MOST_STEPS
        limited = rails.observe_report(report(max_num_seqs=seqs, max_num_batched_tokens=tokens), now)
        assert 1 <= limited.max_num_seqs <= seqs
        assert 1 <= limited.max_num_batched_tokens <= tokens
