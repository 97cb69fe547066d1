"""What each policy evicts, and what all of them promise."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from colibri_format import UsageError
from colibri_runtime._native import native
from colibri_runtime.policies import POLICY_NAMES, make_policy
from colibri_runtime.policy_cadence import half_life_of

needs_library = pytest.mark.skipif(native().library is None, reason=native().reason)
IN_PYTHON = (
    pytest.param("recall in Python", marks=needs_library),
    pytest.param("cadence in Python", marks=needs_library),
)
NAMES = (*POLICY_NAMES, *IN_PYTHON)
RANKED = ("cadence", "recall", *IN_PYTHON)
COUNTING = ("recall", "cadence", "hybrid", "lfu", *IN_PYTHON)


def run(policy, *events):
    """Events `(layer, experts)` of blocks that all have a slot."""
    for layer, experts, *weights in events:
        policy.observe(layer, experts, weights[0] if weights else None)
        for expert in experts:
            policy.release((layer, expert))


def again(policy, layer, experts, weights=None):
    """An event of blocks that are all resident."""
    policy.observe(layer, experts, weights)
    for expert in experts:
        policy.pin((layer, expert))
    for expert in experts:
        policy.release((layer, expert))


def drain(policy):
    """All victims, first to last."""
    victims = []
    while (key := policy.victim(is_prefetch=False)) is not None:
        victims.append(key)
    return victims


class Twins:
    """A policy in C and the same in Python, told the same: they name the same victims."""

    def __init__(self, name, **options):
        self.both = [
            make_policy(name, is_native=is_native, **options) for is_native in (True, False)
        ]

    def __getattr__(self, name):
        def call(*arguments, **named):
            in_c, in_python = (getattr(policy, name)(*arguments, **named) for policy in self.both)
            assert in_c == in_python
            return in_c

        return call


def make(name, n_layers=2, n_slots=8, **options):
    name, _, where = name.partition(" in ")
    options |= {"n_layers": n_layers, "n_slots": n_slots}
    if where == "both":
        return Twins(name, **options)
    return make_policy(name, is_native=False if where else None, **options)


def test_unknown_policy_is_refused_with_the_names_known():
    with pytest.raises(UsageError, match="recall, cadence, hybrid, lfu, lru") as error:
        make("arc")

    assert error.value.code == "unknown-policy"


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("hybrid", {"lfu_weight": 1.5}, "bad-lfu-weight"),
        ("lru", {"lfu_weight": 0.5}, "bad-lfu-weight"),
        ("hybrid", {"hot_share": -0.1}, "bad-hot-share"),
        ("recall", {"hot_share": 0.1}, "bad-hot-share"),
        ("lfu", {"quotas": (1, 2, 3)}, "bad-quotas"),
    ],
)
def test_options_out_of_place_are_refused(name, options, code):
    with pytest.raises(UsageError) as error:
        make(name, **options)

    assert error.value.code == code


@pytest.mark.parametrize("name", NAMES)
def test_every_block_that_is_not_in_use_can_be_evicted_once(name):
    policy = make(name)
    run(policy, (0, [1, 2]), (1, [3, 4]))
    policy.pin((0, 2))
    policy.admit((1, 7))
    policy.touch((1, 3))

    victims = drain(policy)

    assert sorted(victims) == [(0, 1), (1, 3), (1, 4), (1, 7)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quotas", [None, (1, 1)])
def test_a_prefetch_takes_nothing_that_waits_or_was_touched(name, quotas):
    policy = make(name, quotas=quotas)
    run(policy, (0, [1, 2, 3]), (1, [4]))
    for expert in (1, 2, 3):
        policy.touch((0, expert))
    policy.admit((1, 5))

    taken = []
    while (key := policy.victim(is_prefetch=True)) is not None:
        taken.append(key)

    assert (1, 5) not in taken
    assert not [key for key in taken if key[0] == 0]
    assert policy.victim(is_prefetch=False) is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_touched_block_is_an_ordinary_one_after_its_layers_next_event(name):
    policy = make(name)
    run(policy, (0, [1, 2]))
    policy.touch((0, 1))
    policy.touch((0, 2))

    policy.observe(0, [2], None)
    policy.pin((0, 2))

    assert policy.victim(is_prefetch=True) == (0, 1)
    policy.release((0, 2))
    assert drain(policy) == [(0, 2)]


@pytest.mark.parametrize("name", NAMES)
def test_a_touched_block_falls_back_without_observe_too(name):
    policy = make(name)
    for expert in (1, 2):
        policy.release((0, expert))
    policy.touch((0, 1))

    policy.pin((0, 2))
    policy.release((0, 2))

    assert sorted([policy.victim(is_prefetch=True), policy.victim(is_prefetch=True)]) == [
        (0, 1),
        (0, 2),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_read_ahead_in_vain_leaves_before_what_was_used(name):
    policy = make(name)
    run(policy, (0, [1]))
    policy.admit((0, 2))
    policy.expire((0, 2))
    policy.expire((0, 2))

    assert drain(policy) == [(0, 2), (0, 1)]


@pytest.mark.parametrize("name", COUNTING)
def test_quotas_protect_the_most_valuable_of_each_layer(name):
    policy = make(name, quotas=(2, 1))
    for _ in range(3):
        run(policy, (0, [1]), (1, [5]))
        policy.pin((0, 1))
        policy.pin((1, 5))
    run(policy, (0, [1, 2, 3]), (1, [5]))

    victims = drain(policy)

    assert len(victims) == 1
    assert victims[0] in {(0, 2), (0, 3)}


def test_lru_evicts_what_was_used_longest_ago_whatever_its_layer():
    policy = make("lru")
    run(policy, (0, [1, 2]), (1, [3]))
    again(policy, 0, [1])

    assert drain(policy) == [(0, 2), (1, 3), (0, 1)]


def test_lfu_evicts_what_was_used_least_and_of_equals_the_oldest():
    policy = make("lfu")
    run(policy, (0, [1]), (1, [2]), (0, [3]))
    again(policy, 0, [1])

    assert drain(policy) == [(1, 2), (0, 3), (0, 1)]


def test_hybrid_of_weight_0_keeps_the_last_token_and_of_weight_1_the_most_used():
    victims = {}
    for weight in (0.0, 1.0):
        policy = make("hybrid", lfu_weight=weight, hot_share=0.0)
        run(policy, (0, [1, 2]))
        for _ in range(5):
            again(policy, 0, [1])
        again(policy, 0, [2])
        again(policy, 0, [2])
        victims[weight] = policy.victim(is_prefetch=False)

    assert victims == {0.0: (0, 1), 1.0: (0, 2)}


def test_hybrid_keeps_hot_blocks_until_nothing_else_is_left():
    policy = make("hybrid", n_layers=1, n_slots=8, lfu_weight=0.5, hot_share=0.125)
    run(policy, (0, [1, 2]))
    for _ in range(20):
        again(policy, 0, [1])
    for _ in range(12):
        again(policy, 0, [2])

    assert drain(policy) == [(0, 2), (0, 1)]


@pytest.mark.parametrize("name", RANKED)
def test_cadence_keeps_what_the_last_token_chose(name):
    policy = make(name, n_layers=1)
    run(policy, (0, [1, 2]))
    for _ in range(3):
        again(policy, 0, [1])
    again(policy, 0, [2])

    assert policy.victim(is_prefetch=False) == (0, 1)


@pytest.mark.parametrize("name", RANKED)
def test_cadence_counts_by_the_routers_weight(name):
    policy = make(name, n_layers=1)
    run(policy, (0, [1, 2], [0.9, 0.1]))

    assert drain(policy) == [(0, 2), (0, 1)]


@pytest.mark.parametrize("name", RANKED)
def test_of_equally_likely_blocks_the_one_whose_layer_was_visited_last_leaves(name):
    """Its next visit is a whole cycle away: least recently used would take the other."""
    policy = make(name, n_layers=3, n_slots=8)
    run(policy, (0, [1]), (1, [1]), (2, [1]))

    assert drain(policy) == [(2, 1), (1, 1), (0, 1)]


@pytest.mark.parametrize("name", (*RANKED, "hybrid"))
def test_counts_stay_in_order_over_more_visits_than_a_unit_can_grow(name):
    policy = make(name, n_layers=1)
    run(policy, (0, [1, 2, 3]))
    for _ in range(9000):
        again(policy, 0, [1])
    again(policy, 0, [2, 1])
    again(policy, 0, [1])

    assert drain(policy) == [(0, 3), (0, 2), (0, 1)]


@pytest.mark.parametrize("name", (*RANKED, "hybrid"))
def test_layers_compare_after_one_went_over_to_a_smaller_unit(name):
    policy = make(name, n_layers=2)
    run(policy, (0, [1, 2]), (1, [1, 2]))
    # So that bounds of layers are known from the start.
    policy.release(policy.victim(is_prefetch=False))
    for _ in range(9000):
        for layer in (0, 1):
            again(policy, layer, [1])
    policy.release((0, 7))
    policy.release((1, 8))

    victims = drain(policy)

    assert {key[1] for key in victims[-2:]} == {1}


def test_a_block_that_is_idle_for_ever_can_still_be_evicted():
    """Its value is divided by the unit's growth until nothing is left of it."""
    for name in ("cadence", "cadence in Python"):
        policy = make(name, n_layers=1)
        policy.admit((0, 5))
        policy.expire((0, 5))
        run(policy, (0, [1]))
        for _ in range(25_000):
            policy.observe(0, [1])

        assert drain(policy) == [(0, 5), (0, 1)]


@needs_library
@pytest.mark.parametrize("name", ["recall", "cadence"])
@pytest.mark.parametrize("quotas", [None, (6, 9, 5)])
def test_c_and_python_name_the_same_victims_in_a_long_run(name, quotas):
    """Experts beyond the first numbers known, batches, blocks read ahead, a seed."""
    random = np.random.default_rng(7)
    twins = Twins(name, n_layers=3, n_slots=24, quotas=quotas, shares={(1, 70): 0.5, (0, 3): 0.25})
    held = set()
    for step in range(600):
        layer = step % 3
        n_experts = 20 if step < 300 else 150
        top_k = 4 if step % 50 else 18
        popular = random.zipf(1.3, 4 * n_experts) - 1
        experts = list(dict.fromkeys(int(e) for e in popular if e < n_experts))[:top_k]
        weights = (random.integers(1, 9, len(experts)) / 8).tolist() if step % 7 else None
        ahead = ((layer + 1) % 3, int(random.integers(n_experts)))
        if ahead in held:
            twins.touch(ahead)
        twins.observe(layer, experts, weights)
        in_use = [(layer, expert) for expert in experts]
        for key in in_use:
            if key in held:
                twins.pin(key)
        for key in in_use:
            if key not in held and len(held) >= 24:
                victim = twins.victim(is_prefetch=False)
                if victim is None:
                    break
                held.remove(victim)
            held.add(key)
        for key in in_use:
            if key in held:
                twins.release(key)
        if ahead not in held and (victim := twins.victim(is_prefetch=True)) is not None:
            held.remove(victim)
            held.add(ahead)
            twins.admit(ahead)
            if step % 5 == 0:
                twins.expire(ahead)

    assert len(drain(twins)) == len(held) - sum(quotas or ())


def test_recall_keeps_what_followed_the_same_token_before():
    """The tokens a, b, c, d come round; after a it is b's experts that are wanted."""
    tokens = {"a": [0, 1], "b": [2, 3], "c": [4, 5], "d": [6, 7]}
    order = {}
    for name in ("recall", "cadence"):
        policy = make(name, n_layers=1)
        run(policy, *((0, experts) for experts in tokens.values()))
        victim = policy.victim(is_prefetch=False)
        policy.release(victim)
        for _ in range(3):
            for experts in tokens.values():
                again(policy, 0, experts)
        again(policy, 0, tokens["a"])
        order[name] = [expert for _, expert in drain(policy)]

    assert set(order["recall"][:2]) != {2, 3}
    assert set(order["cadence"][:2]) == {2, 3}


@pytest.mark.parametrize("name", COUNTING)
def test_history_decides_among_blocks_that_were_preloaded(name):
    policy = make(name, shares={(0, 1): 0.5, (0, 2): 0.1, (1, 3): 0.3})
    for key in ((0, 2), (1, 3), (0, 1), (1, 9)):
        policy.admit(key)
        policy.expire(key)

    assert drain(policy) == [(1, 9), (0, 2), (1, 3), (0, 1)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", [None, [0.0, 0.0]])
def test_weights_of_nothing_count_as_equal(name, weights):
    policy = make(name)
    run(policy, (0, [1, 2], weights))

    assert sorted(drain(policy)) == [(0, 1), (0, 2)]


keys = st.tuples(st.integers(0, 2), st.integers(0, 5))


class PolicyMachine(RuleBasedStateMachine):
    """Any order of calls: victims are blocks it was given and has not given back."""

    name = ""
    quotas = None

    def __init__(self):
        super().__init__()
        self.policy = make(self.name, n_layers=3, n_slots=6, quotas=self.quotas)
        self.idle, self.waiting, self.touched, self.in_use = set(), set(), set(), set()

    @rule(layer=st.integers(0, 2), experts=st.lists(st.integers(0, 5), unique=True, max_size=4))
    def observe(self, layer, experts):
        self.policy.observe(layer, experts, [1.0 + expert for expert in experts])
        self.touched = {key for key in self.touched if key[0] != layer or key[1] in experts}

    @rule(key=keys)
    def pin(self, key):
        if key in self.idle | self.waiting:
            self.policy.pin(key)
            self.idle.discard(key)
            self.waiting.discard(key)
            self.touched.discard(key)
            self.in_use.add(key)

    @rule(key=keys)
    def release_or_load(self, key):
        if key not in self.idle | self.waiting:
            self.policy.release(key)
            self.in_use.discard(key)
            self.idle.add(key)
            self.touched = {k for k in self.touched if k[0] != key[0]}

    @rule(key=keys)
    def admit(self, key):
        if key not in self.idle | self.waiting | self.in_use:
            self.policy.admit(key)
            self.waiting.add(key)

    @rule(key=keys)
    def expire(self, key):
        if key in self.waiting:
            self.policy.expire(key)
            self.waiting.discard(key)
            self.idle.add(key)

    @rule(key=keys)
    def touch(self, key):
        if key in self.idle:
            self.policy.touch(key)
            self.touched.add(key)

    @rule(is_prefetch=st.booleans())
    def evict(self, is_prefetch):
        victim = self.policy.victim(is_prefetch=is_prefetch)
        if victim is not None:
            assert victim in (self.idle if is_prefetch else self.idle | self.waiting)
            self.idle.discard(victim)
            self.waiting.discard(victim)
            self.touched.discard(victim)
        elif not is_prefetch:
            assert not self.waiting
            assert len(self.idle) <= sum(self.quotas or ())

    @invariant()
    def nothing_is_in_two_states(self):
        assert not self.idle & self.in_use


def machines():
    twins = ("recall in both", "cadence in both") if native().library is not None else ()
    for name in (*POLICY_NAMES, *twins):
        for quotas in (None, (2, 1, 0)):
            case = type(f"{name}{quotas}", (PolicyMachine,), {"name": name, "quotas": quotas})
            case.TestCase.settings = settings(
                max_examples=25, stateful_step_count=30, deadline=None
            )
            title = name.title().replace(" ", "")
            yield f"Test{title}{'Global' if quotas is None else 'PerLayer'}", case.TestCase


globals().update(machines())


def test_large_pools_look_further_back():
    assert [half_life_of(n, 1000) for n in (0, 10, 250, 500, 730, 1000, 2000)] == [
        20, 20, 20, 40, pytest.approx(58.4), 80, 80
    ]  # fmt: skip
    assert half_life_of(500, None) == half_life_of(0, 0) == 20


@pytest.mark.parametrize("name", ["recall", "cadence"])
def test_a_use_of_long_ago_counts_more_in_a_large_pool(name):
    victims = []
    for n_blocks in (None, 4):
        policy = make_policy(name, n_layers=1, n_slots=4, n_blocks=n_blocks)
        # Asked for six times long ago, or once lately.
        run(policy, *[(0, [1])] * 6, *[(0, [3])] * 60, (0, [2]), *[(0, [3])] * 4)
        victims.append(policy.victim(is_prefetch=False))
    assert victims == [(0, 1), (0, 2)]
