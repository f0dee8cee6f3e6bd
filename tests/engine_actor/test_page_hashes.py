"""What an engine tells of its prefix cache, and what a gateway asks for, are the same names."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.executor import PAGE_SIZE
from engine_actor.kv.cache import KVCache, SequencePages
from engine_actor.report import with_events_of
from policies.page_hashes import MAX_PAGES, page_hashes
from policies.tickets import EngineReport


def compute(cache: KVCache, namespace: str, prompt: list[int]) -> SequencePages:
    """A request that finds what it can in the cache and computes the rest."""
    table = cache.open(namespace, prompt)
    assert cache.reserve(table, len(prompt))
    cache.share(table, prompt, len(prompt))
    return table


def cached_pages(names: tuple[int, ...], known: set[int]) -> int:
    return next((i for i, name in enumerate(names) if name not in known), len(names))


# Few tokens, so that prompts share prefixes and the tree splits.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(
    lambda runs: [token for run in runs for token in [run] * PAGE_SIZE] + [9]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["x", "y"]), PROMPTS, st.booleans()), max_size=30))
def test_changes_add_up_to_what_a_prompt_would_find(requests: list[tuple[str, list[int], bool]]) -> None:
    cache = KVCache(9)  # small: pages are evicted
    known: set[int] = set()
    for namespace, prompt, look in requests:
        cache.close(compute(cache, namespace, prompt))
        if look:
            added, removed = cache.take_changes()
            assert not set(added) & set(removed)
            known = known - set(removed) | set(added)
            for other_space in "xy":
                for _, other, _ in requests:
                    found = cache.open(other_space, other)
                    assert cached_pages(page_hashes(other_space, other, PAGE_SIZE), known) == found.shared
                    cache.close(found)
    cache.check_idle()


def test_the_first_call_gives_what_is_there_already() -> None:
    cache = KVCache(64)
    prompt = list(range(100))
    cache.close(compute(cache, "x", prompt))
    added, removed = cache.take_changes()
    assert set(added) == set(page_hashes("x", prompt, PAGE_SIZE)) and removed == ()
    assert cache.take_changes() == ((), ())


def test_names_depend_on_everything_before_and_on_the_namespace() -> None:
    first = page_hashes("x", [1] * 33, 16)
    assert len(first) == 2 and first[0] != first[1]
    assert page_hashes("x", [1] * 16 + [2] * 17, 16)[0] == first[0]
    assert not set(page_hashes("y", [1] * 33, 16)) & set(first)
    assert len(page_hashes("x", [1] * 32, 16)) == 1, "the last token is always computed"
    assert page_hashes("x", [], 16) == page_hashes("x", [1], 16) == ()
    assert len(page_hashes("x", [1] * 16 * (MAX_PAGES + 9), 16)) == MAX_PAGES


def test_reports_put_together_tell_the_last_state_of_each_page() -> None:
    def report(step: int, added: tuple[int, ...], removed: tuple[int, ...]) -> EngineReport:
        numbers = dict.fromkeys(("running", "waiting", "waiting_prefill_tokens", "max_num_seqs"), 0)
        sizes = dict.fromkeys(("max_num_batched_tokens", "free_pages", "total_pages", "page_size"), 1)
        return EngineReport(
            "e", 1, step, {}, {}, **numbers, **sizes, page_hashes_added=added, page_hashes_removed=removed
        )

    merged = with_events_of(report(1, (1, 2, 3), (4, 5)), report(2, (4, 6), (1,)))
    assert set(merged.page_hashes_added) == {2, 3, 4, 6}
    assert set(merged.page_hashes_removed) == {1, 5}
