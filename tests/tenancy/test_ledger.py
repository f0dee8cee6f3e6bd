"""The ledger: each hold once, whatever crashes, and the same sums everywhere."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENT, ClockedStore, demand, eventually, take, tenant, usage
from redis.asyncio import Redis
from storm_gateway import LEASE_MS

from tenancy.ledger import LedgerFiles, LedgerRow
from tenancy.ledger_writer import LedgerWriter
from tenancy.quota import Hold, QuotaStore, Used
from tenancy.redis import connect

pytestmark = pytest.mark.asyncio
DAY_US = 86_400_000_000
NOV_14 = 1_700_000_000_000_000


def row(hold: str, at_us: int = NOV_14, **fields: Any) -> LedgerRow:
    defaults = {
        "request": "r", "tenant": "alpha", "key": "k", "model": "m", "class": "default", "outcome": "ok",
        "input_tokens": 1, "cached_tokens": 0, "output_tokens": 2, "price_nano": 3, "timings": {},
    }  # fmt: skip
    return LedgerRow(hold, at_us, {**defaults, **fields})


def sums(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    total: dict[str, int] = defaultdict(int)
    for entry in rows:
        for name in ("input_tokens", "cached_tokens", "output_tokens", "price_nano"):
            total[name] += entry[name]
        total["requests"] += entry["outcome"] != "lapsed"
    return dict(total)


async def test_rows_go_to_the_file_of_their_day_once(tmp_path: Path) -> None:
    files = LedgerFiles(tmp_path / "ledger")
    files.write([row("a"), row("b", NOV_14 + DAY_US, tenant="beta"), row("a", output_tokens=99)])
    files.write([row("a", output_tokens=99), row("c", outcome="lapsed", output_tokens=0)])
    assert sorted(path.name for path in (tmp_path / "ledger").iterdir()) == [
        "usage-2023-11-14.sqlite",
        "usage-2023-11-15.sqlite",
    ]
    assert [(r["hold"], r["output_tokens"]) for r in files.read()] == [("a", 2), ("c", 0), ("b", 2)]
    files.write([row("c", outcome="ok", output_tokens=7), row("a", outcome="lapsed", output_tokens=0)])
    files.write([row("c", outcome="lapsed", output_tokens=0)])
    assert [(r["hold"], r["output_tokens"]) for r in files.read()] == [("a", 2), ("c", 7), ("b", 2)]
    assert [r["hold"] for r in files.read(since=date(2023, 11, 15))] == ["b"]
    assert [r["hold"] for r in files.read(until=date(2023, 11, 14), tenant="alpha")] == ["a", "c"]


async def test_a_writer_that_dies_after_the_file_doubles_nothing(
    store: QuotaStore, redis: Redis, tmp_path: Path
) -> None:
    class Dies(LedgerFiles):
        times = 0

        def write(self, rows: Iterable[LedgerRow]) -> None:
            super().write(rows)
            Dies.times += 1
            if Dies.times == 1:
                raise sqlite3.OperationalError("killed between the file and the stream")

    for _ in range(5):
        await store.settle(await take(store, tenant(tokens_per_day=1000), input_tokens=9), Used(9, 0, 4))
    writer = LedgerWriter(redis, store, Dies(tmp_path))
    with pytest.raises(sqlite3.OperationalError):
        await writer.round()
    second = LedgerWriter(redis, QuotaStore(redis), Dies(tmp_path))
    assert await second.round() == 0, "the first one still has the lease"
    await redis.delete("eh:v2:{+ledger}:writer")
    assert await second.round() == 5, "found without having been told"
    assert sums(LedgerFiles(tmp_path).read()) == {
        "requests": 5, "input_tokens": 45, "cached_tokens": 0, "output_tokens": 20, "price_nano": 0,
    }  # fmt: skip
    assert await redis.xlen("eh:v2:{alpha}:ledger") == 0


async def test_told_tenants_are_written_at_once_and_others_by_the_sweep(
    store: QuotaStore, redis: Redis, tmp_path: Path
) -> None:
    writer, elsewhere = LedgerWriter(redis, store, LedgerFiles(tmp_path)), QuotaStore(redis)
    assert await writer.round() == 0
    await store.settle(await take(store, tenant("mine")), Used(1))
    await elsewhere.settle(await take(elsewhere, tenant("theirs")), Used(1))
    assert await writer.round() == 1
    writer._next_sweep = 0.0
    assert await writer.round() == 1
    assert {r["tenant"] for r in LedgerFiles(tmp_path).read()} == {"mine", "theirs"}


async def test_usage_of_a_tenant_by_day_and_model(clocked: ClockedStore) -> None:
    who = tenant()
    for model, used in (("m|odd:name", Used(5, 2, 1)), ("m", Used(10)), ("m", Used(1, 0, 7))):
        hold = await clocked.reserve(who, demand(model=model))
        assert isinstance(hold, Hold)
        await clocked.settle(hold, used)
    await clocked.advance(DAY_US)
    await clocked.settle(await take(clocked, who), Used(3))
    found = [
        (str(d.day), d.model, d.requests, d.input_tokens, d.cached_tokens, d.output_tokens)
        for d in await clocked.usage("alpha")
    ]
    assert found == [
        ("2023-11-14", "m", 2, 11, 0, 7),
        ("2023-11-14", "m|odd:name", 1, 5, 2, 1),
        ("2023-11-15", "m", 1, 3, 0, 0),
    ]
    await clocked.advance(63 * DAY_US)
    await clocked.settle(await take(clocked, who), Used(1))
    assert [str(d.day) for d in await clocked.usage("alpha")] == ["2024-01-17"], "old days are dropped"


async def test_e01_e04_all_sums_agree_after_a_storm_with_crashes(
    redis_url: str, redis: Redis, tmp_path: Path
) -> None:
    """Three gateways, one killed with 50 requests in flight, writers that come and go."""
    files = LedgerFiles(tmp_path / "ledger")
    program = Path(__file__).with_name("storm_gateway.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    logs = [tmp_path / f"g{i}.log" for i in range(3)]
    gateways = [
        subprocess.Popen(
            [sys.executable, str(program), redis_url, f"g{i}", "300", "50", str(log)], env=environment
        )
        for i, log in enumerate(logs)
    ]
    writers = [LedgerWriter(connect(redis_url + PATIENT), QuotaStore(redis), files) for _ in range(2)]
    try:

        async def under_way() -> bool:
            return logs[0].exists() and logs[0].read_text().count("done") > 40

        await eventually(under_way, 60)
        gateways[0].send_signal(signal.SIGKILL)
        while any(gateway.poll() is None for gateway in gateways):
            for writer in writers:
                writer._next_sweep = 0.0
                await writer.round()
            await redis.delete("eh:v2:{+ledger}:writer")
            await asyncio.sleep(0.05)
    finally:
        for gateway in gateways:
            gateway.kill()
            gateway.wait()
    assert [gateway.returncode for gateway in gateways] == [-signal.SIGKILL, 0, 0]

    async def nothing_held() -> bool:
        writers[0]._next_sweep = 0.0
        await writers[0].round()
        return not [key async for key in redis.scan_iter(match="eh:v2:{storm*}:leases")]

    await eventually(nothing_held, LEASE_MS / 1000 + 15)

    meant: dict[str, tuple[str, ...]] = {}
    ended: dict[str, str] = {}
    for log in logs:
        for line in log.read_text().splitlines():
            request, *rest = line.split()
            if len(rest) == 1:
                ended[request] = rest[0]
            elif len(rest) == 5:
                meant[request] = tuple(rest)
    rows = list(files.read())
    by_request = {r["request"]: r for r in rows if r["outcome"] != "lapsed"}
    assert len({r["hold"] for r in rows}) == len(rows) == len({r["request"] for r in rows})
    for request, how in ended.items():
        assert (request in by_request) == (how == "done"), "no lost row, and none of what was voided"
    for request, entry in by_request.items():
        charged = tuple(
            str(entry[n]) for n in ("tenant", "input_tokens", "cached_tokens", "output_tokens", "price_nano")
        )
        assert charged == meant[request], "charged is what was sent"
    assert any(r["outcome"] == "lapsed" for r in rows), "requests in flight were on record, charged nothing"
    for name in ("storm0", "storm1", "storm2"):
        mine = [r for r in rows if r["tenant"] == name]
        total, counted = sums(mine), await usage(redis, name)
        assert total == {
            "requests": counted["requests"], "input_tokens": counted["input"],
            "cached_tokens": counted["cached"], "output_tokens": counted["output"],
            "price_nano": counted["price"],
        }  # fmt: skip
        counts = await redis.hgetall(f"eh:v2:{{{name}}}:counts")
        assert b"tenant/max_concurrent_requests" not in counts
        script = "local b = cmsgpack.unpack(redis.call('HGET', KEYS[1], ARGV[1])) return {b[2], b[3]}"
        key = f"eh:v2:{{{name}}}:counts"
        assert await redis.eval(script, 1, key, "tenant/tokens_per_day") == [
            total["input_tokens"] + total["output_tokens"],
            0,
        ]
        assert await redis.eval(script, 1, key, "tenant/cost_per_month") == [total["price_nano"], 0]
