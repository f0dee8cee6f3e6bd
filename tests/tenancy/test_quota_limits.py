"""What the limits let through, on a real server: storms, all or nothing, exact waits, exact refunds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import PATIENT, ClockedStore, demand, eventually, refused, take, tenant, usage
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from tenancy.models import Limits, Price, Tenant
from tenancy.quota import LEASE_MS, Hold, QuotaStore, Used
from tenancy.redis import connect

pytestmark = pytest.mark.asyncio
MINUTE_US = 60_000_000
DAY_US = 86_400_000_000


def remaining(hold: Hold) -> int | None:
    return None if hold.requests is None else hold.requests.remaining


@pytest.mark.parametrize(
    "limits", [{"max_concurrent_requests": 5}, {"requests_per_minute": 5}, {"tokens_per_minute": 219}]
)
async def test_e01_a_storm_gets_exactly_the_limit(
    redis_url: str, redis: Redis, limits: dict[str, int]
) -> None:
    clients = [connect(redis_url + PATIENT) for _ in range(3)]  # three gateways
    stores = [QuotaStore(client) for client in clients]
    for repeat in range(5):
        who = tenant(f"storm{repeat}", **limits)
        answers = await asyncio.gather(
            *(
                stores[i % 3].reserve(who, demand(request_id=f"r{i}", input_tokens=30, output_tokens=10))
                for i in range(50)
            )
        )
        assert sum(isinstance(answer, Hold) for answer in answers) == 5
    for client in clients:
        await client.aclose()


async def test_five_a_minute_come_at_once_and_the_sixth_is_told_the_exact_wait(clocked: ClockedStore) -> None:
    who = tenant(requests_per_minute=5)
    for n in range(5):
        hold = await take(clocked, who)
        assert hold.requests is not None
        assert (hold.requests.limit, hold.requests.remaining) == (5, 4 - n)
        assert hold.requests.reset_ms == 60_000
        await clocked.advance(1_000_000)
    refusal = await refused(clocked, who)
    assert (refusal.code, refusal.limit_name, refusal.scope, refusal.limit) == (
        "rate_limit_exceeded",
        "requests_per_minute",
        "tenant",
        5,
    )
    assert refusal.retry_after_ms == 55_000
    assert refusal.requests is not None
    assert (refusal.requests.remaining, refusal.requests.reset_ms) == (0, 59_000)
    await clocked.advance(54_999_999)
    assert (await refused(clocked, who)).retry_after_ms == 1
    await clocked.advance(1)
    await take(clocked, who)
    assert (await refused(clocked, who)).retry_after_ms == 1_000


async def test_e14_waiting_as_told_on_the_real_clock_succeeds(store: QuotaStore) -> None:
    who = tenant(requests_per_minute=300, requests_burst=1)
    await take(store, who)
    refusal = await refused(store, who)
    assert refusal.retry_after_ms is not None and 0 < refusal.retry_after_ms <= 200
    await asyncio.sleep(refusal.retry_after_ms / 1000)
    await take(store, who)


async def test_e14_each_limit_is_named_with_its_own_wait(clocked: ClockedStore) -> None:
    await clocked.advance(1_000_000)  # 2023-11-14, 22:13:21 UTC
    cases: list[tuple[dict[str, Any], str, str, int]] = [
        ({"requests_per_minute": 1}, "rate_limit_exceeded", "requests_per_minute", 60_000),
        ({"tokens_per_minute": 100}, "tokens_limit_exceeded", "tokens_per_minute", 60_000),
        ({"max_concurrent_requests": 1}, "concurrency_limit_exceeded", "max_concurrent_requests", 1_000),
        ({"tokens_per_day": 100}, "budget_exceeded", "tokens_per_day", 6_399_000),
        ({"tokens_per_month": 100}, "budget_exceeded", "tokens_per_month", 6_399_000 + 16 * 86_400_000),
    ]
    for index, (limits, code, name, wait) in enumerate(cases):
        who = tenant(f"t{index}", **limits)
        await take(clocked, who, input_tokens=60)
        refusal = await refused(clocked, who, input_tokens=60)
        assert (refusal.code, refusal.limit_name, refusal.retry_after_ms) == (code, name, wait)
    # Of several, the one that takes longest: a retry after less would be refused again.
    who = tenant("both", requests_per_minute=1, tokens_per_day=100)
    await take(clocked, who, input_tokens=60)
    assert (await refused(clocked, who, input_tokens=60)).limit_name == "tokens_per_day"


async def test_a_request_that_can_never_fit_is_told_so(store: QuotaStore) -> None:
    who = tenant(tokens_per_minute=50, max_concurrent_requests=4, tokens_per_day=80)
    assert (await refused(store, who, slots=5)).retry_after_ms is None
    assert (await refused(store, who, input_tokens=51)).retry_after_ms is None
    assert (await refused(store, who, input_tokens=81)).retry_after_ms is None
    await take(store, who, input_tokens=20, output_tokens=60, slots=4)  # an estimate alone refuses nobody


async def test_every_scope_holds(store: QuotaStore) -> None:
    who = Tenant(
        id="alpha",
        limits=Limits(max_concurrent_requests=4),
        model_limits={"m": Limits(max_concurrent_requests=3)},
        class_limits={"batch": Limits(max_concurrent_requests=1)},
    )

    async def scope(key: str, **fields: Any) -> str:
        answer = await store.reserve(
            who, demand(**fields), key_id=key, key_limits=Limits(max_concurrent_requests=2)
        )
        return "" if isinstance(answer, Hold) else answer.scope

    assert await scope("k1", service_class="batch") == ""
    assert await scope("k1", service_class="batch") == "tenant for batch requests"
    assert await scope("k1") == ""
    assert await scope("k1") == "API key"
    assert await scope("k2") == ""
    assert await scope("k2") == "tenant for this model"
    assert await scope("k2", model="other") == ""
    assert await scope("k3", model="other") == "tenant"


async def test_e02_a_refusal_by_one_limit_spends_nothing_of_the_others(
    store: QuotaStore, redis: Redis
) -> None:
    who = tenant(requests_per_minute=2, max_concurrent_requests=1, tokens_per_minute=100, tokens_per_day=1000)
    first = await take(store, who, input_tokens=10)
    before = [await redis.dump(f"eh:v2:{{alpha}}:{name}") for name in ("windows", "counts", "holds")]
    for _ in range(3):
        refusal = await refused(store, who, input_tokens=10)
        assert refusal.code == "concurrency_limit_exceeded" and refusal.limit == 1
        assert refusal.requests is not None and refusal.requests.remaining == 1
        assert refusal.tokens is not None and refusal.tokens.remaining == 90
    assert before == [await redis.dump(f"eh:v2:{{alpha}}:{name}") for name in ("windows", "counts", "holds")]
    await store.settle(first, Used(10))
    await take(store, who, input_tokens=10)
    assert (await refused(store, who)).code in ("rate_limit_exceeded", "concurrency_limit_exceeded")


@pytest.mark.parametrize("limits", [{}, {"requests_burst": 10}])
async def test_e10_no_window_passes_the_limit_and_all_of_it_can_be_used(
    clocked: ClockedStore, limits: dict[str, int]
) -> None:
    who = tenant(requests_per_minute=60, **limits)
    admitted: list[int] = []
    for _ in range(1500):
        await clocked.advance(100_000)
        if isinstance(await clocked.reserve(who, demand()), Hold):
            admitted.append(clocked.now_us)
    for start in admitted:
        assert sum(start <= t < start + MINUTE_US for t in admitted) <= 60
        if limits:
            assert sum(start <= t < start + 10_000_000 for t in admitted) <= 10
    assert len(admitted) >= 147, "a full minute at once and one a second, less what merging in the log costs"


async def test_a_large_limit_keeps_a_small_log(clocked: ClockedStore, redis: Redis) -> None:
    who = tenant(requests_per_minute=5000)
    for _ in range(1200):
        await clocked.advance(50_000)
        await take(clocked, who)
    hold = await take(clocked, who)
    assert remaining(hold) is not None and 5000 - 1201 <= (remaining(hold) or 0) <= 5000 - 1188
    assert len(await redis.hget("eh:v2:{alpha}:windows", "tenant/requests_per_minute")) < 2000


async def test_settle_and_void_work_once(clocked: ClockedStore, redis: Redis) -> None:
    who = tenant(requests_per_minute=4, max_concurrent_requests=4, tokens_per_day=1000)
    settled, voided, _kept = [await take(clocked, who, input_tokens=100) for _ in range(3)]
    for _ in range(2):
        await clocked.settle(settled, Used(7, 0, 3))
        await clocked.void(settled)
        await clocked.void(voided)
        await clocked.settle(voided, Used(500))
    assert await usage(redis) == {"requests": 1, "input": 7, "output": 3}
    hold = await take(clocked, who, slots=3)
    assert remaining(hold) == 1, "settled and kept are spent, voided is not"
    assert (await refused(clocked, who)).limit_name == "max_concurrent_requests"
    await clocked.void(hold)
    await take(clocked, who, input_tokens=1000 - 10 - 100)
    assert (await refused(clocked, who, input_tokens=1)).limit_name == "tokens_per_day"


async def test_settling_charges_what_was_used_and_no_more(clocked: ClockedStore) -> None:
    who = tenant(tokens_per_minute=1000)

    async def left() -> int:
        probe = await take(clocked, who)
        assert probe.tokens is not None
        await clocked.void(probe)
        return probe.tokens.remaining

    less = await take(clocked, who, input_tokens=100, output_tokens=200)
    more = await take(clocked, who, input_tokens=100, output_tokens=50)
    assert await left() == 550
    await clocked.settle(less, Used(100, 0, 20))
    await clocked.settle(more, Used(100, 0, 90))
    assert await left() == 690
    await clocked.advance(MINUTE_US)
    assert await left() == 1000
    late = await take(clocked, who, input_tokens=100, output_tokens=300)
    for _ in range(5):
        await clocked.advance(MINUTE_US // 5)
        await clocked.renew([late])
    later = await take(clocked, who, input_tokens=400)
    await clocked.settle(late, Used(100, 0, 0))  # its window has passed: nothing of `later` is given back
    assert await left() == 600
    await clocked.void(later)
    assert await left() == 1000


async def test_tokens_and_money_are_priced(redis: Redis) -> None:
    price = Price(input=1.0, cached_input=0.25, output=4.0)
    clocked = ClockedStore(redis, prices={"m": price})
    await clocked.advance(0)
    who = tenant(
        tokens_per_minute=1000, token_weights={"input": 1.0, "cached_input": 0.5, "output": 3.0},
        cost_per_month=0.001,
    )  # fmt: skip
    hold = await take(clocked, who, input_tokens=100, output_tokens=100)
    assert hold.tokens is not None and hold.tokens.remaining == 600
    await clocked.settle(hold, Used(100, 40, 50))
    # 60 * 1 + 40 * 0.25 + 50 * 4 = 270 millionths
    assert await usage(redis) == {"requests": 1, "input": 100, "cached": 40, "output": 50, "price": 270_000}
    hold = await take(clocked, who)
    assert hold.tokens is not None and hold.tokens.remaining == 1000 - 60 - 20 - 150
    await clocked.void(hold)
    await take(clocked, who, input_tokens=730)
    assert (await refused(clocked, who, input_tokens=1)).limit_name == "cost_per_month"
    await clocked.advance(17 * DAY_US)  # into December
    await take(clocked, who, input_tokens=1)
    assert Price(input=0.0375, output=0).nano(3, 0, 0) == 113, "rounded up, once per request"
    await clocked.aclose()


@pytest.mark.parametrize(
    ("days", "until_next_month"),
    [(0, 17), (16, 1), (17, 31), (47, 1), (48, 31), (107, 1), (108, 31), (29 + 78, 1)],
)
async def test_months_are_those_of_the_calendar(
    clocked: ClockedStore, days: int, until_next_month: int
) -> None:
    await clocked.advance(days * DAY_US)  # from Tuesday 2023-11-14; 2024 has a 29 February
    who = tenant(tokens_per_month=1)
    await take(clocked, who, input_tokens=1)
    wait = (await refused(clocked, who, input_tokens=1)).retry_after_ms
    assert wait is not None
    assert -(-wait // 86_400_000) == until_next_month


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
async def test_voids_in_any_order_give_everything_back(clocked: ClockedStore, order: tuple[int, ...]) -> None:
    who = tenant(requests_per_minute=5)
    holds = [await take(clocked, who) for _ in range(5)]
    for index in order:
        await clocked.void(holds[index])
    assert remaining(await take(clocked, who)) == 4


class Log:
    """What was taken and not given back, by time: the definition of a sliding window."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken: dict[str, tuple[int, int]] = {}

    def used(self, now: int) -> int:
        return sum(n for t, n in self.taken.values() if t > now - MINUTE_US)

    def wait(self, now: int, amount: int) -> int:
        live = sorted((t, n) for t, n in self.taken.values() if t > now - MINUTE_US)
        over = self.used(now) + amount - self.limit
        for t, n in live:
            if over <= 0:
                break
            over -= n
            if over <= 0:
                return t + MINUTE_US - now
        return 0


_operations = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(1, 1000 * LEASE_MS - 1), st.just(0)),
        st.tuples(st.just("reserve"), st.integers(1, 300), st.just(0)),
        st.tuples(st.just("void"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("settle"), st.integers(0, 30), st.integers(0, 400)),
    ),
    min_size=10,
    max_size=60,
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(limit=st.sampled_from([300, 700, 1200]), operations=_operations)
async def test_e10_a_window_is_exact_whatever_ends_how(
    redis_url: str, limit: int, operations: list[tuple[str, int, int]]
) -> None:
    client = connect(redis_url + PATIENT)
    await client.flushdb()
    store = ClockedStore(client)
    await store.advance(0)
    who = tenant(tokens_per_minute=limit)
    model = Log(limit)
    holds: list[Hold] = []
    ended: set[str] = set()
    for kind, value, actual in operations:
        if kind == "wait":
            await store.advance(value)
            await store.renew(hold for hold in holds if hold.id not in ended)
        elif kind == "reserve":
            answer = await store.reserve(who, demand(input_tokens=value))
            wait = model.wait(store.now_us, value)
            assert isinstance(answer, Hold) == (wait == 0)
            assert answer.tokens is not None
            if isinstance(answer, Hold):
                model.taken[answer.id] = (store.now_us, value)
                holds.append(answer)
            else:
                assert answer.retry_after_ms == -(-wait // 1000)
            assert answer.tokens.remaining == max(0, limit - model.used(store.now_us))
        elif holds and (hold := holds[value % len(holds)]).id not in ended:
            ended.add(hold.id)
            at, reserved = model.taken.pop(hold.id)
            if kind == "void":
                await store.void(hold)
            else:
                await store.settle(hold, Used(actual))
                model.taken[hold.id] = (at, min(reserved, actual))
                if at <= store.now_us - MINUTE_US:
                    model.taken[hold.id] = (at, reserved)
                model.taken[hold.id + "+"] = (store.now_us, max(0, actual - reserved))
    await store.aclose()
    await client.aclose()


async def test_holds_of_a_dead_gateway_lapse(clocked: ClockedStore, redis: Redis) -> None:
    who = tenant(max_concurrent_requests=5, tokens_per_minute=100, tokens_per_day=100)
    hold = await take(clocked, who, slots=5, input_tokens=100)
    await clocked.advance(1000 * LEASE_MS - 1)
    assert (await refused(clocked, who)).code == "concurrency_limit_exceeded"
    await clocked.advance(1)
    await take(clocked, who, slots=5, input_tokens=100)
    [(_, row)] = await redis.xrange("eh:v2:{alpha}:ledger")
    assert row[b"hold"].decode() == hold.id and b'"outcome":"lapsed"' in row[b"row"]
    await clocked.settle(hold, Used(3))  # it was alive after all: what it used is charged, once
    await clocked.settle(hold, Used(3))
    assert await usage(redis) == {"requests": 1, "input": 3}


async def test_renew_keeps_live_holds_only(clocked: ClockedStore) -> None:
    who, other = tenant(max_concurrent_requests=2), tenant("beta", max_concurrent_requests=1)
    live, leaked, elsewhere = await take(clocked, who), await take(clocked, who), await take(clocked, other)
    for _ in range(3):
        await clocked.advance(12_000_000)
        assert await clocked.renew([live, elsewhere]) == 0
    assert leaked
    await take(clocked, who)
    assert (await refused(clocked, who)).code == "concurrency_limit_exceeded"
    assert (await refused(clocked, other)).code == "concurrency_limit_exceeded"


async def test_a_live_hold_takes_what_lapsed_again(clocked: ClockedStore) -> None:
    who = tenant(max_concurrent_requests=1, tokens_per_day=100, requests_per_minute=9)
    live = await take(clocked, who, input_tokens=60)
    await clocked.advance(31_000_000)
    newer = await take(clocked, who, input_tokens=60)
    assert await clocked.renew([live, newer]) == 1
    await clocked.settle(newer, Used(30))
    assert (await refused(clocked, who)).code == "concurrency_limit_exceeded"
    await clocked.settle(live, Used(60))
    hold = await take(clocked, who, input_tokens=10)
    assert remaining(hold) == 6, "its request counts once"
    await clocked.settle(hold, Used(10))
    assert (await refused(clocked, who, input_tokens=1)).code == "budget_exceeded"


async def test_a_hold_settled_while_it_is_renewed_stays_ended(store: QuotaStore, redis: Redis) -> None:
    who = tenant(max_concurrent_requests=50)
    holds = [await take(store, who) for _ in range(50)]
    await redis.delete("eh:v2:{alpha}:leases")  # all lapsed, so that renewing would take them again
    await asyncio.gather(store.renew(holds), *(store.settle(hold, Used(1)) for hold in holds))
    assert await redis.zcard("eh:v2:{alpha}:leases") == 0 and await redis.hlen("eh:v2:{alpha}:counts") == 0
    assert await usage(redis) == {"requests": 50, "input": 50}


async def test_keys_share_the_hash_tag_and_expire(store: QuotaStore, redis: Redis) -> None:
    who = tenant(requests_per_minute=5, max_concurrent_requests=5, tokens_per_day=50)
    hold = await take(store, who, slots=2)
    await store.renew([hold])
    await store.settle(hold, Used(1))
    await take(store, who)
    names = [key.decode() async for key in redis.scan_iter()]
    assert len(names) == 7 and all(name.startswith("eh:v2:{alpha}:") for name in names)
    expiring = [name for name in names if await redis.pttl(name) > 0]
    assert set(names) - set(expiring) == {"eh:v2:{alpha}:ledger"}, "rows stay until they are in a file"


async def test_a_tenant_without_limits_needs_no_redis_to_be_let_in() -> None:
    nowhere = connect("unix:///nowhere.sock")
    store = QuotaStore(nowhere)
    hold = await take(store, tenant())
    await store.void(hold)
    assert await store.renew([hold]) == 0
    await store.settle(hold, Used(1))
    assert store.owed == 1, "its usage is not forgotten"


async def test_a_lowered_limit_and_a_clock_that_stepped_back_lock_nobody_out(clocked: ClockedStore) -> None:
    for _ in range(10):
        await take(clocked, tenant(requests_per_minute=10))
    assert (await refused(clocked, tenant(requests_per_minute=2))).retry_after_ms == 60_000
    await clocked.advance(-3600_000_000)
    assert (await refused(clocked, tenant(requests_per_minute=10))).retry_after_ms == 60_000


async def test_b12_a_cancelled_reserve_leaves_nothing_behind(store: QuotaStore) -> None:
    who = tenant(requests_per_minute=3, max_concurrent_requests=1)
    for steps in range(25):
        task = asyncio.create_task(store.reserve(who, demand()))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        (answer,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(answer, Hold):  # it was done, or Python 3.11's wait_for swallowed the cancellation
            await store.void(answer)

        async def all_free() -> bool:
            answer = await store.reserve(who, demand())
            if not isinstance(answer, Hold):
                return False
            await store.void(answer)
            return remaining(answer) == 2

        await eventually(all_free)


async def test_b12_a_cancelled_settle_is_finished_in_the_background(store: QuotaStore, redis: Redis) -> None:
    who = tenant(max_concurrent_requests=1)
    for steps in range(1, 20):  # a task that never began cannot have ended anything
        hold = await take(store, who)
        task = asyncio.create_task(store.settle(hold, Used(2)))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()

        async def free() -> bool:
            return store.owed == 0 and await redis.hlen("eh:v2:{alpha}:counts") == 0

        await eventually(free)
        assert await usage(redis) == {"requests": steps, "input": 2 * steps}
