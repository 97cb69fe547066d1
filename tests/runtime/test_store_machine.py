"""Any sequence of calls on a store, over real threads and a disk that fails."""

import os
import threading
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from colibri_format import FormatError, StorageError
from colibri_runtime._native import native
from colibri_runtime.blocks import BlockTable
from colibri_runtime.disk_choice import open_engine
from colibri_runtime.disk_files import BlockFile, open_blocks
from colibri_runtime.disk_threads import ThreadsEngine
from colibri_runtime.policies import make_policy
from colibri_runtime.policy_lru import LayerLru
from colibri_runtime.pool import Pool
from colibri_runtime.pool_plan import plan_pool
from colibri_runtime.prefetch import LastExperts
from colibri_runtime.store import Store
from helpers.blocks import assert_lease_is_right, make_source, small_layout

SMALL, LARGE = small_layout(16, 32), small_layout(40, 48)
LAYERS = st.integers(0, 3)
EXPERTS = st.lists(st.integers(0, 5), max_size=6)


class StoreMachine(RuleBasedStateMachine):
    """Right bytes, no slot lost or owned twice, never more than the budget, no hang.

    Two layers of small blocks, one of large, one of both, over a file and a volume. Reads fail
    with an errno, come short, or bring a wrong bit, as `disk` says.
    """

    READS_AGAIN = False  # what failed is read again by the one who waits for it

    def __init__(self):
        super().__init__()
        self.fetch = None
        self.wanted = set()
        self.leases = []
        self.n_reads = 0
        self.lock = threading.Lock()
        self.disk = Counter()

    def read(self, fd, buffers, offset):
        with self.lock:
            self.n_reads += 1
            fault = next((k for k, every in self.disk.items() if self.n_reads % every == 0), None)
        if fault == "errno":
            raise OSError(5, "Input/output error")
        if fault == "short":
            return os.preadv(fd, [buffers[0][: len(buffers[0]) // 2]], offset)
        n = os.preadv(fd, buffers, offset)
        if fault == "bit":
            buffers[0][7] ^= 1
        return n

    @initialize(
        n_bytes=st.sampled_from([30_000, 70_000, 140_000, 260_000, 10**7]),
        disk=st.dictionaries(
            st.sampled_from(["errno", "short", "bit"]), st.sampled_from([2, 3, 7, 13]), max_size=2
        ),
        foresees=st.booleans(),
        policy=st.sampled_from(["recall", "lru", "quotas"]),
        n_lent=st.integers(0, 5),
    )
    def open(self, n_bytes, disk, foresees, policy, n_lent):
        self.disk = disk
        self.budget = n_bytes
        plan = plan_with(n_bytes, n_lent)
        paths = [SOURCE.path, *SOURCE.volume_paths]
        files = [open_blocks(path, probe=None, direct=False) for path in paths]
        engine = ThreadsEngine(files, read=self.read, sleep=lambda seconds: None)
        pool = Pool(*plan.shape[0], *plan.shape[1:], n_lent=plan.n_lent)
        predictor = LastExperts() if foresees else None

        def make(slots):
            if policy == "quotas":
                return LayerLru(slots.plan.quotas)
            return make_policy(policy, n_layers=4, n_slots=slots.plan.n_slots)

        self.store = Store(SOURCE, pool, engine, plan, make_policy=make, predictor=predictor)
        assert not self.store.is_native

    @rule(layer=LAYERS, experts=EXPERTS)
    def begin(self, layer, experts):
        if self.fetch is None:
            self.fetch = self.store.fetch(layer, experts)
            self.wanted = set(experts)

    @rule(layer=LAYERS, experts=EXPERTS)
    def prefetch(self, layer, experts):
        self.store.prefetch(layer, experts)

    @rule(takes_all=st.booleans())
    def advance(self, takes_all):
        if self.fetch is None:
            return
        self.leases = []
        try:
            self.leases = self.fetch.take() if takes_all else [next(self.fetch)]
        except StopIteration:
            pass
        except (StorageError, FormatError) as error:
            assert self.is_faulty(), error
            self.fetch = None
            return
        if not self.leases:
            assert not self.wanted
            self.fetch = None
        for lease in self.leases:
            self.wanted.remove(lease.expert)

    @rule()
    def leave(self):
        if self.fetch is not None:
            self.fetch.close()
            self.fetch = None
            self.leases = []

    @rule()
    def drop(self):
        self.fetch = None
        self.leases = []

    @rule(n_more=st.integers(0, 5))
    def resize(self, n_more):
        if self.fetch is None:
            n_slots, n_lent = self.store.slots.n_slots, self.store.slots.n_lent
            # One that was dropped is closed by the next.
            self.store.fetch(0, []).close()
            self.store.resize(n_slots + min(n_more, n_lent))

    @rule(layer=LAYERS, experts=EXPERTS)
    def pass_through(self, layer, experts):
        """Whatever happened before, a sound disk gives every block."""
        self.leave()
        is_faulty = self.is_faulty()
        disk, self.disk = self.disk, Counter()
        self.mend()
        with self.store.fetch(layer, experts) as fetch:
            seen = []
            try:
                while leases := fetch.take():
                    for lease in leases:
                        assert_lease_is_right(SOURCE, lease)
                        seen.append(lease.expert)
                assert sorted(seen) == sorted(set(experts))
            except (StorageError, FormatError):
                # A read that was under way before.
                assert is_faulty and not self.READS_AGAIN
        self.disk = disk

    def is_faulty(self):
        return bool(set(self.disk) & {"errno", "bit"})

    def mend(self):
        pass

    @invariant()
    def leases_are_right_and_slots_are_accounted_for(self):
        for lease in self.leases:
            assert_lease_is_right(SOURCE, lease)
        if not hasattr(self, "store"):
            return
        store, cache = self.store, self.store.cache
        assert cache.n_free + cache.n_resident + cache.n_loading == store.n_open
        owners = cache.owners()
        assert max(owners, default=-1) < store.n_open
        assert len(owners) == cache.n_resident + cache.n_loading
        assert len({lease.slot for lease in self.leases}) == len(self.leases)
        for lease in self.leases:
            assert owners[lease.slot] == (lease.layer, lease.expert)
        padded = BlockTable([SOURCE]).padded_bytes
        assert all(padded(*key) <= store.pool.sizes[slot] for slot, key in owners.items())
        assert sum(padded(*key) for key in owners.values()) <= store.pool.mapped_bytes
        lent_bytes = sum(store.pool.sizes[store.slots.n_slots :])
        assert store.pool.mapped_bytes - lent_bytes <= self.budget
        if self.fetch is None:
            assert cache.n_pinned == 0

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()


class NativeStoreMachine(StoreMachine):
    """The same over a ring with a thread, all of it in C; bits flip on disk and back."""

    READS_AGAIN = True

    def __init__(self):
        super().__init__()
        self.damaged = {}

    @initialize(
        n_bytes=st.sampled_from([30_000, 70_000, 140_000, 260_000, 10**7]),
        foresees=st.booleans(),
        policy=st.sampled_from(["recall", "cadence"]),
        piece_bytes=st.sampled_from([None, 4096]),
        n_lent=st.integers(0, 5),
    )
    def open(self, n_bytes, foresees, policy, piece_bytes, n_lent):
        self.budget = n_bytes
        plan = plan_with(n_bytes, n_lent)
        pool = Pool(*plan.shape[0], *plan.shape[1:], n_lent=plan.n_lent)
        files = [
            BlockFile(path, probe_of(place, pool))
            for path, place in zip(
                [SOURCE.path, *SOURCE.volume_paths],
                BlockTable([SOURCE]).first_of_each_file(),
                strict=True,
            )
        ]
        engine = open_ring(files, pool, piece_bytes)

        def make(slots):
            return make_policy(policy, n_layers=4, n_slots=slots.plan.n_slots)

        predictor = LastExperts() if foresees else None
        self.store = Store(SOURCE, pool, engine, plan, make_policy=make, predictor=predictor)
        assert self.store.is_native

    @rule(layer=LAYERS, expert=st.integers(0, 5), place=st.integers(0, 6000))
    def damage(self, layer, expert, place):
        if (layer, expert) in self.damaged or not hasattr(self, "store"):
            return
        entry = SOURCE.index[layer, expert]
        volume = int(SOURCE.block_index.volumes[layer, expert])
        at = int(entry["offset"]) + place % int(entry["size"])
        path = [SOURCE.path, *SOURCE.volume_paths][volume]
        self.damaged[layer, expert] = (path, at)
        self.flip(path, at)

    @rule()
    def mend(self):
        for path, at in self.damaged.values():
            self.flip(path, at)
        self.damaged = {}

    def flip(self, path, at):
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0] ^ 1
            file.seek(at)
            file.write(bytes([byte]))

    def is_faulty(self):
        return bool(self.damaged)

    def teardown(self):
        self.mend()
        super().teardown()


def plan_with(n_bytes, n_lent):
    """The pool of that budget, and `n_lent` slots more as far as there are blocks for them."""
    plan = plan_pool(n_bytes, BlockTable([SOURCE]).census(), top_k=2)
    last = plan.classes[-1]
    return replace(plan, n_lent=min(n_lent, last.n_blocks - last.plan.n_slots))


def probe_of(place, pool):
    return BlockTable([SOURCE]).plan_read(*place, slot=0, buffer=pool.slot(pool.n_slots - 1))


def open_ring(files, pool, piece_bytes):
    for name in ("uring", "aio"):
        try:
            return open_engine(name, files, arena=pool.arena, split_bytes=piece_bytes)
        except StorageError as error:
            reason = str(error)
    pytest.skip(reason)


@pytest.fixture(scope="module", autouse=True)
def source_on_disk(tmp_path_factory):
    global SOURCE  # noqa: PLW0603 - a state machine takes no fixtures
    SOURCE = make_source(
        tmp_path_factory.mktemp("store") / "machine.colibri",
        layouts=[SMALL, SMALL, LARGE, SMALL],
        n_experts=6,
        mixed={(3, 1): LARGE, (3, 2): LARGE},
        n_volumes=1,
    )


StoreMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStoreMachine = StoreMachine.TestCase

NativeStoreMachine.TestCase.settings = StoreMachine.TestCase.settings


@pytest.mark.skipif(native().library is None, reason="no C library")
class TestNativeStoreMachine(NativeStoreMachine.TestCase):
    pass
