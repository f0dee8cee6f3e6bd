"""Pages and prefix cache: exact accounting and isolation, by example and as a state machine."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_actor.executor import PAGE_SIZE
from engine_actor.kv.cache import KVCache, SequencePages, pages_for
from engine_actor.kv.pages import PageError, PagePool


def run(cache: KVCache, namespace: str, tokens: list[int]) -> SequencePages:
    """Compute a whole prompt as one chunk and share it."""
    table = cache.open(namespace, tokens)
    assert cache.reserve(table, len(tokens))
    cache.share(table, tokens, len(tokens))
    return table


def tokens(*pages: int, tail: int = 1) -> list[int]:
    """A prompt whose page i is filled with the value pages[i], and a tail of other tokens."""
    return [value for page in pages for value in [page] * PAGE_SIZE] + [999] * tail


def test_pool_refuses_double_free_and_dummy_page() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    assert 0 not in pages and sorted(pages) == [1, 2, 3]
    with pytest.raises(PageError):
        pool.allocate(1)
    pool.release(pages[:1])
    with pytest.raises(PageError):
        pool.release(pages[:1])
    with pytest.raises(PageError):
        pool.release([0])


def test_prefix_is_found_again_only_in_its_namespace() -> None:
    cache = KVCache(32)
    first = run(cache, "alpha", tokens(1, 2, 3))
    kept = list(first.pages[:3])
    cache.close(first)
    assert cache.open("beta", tokens(1, 2, 3)).pages == []
    again = cache.open("alpha", tokens(1, 2, 4))
    assert again.pages == kept[:2]


def test_last_token_is_always_computed() -> None:
    cache = KVCache(32)
    prompt = [7] * (2 * PAGE_SIZE)
    cache.close(run(cache, "a", prompt))
    assert len(cache.open("a", prompt).pages) == 1


def test_duplicates_are_freed_and_the_table_is_rewritten() -> None:
    cache = KVCache(32)
    prompt = tokens(1, 2)
    one, two = cache.open("a", prompt), cache.open("a", prompt)
    for table in (one, two):
        assert cache.reserve(table, len(prompt))
    used = cache.total - cache.free
    cache.share(one, prompt, len(prompt))
    cache.share(two, prompt, len(prompt))
    assert two.pages[:2] == one.pages[:2]
    assert cache.total - cache.free == used - 2
    cache.close(one)
    cache.close(two)
    cache.check_idle()


def test_D03_neighbouring_runs_do_not_match() -> None:
    cache = KVCache(64)
    base = list(range(100, 100 + PAGE_SIZE))
    cache.close(run(cache, "a", [*base, 1]))
    swapped = [*base]
    swapped[3], swapped[4] = swapped[4], swapped[3]
    shifted = [*base]
    shifted[5] += 31
    shifted[6] -= 1
    for other in (swapped, shifted, base[::-1]):
        assert cache.open("a", [*other, 1]).pages == []
    assert len(cache.open("a", [*base, 1]).pages) == 1


def test_locked_prefix_survives_eviction() -> None:
    cache = KVCache(9)
    held = run(cache, "a", tokens(1, 2))
    cache.close(run(cache, "a", tokens(3, 4)))
    greedy = cache.open("b", tokens(5))
    assert cache.reserve(greedy, 5 * PAGE_SIZE)
    assert not cache.reserve(greedy, 6 * PAGE_SIZE)
    assert cache.evicted_pages == 2
    assert cache.open("a", tokens(1, 2)).pages == held.pages[:2]


def test_least_recently_used_goes_first_tail_first() -> None:
    cache = KVCache(9)
    for value in (1, 2):
        cache.close(run(cache, "a", tokens(value, value, value)))
    cache.close(cache.open("a", tokens(1, 1, 1)))  # touch the older one
    table = cache.open("b", tokens(8))
    assert cache.reserve(table, 4 * PAGE_SIZE)
    assert len(cache.open("a", tokens(1, 1, 1)).pages) == 3
    assert len(cache.open("a", tokens(2, 2, 2)).pages) == 1


def test_a_flood_of_one_tenant_leaves_the_cached_prefixes_of_another() -> None:
    cache = KVCache(41)  # 20 pages for each of two tenants
    quiet = tokens(*range(10))
    cache.close(run(cache, "quiet", quiet))
    for value in range(100, 130):
        cache.close(run(cache, "flood", tokens(value, value, value, value)))
    kept = cache.open("quiet", quiet)
    assert len(kept.pages) == 10
    cache.close(kept)
    cache.check_idle()


def test_shares_of_the_cache_follow_the_weights() -> None:
    cache = KVCache(41)
    for value in range(100, 130):
        for name, weight in (("one", 1.0), ("three", 3.0)):
            prompt = tokens(value, value)
            table = cache.open(name, prompt, name, weight)
            assert cache.reserve(table, len(prompt))
            cache.share(table, prompt, len(prompt))
            cache.close(table)
    held = {root.namespace: root.evictable for root in cache._tree._roots.values()}
    assert abs(held["one"] - 10) <= 3 and abs(held["three"] - 30) <= 3
    assert set(cache.evicted_by_owner) == {"one", "three"}


def test_a_tenant_that_left_long_ago_keeps_no_share() -> None:
    cache = KVCache(41)
    cache.close(run(cache, "gone", tokens(*range(10))))
    for value in range(100, 100 + 60):
        cache.close(run(cache, "here", tokens(value, value, value, value)))
    assert cache.open("gone", tokens(*range(10))).pages == []


def test_a_prefix_of_chunks_is_one_node() -> None:
    cache = KVCache(64)
    prompt = list(range(20 * PAGE_SIZE))
    table = cache.open("a", prompt)
    for end in range(PAGE_SIZE // 2, len(prompt) + 1, PAGE_SIZE // 2):
        assert cache.reserve(table, end)
        cache.share(table, prompt, end)
    assert table.node is not None and len(table.node.pages) == 20
    cache.close(table)
    cache.check_idle()


class CacheMachine(RuleBasedStateMachine):
    """D07: opens, chunks, decodes and closes in any order never lose or double a page, nor mix prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(24)
        self.live: list[tuple[SequencePages, list[int], int]] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(
        namespace=st.sampled_from("ab"),
        shape=st.lists(st.integers(0, 2), max_size=4),
        tail=st.integers(1, 20),
    )
    def open(self, namespace: str, shape: list[int], tail: int) -> None:
        prompt = [value for page in shape for value in [page] * PAGE_SIZE] + [9] * tail
        table = self.cache.open(namespace, prompt)
        for index, page in enumerate(table.pages):
            assert self.content[page] == (namespace, tuple(prompt[: (index + 1) * PAGE_SIZE]))
        self.live.append((table, prompt, len(table.pages) * PAGE_SIZE))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), length=st.integers(1, 40))
    def chunk(self, index: int, length: int) -> None:
        index %= len(self.live)
        table, prompt, computed = self.live[index]
        end = min(len(prompt), computed + length)
        if not self.cache.reserve(table, end):
            return
        for number in range(computed // PAGE_SIZE, pages_for(end)):
            self.content[table.pages[number]] = (table.namespace, tuple(prompt[: (number + 1) * PAGE_SIZE]))
        self.cache.share(table, prompt, end)
        for number in range(end // PAGE_SIZE):
            assert self.content[table.pages[number]] == (
                table.namespace,
                tuple(prompt[: (number + 1) * PAGE_SIZE]),
            )
        self.live[index] = (table, prompt, end)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99))
    def extend(self, index: int) -> None:
        """In the middle of a prompt, take what another request has computed meanwhile."""
        index %= len(self.live)
        table, prompt, computed = self.live[index]
        if table.shared != computed // PAGE_SIZE or not self.cache.extend(table, prompt):
            return
        for number, page in enumerate(table.pages):
            assert self.content[page] == (table.namespace, tuple(prompt[: (number + 1) * PAGE_SIZE]))
        self.live[index] = (table, prompt, table.shared * PAGE_SIZE)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99))
    def close(self, index: int) -> None:
        table, _, _ = self.live.pop(index % len(self.live))
        self.cache.close(table)

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def accounting(self) -> None:
        self.cache.check(private=sum(len(table.pages) - table.shared for table, _, _ in self.live))

    def teardown(self) -> None:
        for table, _, _ in self.live:
            self.cache.close(table)
        self.cache.check_idle()
        self.cache.clear()
        assert self.cache.free == self.cache.total


TestD07CacheMachine = CacheMachine.TestCase
TestD07CacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
