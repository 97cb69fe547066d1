"""Order of eviction and ownership of slots."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colibri_runtime.cache import Cache
from colibri_runtime.policy_lru import LayerLru


def use(cache, key):
    """Reads `key` where it is not resident, uses it, and says whether it was a hit."""
    if cache.pin(key) is not None:
        cache.release(key)
        return True
    assert cache.claim(key) is not None
    cache.land(key)
    cache.release(key)
    return False


def test_a_layer_keeps_the_blocks_it_used_last():
    cache = Cache(3, LayerLru([2]))
    for expert in (0, 1, 0, 2, 3):
        use(cache, (0, expert))

    assert use(cache, (0, 2))
    assert use(cache, (0, 3))


def test_surplus_blocks_still_hit_until_their_slot_is_wanted():
    cache = Cache(3, LayerLru([1, 0]))
    use(cache, (0, 0))
    use(cache, (0, 1))

    assert use(cache, (0, 0))
    use(cache, (1, 0))
    use(cache, (1, 1))
    assert (0, 1) not in cache
    assert (0, 0) in cache


def test_a_token_larger_than_the_pool_still_hits_what_is_protected():
    """A global LRU would evict every block just before its turn."""
    cache = Cache(5, LayerLru([0, 1, 0, 1, 0, 1, 0, 1]))
    for _ in range(3):
        hits = [use(cache, (layer, 0)) for layer in range(8)]

    assert sum(hits) == 4


def test_a_pinned_block_is_never_the_victim():
    cache = Cache(2, LayerLru([0]))
    use(cache, (0, 0))
    cache.pin((0, 0))
    use(cache, (0, 1))
    use(cache, (0, 2))

    assert (0, 0) in cache
    assert cache.claim((0, 3)) is not None
    assert cache.claim((0, 4)) is None


def test_a_prefetch_takes_nothing_protected_nor_read_ahead():
    cache = Cache(2, LayerLru([1, 0]))
    use(cache, (0, 0))
    cache.claim((1, 0), is_prefetch=True)
    cache.land_ahead((1, 0))

    assert cache.claim((1, 1), is_prefetch=True) is None
    assert cache.claim((1, 2)) is not None
    assert (1, 0) not in cache


def test_a_block_read_ahead_in_vain_leaves_first_and_counts_as_waste():
    wasted = []
    cache = Cache(3, LayerLru([0, 0]), wasted.append)
    use(cache, (0, 0))
    cache.claim((1, 0), is_prefetch=True)
    cache.land_ahead((1, 0))
    use(cache, (0, 1))
    assert cache.n_waiting == 1

    cache.expire((1, 0))
    cache.expire((1, 0))

    assert cache.n_waiting == 0
    use(cache, (0, 2))
    assert wasted == [(1, 0)]
    assert (0, 0) in cache


def test_a_block_read_ahead_and_used_is_no_waste():
    wasted = []
    cache = Cache(1, LayerLru([0]), wasted.append)
    cache.claim((0, 0), is_prefetch=True)
    cache.land_ahead((0, 0))

    assert cache.pin((0, 0)) is not None
    assert cache.take_unused(0, [0, 1]) == 1
    assert cache.take_unused(0, [0]) == 0
    cache.release((0, 0))
    cache.claim((0, 1))
    assert wasted == []


def test_a_surplus_block_expected_soon_outlives_older_ones():
    cache = Cache(2, LayerLru([0]))
    use(cache, (0, 0))
    use(cache, (0, 1))

    cache.touch((0, 0))

    use(cache, (0, 2))
    assert (0, 0) in cache
    assert (0, 1) not in cache


def test_an_abandoned_read_gives_its_slot_back():
    cache = Cache(1, LayerLru([0]))
    slot = cache.claim((0, 0))

    cache.abandon((0, 0))

    assert cache.claim((0, 1)) == slot


LAYERS, EXPERTS = 3, 4
keys = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1))


class CacheMachine(RuleBasedStateMachine):
    """Any order of calls: each slot has one owner, and what is pinned or loading keeps its own."""

    def __init__(self):
        super().__init__()
        self.quotas = [2, 1, 0]
        self.n_slots = 5
        self.cache = Cache(self.n_slots, LayerLru(self.quotas))
        self.pinned = {}
        self.loading = {}

    @rule(key=keys)
    def pin(self, key):
        slot = self.cache.pin(key)
        if slot is not None:
            assert self.pinned.get(key, slot) == slot
            self.pinned[key] = slot

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def release(self, data):
        key = data.draw(st.sampled_from(sorted(self.pinned)))
        del self.pinned[key]
        self.cache.release(key)

    @rule(key=keys, is_prefetch=st.booleans())
    def claim(self, key, is_prefetch):
        if key in self.cache or key in self.loading:
            return
        slot = self.cache.claim(key, is_prefetch=is_prefetch)
        if slot is not None:
            self.loading[key] = slot
        elif not is_prefetch:
            # A demand goes without only while all slots are in use or protected.
            unused = self.n_slots - len(self.pinned) - len(self.loading)
            assert unused <= sum(self.quotas)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), end=st.sampled_from(["land", "ahead", "abandon"]))
    def finish(self, data, end):
        key = data.draw(st.sampled_from(sorted(self.loading)))
        slot = self.loading.pop(key)
        if end == "abandon":
            self.cache.abandon(key)
        elif end == "ahead":
            self.cache.land_ahead(key)
        else:
            self.cache.land(key)
            self.pinned[key] = slot

    @rule(key=keys)
    def hint(self, key):
        self.cache.touch(key)
        self.cache.expire(key)

    @invariant()
    def every_slot_has_one_owner(self):
        cache = self.cache
        assert cache.n_free + cache.n_resident + cache.n_loading == self.n_slots
        resident = {
            key: cache.slot_of(key)
            for key in ((i, e) for i in range(LAYERS) for e in range(EXPERTS))
            if key in cache
        }
        owned = [*resident.values(), *self.loading.values()]
        assert len(set(owned)) == len(owned)
        assert all(resident[key] == slot for key, slot in self.pinned.items())
        assert cache.n_pinned == len(self.pinned)


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def test_release_without_pin_is_refused():
    cache = Cache(1, LayerLru([0]))

    with pytest.raises(KeyError):
        cache.release((0, 0))
