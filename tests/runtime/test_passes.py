"""Tokens told apart, and prefetch switched by what they took."""

from colibri_runtime.blocks import block_slot_bytes
from colibri_runtime.passes import KEPT_PASSES
from colibri_runtime.pool import Pool
from colibri_runtime.pool_plan import equal_slots
from colibri_runtime.prefetch import GivenExperts, PrefetchGate
from colibri_runtime.store import Store
from helpers.blocks import StepEngine, make_source, small_layout

N_LAYERS = 3


class Clock:
    """Time that passes while the disk reads: `read_ns` for each block that is waited for."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


class SlowEngine(StepEngine):
    """Whatever was queued is read meanwhile when a lease is computed (`tick`)."""

    def __init__(self, source, clock, read_ns):
        super().__init__(source)
        self.clock = clock
        self.read_ns = read_ns

    def wait(self):
        if not self.done:
            self.clock.now += self.read_ns
        return super().wait()


def make_store(*, gate=None, predictor=None, n_slots=4, read_ns=1000, top_k=1):
    source = make_source(layouts=[small_layout(8, 8)] * N_LAYERS, n_experts=4)
    clock = Clock()
    engine = SlowEngine(source, clock, read_ns)
    size = block_slot_bytes(source)
    plan = equal_slots(size, [4] * N_LAYERS, n_slots, top_k, 1)
    store = Store(
        source, Pool(n_slots, size), engine, plan, predictor=predictor, gate=gate, clock=clock
    )
    return store, engine, clock


def token(store, engine, clock, experts, compute_ns=1000):
    """One pass that asks each layer for `experts[layer]`; computing lets queued reads end."""
    for layer, wanted in enumerate(experts):
        for _ in store.fetch(layer, wanted):
            engine.finish(4)
            clock.now += compute_ns


def test_a_pass_ends_where_a_layer_comes_again():
    store, engine, clock = make_store()
    for _ in range(3):
        token(store, engine, clock, [[0], [1], [2]])
    store.fetch(0, [0]).close()

    passes = store.passes
    assert (passes.n_ended, len(passes.recent)) == (3, 3)
    first, *others = passes.recent
    assert first.counts.n_misses == 3
    assert first.total_ns == 3 * (1000 + 1000)
    assert first.counts.stall_ns == 3000
    assert [p.counts.n_asks for p in others] == [3, 3]
    assert sum(p.counts.n_hits for p in others) > 0
    assert first.n_asks_most == 1


def test_only_the_last_passes_are_kept():
    store, _, _ = make_store()
    for _ in range(KEPT_PASSES + 5):
        store.fetch(0, [0]).close()

    assert len(store.passes.recent) == KEPT_PASSES
    assert store.passes.n_ended == KEPT_PASSES + 4


def visits(n_tokens):
    """Experts that no cache of four blocks keeps, token after token."""
    return [[[(t + layer) % 4] for layer in range(N_LAYERS)] for t in range(n_tokens)]


def gated(predicted, n_tokens, n_slots=4, read_ns=1000):
    gate = PrefetchGate()
    route = visits(n_tokens)
    by_layer = [[predicted(t[layer]) for t in route] for layer in range(N_LAYERS)]
    store, engine, clock = make_store(
        gate=gate, predictor=GivenExperts(by_layer), n_slots=n_slots, read_ns=read_ns
    )
    for experts in route:
        token(store, engine, clock, experts)
    return store, engine


def test_prefetch_that_is_right_stays_on():
    store, _ = gated(lambda experts: experts, 200)

    assert store.passes.gate.is_set_on
    assert store.passes.gate.trials[0].gain > 0.2
    assert store.stats.total().recall == 1


def test_prefetch_that_is_wrong_is_switched_off_and_reads_no_more():
    store, engine = gated(lambda experts: [(e + 1) % 4 for e in experts], 130)
    gate = store.passes.gate

    assert not gate.is_set_on
    assert store.look_ahead == 0
    engine.submitted.clear()
    store.prefetch(1, [0, 1, 2, 3])
    assert engine.submitted == []


def test_passes_of_several_tokens_are_no_trial():
    gate = PrefetchGate()
    store, engine, clock = make_store(gate=gate)
    for _ in range(100):
        token(store, engine, clock, [[0, 1, 2]] * N_LAYERS)

    assert gate.trials == []
    assert gate.verdict() == "not tried yet: too few tokens"


def test_what_is_worth_predicting_follows_the_trial():
    gate = PrefetchGate()
    store, engine, clock = make_store(gate=gate)
    seen = []
    for _ in range(gate.WARM_UP + 4 * gate.WINDOW + 2):
        seen.append(store.look_ahead)
        token(store, engine, clock, [[0], [1], [2]])

    trial = seen[gate.WARM_UP + 1 : gate.WARM_UP + 1 + 4 * gate.WINDOW]
    windows = [trial[i * gate.WINDOW : (i + 1) * gate.WINDOW] for i in range(4)]
    assert [set(window) for window in windows] == [{1}, {0}, {0}, {1}]
