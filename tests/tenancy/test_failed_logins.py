"""Failed logins: bounded per source, in time and in memory, and nobody else's business."""

from __future__ import annotations

import pytest

from tenancy import failed_logins
from tenancy.failed_logins import FailedLogins

LIMIT = 5


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def logins(clock: Clock) -> FailedLogins:
    return FailedLogins(clock)


def attempt(logins: FailedLogins, source: str, tenant: str | None = None) -> float:
    """One login as the gateway treats it; what it has to wait."""
    wait = logins.wait_s(source, tenant, LIMIT)
    if wait == 0.0 and tenant is None:
        logins.failed(source)
    elif wait == 0.0 and tenant is not None:
        logins.accepted(source, tenant)
    return wait


def test_e13_no_minute_sees_more_failures_than_the_limit(logins: FailedLogins, clock: Clock) -> None:
    failed: list[float] = []
    for _ in range(2000):
        clock.now += 0.25
        wait = attempt(logins, "a")
        if wait == 0.0:
            failed.append(clock.now)
        else:
            assert wait == pytest.approx(failed[-LIMIT] + 60 - clock.now), "and it is told the exact wait"
    for first in failed:
        assert sum(first <= t < first + 60 for t in failed) <= LIMIT
    assert len(failed) > 3 * LIMIT, "and the next minute is a new one"


def test_e13_others_are_let_in(logins: FailedLogins, clock: Clock) -> None:
    assert attempt(logins, "office", "alpha") == 0.0
    for _ in range(LIMIT):
        attempt(logins, "office")
    assert attempt(logins, "office") > 0.0
    assert attempt(logins, "home", "alpha") == attempt(logins, "home") == 0.0, "another source"
    assert attempt(logins, "office", "alpha") == 0.0, "a tenant that works from there"
    assert attempt(logins, "office", "beta") > 0.0, "a guess that hits is not told from one that does not"
    clock.now += 60
    assert attempt(logins, "office", "beta") == 0.0


def test_e13_memory_is_bounded(logins: FailedLogins, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_logins, "MAX_FAILURES", 100)
    monkeypatch.setattr(failed_logins, "MAX_KNOWN", 10)
    for number in range(1000):
        attempt(logins, f"source{number}")
        attempt(logins, f"source{number}", "alpha")
        attempt(logins, "steady")
        clock.now += 0.001
    assert sum(map(len, logins._failures.values())) == logins._total <= 100
    assert len(logins._known) == 10
    assert "source0" not in logins._failures and "source999" in logins._failures
    clock.now += 60
    assert attempt(logins, "steady") == 0.0
    assert logins._total == sum(map(len, logins._failures.values()))
