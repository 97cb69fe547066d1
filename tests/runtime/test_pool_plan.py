"""How a pool is cut into slots of several sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_format import UsageError
from colibri_runtime.blocks import slot_waste
from colibri_runtime.errors import BudgetError
from colibri_runtime.pool import Pool
from colibri_runtime.pool_plan import equal_slots, expected_hit_share, plan_pool, pool_cost

MIB = 2**20
SMALL, LARGE = 2_654_208, 3_059_712
MIX = [{LARGE: 128} if i % 2 else {SMALL: 128} for i in range(48)]
"""Blocks as q4_k_m makes them of a model with 48 layers of 128 experts: every second layer's
down matrices in Q6_K instead of Q4_K."""


@st.composite
def censuses(draw):
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=5, unique=True))
    layer = st.dictionaries(st.sampled_from([4096 * s for s in sizes]), st.integers(1, 20))
    return draw(st.lists(layer, min_size=1, max_size=6).filter(any))


@settings(max_examples=60)
@given(
    census=censuses(),
    extra=st.integers(0, 40 * MIB),
    top_k=st.integers(1, 4),
    depth=st.integers(0, 2),
)
def test_a_pool_stays_within_its_budget_and_holds_every_block_in_some_class(
    census, extra, top_k, depth
):
    largest = max(size for layer in census for size in layer)
    smallest = pool_cost(1, largest)

    plan = plan_pool(smallest + extra, census, top_k=top_k, prefetch_depth=depth)

    assert plan.cost_bytes <= smallest + extra
    assert plan.smallest_bytes == smallest
    assert plan.cost_bytes <= plan.largest_bytes
    n_blocks = sum(sum(layer.values()) for layer in census)
    assert plan.n_slots <= n_blocks
    if smallest + extra >= plan.largest_bytes:
        assert plan.n_slots == n_blocks
    sizes = [c.slot_bytes for c in plan.classes]
    assert sizes == sorted(set(sizes))
    for layer in census:
        for size in layer:
            number = plan.class_of_bytes(size)
            assert size <= sizes[number]
            assert number == 0 or size > sizes[number - 1]
    for c in plan.classes:
        assert c.plan.n_transit >= 1 or c.plan.n_slots >= c.n_blocks
    equal = plan_pool(smallest + extra, census, top_k=top_k, prefetch_depth=depth, max_classes=1)
    assert plan.n_protected >= equal.n_protected


def test_a_mix_of_two_sizes_wastes_nothing():
    """6.6 % of the pool with equal slots."""
    budget = 4 * 2**30

    plan = plan_pool(budget, MIX, top_k=8)
    equal = plan_pool(budget, MIX, top_k=8, max_classes=1)

    assert [c.slot_bytes for c in plan.classes] == [SMALL, LARGE]
    assert slot_waste(MIX, [c.slot_bytes for c in plan.classes]) == 0
    assert slot_waste(MIX, [LARGE]) == pytest.approx(0.0663, abs=1e-4)
    assert plan.n_slots > 1.06 * equal.n_slots
    assert plan.n_protected > equal.n_protected
    shares = [c.plan.n_slots / c.n_blocks for c in plan.classes]
    assert shares[0] == pytest.approx(shares[1], abs=0.001)


def test_a_small_pool_is_not_cut_where_that_would_keep_less():
    plan = plan_pool(28 * LARGE, MIX, top_k=8)

    assert [c.slot_bytes for c in plan.classes] == [LARGE]


def test_many_sizes_make_few_classes():
    census = [{4096 * (100 + i): 64} for i in range(40)]

    plan = plan_pool(512 * MIB, census, top_k=2)

    assert 1 < len(plan.classes) <= 4
    assert slot_waste(census, [c.slot_bytes for c in plan.classes]) < 0.05


def test_a_pool_is_made_as_planned():
    plan = plan_pool(300_000, [{4096: 9, 8192: 3}, {8192: 20}], top_k=1, prefetch_depth=0)

    pool = Pool(*plan.shape[0], *plan.shape[1:])

    assert len(plan.classes) == 2
    assert pool.arena_bytes == plan.arena_bytes
    assert pool.sizes == (4096,) * plan.shape[0][0] + (8192,) * plan.shape[1][0]
    starts = [address - pool.addresses[0] for address in pool.addresses]
    assert starts == [sum(pool.sizes[:i]) for i in range(pool.n_slots)]
    assert [len(pool.slot(i)) for i in range(pool.n_slots)] == list(pool.sizes)
    pool.close()


def test_a_budget_below_one_slot_is_refused():
    with pytest.raises(BudgetError) as caught:
        plan_pool(LARGE, MIX, top_k=8)

    assert caught.value.code == "budget-too-small"
    assert plan_pool(caught.value.smallest_bytes, MIX, top_k=8).n_slots == 1


def test_a_block_that_no_slot_holds_is_refused():
    with pytest.raises(UsageError) as caught:
        equal_slots(4096, [3], 2, 1, 0).class_of_bytes(4097)

    assert caught.value.code == "bad-slots"


def test_hits_to_expect_are_those_of_the_hottest():
    assert expected_hit_share(2, np.array([[6, 1, 1], [1, 3, 1]])) == pytest.approx(9 / 13)
    assert expected_hit_share(9, np.array([[6, 1, 1], [1, 3, 1]])) == 1
    assert expected_hit_share(1, np.zeros((1, 2))) is None
