"""What the limits let through, on a real server: storms, all or nothing, exact waits, exact refunds."""

from __future__ import annotations

import asyncio

import pytest
from conftest import PATIENT, ClockedStore, eventually, tenant
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from tenancy.models import Tenant
from tenancy.quota import Hold, QuotaRefusal, QuotaStore
from tenancy.redis import connect

MINUTE_US = 60_000_000


async def take(store: QuotaStore, who: Tenant, **amounts: int) -> Hold:
    hold = await store.reserve(who, "r", **amounts)
    assert isinstance(hold, Hold), hold
    return hold


async def refused(store: QuotaStore, who: Tenant, **amounts: int) -> QuotaRefusal:
    refusal = await store.reserve(who, "r", **amounts)
    assert isinstance(refusal, QuotaRefusal), refusal
    return refusal


@pytest.mark.parametrize("limits", [{"max_concurrent_requests": 5}, {"requests_per_minute": 5}])
@pytest.mark.asyncio
async def test_E01_a_storm_gets_exactly_the_limit(
    redis_url: str, redis: Redis, limits: dict[str, int]
) -> None:
    clients = [connect(redis_url + PATIENT) for _ in range(3)]  # three gateways
    stores = [QuotaStore(client) for client in clients]
    for repeat in range(5):
        who = tenant(f"storm{repeat}", **limits)
        answers = await asyncio.gather(*(stores[i % 3].reserve(who, f"r{i}") for i in range(50)))
        assert sum(isinstance(answer, Hold) for answer in answers) == 5
    for client in clients:
        await client.aclose()


@pytest.mark.asyncio
async def test_five_a_minute_refuses_the_sixth_with_the_exact_wait(clocked: ClockedStore) -> None:
    who = tenant(requests_per_minute=5)
    for n in range(5):
        hold = await take(clocked, who)
        assert hold.rate is not None
        assert (hold.rate.limit, hold.rate.remaining, hold.rate.reset_ms) == (5, 4 - n, 12_000 * (n + 1))
        await clocked.advance(0)
    refusal = await refused(clocked, who)
    assert (refusal.code, refusal.limit_name, refusal.limit) == (
        "rate_limit_exceeded",
        "requests_per_minute",
        5,
    )
    assert refusal.retry_after_ms == 12_000
    assert refusal.rate is not None and (refusal.rate.remaining, refusal.rate.reset_ms) == (0, 60_000)
    await clocked.advance(11_999_999)
    refusal = await refused(clocked, who)
    assert refusal.retry_after_ms == 1
    await clocked.advance(1)
    await take(clocked, who)
    assert (await refused(clocked, who)).retry_after_ms == 12_000


@pytest.mark.asyncio
async def test_E14_waiting_as_told_on_the_real_clock_succeeds(store: QuotaStore) -> None:
    who = tenant(requests_per_minute=300, requests_burst=1)
    await take(store, who)
    refusal = await refused(store, who)
    assert refusal.retry_after_ms is not None and 0 < refusal.retry_after_ms <= 200
    await asyncio.sleep(refusal.retry_after_ms / 1000)
    await take(store, who)


@pytest.mark.asyncio
async def test_a_request_that_can_never_fit_is_told_so(store: QuotaStore) -> None:
    who = tenant(requests_per_minute=5, max_concurrent_requests=4)
    assert (await refused(store, who, requests=6)).retry_after_ms is None
    refusal = await refused(store, who, slots=5)
    assert (refusal.code, refusal.retry_after_ms) == ("concurrency_limit_exceeded", None)
    await take(store, who, requests=5, slots=4)


@pytest.mark.asyncio
async def test_E02_a_refusal_for_concurrency_burns_no_rate_unit(store: QuotaStore) -> None:
    who = tenant(requests_per_minute=2, max_concurrent_requests=1)
    first = await take(store, who)
    for _ in range(3):
        refusal = await refused(store, who)
        assert refusal.code == "concurrency_limit_exceeded" and refusal.limit == 1
        assert refusal.rate is not None and refusal.rate.remaining == 1
    await store.settle(first)
    await take(store, who)


@pytest.mark.asyncio
async def test_E02_a_refusal_for_the_rate_takes_no_slot(store: QuotaStore, redis: Redis) -> None:
    who = tenant(requests_per_minute=1, max_concurrent_requests=9)
    await take(store, who, slots=3)
    assert (await refused(store, who)).code == "rate_limit_exceeded"
    assert await redis.zcard("eh:v1:{alpha}:slots") == 3


@pytest.mark.asyncio
async def test_E10_no_window_lets_two_limits_through(clocked: ClockedStore) -> None:
    who = tenant(requests_per_minute=60, requests_burst=10)
    admitted: list[int] = []
    for _ in range(1500):
        await clocked.advance(100_000)
        if isinstance(await clocked.reserve(who, "r"), Hold):
            admitted.append(clocked.now_us)
    for start in admitted:
        assert sum(start <= t <= start + MINUTE_US for t in admitted) <= 70
    assert len(admitted) >= 150, "and the limit can be used: one a second over 150 s, and the burst"


@pytest.mark.asyncio
async def test_settle_and_void_work_once(clocked: ClockedStore, redis: Redis) -> None:
    who = tenant(requests_per_minute=4, max_concurrent_requests=4)
    settled, voided, _kept = [await take(clocked, who) for _ in range(3)]
    for _ in range(2):
        await clocked.settle(settled)
        await clocked.void(settled)
        await clocked.void(voided)
        await clocked.settle(voided)
    assert await redis.zcard("eh:v1:{alpha}:slots") == 1
    hold = await take(clocked, who)
    assert hold.rate is not None and hold.rate.remaining == 1, "settled and kept are spent, voided is not"


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
@pytest.mark.asyncio
async def test_voids_in_any_order_give_everything_back(clocked: ClockedStore, order: tuple[int, ...]) -> None:
    who = tenant(requests_per_minute=5)
    holds = [await take(clocked, who) for _ in range(5)]
    for index in order:
        await clocked.void(holds[index])
    hold = await take(clocked, who)
    assert hold.rate is not None and hold.rate.remaining == 4


@pytest.mark.asyncio
async def test_a_late_void_gives_back_nothing_of_a_later_request(clocked: ClockedStore) -> None:
    who = tenant(requests_per_minute=6)  # one unit is 10 s
    early, late = await take(clocked, who), await take(clocked, who)
    await clocked.void(early)
    await clocked.advance(10_000_000)  # what `late` occupies has been used up by time: the early unit is gone
    await take(clocked, who)
    await clocked.advance(1_000_000)
    await clocked.void(late)
    hold = await take(clocked, who)
    assert hold.rate is not None and hold.rate.reset_ms == 19_000


class Fluid:
    """The rate as a queue of work, served in order at rate 1; what a voided job has left is taken out."""

    def __init__(self, work: int, capacity: int) -> None:
        self.work, self.capacity = work, capacity
        self.queue: list[tuple[str, int]] = []

    def level(self) -> int:
        return sum(left for _, left in self.queue)

    def pass_time(self, us: int) -> None:
        while us > 0 and self.queue:
            name, left = self.queue[0]
            served = min(us, left)
            us -= served
            self.queue[0] = (name, left - served)
            if served == left:
                self.queue.pop(0)

    def fits(self, units: int) -> bool:
        return self.level() + units * self.work <= self.capacity

    def add(self, name: str, units: int) -> None:
        self.queue.append((name, units * self.work))

    def void(self, name: str) -> None:
        self.queue = [job for job in self.queue if job[0] != name]


_operations = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(1, 25_000_000)),
        st.tuples(st.just("reserve"), st.integers(1, 3)),
        st.tuples(st.just("reserve"), st.just(1)),
        st.tuples(st.sampled_from(["void", "void", "settle"]), st.integers(0, 30)),
    ),
    min_size=10,
    max_size=60,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(limit=st.sampled_from([5, 7, 12]), burst=st.integers(3, 8), operations=_operations)
def test_E10_refunds_are_exact_and_no_window_passes_limit_and_burst(
    redis_url: str, limit: int, burst: int, operations: list[tuple[str, int]]
) -> None:
    async def scenario() -> None:
        client = connect(redis_url + PATIENT)
        await client.flushdb()
        store = ClockedStore(client)
        await store.advance(0)
        who = tenant(requests_per_minute=limit, requests_burst=burst)
        work = -(-MINUTE_US // limit)
        model = Fluid(work, burst * work)
        holds: list[Hold] = []
        ended: set[str] = set()
        spent: dict[str, tuple[int, int]] = {}
        for kind, value in operations:
            if kind == "wait":
                await store.advance(value)
                model.pass_time(value)
            elif kind == "reserve":
                answer = await store.reserve(who, "r", requests=value)
                assert isinstance(answer, Hold) == model.fits(value)
                if isinstance(answer, Hold):
                    model.add(answer.id, value)
                    holds.append(answer)
                    spent[answer.id] = (store.now_us, value)
                elif answer.retry_after_ms is not None:
                    over = model.level() + value * work - model.capacity
                    assert answer.retry_after_ms == -(-over // 1000)
                assert answer.rate is not None and answer.rate.reset_ms == -(-model.level() // 1000)
                assert answer.rate.remaining == (model.capacity - model.level()) // work
            elif holds:
                hold = holds[value % len(holds)]
                if kind == "settle":
                    await store.settle(hold)
                else:
                    await store.void(hold)
                    if hold.id not in ended:
                        model.void(hold.id)
                        del spent[hold.id]
                ended.add(hold.id)
        for start, _ in spent.values():
            assert sum(n for t, n in spent.values() if start <= t <= start + MINUTE_US) <= limit + burst
        await store.aclose()
        await client.aclose()

    asyncio.run(scenario())


@pytest.mark.asyncio
async def test_leases_of_a_dead_gateway_lapse(clocked: ClockedStore) -> None:
    who = tenant(max_concurrent_requests=5)
    await take(clocked, who, slots=5)
    await clocked.advance(29_999_999)
    assert (await refused(clocked, who)).code == "concurrency_limit_exceeded"
    await clocked.advance(1)
    await take(clocked, who, slots=5)


@pytest.mark.asyncio
async def test_renew_keeps_live_holds_only(clocked: ClockedStore) -> None:
    who, other = tenant(max_concurrent_requests=2), tenant("beta", max_concurrent_requests=1)
    live, leaked, elsewhere = await take(clocked, who), await take(clocked, who), await take(clocked, other)
    for _ in range(3):
        await clocked.advance(20_000_000)
        assert await clocked.renew([live, elsewhere]) == 0
    assert leaked
    await take(clocked, who)
    assert (await refused(clocked, who)).code == "concurrency_limit_exceeded"
    assert (await refused(clocked, other)).code == "concurrency_limit_exceeded"


@pytest.mark.asyncio
async def test_a_live_hold_takes_its_lapsed_lease_again(clocked: ClockedStore) -> None:
    who = tenant(max_concurrent_requests=1)
    live = await take(clocked, who)
    await clocked.advance(31_000_000)
    newer = await take(clocked, who)
    assert await clocked.renew([live, newer]) == 1
    await clocked.settle(newer)
    assert (await refused(clocked, who)).code == "concurrency_limit_exceeded"
    await clocked.settle(live)
    await take(clocked, who)


@pytest.mark.asyncio
async def test_a_hold_settled_while_it_is_renewed_gets_no_lease(store: QuotaStore, redis: Redis) -> None:
    who = tenant(max_concurrent_requests=50)
    holds = [await take(store, who) for _ in range(50)]
    await redis.delete("eh:v1:{alpha}:slots")  # all lapsed, so that renewing would take them again
    await asyncio.gather(store.renew(holds), *(store.settle(hold) for hold in holds))
    assert await redis.zcard("eh:v1:{alpha}:slots") == 0


@pytest.mark.asyncio
async def test_keys_share_the_hash_tag_and_expire(store: QuotaStore, redis: Redis) -> None:
    hold = await take(store, tenant(requests_per_minute=5, max_concurrent_requests=5), slots=2)
    await store.renew([hold])
    await store.void(hold)
    await store._send_ending(store._void, hold, withdraw=True)
    await take(store, tenant(requests_per_minute=5, max_concurrent_requests=5))
    names = [key.decode() async for key in redis.scan_iter()]
    assert len(names) == 4 and all(name.startswith("eh:v1:{alpha}:") for name in names)
    assert all([await redis.pttl(name) > 0 for name in names])


@pytest.mark.asyncio
async def test_a_tenant_without_limits_needs_no_redis() -> None:
    nowhere = connect("unix:///nowhere.sock")
    store = QuotaStore(nowhere)
    hold = await take(store, tenant())
    await store.settle(hold)
    await store.void(hold)
    assert await store.renew([hold]) == 0


@pytest.mark.asyncio
async def test_a_lowered_limit_locks_nobody_out_for_longer_than_its_burst(clocked: ClockedStore) -> None:
    await take(clocked, tenant(requests_per_minute=10, requests_burst=100), requests=100)  # 10 minutes ahead
    refusal = await refused(clocked, tenant(requests_per_minute=10))
    assert refusal.retry_after_ms == 6_000


@pytest.mark.asyncio
async def test_B12_a_cancelled_reserve_leaves_nothing_behind(store: QuotaStore, redis: Redis) -> None:
    who = tenant(requests_per_minute=3, max_concurrent_requests=1)
    for steps in range(25):
        task = asyncio.create_task(store.reserve(who, "r"))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        (answer,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(answer, Hold):  # it was done, or Python 3.11's wait_for swallowed the cancellation
            await store.void(answer)

        async def all_free() -> bool:
            answer = await store.reserve(who, "r")
            if not isinstance(answer, Hold):
                return False
            await store.void(answer)
            return answer.rate is not None and answer.rate.remaining == 2

        await eventually(all_free)


@pytest.mark.asyncio
async def test_B12_a_cancelled_settle_is_finished_in_the_background(store: QuotaStore) -> None:
    who = tenant(max_concurrent_requests=1)
    for steps in range(1, 20):  # a task that never began cannot have ended anything
        hold = await take(store, who)
        task = asyncio.create_task(store.settle(hold))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()

        async def free() -> bool:
            answer = await store.reserve(who, "r")
            if isinstance(answer, Hold):
                await store.settle(answer)
            return isinstance(answer, Hold)

        await eventually(free)
