"""How slots are shared out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_format import UsageError
from colibri_runtime.slots import plan_slots


@given(
    n_slots=st.integers(1, 300),
    blocks=st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any),
    top_k=st.integers(1, 8),
    depth=st.integers(0, 2),
)
def test_quotas_and_transit_use_every_slot_and_leave_one_to_move_in(n_slots, blocks, top_k, depth):
    plan = plan_slots(n_slots=n_slots, blocks_per_layer=blocks, top_k=top_k, prefetch_depth=depth)

    assert plan.n_protected + plan.n_transit == n_slots
    assert all(0 <= quota <= n for quota, n in zip(plan.quotas, blocks, strict=True))
    assert plan.n_transit >= 1 or n_slots >= sum(blocks)
    assert 0 <= plan.n_prefetch <= max(depth * top_k, 0)
    if n_slots < sum(blocks):
        demand = min(top_k, max(blocks))
        room = plan.n_transit - plan.n_prefetch
        assert room >= min(demand, (plan.n_transit + 1) // 2)
        spread = [q for q, n in zip(plan.quotas, blocks, strict=True) if q < n]
        assert not spread or max(spread) - min(spread) <= 1


def test_enough_slots_keep_every_block():
    plan = plan_slots(n_slots=40, blocks_per_layer=[16, 8, 16], top_k=4)

    assert plan.quotas == (16, 8, 16)
    assert plan.notes == ()


def test_extra_blocks_are_spread_over_the_depth():
    plan = plan_slots(n_slots=6, blocks_per_layer=[1] * 12, top_k=1, prefetch_depth=1)

    assert plan.n_transit == 2
    assert plan.quotas == (0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1)


def test_what_a_small_layer_leaves_goes_to_the_others():
    plan = plan_slots(n_slots=24, blocks_per_layer=[2, 30, 0, 30], top_k=2, prefetch_depth=1)

    assert plan.n_transit == 4
    assert plan.quotas == (2, 9, 0, 9)


@pytest.mark.parametrize(
    ("n_slots", "word"),
    [(1, "rounds"), (3, "rounds"), (4, "few hits"), (9, "few hits")],
)
def test_a_plan_that_works_badly_says_so(n_slots, word):
    plan = plan_slots(n_slots=n_slots, blocks_per_layer=[16] * 4, top_k=4)

    assert word in " ".join(plan.notes)


def test_two_layers_ahead_may_both_be_read_ahead():
    plan = plan_slots(n_slots=20, blocks_per_layer=[1] * 30, top_k=1, prefetch_depth=2)

    assert (plan.n_transit, plan.n_prefetch) == (3, 2)


def test_a_pool_all_in_transit_says_so():
    plan = plan_slots(n_slots=2, blocks_per_layer=[1] * 8, top_k=1)

    assert "no expert is kept" in " ".join(plan.notes)


def test_no_slots_are_refused():
    with pytest.raises(UsageError) as caught:
        plan_slots(n_slots=0, blocks_per_layer=[4], top_k=1)

    assert caught.value.code == "bad-slots"


def test_a_model_without_blocks_needs_no_slots():
    assert plan_slots(n_slots=0, blocks_per_layer=[0, 0], top_k=1).n_slots == 0
